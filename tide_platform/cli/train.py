"""``tide train``: one training job, alone on a terminal or as a step of Dagster (Pipes)."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from tide_platform.training.job import TrainResult
    from tide_platform.training.progress import StepRecord

_BY_SIGNAL = 128  # exit status of a process ended by signal n: 128 + n


class Ended(BaseException):
    """Raised by the signal handler, so that nothing mistakes it for an error of its own."""


@dataclass
class Ending:
    """SIGTERM or Ctrl-C: at once before the first step, after the step in hand while training; a second one
    at once whenever.
    """

    by: signal.Signals | None = None
    _training: bool = field(default=False, repr=False)

    def listen(self) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._handle)

    def asked(self) -> bool:
        """For the optimizer loop: whoever asks, ends by itself."""
        self._training = True
        return self.by is not None

    def leave(self, text: str) -> NoReturn:
        """Says it and exits as a process does that a signal ended."""
        by = self.by or signal.SIGTERM
        if _first():
            print(f"error: {by.name}: {text}", file=sys.stderr)
        raise typer.Exit(_BY_SIGNAL + by)

    def _handle(self, number: int, _frame: object) -> None:
        at_once = self.by is not None or not self._training
        self.by = signal.Signals(number)
        if at_once:
            raise Ended


def command(
    job: Annotated[Path, typer.Option("--job", help="a training job (JSON)")],
    fresh: Annotated[
        bool, typer.Option("--fresh", help="begin anew, also where a run in the job's folder could go on")
    ] = False,
) -> None:
    """Fine-tune a draft as a job file says; writes the checkpoint and result.json into the job's folder. A
    run that was interrupted goes on. Under torchrun (torchrun -m tide_platform train ...) all processes
    share each step.
    """
    from tide_platform.training.job import TrainJob
    from tide_platform.training.progress import Stopped

    ending = Ending()
    ending.listen()
    try:
        with _reporting() as report:
            from tide_platform.training.run import run_job

            read = TrainJob.read(job)
            report.done(run_job(read, report.step, on_past=report.past, fresh=fresh, stop=ending.asked))
    except Ended:
        ending.leave(f"{job}: ended at once; `tide train --job {job}` goes on")
    except Stopped as error:
        ending.leave(f"{job}: {error}, all of them kept; `tide train --job {job}` goes on from there")


@dataclass(frozen=True)
class Report:
    """Where progress goes."""

    step: "Callable[[StepRecord], None]"
    past: "Callable[[list[StepRecord]], None]"  # steps of earlier processes of this run
    done: "Callable[[TrainResult], None]"


def _first() -> bool:
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _reporting() -> Iterator[Report]:
    """Dagster Pipes when its context is there, a progress bar on a terminal, else JSON lines; of several
    processes the first one tells.
    """
    if not _first():
        yield Report(lambda record: None, lambda records: None, lambda result: None)
    elif os.environ.get("DAGSTER_PIPES_CONTEXT"):
        from dagster_pipes import open_dagster_pipes

        with open_dagster_pipes() as pipes:

            def to_pipes(record: "StepRecord") -> None:
                if record.step == record.steps or record.step % max(1, record.steps // 20) == 0:
                    pipes.log.info(_line(record))
                _step(record)

            def past(records: "list[StepRecord]") -> None:
                pipes.log.info(f"goes on with a run of which {records[-1].step} steps were acknowledged")
                _past(records)

            def done(result: "TrainResult") -> None:
                pipes.report_asset_materialization(metadata=_metadata(result))
                _done(result)

            yield Report(to_pipes, past, done)
    elif sys.stderr.isatty():
        with _bar() as update:
            yield Report(update, lambda records: update(records[-1]), lambda r: _print(r.summary()))
    else:
        yield Report(_step, _past, _done)


@contextmanager
def _bar() -> "Iterator[Callable[[StepRecord], None]]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("training", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True)) as bar:
        task = bar.add_task("reading the samples' lengths", total=None)
        yield lambda r: bar.update(task, completed=r.step, total=r.steps, description=_line(r))


def _step(record: "StepRecord") -> None:
    _print({"event": "step", **record.to_json()})


def _past(records: "list[StepRecord]") -> None:
    for record in records:
        _print({"event": "past_step", **record.to_json()})


def _done(result: "TrainResult") -> None:
    _print({"event": "done", **result.summary()})


def _line(record: "StepRecord") -> str:
    accuracy = " ".join(f"{a:.2f}" for a in record.accuracy)
    speed = record.tokens / max(record.seconds, 1e-9)
    return (
        f"step {record.step}/{record.steps} loss {record.loss:.3f} accuracy {accuracy} "
        f"({speed:.0f} tokens/s, waited {record.wait_seconds:.2f} s of "
        f"{record.wait_seconds + record.compute_seconds:.2f})"
    )


def _metadata(result: "TrainResult") -> dict[str, Any]:
    """Pipes takes plain values; lists and dicts must say that they are JSON."""
    plain = (str, int, float)
    return {
        k: v if isinstance(v, plain) else {"raw_value": v, "type": "json"}
        for k, v in result.summary().items()
    }


def _print(record: dict[str, Any]) -> None:
    print(json.dumps(record, default=str), flush=True)
