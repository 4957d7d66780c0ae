"""A first draft from captured traffic of the tiny target."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import AUX_LAYERS, TINY, prompts, say

from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.config import Settings, draft_digest
from tide_platform.config.schema import Training
from tide_platform.draft.check import check_draft
from tide_platform.store.hidden_states import open_store
from tide_platform.training.pretrain import Hooks, PretrainPlan, TooFewSamples, pretrain
from tide_platform.training.progress import Stopped
from tide_platform.training.samples import MemorySamples

PLAN = PretrainPlan(
    vocab_size=64,
    epochs_one_step=2,
    epochs=2,
    learning_rate_one_step=3e-3,
    learning_rate=2e-3,
    held_out=4,
    seed=0,
)


def test_pretrain(tmp_path: Path) -> None:
    samples = say(prompts(60), 40)
    lines: list[str] = []
    figures = pretrain(
        MemorySamples(samples), TINY, AUX_LAYERS, tmp_path / "d", PLAN, Training(threads=1),
        Hooks(say=lines.append),
    )  # fmt: skip
    assert figures["digest"] == draft_digest(tmp_path / "d")
    config = check_draft(tmp_path / "d", TINY)
    assert (config.draft_vocab_size, config.aux_layer_ids) == (64, AUX_LAYERS)
    assert figures["samples"] + figures["held_out"]["samples"] == 60
    assert figures["coverage"] > 0.9
    lengths = [stage["held_out"]["acceptance_length"][2] for stage in figures["stages"]]
    assert len(lengths) == 2 and figures["held_out"]["acceptance_length"][2] == lengths[-1] > 1.1
    assert json.loads((tmp_path / "d.figures.json").read_text())["digest"] == figures["digest"]
    assert "held-out acceptance length" in lines[-1]


def test_interrupted_in_either_stage_it_ends_with_the_same_draft(tmp_path: Path) -> None:
    samples = MemorySamples(say(prompts(30), 20))

    def call(out: str, stop_at: tuple[str, int] | None = None) -> dict[str, Any]:
        seen: list[tuple[str, int]] = []
        hooks = Hooks(
            lambda stage, record: seen.append((stage, record.step)),
            lambda text: None,
            lambda: stop_at in seen,
        )
        return pretrain(samples, TINY, AUX_LAYERS, tmp_path / out, PLAN, Training(threads=1), hooks)

    for stop_at in (("one step", 3), ("unrolled", 2)):
        with pytest.raises(Stopped):
            call("a", stop_at)
    assert not (tmp_path / "a").exists() and (tmp_path / "a.run").is_dir()
    assert call("a")["digest"] == call("b")["digest"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["a", "b"]


def test_from_the_store_it_is_the_draft_that_it_is_from_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `tide draft pretrain` does, with a batch size of the command's own."""
    from tide_platform.cli.draft import _pretrain

    samples = say(prompts(30), 20)
    settings = Settings.model_validate({
        "storage": {"uri": str(tmp_path / "store")}, "training": {"threads": 1, "batch_size": 4},
    })  # fmt: skip
    store = open_store(settings)
    store.ensure(StreamMeta("t", 96, 256, AUX_LAYERS, 16))
    other = [
        Sample(replace(s.meta, sample_id=f"o{i}", tenant="o'ther"), s.tensors) for i, s in enumerate(samples)
    ]
    store.append([*samples, *other], ["segment"])
    plan = (64, 1, 1, 3e-3, 2e-3, 4, 0)
    figures = _pretrain(settings, TINY, tmp_path / "a", "general", plan, False, lambda: False)
    memory = pretrain(
        MemorySamples(samples), TINY, AUX_LAYERS, tmp_path / "b", PretrainPlan(*plan), settings.training,
        Hooks(say=lambda text: None),
    )  # fmt: skip
    assert figures["digest"] == memory["digest"] == draft_digest(tmp_path / "a")
    said = capsys.readouterr().out
    assert "30 samples of tenant general, version" in said and "one step 8/8" in said
    told = json.loads((tmp_path / "a" / "tide.json").read_text())
    assert told["plan.vocab_size"] == 64 and told["training"]["batch_size"] == 4 and told["sample_ids"]
    with pytest.raises(TooFewSamples):
        _pretrain(settings, TINY, tmp_path / "c", "nobody", plan, False, lambda: False)


def test_too_few() -> None:
    with pytest.raises(TooFewSamples, match="capture more traffic"):
        pretrain(MemorySamples(say(prompts(3), 4)), TINY, AUX_LAYERS, Path("never"), PLAN, Training())
