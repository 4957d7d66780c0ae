"""What becomes of windows that land faster than they are trained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_platform.control.backlog import Policy, folds
from tide_platform.control.records import WindowRecord
from tide_platform.control.states import State, WindowKey, window_name


def window(index: int, state: State = State.OWED, samples: int = 10, attempt: int = 1) -> WindowRecord:
    return WindowRecord(
        key=WindowKey("demo", window_name(index)),
        state=state,
        attempt=attempt,
        holder=None,
        seen_at=None,
        run_id=None,
        after_row=10 * (index - 1) - 1,
        last_row=10 * index - 1,
        lance_version=index,
        samples=samples,
        tokens=100 * samples,
        parent=None,
        challenger=None,
        mlflow_run=None,
        reason=None,
        created_at=0.0,
        updated_at=0.0,
        rule=None,
        taken_by=None,
    )


def names(records: tuple[WindowRecord, ...]) -> list[str]:
    return [record.key.window for record in records]


def test_the_newest_supersedes_the_others():
    waiting = [window(1), window(2, attempt=2), window(3)]
    (fold,) = folds("latest", waiting, waiting, 1000)
    assert (names(fold.gone), fold.into.key.window) == (["w00001", "w00002"], "w00003")
    assert fold.state is State.SUPERSEDED


def test_the_newest_takes_what_fits_and_supersedes_the_rest():
    waiting = [window(1), window(2), window(3), window(4)]
    superseded, merged = folds("merge", waiting, waiting, 30)
    assert (names(superseded.gone), superseded.state) == (["w00001"], State.SUPERSEDED)
    assert (names(merged.gone), merged.state) == (["w00002", "w00003"], State.MERGED)


def test_a_window_with_others_samples_between_or_a_failed_attempt_is_not_merged():
    every = [window(1), window(2, State.RUNNING), window(3)]
    (fold,) = folds("merge", [every[0], every[2]], every, 1000)
    assert fold.state is State.SUPERSEDED, "what w00002 trains lies between them"
    assert folds("merge", [window(1, attempt=2), window(2)], [window(1), window(2)], 1000) == []
    gone = [window(1), window(2, State.MERGED), window(3)]
    (fold,) = folds("merge", [gone[0], gone[2]], gone, 1000)
    assert fold.state is State.MERGED


@pytest.mark.parametrize("policy", ["latest", "merge", "all"])
def test_nothing_happens_to_one_window(policy: Policy):
    assert folds(policy, [window(1)], [window(1)], 1000) == []
    assert folds("all", [window(1), window(2)], [window(1), window(2)], 1000) == []


@given(st.lists(st.integers(2, 50), min_size=2, max_size=12), st.integers(2, 200))
def test_no_window_is_lost_and_no_merge_is_too_large(sizes: list[int], most: int):
    waiting = [window(index, samples=size) for index, size in enumerate(sizes, start=1)]
    found = folds("merge", waiting, waiting, most)
    gone = [name for fold in found for name in names(fold.gone)]
    assert sorted([*gone, waiting[-1].key.window]) == names(tuple(waiting))
    merged = [record for fold in found if fold.state is State.MERGED for record in fold.gone]
    assert not merged or sum(record.samples for record in merged) + waiting[-1].samples <= most
