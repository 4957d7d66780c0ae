"""What SGLang's adaptive speculation is started with (docs/speculation.md): a file of candidate steps,
written from the cost model unless the settings name one.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tide_platform.config import Settings, TideError
from tide_platform.config.files import write_json
from tide_platform.evaluation.cost_model import of_deployment
from tide_platform.evaluation.speculation import Acceptance, candidates

FILE = "adaptive.json"  # below STATE
# the most that SGLang's own configuration speculates, in each version that has an adapter
SGLANG_MOST = 7

# a draft's digest -> its acceptance by k
Known = Callable[[str], Acceptance]


class AdaptiveConfigUnusable(TideError):
    """SGLang would not start with this file."""

    def __init__(self, path: Path, reason: str):
        super().__init__(
            f"serving.adaptive_config {path}: {reason}; SGLang reads a JSON object like "
            '{"1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [0, 1]}}, keyed by batch size'
        )
        self.path, self.reason = path, reason


@dataclass(frozen=True)
class Adaptive:
    """``start``: the steps of the first rounds. It is the most that any batch size may have, since SGLang and
    the plugin size their buffers by it. ``file`` None: SGLang's own configuration.
    """

    file: Path | None
    start: int
    reason: str


def plan_adaptive(settings: Settings, target_digest: str, draft_digest: str, known: Known) -> Adaptive:
    """Of a deployment with ``serving.adaptive``; writes ``STATE/adaptive.json`` where it is made here.

    Raises :class:`AdaptiveConfigUnusable`, :class:`~tide_platform.evaluation.cost_model.NoCostModel`, and
    what ``known`` raises.
    """
    given = settings.serving.adaptive_config
    if given is not None:
        return Adaptive(given, _most(given), f"candidate steps of {given} (serving.adaptive_config)")
    model, costs = of_deployment(settings, target_digest)
    if model is None:
        return Adaptive(None, SGLANG_MOST, f"SGLang's own candidate steps: costs are {costs}")
    acceptance = known(draft_digest)
    if not acceptance.by_k:
        return Adaptive(None, SGLANG_MOST, f"SGLang's own candidate steps: {acceptance.source}")
    path = settings.state / FILE
    steps = candidates(model, acceptance.by_k)
    write_json(path, steps, indent=2)
    said = ", ".join(f"from batch {batch} {entry['candidate_steps']}" for batch, entry in steps.items())
    return Adaptive(path, _most(path), f"{path} written: {said}; {costs}; {acceptance.source}")


def _most(path: Path) -> int:
    """The largest candidate, checked as SGLang checks. Raises :class:`AdaptiveConfigUnusable`."""
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AdaptiveConfigUnusable(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(raw, dict):
        raise AdaptiveConfigUnusable(path, "not an object")
    found: set[int] = set()
    for batch, entry in raw.items():
        if not batch.isdigit():
            continue
        steps = entry.get("candidate_steps") if isinstance(entry, dict) else None
        if not isinstance(steps, list) or not steps or any(type(s) is not int or s < 0 for s in steps):
            raise AdaptiveConfigUnusable(path, f"batch {batch} has the candidate_steps {steps!r}")
        found |= set(steps)
    if not found - {0}:
        raise AdaptiveConfigUnusable(path, "no batch size has a step above 0: serving.k 0 serves without")
    return max(found)
