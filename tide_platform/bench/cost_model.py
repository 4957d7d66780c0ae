"""The coefficients of the cost model (evaluation/cost_model.py), measured as ``tide bench serve`` measures.

A round at batch size b costs ``c k + beta(k)`` plain steps of that batch. Its cost is measured; which part of
it are the k draft steps is told by the target alone: a verify pass has the rows of a plain step of k + 1
times the batch, so ``T(b (k + 1)) / T(b)`` stands for beta when c is fitted (as TIDE profiles it), by least
squares through the rounds of all k. beta is then what is left of the measured round, so that
``c k + beta(k)`` is that round, exactly, whatever c.
"""

import statistics
from collections.abc import Sequence

from tide_platform.bench import serve
from tide_platform.bench.report import Report, paired_interval, ratio_of_medians
from tide_platform.config import Settings
from tide_platform.evaluation.cost_model import FILE, BatchCosts, CostModel

BATCHES, KS = (1, 4, 8), (1, 2, 3, 4, 5)
REPETITIONS = 3


def run(
    settings: Settings,
    *,
    batches: Sequence[int] = BATCHES,
    ks: Sequence[int] = KS,
    repetitions: int = REPETITIONS,
) -> Report:
    """Measures, and writes the model to ``STATE/cost_model.json``.

    ``ratios``, in plain steps of the batch: ``draft_batch_<b>`` is c, ``verify_k<k>_batch_<b>`` beta,
    ``round_k<k>_batch_<b>`` their sum, which is what was measured, with its interval.
    """
    # one k at a time beside the target alone: as many servers as k have no room on a small machine
    measured = {k: serve.measure(settings, _cases(k, batches), repetitions) for k in ks}
    report = Report("cost-model", {}, raw={f"k{k}": of.raw() for k, of in measured.items()})
    by_batch = {}
    for batch in batches:
        rounds, rows, steps = {}, {}, []
        for k, of in measured.items():
            step = of.ms[0, batch]
            steps += step
            rounds[k] = ratio_of_medians(of.ms[k, batch], step)
            rows[k] = ratio_of_medians(of.ms[0, batch * (k + 1)], step)
            report.ratios[f"round_k{k}_batch_{batch}"] = rounds[k]
            report.intervals[f"round_k{k}_batch_{batch}"] = paired_interval(of.ms[k, batch], step)
        by_batch[batch] = fit(statistics.median(steps), rounds, rows)
        report.ratios[f"draft_batch_{batch}"] = by_batch[batch].draft
        report.ratios |= {f"verify_k{k}_batch_{batch}": by_batch[batch].verify[k] for k in ks}
        report.raw[f"steps_of_more_rows_batch_{batch}"] = rows
    conditions = report.conditions | {
        "device": settings.serving.device,
        "dtype": settings.serving.dtype,
        "server_threads": settings.serving.threads,
    }
    path = settings.state / FILE
    CostModel(by_batch, next(iter(measured.values())).target_digest, conditions).write(path)
    report.notes.append(f"written to {path}")
    return report


def _cases(k: int, batches: Sequence[int]) -> list[tuple[int, int]]:
    """Rounds of ``k`` at each batch size; plain steps of that many requests and of k + 1 times as many."""
    plain = sorted({batch * rows for batch in batches for rows in (1, k + 1)})
    return [(0, batch) for batch in plain] + [(k, batch) for batch in batches]


def fit(step_ms: float, rounds: dict[int, float], rows: dict[int, float]) -> BatchCosts:
    """c by least squares of ``rounds[k] - rows[k]`` on k, not below 0; beta is the rest of each round.

    All in plain steps: ``rounds[k]`` of a round, ``rows[k]`` of a plain step with k + 1 times the requests.
    """
    c = sum(k * (rounds[k] - rows[k]) for k in rounds) / sum(k * k for k in rounds)
    # a verify pass is no cheaper than the plain step that it contains
    c = min(max(0.0, c), min((rounds[k] - 1) / k for k in rounds)) if min(rounds.values()) > 1 else 0.0
    return BatchCosts(step_ms, c, {k: rounds[k] - c * k for k in rounds})
