"""Blob columns are what Lance's own constructor makes of the same bytes."""

import lance
import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tide_platform.store.schema import _blob_column

MATRIX = st.tuples(st.integers(0, 5), st.integers(0, 7)).flatmap(lambda shape: arrays(np.uint16, shape))


@given(st.lists(MATRIX, min_size=1, max_size=6))
def test_a_blob_column_is_lances_own(values: list[np.ndarray]) -> None:
    ours = _blob_column(values)
    theirs = lance.blob_array([value.tobytes() for value in values])
    assert ours.type == theirs.type and ours.to_pylist() == theirs.to_pylist()
    ours.validate(full=True)
    field = [lance.blob_field("blob")]
    assert pa.table([ours], schema=pa.schema(field)) == pa.table([theirs], schema=pa.schema(field))
