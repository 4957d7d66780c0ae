"""Records that cannot be used: set aside with a reason, counted, and only so many of them."""

import json
from pathlib import Path
from types import TracebackType
from typing import IO

from tide_platform.corpus.errors import TooManyRejected
from tide_platform.corpus.reading import Record

_EARLY = 500  # records after which a file that is mostly bad is given up at once
_SHOWN = 2000  # characters kept of a record


class Rejects:
    """``path`` is written when the first record is rejected; one of an earlier run is removed."""

    def __init__(self, source: Path, path: Path, max_share: float):
        self.source, self.path, self.max_share = source, path, max_share
        self.count = 0
        self._first = ""
        self._file: IO[str] | None = None

    def __enter__(self) -> "Rejects":
        self.path.unlink(missing_ok=True)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def add(self, record: Record, reason: str) -> None:
        """Raises :class:`TooManyRejected` early where most of a long file is bad."""
        if self._file is None:
            self._file = self.path.open("w", encoding="utf-8")
            self._first = f"record {record.number}: {reason}"
        self.count += 1
        text = record.value if record.error else json.dumps(record.value, ensure_ascii=False)
        line = {"record": record.number, "reason": reason, "text": text[:_SHOWN]}
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        if record.number >= _EARLY and self.count > record.number * max(self.max_share, 0.5):
            self.check(record.number)

    def check(self, records: int) -> None:
        """Raises :class:`TooManyRejected`."""
        if self.count > records * self.max_share:
            if self._file:
                self._file.flush()
            raise TooManyRejected(self.source, self.count, records, self.max_share, self._first, self.path)
