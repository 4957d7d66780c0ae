"""``tide bench``: measurements, each beside its yardstick (docs/benchmarks.md)."""

import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tide_platform.bench.report import Report
    from tide_platform.config import Settings


class Workload(StrEnum):
    """Traffic that a draft can be adapted to."""

    MATHS = "maths"
    CODE = "code"


app = typer.Typer(no_args_is_help=True, help=__doc__)

Json = Annotated[bool, typer.Option("--json", help="print one JSON object last, on stdout")]
Quick = Annotated[
    bool, typer.Option("--quick", help="fewer repetitions: shows that it works, judges nothing")
]
Config = Annotated[Path | None, typer.Option("--config", help="configuration file")]
Folder = Annotated[Path | None, typer.Option("--folder", help="where to write; default: STATE/bench")]


@app.command()
def capture(
    config: Config = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="requests at a time, may be given several times; default: 1, 4, 16"),
    ] = None,
    blocks: Annotated[
        int | None, typer.Option(min=4, help="of ten seconds, for each concurrency; default: 40")
    ] = None,
    quick: Quick = False,
    json_output: Json = False,
) -> None:
    """Throughput of one server with capture on against off, and capture's share of the scheduler's thread."""
    from tide_platform.bench import capture_cost

    settings = _settings(config)
    loads, most = ((1, 8), 4) if quick else ((1, 4, 16), 40)
    _run(
        lambda: capture_cost.run(settings, concurrencies=concurrency or loads, blocks=blocks or most),
        json_output,
    )


@app.command()
def spool(
    config: Config = None, folder: Folder = None, quick: Quick = False, json_output: Json = False
) -> None:
    """Durable bytes a second of the spool against the same bytes written raw."""
    from tide_platform.bench import spool as bench

    where = _folder(config, folder, "spool")
    seconds, rounds = (2.0, 2) if quick else (6.0, 6)
    _run(lambda: bench.run(where, seconds=seconds, rounds=rounds), json_output)


@app.command()
def ingest(
    config: Config = None, folder: Folder = None, quick: Quick = False, json_output: Json = False
) -> None:
    """Segments into the dataset on object storage against boto3's multipart put of the same bytes."""
    from tide_platform.bench import ingest as bench

    where = _folder(config, folder, "ingest")
    size, rounds = (64 << 20, 2) if quick else (256 << 20, 6)
    _run(lambda: bench.run(where, bytes=size, rounds=rounds), json_output)


@app.command()
def store(
    config: Config = None,
    uri: Annotated[str | None, typer.Option("--uri", help="folder or s3:// prefix to write under")] = None,
    quick: Quick = False,
    json_output: Json = False,
) -> None:
    """Append, poll and read of the dataset as it grows."""
    from tide_platform.bench import store as bench

    where = uri or str(_folder(config, None, "store"))
    commits = (10, 100) if quick else (10, 100, 1000, 5000)
    _run(lambda: bench.run(where, commits=commits), json_output)


@app.command()
def serve(config: Config = None, quick: Quick = False, json_output: Json = False) -> None:
    """Cost of a speculative round over a plain step, by batch size and number of draft steps."""
    from tide_platform.bench import serve as bench

    settings = _settings(config)
    batches, ks = ((1, 8), (2,)) if quick else ((1, 2, 4, 8), (2, 3))
    _run(lambda: bench.run(settings, batches=batches, ks=ks), json_output)


@app.command("bytes")
def bytes_(
    config: Config = None,
    folder: Folder = None,
    runs: Annotated[int | None, typer.Option("--runs", min=1, help="end after so many fine-tunings")] = None,
    json_output: Json = False,
) -> None:
    """Bytes a training token and acceptance after adaptation, by how aux states are stored. An hour or two;
    goes on where it was interrupted.
    """
    from tide_platform.bench import bytes as bench

    settings, where = _settings(config), _folder(config, folder, "bytes")

    def say(line: str) -> None:
        typer.echo(line, err=json_output)

    _run(lambda: bench.run(settings, where, most=runs, say=say), json_output)


@app.command()
def replay(
    config: Config = None,
    folder: Folder = None,
    runs: Annotated[
        int | None, typer.Option("--runs", min=1, help="end after serving so many pieces")
    ] = None,
    prompts: Annotated[
        int | None, typer.Option("--prompts", min=1, help="of each workload; default: 64")
    ] = None,
    quick: Quick = False,
    json_output: Json = False,
) -> None:
    """Acceptance replay against live acceptance on the same prompts, by workload and k. Half an hour;
    goes on where it was interrupted, also with more prompts.
    """
    from tide_platform.bench import replay as bench

    settings, where = _settings(config), _folder(config, folder, "replay")
    ks, count = ((1, 3), 4) if quick else (bench.KS, bench.PROMPTS)

    def say(line: str) -> None:
        typer.echo(line, err=json_output)

    _run(lambda: bench.run(settings, where, ks=ks, prompts=prompts or count, most=runs, say=say), json_output)


@app.command("cost-model")
def cost_model(config: Config = None, quick: Quick = False, json_output: Json = False) -> None:
    """What a draft step and a verify pass cost, in plain steps, by batch size and k; kept in STATE for the
    verdicts.
    """
    from tide_platform.bench import cost_model as bench

    settings = _settings(config)
    batches, ks = ((1, 4), (1, 3)) if quick else (bench.BATCHES, bench.KS)
    _run(lambda: bench.run(settings, batches=batches, ks=ks), json_output)


@app.command()
def adapt(
    config: Config = None,
    folder: Folder = None,
    workload: Annotated[
        list[Workload] | None, typer.Option(help="may be given several times; default: each")
    ] = None,
    samples: Annotated[
        list[int] | None,
        typer.Option(min=1, help="to fine-tune on, may be given several times; default: 64 to 1024"),
    ] = None,
    runs: Annotated[int | None, typer.Option("--runs", min=1, help="end after so many fine-tunings")] = None,
    live: Annotated[bool, typer.Option(help="measure speed on live servers, at the end")] = True,
    over_time: Annotated[
        bool, typer.Option("--over-time", help="only acceptance over time after a shift of live traffic")
    ] = False,
    minutes: Annotated[
        float, typer.Option(min=1, help="of traffic after the shift, with --over-time")
    ] = 15.0,
    json_output: Json = False,
) -> None:
    """Acceptance and speed after adaptation, by the number of samples: hours. Or, with --over-time, by the
    minutes since the traffic changed, at 1, 4 and 16 requests at a time: one hour. Goes on where it was
    interrupted.
    """
    from tide_platform.bench import adapt as bench
    from tide_platform.bench import adapt_time

    settings, where = _settings(config), _folder(config, folder, "adapt")

    def say(line: str) -> None:
        typer.echo(line, err=json_output)

    if over_time:
        _run(lambda: adapt_time.run(settings, where / "time", minutes=minutes, say=say), json_output)
        return
    workloads, sizes = workload or bench.WORKLOADS, sorted(set(samples or bench.SIZES))
    _run(
        lambda: bench.run(settings, where, workloads=workloads, sizes=sizes, most=runs, live=live, say=say),
        json_output,
    )


@app.command()
def tick(
    config: Config = None,
    folder: Folder = None,
    windows: Annotated[int, typer.Option("--windows", min=1, help="in the ledger")] = 1000,
    commits: Annotated[int, typer.Option("--commits", min=1, help="of the dataset")] = 5000,
    quick: Quick = False,
    json_output: Json = False,
) -> None:
    """A tick of the sensor with a long history behind it, over a second."""
    from tide_platform.bench import tick as bench

    where = _folder(config, folder, "tick")
    sizes = {"windows": 20, "commits": 40} if quick else {"windows": windows, "commits": commits}
    _run(lambda: bench.run(where, **sizes), json_output)


@app.command()
def train(
    config: Config = None,
    folder: Folder = None,
    runs: Annotated[
        int | None, typer.Option("--runs", min=0, help="end after so many runs, without the live server")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=8, help="captured samples to train on")] = 96,
    held_out: Annotated[int, typer.Option("--held-out", min=8, help="captured samples to judge on")] = 48,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="runs of each side")] = 3,
    quick: Quick = False,
    json_output: Json = False,
) -> None:
    """Our trainer against `speculators` (`make setup-peers`), and training from the store against memory and
    against recomputing hidden states. An hour; goes on where it was interrupted.
    """
    from tide_platform.bench import train as bench

    settings, where = _settings(config), _folder(config, folder, "train")
    sizes = bench.Sizes(samples, held_out, range(seeds), bench.STORE_PAIRS)
    if quick:
        sizes = bench.Sizes(16, 8, range(1), 1)

    def say(line: str) -> None:
        typer.echo(line, err=json_output)

    _run(lambda: bench.run(settings, where, sizes, most=runs, say=say), json_output)


def _settings(config: Path | None) -> "Settings":
    from tide_platform.config import load_settings

    return load_settings(config)


def _folder(config: Path | None, folder: Path | None, name: str) -> Path:
    return folder or _settings(config).state / "bench" / name


def _run(measure: "Callable[[], Report]", json_output: bool) -> None:
    """Measure, print a table, and the JSON last."""
    from tide_platform.local.interrupt import EXIT_STATUS, Interrupted, interruptible

    load = round(os.getloadavg()[0], 2)
    try:
        with interruptible():  # what was started for the measurement is ended
            report = measure()
    except Interrupted:
        raise typer.Exit(EXIT_STATUS) from None
    report.conditions["load_average"]["start"] = load
    _print(report, err=json_output)
    if json_output:
        typer.echo(report.to_json())


def _print(report: "Report", err: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "ratio", "95 % interval", title=f"tide bench {report.bench}", title_justify="left")
    for name, ratio in report.ratios.items():
        interval = report.intervals.get(name)
        table.add_row(name, f"{ratio:.3f}", f"{interval[0]:.3f} … {interval[1]:.3f}" if interval else "")
    console = Console(stderr=err, highlight=False)
    console.print(table)
    for note in report.notes:
        console.print(note, markup=False, soft_wrap=True)
    load = report.conditions["load_average"]
    console.print(f"load average {load['start']} before, {load['end']} after", markup=False)
