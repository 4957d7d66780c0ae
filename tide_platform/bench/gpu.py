"""``make gpu``: what can be known of a box with CUDA or ROCm and SGLang, in one JSON object.

``python -m tide_platform.bench.gpu [--config FILE] [--only STEP]``. A step that the box cannot do is printed
as untested, with the reason; the exit status is 1 where a step failed.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tide_platform.bench import gpu_steps
from tide_platform.bench.gpu_steps import Context
from tide_platform.bench.report import Report
from tide_platform.config import Settings, TideError, load_settings
from tide_platform.engine.support import ADAPTERS
from tide_platform.serving.interpreter import InterpreterUnusable, find_python, probe_interpreter

_PROBE = """
import json, torch
backend = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else None
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"torch": torch.__version__, "backend": backend,
    "devices": [torch.cuda.get_device_name(i) for i in range(count)]}))
"""


@dataclass(frozen=True)
class Box:
    """What the machine has."""

    sglang: str | None
    torch: str | None
    backend: str | None  # cuda | rocm: what torch was built for
    devices: list[str]
    problem: str | None = None  # why SGLang's Python is of no use


@dataclass(frozen=True)
class Step:
    """One thing to find out."""

    name: str
    run: Callable[[Context], dict[str, Any]]
    devices: int = 1
    sglang: bool = True

    def obstacle(self, box: Box) -> str | None:
        """Why the box cannot do it."""
        if self.sglang and box.problem:
            return box.problem
        if len(box.devices) < self.devices:
            return f"needs {self.devices} GPU(s) that torch sees, here are {len(box.devices)}"
        return None


PLAN = (
    Step("ring under a graph's replays", gpu_steps.ring_graph, sglang=False),
    Step("capture truth with graphs, overlap and radix cache", gpu_steps.capture_truth),
    Step("capture truth on two devices (TP 2)", gpu_steps.two_ranks, devices=2),
    Step("capture truth and reload under DP attention", gpu_steps.attention_ranks, devices=2),
    Step("capture truth and reload of two replicas", gpu_steps.replicas, devices=2),
    Step("reload of the draft", gpu_steps.reload),
    Step("capture's cost at concurrency 1 to 256", gpu_steps.cost),
)


@dataclass
class Outcome:
    status: Literal["passed", "failed", "untested"]
    reason: str | None = None
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)


def probe(python: Path) -> Box:
    """Asks the Python that has SGLang."""
    try:
        sglang, problem = probe_interpreter(python, sorted(ADAPTERS)).sglang, None
    except InterpreterUnusable as error:
        sglang, problem = None, str(error)
    done = subprocess.run([str(python), "-c", _PROBE], capture_output=True, text=True, timeout=120)
    if done.returncode:
        return Box(sglang, None, None, [], problem or f"serving.python {python}: torch cannot be imported")
    return Box(sglang, problem=problem, **json.loads(done.stdout))


def run(
    settings: Settings,
    folder: Path,
    *,
    box: Box | None = None,
    plan: Sequence[Step] = PLAN,
    say: Callable[[str], None] = print,
) -> Report:
    """Runs what the box can do. ``raw``: ``box``, and an outcome a step; a step that fails stops no other."""
    python = find_python(settings)
    box = box or probe(python)
    own = settings.model_copy(deep=True)
    if box.backend in ("cuda", "rocm"):
        own.serving.device = box.backend
    own.serving.python, own.serving.max_total_tokens = python, None  # SGLang measures its KV cache
    outcomes: dict[str, Outcome] = {}
    for order, step in enumerate(plan):
        where = folder / str(order)
        where.mkdir(parents=True, exist_ok=True)
        outcome = outcomes[step.name] = _outcome(step, box, Context(own, python, where))
        say(f"{outcome.status:9} {step.name}" + (f": {outcome.reason}" if outcome.reason else ""))
    passed = sum(outcome.status == "passed" for outcome in outcomes.values())
    report = Report("gpu", {"passed": passed / len(plan)})
    report.raw = {"box": asdict(box), "steps": {name: asdict(one) for name, one in outcomes.items()}}
    return report


def _outcome(step: Step, box: Box, context: Context) -> Outcome:
    obstacle = step.obstacle(box)
    if obstacle:
        return Outcome("untested", obstacle)
    started = time.monotonic()
    try:
        found = step.run(context)
    except (TideError, OSError, subprocess.TimeoutExpired, KeyError, ValueError) as error:
        return Outcome("failed", f"{type(error).__name__}: {error}", time.monotonic() - started)
    return Outcome("passed", None, time.monotonic() - started, found)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--config", type=Path, help="configuration: target, draft, serving.python")
    parser.add_argument("--only", help="the steps whose name holds this")
    given = parser.parse_args(argv)
    settings = load_settings(given.config)
    plan = [step for step in PLAN if given.only is None or given.only in step.name]
    report = run(settings, settings.state / "bench" / "gpu", plan=plan)
    print(report.to_json())
    return int(any(step["status"] == "failed" for step in report.raw["steps"].values()))


if __name__ == "__main__":
    sys.exit(main())
