"""``tide train``: one training job, alone on a terminal or as a step of Dagster (Pipes)."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tide_platform.training.job import TrainResult
    from tide_platform.training.trainer import StepRecord

TERMINATED = 128 + signal.SIGTERM


class _Terminated(BaseException):
    """Raised by the signal handler, so that nothing mistakes it for an error of its own."""


def command(job: Annotated[Path, typer.Option("--job", help="a training job (JSON)")]) -> None:
    """Fine-tune a draft as a job file says; writes the checkpoint and result.json into the job's folder."""
    from tide_platform.training.job import TrainJob, run_job

    signal.signal(signal.SIGTERM, _terminate)
    try:
        with _reporting() as (on_step, on_result):
            on_result(run_job(TrainJob.read(job), on_step))
    except _Terminated:
        print(
            f"error: {job}: ended by SIGTERM; no checkpoint was written, run the job again", file=sys.stderr
        )
        raise typer.Exit(TERMINATED) from None


def _terminate(_signal: int, _frame: object) -> None:
    raise _Terminated


@contextmanager
def _reporting() -> "Iterator[tuple[Callable[[StepRecord], None], Callable[[TrainResult], None]]]":
    """Where progress goes: Dagster Pipes when its context is there, a progress bar on a terminal, else JSON
    lines.
    """
    if os.environ.get("DAGSTER_PIPES_CONTEXT"):
        from dagster_pipes import open_dagster_pipes

        with open_dagster_pipes() as pipes:

            def to_pipes(record: "StepRecord") -> None:
                if record.step == record.steps or record.step % max(1, record.steps // 20) == 0:
                    pipes.log.info(_line(record))
                _print({"event": "step", **record.to_json()})

            def done(result: "TrainResult") -> None:
                pipes.report_asset_materialization(metadata=_metadata(result))
                _print({"event": "done", **result.summary()})

            yield to_pipes, done
    elif sys.stderr.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            "training",
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        from rich.console import Console

        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("loading samples", total=None)
            yield (
                lambda r: bar.update(task, completed=r.step, total=r.steps, description=_line(r)),
                lambda result: _print(result.summary()),
            )
    else:
        yield (
            lambda r: _print({"event": "step", **r.to_json()}),
            lambda result: _print({"event": "done", **result.summary()}),
        )


def _line(record: "StepRecord") -> str:
    accuracy = " ".join(f"{a:.2f}" for a in record.accuracy)
    speed = record.tokens / max(record.seconds, 1e-9)
    return (
        f"step {record.step}/{record.steps} loss {record.loss:.3f} accuracy {accuracy} ({speed:.0f} tokens/s)"
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
