"""What capture costs a server: throughput with it on against off, and its share of the scheduler's thread.

One server, capture toggled by ``POST /tide/capture`` in ABBA blocks of a fixed number of requests of fixed
length, about ten seconds each (shorter ones differ by 30 % on a shared machine). Both blocks of a pair send
the same prompts from an empty prefix cache, so that prompts are captured as well.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tide_platform.bench import load
from tide_platform.bench.report import Report, alternation, paired_interval, paired_ratio
from tide_platform.capture.folder import RING_FILE
from tide_platform.capture.ring import Ring
from tide_platform.config import Settings
from tide_platform.serving.own_server import Served, served

NEW_TOKENS = 64
BLOCK_REQUESTS = 6  # at least this many a block, one after the other where the concurrency is lower
SHARE_TOKENS = 96  # of a request where shares are measured: the prompt's part is small then
SHARE_FLOWS = 5  # a single one of two seconds differs by 5 % from the next
BATCHES = (1, 2, 4, 8)
_DRAIN_S = 30.0
_SETTLE_S = 1.0  # the spool writes what a block left, at nobody's cost


def run(
    settings: Settings, *, concurrencies: Sequence[int], blocks: int, batches: Sequence[int] = BATCHES
) -> Report:
    """``ratios``: ``throughput_<concurrency>``, on over off; ``share_batch_<b>``, CPU seconds of capture over
    CPU seconds of all forward steps on the scheduler's thread. ``raw`` has the CPU milliseconds of capture a
    captured row (``cpu_ms_a_row``). ``blocks``: at least 4, on and off together.
    """
    own = settings.model_copy(deep=True)
    own.capture.enabled, own.capture.sampling_rate, own.capture.default = True, 1.0, "allow"
    report = Report("capture", {})
    report.raw |= {"server_threads": own.serving.threads, "k": own.serving.k, "dtype": own.serving.dtype}
    report.raw |= {"aux_format": own.capture.aux_format, "teacher_k": own.capture.teacher_k}
    with served(own, settings.state / "bench" / "capture") as server:
        _warm_up(server, max(concurrencies))
        for concurrency in concurrencies:
            rates, waiting = _throughput(server, concurrency, blocks)
            case = f"throughput_{concurrency}"
            report.ratios[case] = paired_ratio(rates[True], rates[False])
            report.intervals[case] = paired_interval(rates[True], rates[False])
            report.raw[case] = {"on": rates[True], "off": rates[False], "unit": "tokens a second"} | {
                "waiting": waiting
            }
            report.notes.append(
                f"at {concurrency}: {np.median(waiting):.1%} of a block's bytes waited at its end, "
                f"{max(waiting):.1%} at most"
            )
        for batch in batches:
            found = _share(server, batch)
            report.raw[f"cost_batch_{batch}"] = found
            report.ratios[f"share_batch_{batch}"] = found["capture_cpu_s"] / found["round_cpu_s"]
        report.raw["dropped"] = server.client.status()["capture"]["dropped"]
    cost = ", ".join(f"{report.raw[f'cost_batch_{b}']['cpu_ms_a_row']:.3f} at batch {b}" for b in batches)
    report.notes.append(f"CPU milliseconds on the scheduler's thread a captured row: {cost}")
    if any(report.raw["dropped"].values()):
        report.notes.append(f"samples were dropped: {report.raw['dropped']}; those cost less than kept ones")
    return report


def _warm_up(server: Served, concurrency: int) -> None:
    """Weights are packed and both sides of the ring touched."""
    load.flow(server, load.prompts(server, concurrency), 8, concurrency, capture=True)


def _throughput(server: Served, concurrency: int, blocks: int) -> tuple[dict[bool, list[float]], list[float]]:
    """Tokens a second of each block, by whether capture was on; of what each block with capture wrote, the
    share that the spool had yet to take at its end.
    """
    waiting: list[float] = []
    pairs = blocks // 2
    requests = -(-max(BLOCK_REQUESTS, concurrency) // concurrency) * concurrency
    inputs = load.prompts(server, requests * pairs)
    rates: dict[bool, list[float]] = {True: [], False: []}
    for block, on in enumerate(alternation(pairs)):
        first = block // 2 * requests
        server.client.capture(enabled=on)
        written = server.client.status()["capture"]["bytes"]
        done = load.flow(server, inputs[first : first + requests], NEW_TOKENS, concurrency, capture=True)
        rates[on].append(done.tokens_per_s)
        if on:
            left = _left_in_ring(server)
            waiting.append(left / max(1, server.client.status()["capture"]["bytes"] - written))
            until = time.monotonic() + _DRAIN_S
            while _left_in_ring(server) and time.monotonic() < until:  # else the next block would pay for it
                time.sleep(0.1)
            time.sleep(_SETTLE_S)
    server.client.capture(enabled=True)
    return rates, waiting


def _left_in_ring(server: Served) -> int:
    """Bytes that the spool has yet to take."""
    ring = Ring.open(server.settings.spool_folder / RING_FILE)
    left = ring.head - ring.tail
    ring.close()
    return left


def _share(server: Served, batch: int) -> dict[str, Any]:
    """What the engine counted of ``batch`` requests at a time: seconds, captured rows."""
    inputs = load.prompts(server, batch)
    before = server.client.status()["capture"]
    for _ in range(SHARE_FLOWS):
        load.flow(server, inputs, SHARE_TOKENS, batch, capture=True)
    after = server.client.status()["capture"]
    found = {name: after["cost"][name] - value for name, value in before["cost"].items()}
    rows = after["rows"] - before["rows"]
    return found | {"rows": rows, "cpu_ms_a_row": found["capture_cpu_s"] / rows * 1e3}
