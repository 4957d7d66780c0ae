"""The names under which drafts are compared in MLflow: metrics, tags, artifacts. One place, one spelling; the
tables in docs/mlflow.md are written from it. No MLflow needed.
"""

import hashlib
import re
from dataclasses import dataclass

CHAMPION_PREFIX = "champion."  # the same figure of the draft that the challenger was compared with
LIVE_PREFIX = "live."
MOST_VALUES = 20  # slices of one dimension, those with most requests; all are in verdict.json
# dimensions whose values mean the same in every window; `draft_version` does not
SLICED = ("tenant", "prompt_tokens", "temperature", "flags")

_PLAIN = re.compile(r"[\w.-]{1,60}", re.ASCII)
_PARTS = {
    "set": r"(?:window|reference)",
    "k": r"\d+",
    "i": r"\d+",
    "j": r"\d+",
    "batch": r"\d+",
    "dimension": rf"(?:{'|'.join(SLICED)})",
    "value": r"[\w.-]+",
}


@dataclass(frozen=True)
class Name:
    """A metric. ``where``: on what it is logged; ``<...>`` in ``pattern`` stands for what varies."""

    pattern: str
    where: str
    meaning: str

    def matches(self, name: str) -> bool:
        parts = re.split(r"<(\w+)>", self.pattern)
        text = "".join(_PARTS[part] if i % 2 else re.escape(part) for i, part in enumerate(parts))
        return re.fullmatch(text, name) is not None


_CURVE, _VERDICT, _LIVE = "run, every step", "run and model, at the verdict", "run and model, after a rollout"


def _both(pattern: str, where: str, meaning: str) -> tuple[Name, Name]:
    of_champion = Name(CHAMPION_PREFIX + pattern, where, f"the same of the champion: {meaning}")
    return Name(pattern, where, meaning), of_champion


METRICS = (
    Name("loss", _CURVE, "the objective, nats; a step of which no sample was usable has none"),
    Name("losses.step_<j>", _CURVE, "its part of unroll step j, nats"),
    Name("accuracy.step_<j>", _CURVE, "share of positions at which the draft's first choice is the target's"),
    Name("learning_rate", _CURVE, "of the step"),
    Name("grad_norm", _CURVE, "before clipping"),
    Name("epoch", _CURVE, "from 0"),
    Name("samples", _CURVE, "samples of the step that taught something"),
    Name("tokens", _CURVE, "response tokens seen so far"),
    Name("tokens_per_second", _CURVE, "the same over the seconds spent so far"),
    Name("wait_seconds", _CURVE, "of the step: for its samples"),
    Name("compute_seconds", _CURVE, "of the step: forward, backward, update"),
    *_both("acceptance_length.<set>", _VERDICT, "by replay, at the served k"),
    *_both("acceptance_length.<set>.k<k>", _VERDICT, "by replay, at k speculative steps"),
    *_both("acceptance_rate.<set>.<i>", _VERDICT, "of draft token i, given that those before were accepted"),
    *_both("acceptance_length.<set>.<dimension>.<value>", _VERDICT, "by replay, on one slice"),
    Name("requests.<set>", _VERDICT, "that were replayed"),
    Name("gain.<set>", _VERDICT, "challenger over champion, less 1"),
    Name("gain.<set>.<dimension>.<value>", _VERDICT, "the same on one slice"),
    Name("gain_lower.<set>", _VERDICT, "lower bound of the gain at `gate.confidence`, for one look"),
    Name("gain_upper.<set>", _VERDICT, "upper bound"),
    Name("gain_lower_any_time.<set>", _VERDICT, "lower bound for any number of looks"),
    Name("e_value.<set>", _VERDICT, "evidence for a gain above `gate.min_gain`"),
    *_both(
        "predicted_speed.batch<batch>.k<k>", _VERDICT, "times as fast as the target alone, by the cost model"
    ),
    Name("predicted_speed", _VERDICT, "the same under the batch sizes that were served"),
    Name("predicted_gain", _VERDICT, "that of the challenger over the champion's, less 1"),
    Name("predicted_gain_lower", _VERDICT, "its lower bound at `gate.confidence`: what the gate judges"),
    *_both("live.acceptance_length", _LIVE, "of the requests by which the canary was watched"),
    *_both("live.requests", _LIVE, "so many"),
    *_both("live.aborted", _LIVE, "of these"),
    *_both("live.token_ms_p50", _LIVE, "median of their milliseconds a token"),
    *_both("live.token_ms_p99", _LIVE, "99th percentile"),
)

# tag -> meaning; on the run, the logged model and the registered version alike
TAGS = {
    "deployment": "whose draft it is",
    "window": "that it was trained on",
    "samples": "of the window",
    "tokens": "of the window",
    "lance_version": "version of the dataset that the window is pinned to",
    "parent": "digest of the draft that training started from",
    "parent_version": "its registered version",
    "dagster_run_id": "the Dagster run that trained it",
    "attempt": "of the window, from 1",
    "origin": "`served`: it was served before it was registered; then it has no window",
    "digest": "of the draft's content",
    "uri": "of its files in the object store",
    "verdict": "`passed` or `rejected`",
    "verdict_against": "digest of the champion that it was judged against",
    "verdict_reasons": "in words",
    "state": "`served`, `replaced` or `rolled back`; none before a rollout",
    "served_at": "when all servers served it, UTC",
    "served_by": "a person, or the run",
    "served_reason": "in words",
    "replaced_at": "when a successor was served, UTC",
    "replaced_by": "digest of that",
    "rolled_back_at": "when it was taken back, UTC",
    "rolled_back_by": "a person, the run or the sensor",
    "rolled_back_reason": "in words",
}

ARTIFACTS = {
    "settings.yaml": "the whole configuration of the run, without passwords",
    "checkpoint/": "`config.json`, `tide.json` (provenance) and where the weights lie",
    "verdict.html": "the verdict as a page: both drafts on both sets, by slice, the reasons",
    "verdict.json": "the same as evidence",
}


def value_part(value: str) -> str:
    """A slice's value as part of a metric's name: ``<= 64`` is ``up_to_64``, ``> 4096`` is ``over_4096``.

    What MLflow does not take is replaced, and a piece of a hash keeps such values apart.
    """
    if (found := re.fullmatch(r"(<=|>) ([\d.]+)", value)) is not None:
        return f"{'up_to' if found[1] == '<=' else 'over'}_{found[2]}"
    if _PLAIN.fullmatch(value) and not value.startswith("."):
        return value
    kept = re.sub(r"[^\w-]", "_", value, flags=re.ASCII)[:40]
    return f"{kept}-{hashlib.sha256(value.encode()).hexdigest()[:6]}"


def named(name: str) -> list[Name]:
    """The entries of :data:`METRICS` that a metric's name fits; one of each that the platform logs."""
    return [each for each in METRICS if each.matches(name)]


def markdown_tables() -> dict[str, str]:
    """The tables of docs/mlflow.md by heading."""
    metrics = ["| metric | on | meaning |", "| --- | --- | --- |"]
    metrics += [f"| `{each.pattern}` | {each.where} | {each.meaning} |" for each in METRICS]
    tags = ["| tag | meaning |", "| --- | --- |", *(f"| `{name}` | {what} |" for name, what in TAGS.items())]
    files = ["| artifact | what |", "| --- | --- |"]
    files += [f"| `{name}` | {what} |" for name, what in ARTIFACTS.items()]
    return {
        name: "\n".join(rows) for name, rows in (("Metrics", metrics), ("Tags", tags), ("Artifacts", files))
    }
