"""The second half of ``tide bench adapt``: tokens a second of an adapted draft on live servers.

A server without a draft and one for each k run side by side and are asked in turn; those that are not asked
sleep. Each server with a draft is asked with the static and with the adapted draft, loaded into it in turn.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tide_platform.bench.report import Report, paired_interval, paired_ratio
from tide_platform.config import Settings
from tide_platform.config.files import write_json
from tide_platform.serving.own_server import Served, served

KS = (2, 3, 4)
PASSES = 4  # over the held_out prompts, of each server and draft
PROMPTS, CONCURRENCY, NEW_TOKENS = 32, 8, 96
_PLAIN, _STATIC, _ADAPTED = "plain", "static", "adapted"


def measure(
    settings: Settings,
    folder: Path,
    workload: str,
    draft: Path,
    report: Report,
    say: Callable[[str], None],
) -> None:
    """Adds to ``report``: ``<workload>_speed_over_static`` and ``_over_plain``, tokens a second of the
    adapted draft at its best k over the static one's at *its* best k and over no speculation, with intervals;
    ``<workload>_live_k<k>``, live acceptance length, adapted over static. ``raw`` has every pass.
    """
    path = folder / "live" / f"{workload}.json"
    if not path.exists():
        write_json(path, _passes(settings, folder, workload, draft, say))
    passes = json.loads(path.read_text())
    report.raw[f"{workload}_live"] = passes
    best = {
        who: max(KS, key=lambda k, who=who: _median(passes[f"{who}_k{k}"])) for who in (_STATIC, _ADAPTED)
    }
    adapted = _rates(passes[f"{_ADAPTED}_k{best[_ADAPTED]}"])
    static, plain = _rates(passes[f"{_STATIC}_k{best[_STATIC]}"]), _rates(passes[_PLAIN])
    for name, yardstick in (("static", static), ("plain", plain)):
        case = f"{workload}_speed_over_{name}"
        report.ratios[case] = paired_ratio(adapted, yardstick)
        report.intervals[case] = paired_interval(adapted, yardstick)
    for k in KS:
        lengths = [_length(passes[f"{who}_k{k}"]) for who in (_ADAPTED, _STATIC)]
        report.ratios[f"{workload}_live_k{k}"] = lengths[0] / lengths[1]
        report.notes.append(f"{workload} k {k}: live acceptance {lengths[1]:.3f} -> {lengths[0]:.3f}")
    report.notes.append(
        f"{workload}: best k {best[_ADAPTED]} adapted, {best[_STATIC]} static; {_median(passes[_PLAIN]):.1f} "
        f"tokens a second plain, {_median(passes[f'{_STATIC}_k{best[_STATIC]}']):.1f} static, "
        f"{_median(passes[f'{_ADAPTED}_k{best[_ADAPTED]}']):.1f} adapted"
    )


def _passes(
    settings: Settings, folder: Path, workload: str, draft: Path, say: Callable[[str], None]
) -> dict[str, list[dict[str, Any]]]:
    """Every pass by who was asked: tokens a second, rounds, accepted drafts."""
    from tide_platform.serving.drafts import resolve_draft, stage_draft
    from tide_platform.serving.workloads import load_workload

    prompts = load_workload(workload, "held_out", PROMPTS)
    found: dict[str, list[dict[str, Any]]] = {}
    with _servers(settings, folder) as servers:
        drafts = {_STATIC: resolve_draft(settings), _ADAPTED: draft}
        staged = {(k, who): stage_draft(servers[k].settings, of) for k in KS for who, of in drafts.items()}
        for server in servers.values():
            _ask(server, prompts[:8])  # weights are packed at their first use
        for number in range(PASSES):
            turns = [(0, _PLAIN), *((k, who) for k in KS for who in (_STATIC, _ADAPTED))]
            for k, who in turns if number % 2 == 0 else reversed(turns):
                if k:
                    servers[k].client.reload_draft(*staged[k, who])
                    _ask(servers[k], prompts[:1])
                name = f"{who}_k{k}" if k else who
                found.setdefault(name, []).append(_ask(servers[k], prompts))
                say(f"{workload}: {name} {found[name][-1]['tokens_per_s']:.1f} tokens a second")
    return found


@contextmanager
def _servers(settings: Settings, folder: Path) -> Iterator[dict[int, Served]]:
    with ExitStack() as stack:
        servers = {}
        for k in (0, *KS):
            own = settings.model_copy(deep=True)
            own.serving.k, own.capture.enabled = k, False
            servers[k] = stack.enter_context(served(own, folder / f"live-k{k}"))
        yield servers


def _ask(server: Served, prompts: Any) -> dict[str, Any]:
    from tide_platform.bench.load import flush
    from tide_platform.serving.traffic import run_traffic

    flush(server)
    report = run_traffic(
        server.url, prompts, server.target, concurrency=CONCURRENCY, max_new_tokens=NEW_TOKENS, capture=False
    )
    names = ("tokens_per_s", "verify_rounds", "accepted_drafts", "completion_tokens")
    return {name: getattr(report, name) for name in names}


def _rates(passes: list[dict[str, Any]]) -> list[float]:
    return [one["tokens_per_s"] for one in passes]


def _median(passes: list[dict[str, Any]]) -> float:
    import statistics

    return statistics.median(_rates(passes))


def _length(passes: list[dict[str, Any]]) -> float:
    return 1 + sum(p["accepted_drafts"] for p in passes) / sum(p["verify_rounds"] for p in passes)
