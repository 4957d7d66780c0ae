"""The benchmarks that ask servers, end to end on the tiny target. They judge nothing here."""

from pathlib import Path

import numpy as np
import pytest

from tide_platform.bench import capture_cost, load, replay, serve
from tide_platform.capture.segment import read_segment
from tide_platform.capture.spool import sealed_segments
from tide_platform.config import Settings
from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft
from tide_platform.serving import chat, workloads

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TINY = Path(__file__).parents[1] / "fixtures" / "tiny_target"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    draft = tmp_path / "draft"
    save_draft(draft, new_draft(load_target_parts(TINY), np.arange(256)), {})
    monkeypatch.setattr(load, "prompts", lambda server, count: [[30 + i, 40, 50] for i in range(count)])
    settings = Settings(target=TINY, draft=draft, state=tmp_path / "state")
    settings.serving.threads, settings.serving.dtype, settings.serving.context_length = 1, "float32", 256
    settings.serving.max_total_tokens = 2048
    settings.capture.ring_bytes, settings.capture.segment_bytes = 16 << 20, 1 << 20
    settings.capture.segment_seconds = 0.2
    return settings


def test_capture_is_on_in_half_of_the_blocks(settings: Settings) -> None:
    report = capture_cost.run(settings, concurrencies=(3,), blocks=4, batches=(2,))
    rates = report.raw["throughput_3"]
    assert len(rates["on"]) == len(rates["off"]) == 2 and min(rates["on"] + rates["off"]) > 0
    low, high = report.intervals["throughput_3"]
    assert low <= report.ratios["throughput_3"] <= high
    assert 0 < report.ratios["share_batch_2"] < 1 and report.raw["cost_batch_2"]["cpu_ms_a_row"] > 0
    assert not any(report.raw["dropped"].values())
    spool = settings.state / "bench" / "capture" / "state" / "spool"
    kept = [sample.meta for path in sealed_segments(spool) for sample in read_segment(path)[1]]
    # the warm-up, two blocks with capture on, and the flows of two whose cost was counted
    counted = 2 * capture_cost.SHARE_FLOWS
    assert len(kept) == 3 + 2 * capture_cost.BLOCK_REQUESTS + counted
    assert {meta.tenant for meta in kept} == {"bench"}
    assert report.raw["cost_batch_2"]["rows"] >= 2 * capture_cost.SHARE_TOKENS


def test_rounds_are_measured_beside_plain_steps(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "REPETITIONS", 2)
    report = serve.run(settings, batches=(1, 2), ks=(2,))
    assert report.ratios.keys() == report.intervals.keys() == {"k2_batch_1", "k2_batch_2"}
    assert all(len(of) == 2 and min(of) > 0 for of in report.raw["ms"].values())
    assert 1 <= report.raw["tokens_a_round"]["k2"] <= 3


def test_replay_is_what_the_live_server_counts(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured at k = 2, served at k = 1: the same answers, and the same rounds by replay."""
    text = (TINY.parent / "tiny_prompts.txt").read_bytes()
    inputs = [list(text[at : at + 12]) for at in (0, 40, 90, 150)]
    monkeypatch.setattr(workloads, "load_workload", lambda name, split, count: inputs[:count])
    monkeypatch.setattr(chat, "encode_prompts", lambda target, prompts: list(prompts))
    report = replay.run(
        settings, settings.state / "replay", workloads=("maths",), ks=(1,), prompts=4, say=lambda _: None
    )
    case = report.raw["cases"]["live_maths_k1"]
    assert case["same_text"] == 1 and len(case["requests"]) == 4
    assert all(live == replayed for live, _, replayed, _, _ in case["requests"].values()), "rounds"
    assert report.ratios["live_maths_k1"] == pytest.approx(1, abs=0.02)
