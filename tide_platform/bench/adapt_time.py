"""Acceptance over time after a shift of traffic, by the number of requests at a time: more requests at a time
bring more samples a minute, and so an adapted draft sooner (TIDE, arXiv 2602.05145, figure 5).

For each number of requests at a time the local stack starts anew with the shipped draft; a reference set is
captured, general prompts are served, then the workload, on and on, while the loop is left to itself. What is
told is the live acceptance length of the workload's requests, as the ledger's history has it.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tide_platform.bench.report import Report
from tide_platform.config import Settings
from tide_platform.config.files import write_json
from tide_platform.control.history import Block, total

CONCURRENCY = (1, 4, 16)
WORKLOAD = "maths"
REFERENCE, REFERENCE_CONCURRENCY, GENERAL = 200, 16, 48
WINDOW = 96  # samples
SLOT_S = 60.0
WORTH = 1.1  # times the acceptance of the first slot: adapted


def run(
    settings: Settings,
    folder: Path,
    *,
    concurrency: Sequence[int] = CONCURRENCY,
    minutes: float,
    say: Callable[[str], None],
) -> Report:
    """``ratios``: ``minutes_<n>``, until the acceptance length is :data:`WORTH` times what it was at the
    shift, over the minutes at the fewest requests at a time (infinite where it was not reached), and
    ``gain_<n>``, the last slot's over the first's. Levels that are done are not done again.
    """
    levels: dict[int, dict[str, Any]] = {}
    for level in concurrency:
        path = folder / f"{WORKLOAD}-{level}.json"
        if not path.exists():
            write_json(path, one_level(settings, folder / f"state-{level}", level, minutes, say))
        levels[level] = _read(path)
        say(f"{level} at a time: {_words(levels[level])}")
    (folder / "adaptation-over-time.svg").write_text(plot(levels), encoding="utf-8")
    return judge(levels)


def one_level(
    settings: Settings, state: Path, level: int, minutes: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Serves and watches at ``level`` requests at a time; the slots and the deployments, in seconds since
    the shift.
    """
    import os

    from tide_platform.control.ledger import Ledger
    from tide_platform.local import services
    from tide_platform.local.demo.measure import Bench
    from tide_platform.local.demo.samples import captured_traffic, wait_landed
    from tide_platform.local.demo.screen import Screen
    from tide_platform.local.ready import server_url
    from tide_platform.local.soak.traffic import Users
    from tide_platform.local.stack import Stack
    from tide_platform.serving.client import SglangClient
    from tide_platform.serving.target import prepare_target, resolve_target
    from tide_platform.serving.workloads import TRAFFIC, load_workload

    own = settings.model_copy(deep=True)
    own.state, own.window.min_samples, own.watch.sensor_seconds = state, WINDOW, 5
    own.serving.threads = own.training.threads = 1  # they work at the same time, on a core each
    own.rollout.watch_requests, own.rollout.watch_seconds = 24, 30.0
    if own.target is None:
        prepare_target(say)
    with Stack(own, say, auto_ports=True) as stack:
        stack.open(die_with_parent=True, fresh=True)
        stack.start(services.ALL)
        target, url = resolve_target(stack.settings), server_url(stack.settings)
        with SglangClient(url, os.environ["TIDE_ADMIN_KEY"]) as client:
            bench = Bench(client, target, Screen(), time.monotonic())
            # from the end: the base draft was trained on the first of them (drafts/README.md)
            reference = load_workload("general", TRAFFIC)[-REFERENCE:]
            captured_traffic(bench, reference, "static", REFERENCE_CONCURRENCY, "reference")
            wait_landed(stack.settings, "reference", len(reference), lambda _: None)
        users, ledger = Users(url, target, level), Ledger(stack.settings.ledger.url)
        try:
            users.send("general", GENERAL)
            shift = time.time()
            users.want(WORKLOAD)
            while time.time() < shift + 60 * minutes:
                users.check()
                time.sleep(1.0)
            users.want(None)
            time.sleep(3 * stack.settings.watch.sensor_seconds)  # its last requests are read
            blocks = ledger.history.blocks(stack.settings.deployment, shift)
            deployed = [row["deployed_at"] - shift for row in ledger.deployments(stack.settings.deployment)]
        finally:
            users.close()
            ledger.close()
    return {"slots": slots(blocks, WORKLOAD, shift), "deployed_s": deployed, "requests": users.sent}


def slots(
    blocks: Sequence[Block],
    tenant: str,
    began: float,
) -> list[dict[str, float]]:
    """Acceptance length of a tenant's requests by time since ``began``, a slot of ``SLOT_S`` seconds each;
    slots without a verify round are left out.
    """
    found: dict[int, list[Block]] = {}
    for block in blocks:
        if block.tenant == tenant and block.rounds and block.ended_at >= began:
            found.setdefault(int((block.ended_at - began) // SLOT_S), []).append(block)
    summed = {number: total(of) for number, of in sorted(found.items())}
    return [
        {
            "s": (number + 0.5) * SLOT_S,
            "acceptance_length": of.acceptance_length or 1.0,
            "requests": of.requests,
            "tokens": of.tokens,
        }
        for number, of in summed.items()
    ]


def seconds_until(level: dict[str, Any], worth: float = WORTH) -> float:
    """Until the middle of the first slot of ``worth`` times the first one's acceptance length; infinite where
    there is none.
    """
    first = level["slots"][0]["acceptance_length"]
    better = [slot["s"] for slot in level["slots"] if slot["acceptance_length"] >= worth * first]
    return better[0] if better else float("inf")


def judge(levels: dict[int, dict[str, Any]]) -> Report:
    fewest = min(levels)
    slowest = seconds_until(levels[fewest])
    ratios: dict[str, float] = {}
    for level, of in levels.items():
        until = seconds_until(of)
        ratios[f"minutes_{level}"] = 1.0 if until == slowest else until / slowest
        ratios[f"gain_{level}"] = of["slots"][-1]["acceptance_length"] / of["slots"][0]["acceptance_length"]
    notes = [
        f"minutes_<n>: until acceptance is {WORTH} times the first minute's, over that at {fewest} at a time",
        "gain_<n>: acceptance length of the last minute over the first one's",
    ]
    return Report("adapt-time", ratios, {}, {str(level): of for level, of in levels.items()}, notes)


def plot(levels: dict[int, dict[str, Any]]) -> str:
    """One curve a level; a mark where a draft was deployed."""
    from tide_platform.report.svg import PALETTE, figure, svg

    made, axes = figure()
    for colour, (level, of) in zip(PALETTE, sorted(levels.items()), strict=False):
        minutes = [slot["s"] / 60 for slot in of["slots"]]
        lengths = [slot["acceptance_length"] for slot in of["slots"]]
        axes.plot(minutes, lengths, color=colour, label=f"{level} at a time")
        for second in of["deployed_s"]:
            axes.axvline(second / 60, color=colour, linestyle=":", linewidth=1)
    axes.set_xlabel(f"minutes since traffic became {WORKLOAD}")
    axes.set_ylabel("live acceptance length")
    title = "Acceptance length over time after a shift, by requests at a time; dotted: a draft was deployed"
    return svg(made, axes, "adapt-time", title)


def _read(path: Path) -> dict[str, Any]:
    import json

    return json.loads(path.read_text())


def _words(level: dict[str, Any]) -> str:
    first, last = level["slots"][0], level["slots"][-1]
    deployed = ", ".join(f"{seconds / 60:.1f}" for seconds in level["deployed_s"]) or "never"
    return (
        f"acceptance length {first['acceptance_length']:.3f} in the first minute, "
        f"{last['acceptance_length']:.3f} in the last; deployed at minute {deployed}"
    )
