"""The file of regenerated conversations: appended line by line, and continued by the next run."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tide_platform.config.files import write_json
from tide_platform.corpus.errors import ForeignOutput, ResumeMismatch
from tide_platform.corpus.prepared import header_path

FORMAT_VERSION = 1


class Answers:
    """``path`` holds a line a conversation, ``path`` + ``.errors.jsonl`` those of this run that failed, and
    the header beside it the settings that all answers share.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]):
        """Raises :class:`ResumeMismatch` where ``path`` was begun with other settings, :class:`ForeignOutput`
        where it holds no answers.
        """
        self.path, self.errors_path = path, path.with_name(path.name + ".errors.jsonl")
        self._settings = dict(settings) | {"format_version": FORMAT_VERSION}
        self.done = self._resume()

    def __enter__(self) -> "Answers":
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not header_path(self.path).exists():
            write_json(header_path(self.path), self._settings, indent=1)
        self._file = self.path.open("a", encoding="utf-8")
        self.errors_path.unlink(missing_ok=True)
        self._errors: IO[str] | None = None
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        for file in (self._file, self._errors):
            if file:
                file.flush()
                os.fsync(file.fileno())
                file.close()

    def add(self, name: str, content: Mapping[str, Any]) -> None:
        """A whole line at once: an interrupted run loses at most the line that it was writing."""
        self._file.write(json.dumps({"id": name, **content}, ensure_ascii=False) + "\n")
        self._file.flush()
        self.done.add(name)

    def fail(self, name: str, record: int, reason: str) -> None:
        """It is tried again by the next run."""
        if self._errors is None:
            self._errors = self.errors_path.open("w", encoding="utf-8")
        line = {"id": name, "record": record, "reason": reason}
        self._errors.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._errors.flush()

    def _resume(self) -> set[str]:
        """Ids that are answered; a torn last line is cut off."""
        if not self.path.exists():
            header_path(self.path).unlink(missing_ok=True)
            return set()
        self._check_settings()
        done: set[str] = set()
        whole = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    done.add(json.loads(line)["id"])
                except (ValueError, KeyError, TypeError) as error:
                    raise ForeignOutput(self.path, f"a line of it is no answer ({error})") from error
                whole += len(line)
        os.truncate(self.path, whole)
        return done

    def _check_settings(self) -> None:
        try:
            before = json.loads(header_path(self.path).read_text())
        except (OSError, ValueError) as error:
            raise ForeignOutput(self.path, f"no run of this command began it ({error})") from error
        names = sorted(before.keys() | self._settings.keys())
        changed = {n: (before.get(n), self._settings.get(n)) for n in names}
        changed = {n: pair for n, pair in changed.items() if pair[0] != pair[1]}
        if changed:
            raise ResumeMismatch(self.path, changed)
