"""What the registry is told at each step of a cycle: tags, parameters, metrics and files under the names of
:mod:`tide_platform.registry.names`. Pure.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tide_platform.config import Settings
from tide_platform.control.audit import Action
from tide_platform.control.promotion import Verdict
from tide_platform.control.records import WindowRecord
from tide_platform.control.rollouts import Rollout
from tide_platform.control.verdict_page import verdict_html
from tide_platform.registry.names import CHAMPION_PREFIX, LIVE_PREFIX

WORDS_CHARS = 1000  # of a reason in a tag
_REPLACED = ("replaced_at", "replaced_by")
_TAKEN_BACK = ("rolled_back_at", "rolled_back_by", "rolled_back_reason")
_LIVE = ("acceptance_length", "requests", "aborted", "token_ms_p50", "token_ms_p99")


@dataclass(frozen=True)
class Told:
    """What became known of one draft; ``cleared``: tags that hold no more."""

    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    cleared: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)


def training_tags(record: WindowRecord, run_id: str, parent: str, parent_version: str) -> dict[str, str]:
    """Where a challenger comes from."""
    return {
        "window": record.key.window,
        "samples": str(record.samples),
        "tokens": str(record.tokens),
        "lance_version": str(record.lance_version),
        "parent": parent,
        "parent_version": parent_version,
        "dagster_run_id": run_id,
        "attempt": str(record.attempt),
    }


def training_params(settings: Settings) -> dict[str, Any]:
    """What training, judging and capture were set to."""
    capture = ("teacher_k", "aux_format", "target_signal", "max_sample_tokens")
    return {
        **settings.training.model_dump(),
        "serving.k": settings.serving.k,
        "serving.dtype": settings.serving.dtype,
        "window.validation_share": settings.window.validation_share,
        **{f"gate.{name}": value for name, value in settings.gate.model_dump().items()},
        **{f"capture.{name}": getattr(settings.capture, name) for name in capture},
    }


def of_verdict(verdict: Verdict) -> Told:
    return Told(
        tags={
            "verdict": "passed" if verdict.passed else "rejected",
            "verdict_against": verdict.champion,
            "verdict_reasons": "; ".join(verdict.reasons)[:WORDS_CHARS],
        },
        metrics=verdict.metrics(),
        files={
            "verdict.json": json.dumps(verdict.to_json(), indent=2),
            "verdict.html": verdict_html(verdict),
        },
    )


def of_rollout(rollout: Rollout, served: bool, evidence: Mapping[str, Any], at: float) -> dict[str, Told]:
    """By draft: the rollout is served, or undone, at ``at`` (Unix time); ``evidence`` adds to the rollout's.

    Of both drafts every time: a process that died may have told something else before.
    """
    when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    live = _live_metrics((rollout.evidence | dict(evidence)).get("watched") or {})
    if not served:
        reason = str(evidence.get("undone", ""))
        return {
            rollout.challenger: Told(_taken_back(when, rollout.actor, reason), live),
            rollout.previous: Told({"state": "served"}, cleared=(*_REPLACED, *_TAKEN_BACK)),
        }
    taken_back = rollout.evidence.get("action") == Action.ROLLED_BACK
    reason = f"in place of {rollout.previous}, which was taken back: " if taken_back else ""
    tags = {"state": "served", "served_at": when, "served_by": rollout.actor}
    tags["served_reason"] = (reason + rollout.reason)[:WORDS_CHARS]
    found = {rollout.challenger: Told(tags, live, cleared=(*_REPLACED, *_TAKEN_BACK))}
    if rollout.previous != rollout.challenger:
        if taken_back:
            found[rollout.previous] = Told(_taken_back(when, rollout.actor, rollout.reason))
        else:
            tags = {"state": "replaced", "replaced_at": when, "replaced_by": rollout.challenger}
            found[rollout.previous] = Told(tags)
    return found


def _taken_back(when: str, actor: str, reason: str) -> dict[str, str]:
    values = (when, actor, reason[:WORDS_CHARS])
    return {"state": "rolled back", **dict(zip(_TAKEN_BACK, values, strict=True))}


def _live_metrics(watched: Mapping[str, Any]) -> dict[str, float]:
    """Of both drafts, as the canary's watch saw them; a draft without requests has none."""
    found: dict[str, float] = {}
    for draft, prefix in (("challenger", ""), ("champion", CHAMPION_PREFIX)):
        of = watched.get(draft) or {}
        if of.get("requests"):
            figures = {name: of[name] for name in _LIVE if of.get(name) is not None}
            found |= {f"{prefix}{LIVE_PREFIX}{name}": float(value) for name, value in figures.items()}
    return found
