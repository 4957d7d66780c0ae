"""Cost of a speculative round over a plain decoding step, by batch size and number of draft steps.

Servers without and with a draft run side by side and are asked in turn, one at a time; those that are not
asked sleep. A batch holds copies of one prompt, so that it keeps its size to the end: greedy copies accept
alike. What a prompt costs is taken off: the same batch is asked for one token first.
"""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from tide_platform.bench import load
from tide_platform.bench.report import Report, paired_interval, paired_ratio
from tide_platform.config import Settings, TideError
from tide_platform.serving.own_server import Served, served

NEW_TOKENS = 40
REPETITIONS = 5


class BatchDivided(TideError):
    """The copies of one prompt did not stay together."""

    def __init__(self, server: str, rounds: list[int]):
        super().__init__(f"{server}: copies of one prompt took {rounds} rounds; run the benchmark again")
        self.rounds = rounds


@dataclass(frozen=True)
class Measured:
    """Milliseconds of a step (k = 0) or round by ``(k, batch)``, one for each repetition; tokens a round."""

    ms: dict[tuple[int, int], list[float]]
    tokens: dict[int, list[float]]
    target_digest: str

    def raw(self) -> dict[str, Any]:
        return {
            "ms": {f"k{k}_batch_{b}": of for (k, b), of in self.ms.items()},
            "tokens_a_round": {f"k{k}": statistics.mean(of) for k, of in self.tokens.items() if of},
        }


def run(settings: Settings, *, batches: Sequence[int], ks: Sequence[int]) -> Report:
    """``ratios``: ``k<k>_batch_<b>``, milliseconds of a round over those of a plain step, median over pairs.

    ``raw``: every measurement in milliseconds, and tokens a round, which the ratio does not depend on.
    """
    measured = measure(settings, list(product((0, *ks), batches)), REPETITIONS)
    cost = measured.ms
    report = Report("serve", {}, raw=measured.raw())
    report.raw |= {"server_threads": settings.serving.threads, "dtype": settings.serving.dtype}
    for k, batch in product(ks, batches):
        case = f"k{k}_batch_{batch}"
        report.ratios[case] = paired_ratio(cost[k, batch], cost[0, batch])
        report.intervals[case] = paired_interval(cost[k, batch], cost[0, batch])
    plain = ", ".join(f"{statistics.median(cost[0, batch]):.1f} ms at {batch}" for batch in batches)
    report.notes.append(f"a plain step by batch size: {plain}")
    return report


def measure(settings: Settings, cases: Sequence[tuple[int, int]], repetitions: int) -> Measured:
    """Every ``(k, batch)`` of ``cases`` once a repetition, in turn, forwards and backwards, those of a batch
    size one beside the other; k = 0 is a step of the target alone. Raises :class:`BatchDivided`.
    """
    cases = sorted(cases, key=lambda case: (case[1], case[0]))
    folder = settings.state / "bench" / "serve"
    own = settings.model_copy(deep=True)
    own.serving.max_running_requests = max(own.serving.max_running_requests, *(batch for _, batch in cases))
    measured = Measured({case: [] for case in cases}, {k: [] for k, _ in cases}, "")
    with ExitStack() as stack:
        ks = sorted({k for k, _ in cases})
        servers = {k: stack.enter_context(_server(own, folder, k)) for k in ks}
        inputs = load.prompts(servers[ks[0]], repetitions)
        for k, batch in cases:
            load.at_once(servers[k], [inputs[0]] * batch, 4)
        for number in range(repetitions):
            for k, batch in cases if number % 2 == 0 else reversed(cases):
                milliseconds, tokens = _round(servers[k], k, [inputs[number]] * batch)
                measured.ms[k, batch].append(milliseconds)
                if k:
                    measured.tokens[k].append(tokens)
        digest = servers[ks[0]].client.status()["target_digest"]
    return replace(measured, target_digest=digest)


def _server(settings: Settings, folder: Path, k: int) -> Any:
    own = settings.model_copy(deep=True)
    own.serving.k, own.capture.enabled, own.serving.radix_cache = k, False, False
    return served(own, folder / f"k{k}")


def _round(server: Served, k: int, inputs: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Milliseconds of a round (k = 0: of a step), and tokens a round. Raises :class:`BatchDivided`."""
    prompt_s = load.at_once(server, inputs, 1)[0].latency_s
    replies = load.at_once(server, inputs, NEW_TOKENS)
    rounds = [reply.verify_rounds if k else NEW_TOKENS - 1 for reply in replies]
    if max(rounds) > min(rounds) + 1:
        raise BatchDivided(f"k = {k}", rounds)
    return (replies[0].latency_s - prompt_s) / max(rounds) * 1e3, (NEW_TOKENS - 1) / max(rounds)
