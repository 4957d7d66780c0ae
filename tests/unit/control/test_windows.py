"""Cutting and dividing: every sample in one window, requests never on both sides."""

import pytest
from control_fakes import Data, Row
from hypothesis import given
from hypothesis import strategies as st

from tide_platform.control.records import Scan
from tide_platform.control.states import BadWindowKey, WindowKey, window_name
from tide_platform.control.windows import (
    MAX_CUTS,
    DatasetReplaced,
    NoReference,
    Rule,
    cut,
    divide,
    halve,
    retired,
)


@given(
    batches=st.lists(st.lists(st.sampled_from(["default", "b", "reference"]), max_size=40), max_size=12),
    minimum=st.integers(2, 9),
)
def test_each_sample_is_in_one_window_in_order(batches: list[list[str]], minimum: int):
    data, scan, cuts = Data(), Scan(), []
    for version, batch in enumerate(batches, start=1):
        data.rows += [Row(len(data.rows) + i, tenant) for i, tenant in enumerate(batch)]
        for _ in range(1 + len(batch) // minimum):  # more ticks than a backlog needs
            reads = data.reads
            scan, new = cut("demo", scan, version, len(data.rows), data.after, Rule(minimum))
            assert data.reads <= reads + 1
            cuts += new
    samples = [row.row_id for row in data.rows if row.tenant != "reference"]
    covered = []
    for each in cuts:
        mine = [row for row in samples if each.after_row < row <= each.last_row]
        assert len(mine) == each.samples == minimum
        covered += mine
    assert covered == samples[: len(covered)]
    assert len(samples) - len(covered) < minimum


def test_nothing_is_read_before_enough_rows_landed():
    data = Data()
    data.rows = [Row(i) for i in range(9)]
    scan, cuts = cut("demo", Scan(), 1, 9, data.after, Rule(10))
    assert (scan, cuts, data.reads) == (Scan(), [], 0)


def test_reference_rows_are_read_once_and_make_no_window():
    data = Data()
    data.rows = [Row(i, "reference") for i in range(50)]
    scan, cuts = cut("demo", Scan(), 3, 50, data.after, Rule(10))
    assert (scan, cuts) == (Scan(3, 50, 49, 0), [])
    assert cut("demo", scan, 3, 50, data.after, Rule(10)) == (scan, [])
    assert data.reads == 1


def test_a_backlog_is_cut_over_several_ticks():
    data = Data()
    data.rows = [Row(i) for i in range(100)]
    scan, cuts = cut("demo", Scan(), 1, 100, data.after, Rule(10))
    assert len(cuts) == MAX_CUTS
    scan, cuts = cut("demo", scan, 1, 100, data.after, Rule(10))
    assert len(cuts) == 10 - MAX_CUTS and scan.pending == 0


@given(
    lengths=st.lists(st.integers(1, 40), max_size=80),
    by_samples=st.integers(2, 9),
    by_tokens=st.integers(1, 120),
)
def test_a_window_is_complete_by_samples_or_by_tokens(lengths: list[int], by_samples: int, by_tokens: int):
    data, scan, cuts = Data(), Scan(), []
    for version, length in enumerate(lengths, start=1):
        data.rows.append(Row(len(data.rows), num_tokens=length))
        scan, new = cut("demo", scan, version, len(data.rows), data.after, Rule(by_samples, by_tokens))
        cuts += new
    expected, part = [], []
    for length in lengths:
        part.append(length)
        if len(part) >= by_samples or (len(part) >= 2 and sum(part) >= by_tokens):
            expected.append((len(part), sum(part), "samples" if len(part) >= by_samples else "tokens"))
            part = []
    assert [(each.samples, each.tokens, each.rule["by"]) for each in cuts] == expected
    assert scan.pending + len(data.rows) - scan.rows == len(part), "what waits is known"


def test_expired_rows_do_not_stop_the_cutting():
    data = Data()
    data.rows = [Row(i) for i in range(50, 75)]  # rows 0..49 were in a window and have expired
    scan, cuts = cut("demo", Scan(5, 50, 49, 0), 9, 25, data.after, Rule(10))
    assert [each.samples for each in cuts] == [10, 10] and scan.pending == 5


def test_a_replaced_dataset_is_named():
    with pytest.raises(DatasetReplaced, match="version 2"):
        cut("demo", Scan(5, 50, 49, 0), 2, 500, Data().after, Rule(10))


@given(st.lists(st.integers(0, 30), min_size=2, max_size=60), st.floats(0.01, 0.99))
def test_both_sides_get_a_request_and_none_is_on_both(requests: list[int], share: float):
    rows = [Row(i, request_id=f"r{request}") for i, request in enumerate(requests)]
    inside, outside = halve(rows, share, "x")
    assert sorted(row.row_id for row in inside + outside) == list(range(len(rows)))
    assert not {row.request_id for row in inside} & {row.request_id for row in outside}
    if len(set(requests)) >= 2:
        assert inside and outside


def test_old_windows_are_retired_but_for_open_ones_and_other_deployments():
    keys = [f"demo/{window_name(i)}" for i in range(1, 8)]
    opened = {WindowKey("demo", window_name(2))}
    assert retired("demo", [*keys, "other/w00001"], opened, 4) == ["demo/w00001", "demo/w00003"]
    assert retired("demo", keys[:4], opened, 4) == []


def test_the_share_is_about_what_was_asked_for():
    rows = [Row(i, request_id=f"request-{i}") for i in range(4000)]
    inside, _ = halve(rows, 0.15, "validation")
    assert 0.13 < len(inside) / len(rows) < 0.17


def test_a_division_has_four_parts():
    samples = [Row(i, request_id=f"a{i}") for i in range(20)]
    reference = [Row(100 + i, "reference", f"b{i}") for i in range(20)]
    division = divide("demo", samples, reference, 0.2)
    assert sorted(division.train + division.validation) == sorted(row.sample_id for row in samples)
    assert sorted(division.reference_train + division.reference_judge) == sorted(
        row.sample_id for row in reference
    )


def test_without_a_reference_set_nothing_is_divided():
    with pytest.raises(NoReference, match="tide traffic"):
        divide("demo", [Row(1, request_id="a"), Row(2, request_id="b")], [], 0.2)


def test_window_keys():
    key = WindowKey("demo", window_name(7))
    assert str(key) == "demo/w00007" and WindowKey.parse(str(key)) == key
    for text in ("demo", "/w1", "demo/", "a/b/c"):
        with pytest.raises(BadWindowKey):
            WindowKey.parse(text)
