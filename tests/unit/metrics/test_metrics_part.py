"""An answer is never late and never silent, whatever a part does."""

import logging
import threading
import time

import pytest

from tide_platform.config import Settings, TideError
from tide_platform.metrics.exporter import Exporter
from tide_platform.metrics.part import Part
from tide_platform.metrics.sheet import Sheet


def frozen(value: float) -> Sheet:
    sheet = Sheet()
    sheet.put("tide_frozen", value)
    return sheet


def answer(exporter: Exporter) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in exporter.collect()
        for sample in family.samples
    }


def exporter(*parts: Part, seconds: float = 2.0) -> Exporter:
    settings = Settings()
    settings.metrics.scrape_seconds = seconds
    return Exporter(settings, parts)


def test_a_part_is_not_read_again_too_soon():
    reads: list[float] = []

    def read() -> Sheet:
        reads.append(time.monotonic())
        return frozen(len(reads))

    often, seldom = exporter(Part("ledger", read, 0.0)), exporter(Part("dataset", read, 60.0))
    assert [answer(often)["tide_frozen",] for _ in range(3)] == [1, 2, 3]
    assert [answer(seldom)["tide_frozen",] for _ in range(3)] == [4, 4, 4]


def test_one_that_hangs_is_told_of_in_time_and_read_by_one_thread(caplog: pytest.LogCaptureFixture):
    let_go, started = threading.Event(), []

    def hang() -> Sheet:
        started.append(1)
        let_go.wait(30)
        return frozen(1)

    both = exporter(Part("servers", hang, 0.0), Part("ledger", lambda: frozen(0), 0.0), seconds=0.2)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "tide.metrics"):
        first, second = answer(both), answer(both)
    assert time.monotonic() - began < 5
    assert first["tide_up", "servers"] == 0 and first["tide_up", "ledger"] == 1
    assert first["tide_frozen",] == 0, "the other's"
    assert second["tide_unread_total", "servers"] == 2 and started == [1]
    assert caplog.text.count("takes too long") == 1, "said once"
    let_go.set()
    end = time.monotonic() + 10
    while answer(both)["tide_up", "servers"] != 1:
        assert time.monotonic() < end
    assert "servers: is read again" in caplog.text


@pytest.mark.parametrize("error", [TideError("no such folder"), OSError("disk"), ZeroDivisionError("a bug")])
def test_one_that_fails_is_told_of_and_counted(error: Exception, caplog: pytest.LogCaptureFixture):
    failing = [error]

    def read() -> Sheet:
        if failing:
            raise failing[0]
        return frozen(1)

    both = exporter(Part("files", read, 0.0), Part("ledger", Sheet, 0.0))
    for times in (1, 2):
        told = answer(both)
        assert (told["tide_up", "files"], told["tide_unread_total", "files"]) == (0, times)
        assert told["tide_up", "ledger"] == 1 and ("tide_frozen",) not in told
    assert str(error) in caplog.text
    assert ("Traceback" in caplog.text) is isinstance(error, ZeroDivisionError)
    failing.clear()
    told = answer(both)
    assert (told["tide_up", "files"], told["tide_unread_total", "files"], told["tide_frozen",]) == (1, 2, 1)


def test_values_that_nobody_knows_are_left_out_and_wrong_labels_are_a_bug():
    sheet = Sheet()
    sheet.put("tide_champion_timestamp_seconds", None)
    assert not sheet.values
    with pytest.raises(AssertionError):
        sheet.put("tide_windows", 1)
    with pytest.raises(KeyError):
        sheet.put("tide_nothing", 1)
