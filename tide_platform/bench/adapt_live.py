"""The second half of ``tide bench adapt``: tokens a second of an adapted draft on live servers.

A server without a draft and one for each k run side by side and are asked in turn; those that are not asked
sleep. Each server with a draft is asked with the static and with the adapted draft, loaded into it in turn.
For each number of requests at a time a short probe finds the best k of each draft; what is judged are other
passes.
"""

import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tide_platform.bench.report import Report, paired_interval, paired_ratio
from tide_platform.config import Settings
from tide_platform.config.files import write_json
from tide_platform.serving.own_server import Served, served
from tide_platform.serving.workloads import Prompt

KS = (1, 2, 3, 4)
PASSES = {1: 4, 4: 16, 8: 16}  # requests at a time -> prompts of a pass
REPEATS = 6  # judged passes of each server and draft
HELD_OUT, NEW_TOKENS = 64, 96
PLAIN, STATIC, ADAPTED = "plain", "static", "adapted"

Passes = dict[str, list[dict[str, Any]]]  # by who was asked, see _name


def measure(
    settings: Settings,
    folder: Path,
    workload: str,
    draft: Path,
    report: Report,
    say: Callable[[str], None],
) -> None:
    """Adds to ``report``, for each number of requests at a time: ``<workload>_at_<n>_over_static`` and
    ``_over_plain``, tokens a second of the adapted draft at its best k over the static one's at *its* best k
    and over no speculation; ``_over_static_same_k``, both at the adapted draft's best k; ``_acceptance``,
    live acceptance length there, adapted over static. ``raw`` has every pass.
    """
    paths = {level: folder / "live" / f"{workload}-{level}.json" for level in PASSES}
    left = [level for level, path in paths.items() if not path.exists()]
    if left:
        with _servers(settings, folder) as servers:
            ask = _Asker(settings, servers, draft, workload)
            for level in left:
                write_json(paths[level], _passes(ask, level, lambda line: say(f"{workload}: {line}")))
    for level, path in paths.items():
        found = json.loads(path.read_text())
        report.raw[f"{workload}_live_at_{level}"] = found
        _compare(report, f"{workload}_at_{level}", found["best_k"], found["passes"])


def _compare(report: Report, case: str, best_k: dict[str, int], passes: Passes) -> None:
    k = best_k[ADAPTED]
    who = {
        ADAPTED: passes[_name(ADAPTED, k)],
        STATIC: passes[_name(STATIC, best_k[STATIC])],
        "static_same_k": passes[_name(STATIC, k)],
        PLAIN: passes[PLAIN],
    }
    rates = {name: [one["tokens_per_s"] for one in of] for name, of in who.items()}
    for name in (STATIC, "static_same_k", PLAIN):
        report.ratios[f"{case}_over_{name}"] = paired_ratio(rates[ADAPTED], rates[name])
        report.intervals[f"{case}_over_{name}"] = paired_interval(rates[ADAPTED], rates[name])
    lengths = {name: _length(who[name]) for name in (ADAPTED, "static_same_k")}
    report.ratios[f"{case}_acceptance"] = lengths[ADAPTED] / lengths["static_same_k"]
    report.notes.append(
        f"{case}: best k {k} adapted, {best_k[STATIC]} static; acceptance length at k {k} "
        f"{lengths['static_same_k']:.3f} -> {lengths[ADAPTED]:.3f}; tokens a second "
        + ", ".join(f"{statistics.median(of):.1f} {name}" for name, of in rates.items())
    )


class _Asker:
    """Sends passes of held_out prompts to the servers, each with the draft that is asked for."""

    def __init__(self, settings: Settings, servers: dict[int, Served], adapted: Path, workload: str):
        from tide_platform.serving.drafts import resolve_draft, stage_draft
        from tide_platform.serving.workloads import load_workload

        self.servers = servers
        self.prompts = load_workload(workload, "held_out", HELD_OUT)
        drafts = {STATIC: resolve_draft(settings), ADAPTED: adapted}
        self.staged = {
            (who, k): stage_draft(servers[k].settings, of) for k in KS for who, of in drafts.items()
        }
        for server in servers.values():
            _send(server, self.prompts[:8], max(PASSES))  # weights are packed at their first use

    def __call__(self, who: str, k: int, number: int, level: int) -> dict[str, Any]:
        """Pass ``number``: tokens a second, rounds, accepted drafts. The prompts go round."""
        if k:
            self.servers[k].client.reload_draft(*self.staged[who, k])
            _send(self.servers[k], self.prompts[:1], 1)
        size = PASSES[level]
        chosen = itertools.islice(itertools.cycle(self.prompts), number * size, (number + 1) * size)
        return _send(self.servers[k], list(chosen), level)


def _passes(ask: _Asker, level: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The probe, the best k of each draft by it, and every judged pass by who was asked."""
    everyone = [(who, k) for k in KS for who in (STATIC, ADAPTED)]
    probe = {_name(who, k): [ask(who, k, 0, level)] for who, k in everyone}
    best_k = {
        who: max(KS, key=lambda k, who=who: probe[_name(who, k)][0]["tokens_per_s"])
        for who in (STATIC, ADAPTED)
    }
    judged = [(PLAIN, 0), (STATIC, best_k[STATIC]), (STATIC, best_k[ADAPTED]), (ADAPTED, best_k[ADAPTED])]
    turns, passes = list(dict.fromkeys(judged)), dict[str, list[dict[str, Any]]]()
    for number in range(REPEATS):
        for who, k in turns if number % 2 == 0 else reversed(turns):
            found = ask(who, k, number, level)
            passes.setdefault(_name(who, k), []).append(found)
            say(f"{level} at a time, {_name(who, k)}: {found['tokens_per_s']:.1f} tokens a second")
    return {"best_k": best_k, "probe": probe, "passes": passes}


@contextmanager
def _servers(settings: Settings, folder: Path) -> Iterator[dict[int, Served]]:
    """By k; 0 has no draft."""
    with ExitStack() as stack:
        servers = {}
        for k in (0, *KS):
            own = settings.model_copy(deep=True)
            own.serving.k, own.capture.enabled = k, False
            servers[k] = stack.enter_context(served(own, folder / f"live-k{k}"))
        yield servers


def _send(server: Served, prompts: Sequence[Prompt], concurrency: int) -> dict[str, Any]:
    from tide_platform.bench.load import flush
    from tide_platform.serving.traffic import run_traffic

    flush(server)
    report = run_traffic(
        server.url, prompts, server.target, concurrency=concurrency, max_new_tokens=NEW_TOKENS, capture=False
    )
    names = ("tokens_per_s", "verify_rounds", "accepted_drafts", "completion_tokens")
    return {name: getattr(report, name) for name in names}


def _name(who: str, k: int) -> str:
    return f"{who}_k{k}" if k else who


def _length(passes: list[dict[str, Any]]) -> float:
    return 1 + sum(p["accepted_drafts"] for p in passes) / sum(p["verify_rounds"] for p in passes)
