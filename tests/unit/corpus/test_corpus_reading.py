"""Records of files, whole and broken, in pieces of any size."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tide_platform.corpus import reading
from tide_platform.corpus.errors import CorpusUnreadable
from tide_platform.corpus.reading import read_records

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(VALUES, min_size=1, max_size=6),
    chunk=st.integers(1, 9),
    indent=st.sampled_from([None, 1]),
)
def test_an_array_is_read_alike_in_pieces_of_any_size(tmp_path: Path, monkeypatch, values, chunk, indent):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(values, indent=indent) + "\n")
    monkeypatch.setattr(reading, "_CHUNK", chunk)
    records = list(read_records(path))
    assert [r.value for r in records] == values and [r.number for r in records] == [
        *range(1, len(values) + 1)
    ]


def test_a_broken_line_is_a_record_with_its_error(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": \n{"a": "\xff"}\n{"a": 3}\n')
    records = list(read_records(path))
    assert [r.number for r in records] == [1, 3, 4, 5]
    assert [r.error is None for r in records] == [True, False, False, True]
    assert records[1].value == '{"a": \n' and "not JSON" in (records[1].error or "")


def test_records_come_before_the_rest_of_the_file_is_read(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(reading, "_CHUNK", 4)
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1}, {"a": 2}, broken')
    assert [r.value["a"] for r in itertools.islice(read_records(path), 2)] == [1, 2]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "empty"),
        (" \n ", "empty"),
        ('[{"a": 1}, {"a"', "element 2"),
        ('[{"a": 1}', "element 1"),
        ('[{"a": 1},', "without a `]`"),
        ('[{"a": 1} {"a": 2}]', "comma"),
        ('[{"a": 1}] x', "follows"),
        ('[{"a": 1},]', "element 2"),
    ],
)
def test_what_is_wrong_with_a_whole_file_is_said(tmp_path: Path, content: str, says: str):
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(CorpusUnreadable, match=says):
        list(read_records(path))


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(CorpusUnreadable, match="no such file"):
        list(read_records(tmp_path / "a.json"))
