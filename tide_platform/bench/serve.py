"""Cost of a speculative round over a plain decoding step, by batch size and number of draft steps.

Servers without and with a draft run side by side and are asked in turn, one at a time; those that are not
asked sleep. A batch holds copies of one prompt, so that it keeps its size to the end: greedy copies accept
alike. What a prompt costs is taken off: the same batch is asked for one token first.
"""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from tide_platform.bench import load
from tide_platform.bench.report import Report, paired_interval, paired_ratio
from tide_platform.bench.server import Served, served
from tide_platform.config import Settings, TideError

NEW_TOKENS = 40
REPETITIONS = 5


class BatchDivided(TideError):
    """The copies of one prompt did not stay together."""

    def __init__(self, server: str, rounds: list[int]):
        super().__init__(f"{server}: copies of one prompt took {rounds} rounds; run the benchmark again")
        self.rounds = rounds


def run(settings: Settings, *, batches: Sequence[int], ks: Sequence[int]) -> Report:
    """``ratios``: ``k<k>_batch_<b>``, milliseconds of a round over those of a plain step, median over pairs.

    ``raw``: every measurement in milliseconds, and tokens a round, which the ratio does not depend on.
    """
    folder = settings.state / "bench" / "serve"
    cost: dict[tuple[int, int], list[float]] = {pair: [] for pair in product((0, *ks), batches)}
    accepted: dict[str, list[float]] = {f"k{k}": [] for k in ks}
    with ExitStack() as stack:
        servers = {k: stack.enter_context(_server(settings, folder, k)) for k in (0, *ks)}
        inputs = load.prompts(servers[0], REPETITIONS)
        for k, batch in cost:
            load.at_once(servers[k], [inputs[0]] * batch, 4)
        for number, batch in product(range(REPETITIONS), batches):
            for k in (0, *ks) if number % 2 == 0 else (*reversed(ks), 0):
                milliseconds, tokens = _round(servers[k], k, [inputs[number]] * batch)
                cost[k, batch].append(milliseconds)
                if k:
                    accepted[f"k{k}"].append(tokens)
    report = Report("serve", {}, raw={"ms": {f"k{k}_batch_{b}": of for (k, b), of in cost.items()}})
    report.raw |= {"tokens_a_round": {name: statistics.mean(of) for name, of in accepted.items()}}
    report.raw |= {"server_threads": settings.serving.threads, "dtype": settings.serving.dtype}
    for k, batch in product(ks, batches):
        case = f"k{k}_batch_{batch}"
        report.ratios[case] = paired_ratio(cost[k, batch], cost[0, batch])
        report.intervals[case] = paired_interval(cost[k, batch], cost[0, batch])
    plain = ", ".join(f"{statistics.median(cost[0, batch]):.1f} ms at {batch}" for batch in batches)
    report.notes.append(f"a plain step by batch size: {plain}")
    return report


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
