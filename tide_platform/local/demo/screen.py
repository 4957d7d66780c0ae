"""What the demo prints: lines, progress bars and a live line of status; plain lines without a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Screen:
    """One console. On a terminal things move; elsewhere a line is printed whenever something new is said."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self._last = ""

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        """A progress bar; call the yielded function once a step, with a few words on how it goes."""
        if not self.console.is_terminal:
            with self._lines(title, total) as step:
                yield step
            return
        columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[words]}"), console=self.console) as progress:
            task = progress.add_task(title, total=total, words="")
            yield lambda words: progress.update(task, advance=1, words=words)

    @contextmanager
    def status(self) -> Iterator[Callable[[str], None]]:
        """A live line; call the yielded function with its text. What is behind the last comma is detail."""
        if self.console.is_terminal:
            with self.console.status("", spinner="dots") as status:
                yield status.update
            return
        yield self._when_new

    @contextmanager
    def _lines(self, title: str, total: int) -> Iterator[Callable[[str], None]]:
        done = 0

        def step(words: str) -> None:
            nonlocal done
            done += 1
            if done == total or done % max(1, total // 4) == 0:
                self.say(f"  {title}: {done}/{total} {words}")

        yield step

    def _when_new(self, text: str) -> None:
        what = text.rpartition(",")[0] or text
        if what != self._last:
            self._last = what
            self.say(f"  {text}")
