"""Curves of acceptance over time, and what is said of them."""

import math
from pathlib import Path
from typing import Any

import pytest

from tide_platform.bench import adapt_time
from tide_platform.bench.adapt_time import judge, plot, run, seconds_until, slots
from tide_platform.config import Settings
from tide_platform.control.history import Block


def block(at: float, rounds: int, accepted: int, tenant: str = "maths") -> Block:
    tokens = rounds + accepted
    return Block("s", "d", tenant, 4, at, at, 2, 0, tokens, rounds, accepted, 1.0, tokens, {})


def level(*lengths: float, deployed: float = 90.0) -> dict[str, Any]:
    found = [
        {"s": 30.0 + 60 * n, "acceptance_length": length, "requests": 4, "tokens": 90}
        for n, length in enumerate(lengths)
    ]
    return {"slots": found, "deployed_s": [deployed], "requests": 9}


def test_blocks_are_added_up_by_the_minute() -> None:
    blocks = [
        block(1000.0, 10, 2),
        block(1059.0, 30, 10),
        block(1061.0, 10, 10),
        block(1065.0, 10, 0, tenant="general"),
        block(1200.0, 0, 0),
        block(999.0, 10, 10),
    ]
    assert slots(blocks, "maths", 1000.0) == [
        {"s": 30.0, "acceptance_length": 1.3, "requests": 4, "tokens": 52},
        {"s": 90.0, "acceptance_length": 2.0, "requests": 2, "tokens": 20},
    ]


def test_how_long_it_took() -> None:
    assert seconds_until(level(1.3, 1.35, 1.44, 1.5)) == 150.0
    assert math.isinf(seconds_until(level(1.3, 1.3)))


def test_levels_are_told_beside_the_fewest_at_a_time() -> None:
    report = judge({1: level(1.3, 1.3, 1.3, 1.5), 16: level(1.3, 1.5, 1.6, 1.6)})
    assert report.ratios == {
        "minutes_1": 1.0,
        "gain_1": pytest.approx(1.5 / 1.3),
        "minutes_16": pytest.approx(90 / 210),
        "gain_16": pytest.approx(1.6 / 1.3),
    }
    never = judge({1: level(1.3, 1.3), 4: level(1.3, 1.5)})
    assert never.ratios["minutes_1"] == 1.0 and never.ratios["minutes_4"] == 0.0


def test_a_level_that_is_done_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def one(settings: Settings, state: Path, at: int, *_: Any) -> dict[str, Any]:
        done.append(at)
        if at == 16 and done.count(16) == 1:
            raise KeyboardInterrupt
        return level(1.3, 1.5)

    monkeypatch.setattr(adapt_time, "one_level", one)
    with pytest.raises(KeyboardInterrupt):
        run(Settings(), tmp_path, minutes=1.0, say=lambda _: None)
    report = run(Settings(), tmp_path, minutes=1.0, say=lambda _: None)
    assert done == [1, 4, 16, 16] and set(report.raw) == {"1", "4", "16"}
    assert (tmp_path / "adaptation-over-time.svg").read_text().startswith("<svg")


def test_the_plot_names_each_level() -> None:
    drawn = plot({1: level(1.3, 1.4), 4: level(1.3, 1.5)})
    assert "adapt-time" in drawn and "dotted: a draft was deployed" in drawn
