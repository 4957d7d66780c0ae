"""Holes of prefix-cache hits, filled from samples that computed the prefix."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_sample

from tide_platform.capture.record import Sample
from tide_platform.draft.prefix import fill_prefixes


def cut(sample: Sample, first: int) -> Sample:
    keep = sample.tensors["row_pos"] >= first
    return Sample(
        sample.meta,
        sample.tensors | {"row_pos": sample.tensors["row_pos"][keep], "aux": sample.tensors["aux"][keep]},
    )


def sharing(rng: np.random.Generator, shared: int) -> tuple[Sample, Sample]:
    """Two samples whose first ``shared`` tokens, and rows, are the same."""
    a, b = (random_sample(rng, name, 12, 8, 0, 0.0) for name in "ab")
    b.tensors["input_ids"][:shared] = a.tensors["input_ids"][:shared]
    b.tensors["input_ids"][shared] = (a.tensors["input_ids"][shared] + 1) % 20
    b.tensors["aux"][:shared] = a.tensors["aux"][:shared]
    return a, b


@settings(deadline=None)
@given(st.integers(1, 10), st.integers(1, 11), st.integers(0, 99))
def test_what_is_filled_is_what_was_cut(shared: int, first: int, seed: int) -> None:
    a, b = sharing(np.random.default_rng(seed), shared)
    _, filled = fill_prefixes([a, cut(b, first)])
    expected = cut(b, first).tensors["row_pos"].tolist()
    expected = [*range(min(shared, first)), *expected]
    assert filled.tensors["row_pos"].tolist() == expected
    assert (filled.tensors["aux"] == b.tensors["aux"][expected]).all()


def test_donors_are_not_returned_and_nothing_is_invented() -> None:
    a, b = sharing(np.random.default_rng(0), 6)
    assert len(fill_prefixes([cut(b, 6)], [a])[0].tensors["row_pos"]) == 12
    alone = cut(b, 6)
    assert fill_prefixes([alone])[0] is alone
    stretch = Sample(replace(a.meta, start_pos=5), cut(a, 3).tensors)
    assert fill_prefixes([stretch], [a])[0] is stretch


def test_rows_stay_within_a_tenant() -> None:
    a, b = sharing(np.random.default_rng(0), 6)
    other = Sample(replace(a.meta, tenant="other"), a.tensors)
    alone = cut(b, 6)
    assert fill_prefixes([other, alone])[1] is alone
    assert fill_prefixes([alone], [other])[0] is alone
