"""The report's figures against a slow computation over single requests."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.live_traffic import Traffic
from tests.fixtures.week import BEGAN, FIRST, HOUR, SECOND, THIRD, Clock, week
from tide_platform.config import Settings, target_digest
from tide_platform.control.history import batch_of
from tide_platform.control.ledger import Ledger
from tide_platform.evaluation.cost_model import FILE, BatchCosts, CostModel
from tide_platform.report.figures import Report
from tide_platform.report.gather import gather
from tide_platform.report.live import WIDTHS_S, bin_width
from tide_platform.report.since import BadSince, seconds

TINY = Path(__file__).parents[2] / "fixtures" / "tiny_target"
LONG = 30 * 86_400.0


class Story:
    def __init__(self, folder: Path):
        self.settings = Settings(state=folder, target=TINY)
        self.clock = Clock()
        self.ledger = Ledger(f"sqlite:///{folder}/ledger.db", clock=self.clock)
        self.traffic: Traffic = week(self.ledger, self.clock)
        self.report: Report = self.gather()

    def gather(self, back_s: float = LONG) -> Report:
        return gather(self.settings, self.ledger, back_s, self.clock.now)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    made = Story(tmp_path_factory.mktemp("week"))
    yield made
    made.ledger.close()


def test_sums_by_concurrency_and_tenant_are_those_of_the_requests(story: Story):
    whole = [one for one in story.traffic.told if not one["straddles"]]
    by_band, by_tenant = defaultdict(list), defaultdict(list)
    for one in whole:
        by_band[batch_of(one["concurrency"]), one["draft"]].append(one)
        by_tenant[one["tenant"], one["draft"]].append(one)
    assert {(c.batch, c.draft) for c in story.report.by_concurrency} == by_band.keys()
    for cell in story.report.by_concurrency:
        of = by_band[cell.batch, cell.draft]
        assert (cell.requests, cell.tokens) == (len(of), sum(one["tokens"] for one in of))
        length = 1 + sum(one["accepted"] for one in of) / sum(one["rounds"] for one in of)
        assert cell.acceptance_length == pytest.approx(length)
        times = sum(one["token_ms"] * (one["tokens"] - 1) for one in of)
        ms = times / sum(one["tokens"] - 1 for one in of)
        assert cell.mean_token_ms == pytest.approx(ms)
        assert cell.tokens_per_s == pytest.approx((cell.batch or 0) * 1000 / ms)
        assert cell.token_ms_p50 == pytest.approx(np.quantile([o["token_ms"] for o in of], 0.5), rel=0.08)
    assert {(c.tenant, c.draft): c.requests for c in story.report.by_tenant} == {
        key: len(of) for key, of in by_tenant.items()
    }
    assert story.report.live is not None and story.report.live.requests == len(story.traffic.told)
    assert story.report.mixed == 1


def test_figures_over_time_part_at_a_reload_and_lose_nothing(story: Story):
    report = story.report
    assert sum(cell.requests for cell in report.volume) == len(story.traffic.told)
    assert sum(cell.requests for cell in report.speed) == len(story.traffic.told)
    assert sum(cell.requests for cell in report.acceptance) == len(story.traffic.told) - report.mixed
    for cell in report.acceptance:
        of = [
            one
            for one in story.traffic.told
            if one["draft"] == cell.draft
            and cell.began_at <= one["at"] <= cell.ended_at
            and not one["straddles"]
        ]
        assert cell.requests == len(of)
        assert cell.acceptance_length == pytest.approx(
            1 + sum(one["accepted"] for one in of) / sum(one["rounds"] for one in of)
        )
    assert len(report.volume) <= 61


def test_what_was_saved_is_the_slow_sum_over_requests(story: Story):
    """Of each later request: the first draft's mean time at its band, less its own time, over the batch."""
    whole = [one for one in story.traffic.told if not one["straddles"]]
    spent, tokens = defaultdict(float), defaultdict(int)
    for one in whole:
        if one["draft"] == FIRST:
            spent[batch_of(one["concurrency"])] += one["token_ms"] * (one["tokens"] - 1)
            tokens[batch_of(one["concurrency"])] += one["tokens"] - 1
    saved_s = would_s = 0.0
    left_out = 0
    for one in whole:
        band = batch_of(one["concurrency"])
        if one["draft"] == FIRST:
            continue
        if band not in tokens:
            left_out += one["tokens"] - 1
            continue
        would = spent[band] / tokens[band] * (one["tokens"] - 1) / 1000 / band
        would_s += would
        saved_s += would - one["token_ms"] * (one["tokens"] - 1) / 1000 / band
    saved = story.report.saved
    assert saved.first == FIRST and saved.missing == [16] and left_out > 0
    assert saved.saved_hours * HOUR == pytest.approx(saved_s) and saved_s > 0
    assert saved.share == pytest.approx(saved_s / would_s)
    assert saved.tokens - saved.compared == left_out
    assert sum(each.saved_s for each in saved.stretches) == pytest.approx(saved_s)
    assert "An estimate" in saved.words and "up to 16 at a time" in saved.words
    bad = sum(each.saved_s for each in saved.stretches if each.draft == THIRD)
    assert bad < 0, "what a worse draft cost is not hidden"


def test_the_first_drafts_own_requests_may_be_older_than_the_report(story: Story):
    short = story.gather(12 * HOUR)
    assert {cell.draft for cell in short.acceptance} == {SECOND}
    assert short.saved.baselines == story.report.saved.baselines
    assert short.saved.share is not None and short.saved.saved_hours < story.report.saved.saved_hours


def test_marks_and_what_is_served(story: Story):
    report = story.report
    assert [(mark.what, mark.digest, mark.serves, mark.window) for mark in report.marks] == [
        ("deployed", SECOND, SECOND, "w00001"),
        ("deployed", THIRD, THIRD, "w00002"),
        ("rolled back", THIRD, SECOND, None),
    ]
    assert report.served is not None
    assert (report.served.digest, report.served.by, report.served.window) == (SECOND, "ann@host", None)
    assert report.windows == {"deployed": 2, "owed": 1, "rejected": 1}
    assert report.frozen is not None and [bar.digest for bar in report.bars] == [THIRD]
    assert report.verdict is not None and not report.verdict.passed
    assert set(report.verdict.by_position) == {"champion", "challenger"} and len(report.verdict.slices) == 3
    assert [row.action for row in report.audit][-1] == "frozen"


def test_an_undone_rollout_is_marked(story: Story, tmp_path: Path):
    from tide_platform.control.rollouts import Order

    clock = Clock()
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db", clock=clock)
    rollout = ledger.rollouts.begin("demo", Order(SECOND, "run r", "better"), FIRST, ["http://one"])
    ledger.rollouts.undone(rollout, "slower on the canary")
    report = gather(Settings(state=tmp_path, target=TINY), ledger, LONG, BEGAN + 60)
    assert [(m.what, m.digest, m.serves, m.reason) for m in report.marks] == [
        ("undone", SECOND, FIRST, "slower on the canary")
    ]
    assert report.saved.share is None
    ledger.close()


def test_predicted_speed_needs_a_model_of_this_target(story: Story):
    assert story.report.predicted == [] and "no cost model was measured" in story.report.costs
    costs = {batch: BatchCosts(40.0, 0.1, {1: 1.0, 2: 1.2}) for batch in (1, 4, 32)}
    of = {"dtype": "bfloat16", "device": "cpu", "date": "2026-11-30", "cores": 2}
    CostModel(costs, target_digest(TINY), of).write(story.settings.state / FILE)
    try:
        report = story.gather()
    finally:
        (story.settings.state / FILE).unlink()
    assert {(row.batch, row.draft) for row in report.predicted} == {
        (batch, draft) for batch in (1, 4) for draft in (FIRST, SECOND)
    }
    for row in report.predicted:
        cell = next(c for c in report.by_concurrency if (c.batch, c.draft) == (row.batch, row.draft))
        assert row.speed == pytest.approx((cell.acceptance_length or 0) / (0.1 * 2 + 1.2))


def test_nothing_at_all_is_no_error(tmp_path: Path):
    ledger = Ledger(f"sqlite:///{tmp_path}/ledger.db")
    report = gather(Settings(state=tmp_path, target=TINY), ledger, LONG)
    assert report.served is None and report.live is None and report.marks == []
    assert report.saved.share is None and "no draft but the first" in report.saved.words
    ledger.close()


def test_bins_are_few_and_round(story: Story):
    blocks = story.ledger.history.blocks("demo")
    assert bin_width(blocks) == 10_800.0, "three days"
    assert bin_width(blocks[:5]) in WIDTHS_S and bin_width([]) == WIDTHS_S[0]


@pytest.mark.parametrize(
    ("text", "value"), [("90m", 5400), ("24h", 86_400), ("7d", 604_800), ("1.5w", 907_200)]
)
def test_lengths_of_time(text: str, value: float):
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "0d", "7 days"])
def test_what_is_no_length_of_time_is_named(text: str):
    with pytest.raises(BadSince, match="write 90m"):
        seconds(text)
