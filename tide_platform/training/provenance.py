"""Where a draft comes from, as its ``tide.json`` says it, and what decides a run's result."""

import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tide_platform.config.schema import Training

# settings of `training` that change how fast or how safely a run gets there, not where it gets to
_INDIFFERENT = frozenset(
    {
        "threads",
        "seed",
        "checkpoint_seconds",
        "prefetch_steps",
        "cache_bytes",
        "max_damaged_share",
        "device",
        "parallel",
        "micro_batch_positions",
    }
)
_MOST_RANGES = 1000
_ROOT = Path(__file__).parents[2]


def decisive(settings: Training) -> dict[str, Any]:
    """The settings that decide a run's result; its seed is the job's own."""
    return {name: value for name, value in settings.model_dump().items() if name not in _INDIFFERENT}


def ids_digest(sample_ids: Iterable[str]) -> str:
    """Of sample ids in order: the first 16 hexadecimal digits of a SHA-256 over them, one a line."""
    return hashlib.sha256("\n".join(sample_ids).encode()).hexdigest()[:16]


def samples_of(refs: Sequence[Any]) -> dict[str, Any]:
    """A set of samples (:class:`~tide_platform.store.feature_store.SampleRef`) in few words: how many, the
    digest of their ids, and their row ids as ranges ``[first, last]``, the outermost alone where there are
    many ranges.
    """
    ranges: list[list[int]] = []
    for row_id in sorted(ref.row_id for ref in refs):
        if ranges and row_id == ranges[-1][1] + 1:
            ranges[-1][1] = row_id
        else:
            ranges.append([row_id, row_id])
    told: dict[str, Any] = {"count": len(refs), "ids": ids_digest(ref.sample_id for ref in refs)}
    if len(ranges) > _MOST_RANGES:
        return told | {"row_ids_within": [ranges[0][0], ranges[-1][1]]}
    return told | {"row_ids": ranges}


def package_version() -> str:
    return importlib.metadata.version("tide-platform")


def code_version() -> dict[str, str]:
    """The package's version and, where it runs from a checkout, the commit; ``-dirty`` where files differ."""
    told = {"version": package_version()}
    if (_ROOT / ".git").exists():
        try:
            commit = _git("rev-parse", "HEAD")
            told["commit"] = commit + ("-dirty" if _git("status", "--porcelain", "-uno") else "")
        except (OSError, subprocess.SubprocessError):  # no git here, or not its owner's checkout
            told["commit"] = "unknown"
    return told


def machine(settings: Training, device: str, processes: int = 1) -> dict[str, Any]:
    """What decides the last bits of a result, and no more than those."""
    import torch

    return {
        "torch": torch.__version__,
        "threads": settings.threads,
        "device": device,
        "processes": processes,
        "parallel": settings.parallel if processes > 1 else None,
        "micro_batch_positions": settings.micro_batch_positions,
        "processor": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(_ROOT), *words], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
