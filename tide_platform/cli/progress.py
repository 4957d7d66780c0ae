"""A progress bar for traffic, on stderr."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from tide_platform.serving.client import Generation


class TrafficProgress:
    """Shows requests done, tokens a second and the acceptance length so far."""

    def __init__(self, total: int, description: str = "traffic"):
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task(description, total=total, figures="")
        self._tokens = self._rounds = self._accepted = 0

    def __enter__(self) -> "TrafficProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, generation: "Generation") -> None:
        self._tokens += generation.completion_tokens
        self._rounds += generation.verify_rounds
        self._accepted += generation.accepted_drafts
        elapsed = self._progress.tasks[self._task].elapsed or 1e-9
        figures = f"{self._tokens / elapsed:.0f} tok/s"
        if self._rounds:
            figures += f", acceptance {1 + self._accepted / self._rounds:.2f}"
        self._progress.update(self._task, advance=1, figures=figures)
