"""The vocabulary map."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tide_platform.draft.vocab import choose_vocabulary, count_tokens, coverage, inverse_map, to_maps

counts = arrays(np.int64, st.integers(1, 60), elements=st.integers(0, 9))


@given(counts, st.data())
def test_maps_agree_with_each_other(drawn: np.ndarray, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(drawn)))
    chosen = choose_vocabulary(drawn, size)
    d2t, t2d = to_maps(chosen, len(drawn))
    assert (np.diff(chosen) > 0).all() and len(chosen) == size
    assert (d2t + np.arange(size) == chosen).all() and (np.flatnonzero(t2d) == chosen).all()
    inverse = inverse_map(d2t, len(drawn))
    assert (inverse[chosen] == np.arange(size)).all() and (inverse >= 0).sum() == size
    left_out = np.delete(drawn, chosen)
    assert not len(left_out) or left_out.max() <= drawn[chosen].min()


def test_unseen_tokens_fill_up_from_the_lowest() -> None:
    seen = count_tokens([np.array([7, 7, 5])], 10)
    assert choose_vocabulary(seen, 4).tolist() == [0, 1, 5, 7]
    assert coverage(seen, to_maps(np.array([7]), 10)[1]) == pytest.approx(2 / 3)


def test_too_large_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        choose_vocabulary(np.zeros(5), 6)
