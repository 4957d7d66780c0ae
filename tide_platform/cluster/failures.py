"""What the trainers of a run wrote of their own errors, a file a rank on the shared volume: whole words where
a log's end has only the tracebacks of those who lost a peer.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tide_platform.config.locks import LockHeld
from tide_platform.training.job import FAILED, RUN_FOLDER

# of Failure.kind, the name of an error's class, which has others too
GPU_MEMORY, LOCK_HELD = "OutOfMemory", LockHeld.__name__


@dataclass(frozen=True)
class Failure:
    """An error of one rank's own."""

    rank: int
    kind: str
    text: str
    at: float | str  # when, by its node's clock; of one kind in all files of a run


class FailureFiles:
    """Of one attempt: files that are there already as they are now are an earlier one's. They are told apart
    by what they say, for clocks of nodes and volumes differ.
    """

    def __init__(self, out: Path):
        self._folder = out / RUN_FOLDER
        self._earlier = self._texts()

    def read(self) -> list[Failure]:
        """Earliest first. A file that is not whole yet is left out."""
        found = []
        for path, text in self._texts().items():
            if text != self._earlier.get(path) and (failure := _parsed(text)) is not None:
                found.append(failure)
        return sorted(found, key=lambda each: (str(type(each.at)), each.at, each.rank))

    def _texts(self) -> dict[Path, str]:
        texts = {}
        try:
            paths = sorted(self._folder.glob(FAILED.format("*")))
        except OSError:
            return {}
        for path in paths:
            try:
                texts[path] = path.read_text(errors="replace")
            except OSError:  # a shared volume's: gone or stale between listing and reading
                continue
        return texts


def _parsed(text: str) -> Failure | None:
    try:
        raw = json.loads(text)
        return Failure(int(raw["rank"]), str(raw["kind"]), str(raw["text"]), raw["at"])
    except (ValueError, KeyError, TypeError):
        return None
