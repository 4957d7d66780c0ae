"""Rows off a GPU without SGLang: a graph whose outputs the next replay overwrites, staging, the ring.

``python -m tide_platform.bench.gpu_ring FOLDER``, run by the Python that has the GPU, prints one JSON object.
"""

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide_platform.capture.reader import RingReader
from tide_platform.capture.record import StreamMeta
from tide_platform.capture.ring import Ring
from tide_platform.capture.writer import RingWriter
from tide_platform.config import TideError
from tide_platform.engine.capture import Capture, Origin
from tide_platform.engine.policy import Policy, Request
from tide_platform.engine.staging import StreamStager
from tide_platform.engine.staging_memory import CudaDevice, Device, Shape, Staging
from tide_platform.engine.steps import Planned, VerifyStep

STEPS, BATCH, ROWS, HIDDEN, VOCABULARY, TEACHERS = 200, 8, 4, 64, 512, 16
RING_BYTES = 64 << 20
IN_FLIGHT = 4  # steps at a time, at most; as many slots
PATIENCE_S = 60.0
NO_TOKENS = np.zeros(0, np.int32)


class RowsWrong(TideError):
    """What came out of the ring is not what the graph computed."""


class Engine:
    """Computes a step's outputs from its number alone, always into the same memory: numbers small enough to
    be exact in bf16, logits without ties.
    """

    def __init__(self, device: torch.device):
        self.number = torch.zeros((), dtype=torch.int64, device=device)
        self._rows = torch.arange(BATCH * ROWS, device=device)
        self._width = torch.arange(3 * HIDDEN, device=device)
        self._vocabulary = torch.arange(VOCABULARY, device=device)
        self._batch = torch.arange(BATCH, device=device)
        self.outputs: dict[str, torch.Tensor] = {}

    def compute(self) -> None:
        step, rows = self.number, self._rows.unsqueeze(1)
        made = {
            "hidden": ((step * 7 + rows * 13 + self._width) % 251).to(torch.bfloat16),
            "raw": ((step * 31 + rows * 17 + self._vocabulary * 5) % 1009).float() / 16,
            "predict": ((step + self._rows) % VOCABULARY).int(),
            "accept_lens": (step + self._batch) % ROWS + 1,
            "seq_lens": step * ROWS + self._batch * 0,
        }
        for name, value in made.items():
            if name in self.outputs:
                self.outputs[name].copy_(value)
            else:
                self.outputs[name] = value.clone()


def graph_of(engine: Engine) -> Callable[[], None]:
    """The engine's step as a CUDA graph (a HIP graph on ROCm)."""
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        engine.compute()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.compute()
    return graph.replay


def check(folder: Path, staging: Device, engine: Engine, replay: Callable[[], None]) -> dict[str, Any]:
    """Stages every step while the next one overwrites it. Raises :class:`RowsWrong`."""
    stream = StreamMeta("ring-check", HIDDEN, VOCABULARY, (0, 1, 2), TEACHERS)
    ring = Ring.create(folder / "check.ring", RING_BYTES, stream)
    writer = RingWriter(ring)
    capture = Capture(writer, Policy(True, "allow", 1.0), Origin("t", "greedy", "check"), "d", ROWS - 1)
    faults: list[Exception] = []
    shape = Shape(3 * HIDDEN, TEACHERS, rows=BATCH * ROWS, slots=IN_FLIGHT)
    stager = StreamStager(capture, Staging(shape, staging), faults.append)
    samples = [capture.admit(Request(str(b), 0, 0.0, 1.0, -1), 0.0) for b in range(BATCH)]
    plan = [Planned(b, sample, 0, NO_TOKENS) for b, sample in enumerate(samples) if sample]
    for planned in plan:
        stager.run(capture.begin, planned.sample)
    for step in range(STEPS):
        engine.number.fill_(step)
        replay()
        out = engine.outputs
        stager.stage(
            VerifyStep(
                plan,
                ROWS,
                out["hidden"],
                out["raw"],
                False,
                out["predict"],
                out["accept_lens"],
                out["seq_lens"],
            )
        )
        if step % IN_FLIGHT == 0:  # a server waits for its steps too, and never has more than two on the way
            _wait(stager, faults)
    _wait(stager, faults)
    rows = _compare(RingReader(ring), {p.sample.sample_id: p.place for p in plan})
    return {"steps": STEPS, "rows": rows, "dropped": dict(writer.dropped)}


def _wait(stager: StreamStager, faults: list[Exception]) -> None:
    arrived = threading.Event()
    stager.run(arrived.set)
    if not arrived.wait(PATIENCE_S) or faults:
        raise RowsWrong(f"rows did not arrive within {PATIENCE_S:.0f} s: {faults}")


def _compare(reader: RingReader, places: dict[str, int]) -> int:
    """Rows of the ring, each compared with what its step computed."""
    serials: dict[int, int] = {}
    rows = 0
    while record := reader.peek():
        if "sample_id" in record.content:
            serials[record.serial] = places[record.content["sample_id"]]
        if len(record.aux):
            rows += len(record.aux)
            _compare_record(record, serials[record.serial])
        reader.advance(record)
    expected = sum((step + b) % ROWS + 1 for step in range(STEPS) for b in range(BATCH))
    if rows != expected:
        raise RowsWrong(f"{rows} rows came out of the ring, {expected} were accepted")
    return rows


def _compare_record(record: Any, place: int) -> None:
    step = record.pos // ROWS
    count = (step + place) % ROWS + 1
    of = place * ROWS + np.arange(count)[:, None]
    hidden = torch.from_numpy((step * 7 + of * 13 + np.arange(3 * HIDDEN)) % 251).to(torch.bfloat16)
    raw = (step * 31 + of * 17 + np.arange(VOCABULARY) * 5) % 1009
    best = np.argsort(-raw, axis=1)[:, :TEACHERS]
    if not np.array_equal(record.aux, hidden.view(torch.int16).numpy().view(np.uint16)):
        raise RowsWrong(f"hidden states of step {step}, request {place} are another step's")
    if not np.array_equal(record.teacher_ids, best):
        raise RowsWrong(f"teacher rows of step {step}, request {place} are another step's")


def main() -> None:
    engine = Engine(torch.device("cuda", torch.cuda.current_device()))
    found = check(Path(sys.argv[1]), CudaDevice(engine.number.device), engine, graph_of(engine))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
