"""Captured samples are asked for once; what is missing is told by prompt."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.synthetic import STREAM, make_sample
from tide_platform.bench import captured as bench
from tide_platform.bench.captured import NotCaptured, captured, request_id
from tide_platform.capture.record import Sample
from tide_platform.capture.segment import SegmentWriter
from tide_platform.config import Settings


class Server:
    """Captures what it is sent, but the requests that it loses."""

    def __init__(self, loses: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.loses, self.kept, self.sent = loses, {}, []
        self.settings: Settings | None = None

    def send(
        self,
        settings: Settings,
        _: Path,
        prompts: Mapping[str, Any],
        missing: Mapping[str, Sequence[int]],
        *__: Any,
    ) -> list[str]:
        self.settings = settings
        for tenant, numbers in missing.items():
            self.sent += [request_id(tenant, number) for number in numbers]
        self.kept: dict[str, Sample] = self.kept | {
            name: make_sample(name, 8) for name in self.sent if name not in self.loses
        }
        return [f"{name}: timed out" for name in self.sent if name in self.loses]


def collect(server: Server, monkeypatch: pytest.MonkeyPatch, **prompts: int) -> dict[str, list[Sample]]:
    monkeypatch.setattr(bench, "_send", server.send)
    monkeypatch.setattr(bench, "_found", lambda folder: server.kept)
    settings = Settings.model_validate({"capture": {"aux_format": "int4", "sampling_rate": 0.1}})
    sent: Any = {tenant: ["prompt"] * count for tenant, count in prompts.items()}
    return captured(settings, Path("x"), sent, new_tokens=8, concurrency=4, say=lambda _: None)


def test_only_what_is_missing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    first = collect(server, monkeypatch, maths=2)
    assert [s.meta.sample_id for s in first["maths"]] == ["maths-0000", "maths-0001"]
    assert server.settings is not None and server.settings.capture.aux_format == "bf16"
    assert server.settings.capture.sampling_rate == 1
    server.sent.clear()
    more = collect(server, monkeypatch, maths=3, code=1)
    assert server.sent == ["maths-0002", "code-0000"]
    assert [s.meta.sample_id for s in more["maths"]] == ["maths-0000", "maths-0001", "maths-0002"]
    server.sent.clear()
    collect(server, monkeypatch, maths=3, code=1)
    assert server.sent == []


def test_a_lost_sample_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        NotCaptured, match=r"1 of 2 samples of tenant maths were captured .*the last: maths-0001: timed out"
    ):
        collect(Server({"maths-0001"}), monkeypatch, maths=2)


def test_an_aborted_sample_is_sent_again(tmp_path: Path) -> None:
    spool = tmp_path / "state" / "spool"
    spool.mkdir(parents=True)
    segment = SegmentWriter(spool, STREAM)
    for name, flags in (("maths-0000", ()), ("maths-0001", ("aborted",))):
        segment.append(make_sample(name, 8, request_id=name, flags=flags))
    segment.seal()
    sent: Any = {"maths": ["prompt"] * 3}
    assert bench._missing(bench._found(tmp_path), sent) == {"maths": [1, 2]}
