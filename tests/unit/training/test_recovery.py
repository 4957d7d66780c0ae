"""A run that dies goes on to the very same weights, whenever it died; nothing is acknowledged twice."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import random_draft, random_sample

from tide_platform.config.schema import Training
from tide_platform.draft.vocab import inverse_map
from tide_platform.training.data import Example, prepare_all
from tide_platform.training.plan import Plan, plan_run
from tide_platform.training.progress import JOURNAL, StepRecord, Stopped
from tide_platform.training.recovery import Recovery, ReplayDiverged, ResumeRefused
from tide_platform.training.trainer import fit

RECIPE = Training(threads=1, epochs=3, batch_size=2, learning_rate=1e-2, checkpoint_seconds=1e9)
CONTRACT = {"parent": "p", "plan": "x", "training.lr_schedule": "cosine"}


class Died(BaseException):
    """As if killed: nothing is saved on the way out."""


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    rng = np.random.default_rng(0)
    draft, _ = random_draft(0, draft_vocab=18)
    samples = [random_sample(rng, f"s{i}", 12 + i, 4, 0, 0.0) for i in range(6)]
    return prepare_all(samples, inverse_map(draft.d2t.numpy(), 20), RECIPE.unroll_steps, 100)[0]


def life(
    examples: list[Example],
    folder: Path | None,
    on_step: Callable[[StepRecord], None] = lambda record: None,
    contract: dict[str, Any] = CONTRACT,
    save_at: int | None = None,
    recipe: Training = RECIPE,
    **more: Any,
) -> tuple[dict[str, torch.Tensor], list[StepRecord], Recovery | None]:
    """One process's life: weights and records at its end."""
    draft, embed = random_draft(0, draft_vocab=18)
    plan: Plan = plan_run(examples, [range(len(examples))] * recipe.epochs, recipe.batch_size, 0)

    def fetch(chosen: Any) -> list[Example]:
        return [examples[i] for i in chosen]

    if folder is None:
        records = fit(draft, embed, plan, fetch, recipe, 0, on_step=on_step)
        return draft.state_dict(), records, None
    with closing(Recovery(folder, contract, {"threads": 1}, recipe.checkpoint_seconds)) as recovery:
        if save_at is not None:
            recovery.due = lambda: recovery.acknowledged[-1].step == save_at  # type: ignore[method-assign]
        records = fit(draft, embed, plan, fetch, recipe, 0, on_step=on_step, recovery=recovery, **more)
    return draft.state_dict(), records, recovery


def dying_at(step: int, told: list[int]) -> Callable[[StepRecord], None]:
    def on_step(record: StepRecord) -> None:
        told.append(record.step)
        if record.step == step:
            raise Died

    return on_step


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=3))
def test_whenever_it_dies_it_ends_with_the_same_weights(
    examples: list[Example], tmp_path_factory: pytest.TempPathFactory, deaths: list[tuple[int, int]]
) -> None:
    """Each death: (the step after which it dies, the step that it checkpoints if it comes by)."""
    folder, told = tmp_path_factory.mktemp("run"), []
    alone, records, _ = life(examples, None)
    for dies, saves in deaths:
        try:
            life(examples, folder, dying_at(dies, told), save_at=saves)
        except Died:
            continue
    weights, found, recovery = life(examples, folder, dying_at(99, told))
    assert same(weights, alone)
    assert told == list(range(1, 10))  # each once
    assert all(a.same(b) for a, b in zip(found, records, strict=True))
    assert recovery and recovery.diverged == 0


def test_steps_behind_the_checkpoint_are_computed_again(examples: list[Example], tmp_path: Path) -> None:
    told: list[int] = []
    with pytest.raises(Died):
        life(examples, tmp_path, dying_at(6, told), save_at=4)
    _, _, recovery = life(examples, tmp_path, dying_at(99, told))
    assert recovery and recovery.replayed == 2  # 5 and 6
    _, records, again = life(examples, tmp_path, dying_at(99, told))  # finished already
    assert again and again.replayed == 0 and len(records) == 9 and told == list(range(1, 10))


def test_asked_to_stop_it_saves_and_says_where(examples: list[Example], tmp_path: Path) -> None:
    asked: list[int] = []
    with pytest.raises(Stopped, match="after step 4 of 9"):
        life(examples, tmp_path, lambda r: asked.append(r.step), stop=lambda: bool(asked and asked[-1] >= 4))
    _, _, recovery = life(examples, tmp_path)
    assert recovery and recovery.replayed == 0


def test_when_nobody_listens_any_more_it_saves(examples: list[Example], tmp_path: Path) -> None:
    told: list[int] = []

    def on_step(record: StepRecord) -> None:
        told.append(record.step)
        if record.step == 4:
            raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        life(examples, tmp_path, on_step)
    _, _, recovery = life(examples, tmp_path, dying_at(99, told))
    assert recovery and recovery.replayed == 0 and told == list(range(1, 10))


def test_a_step_given_up_half_way_changes_nothing(examples: list[Example], tmp_path: Path) -> None:
    recipe = RECIPE.model_copy(update={"micro_batch_positions": 1})  # a sample a micro-batch
    alone, _, _ = life(examples, None, recipe=recipe)
    polls = iter([False] * 8 + [True] * 99)
    with pytest.raises(Stopped):
        life(examples, tmp_path, stop=lambda: next(polls), recipe=recipe)
    weights, _, _ = life(examples, tmp_path, recipe=recipe)
    assert same(weights, alone)


def test_samples_that_cannot_be_had_keep_the_steps_done(examples: list[Example], tmp_path: Path) -> None:
    from tide_platform.store.errors import StoreUnavailable

    draft, embed = random_draft(0, draft_vocab=18)
    plan = plan_run(examples, [range(len(examples))] * 3, 2, 0)
    calls: list[int] = []

    def fetch(chosen: Any) -> list[Example]:
        calls.append(1)
        if len(calls) == 6:
            raise StoreUnavailable("s3://x", "it is down")
        return [examples[i] for i in chosen]

    with (
        closing(Recovery(tmp_path, CONTRACT, {"threads": 1}, 1e9)) as recovery,
        pytest.raises(StoreUnavailable),
    ):
        fit(draft, embed, plan, fetch, RECIPE, 0, recovery=recovery)
    _, _, after = life(examples, tmp_path)
    assert after and after.replayed == 0 and len(after.acknowledged) == 9


def test_another_run_is_refused_and_what_differs_named(examples: list[Example], tmp_path: Path) -> None:
    life(examples, tmp_path)
    other = CONTRACT | {"training.lr_schedule": "constant", "processes": 2}
    with pytest.raises(ResumeRefused) as refused:
        life(examples, tmp_path, contract=other)
    assert refused.value.differing == {
        "training.lr_schedule": ("cosine", "constant"),
        "processes": (None, 2),
    }
    assert "training.lr_schedule was cosine, now is constant" in str(refused.value)
    assert "--fresh" in str(refused.value)


def test_other_threads_are_said_and_allowed(
    examples: list[Example], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life(examples, tmp_path)
    Recovery(tmp_path, CONTRACT, {"threads": 7}, 60).close()
    assert "threads was 1, now is 7" in caplog.text


def changed_loss(folder: Path, factor: float) -> None:
    """The acknowledged loss of step 2 becomes another."""
    import json

    lines = (folder / JOURNAL).read_text().splitlines()
    second = json.loads(lines[1])
    lines[1] = json.dumps(second | {"loss": second["loss"] * factor})
    (folder / JOURNAL).write_text("\n".join(lines) + "\n")


def test_a_step_that_comes_out_otherwise_ends_the_run_by_name(
    examples: list[Example], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for factor, told in ((1 + 1e-7, False), (1.5, True)):
        folder = tmp_path / str(factor)
        with pytest.raises(Died):
            life(examples, folder, dying_at(3, []))
        changed_loss(folder, factor)
        if told:
            with pytest.raises(ReplayDiverged, match=r"step 2, computed again.*acknowledged.*--fresh"):
                life(examples, folder)
        else:
            _, _, recovery = life(examples, folder)
            assert recovery and recovery.diverged == 1
            assert "step 2, computed again, differs in its rounding" in caplog.text


def test_checkpoints_take_no_more_than_a_share_of_the_time(tmp_path: Path) -> None:
    with closing(Recovery(tmp_path, CONTRACT, {}, 0.0)) as recovery:
        assert recovery.due()
        recovery._took, recovery._saved_at = 1.0, recovery._saved_at - 10
        assert not recovery.due()
        recovery._saved_at -= 11
        assert recovery.due()
