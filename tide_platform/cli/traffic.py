"""``tide traffic``: send a workload to the server and measure."""

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    workload: Annotated[str, typer.Option(help="general, maths, code, or a JSONL file of yours.")],
    split: Annotated[str, typer.Option(help="traffic or held_out; held_out is never captured.")] = "traffic",
    requests: Annotated[int, typer.Option(min=1, help="Prompts to send.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    uncaptured: Annotated[bool, typer.Option("--uncaptured", help="Keep these out of the dataset.")] = False,
    tenant: Annotated[str, typer.Option(help="Whose traffic this is.")] = "default",
    url: Annotated[str | None, typer.Option(help="The server; default: that of the configuration.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file.")] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, progress on stderr.")
    ] = False,
) -> None:
    """Send prompts to the server; prints tokens a second, latencies and acceptance length."""
    from tide_platform.cli.progress import TrafficProgress
    from tide_platform.config import load_settings
    from tide_platform.serving.chat import load_tokenizer
    from tide_platform.serving.launch import base_url
    from tide_platform.serving.served import served_target
    from tide_platform.serving.traffic import run_traffic
    from tide_platform.serving.workloads import HELD_OUT, load_workload

    settings = load_settings(config)
    address = url or base_url(settings)
    prompts = load_workload(workload, split, requests)
    if len(prompts) < requests:
        typer.echo(f"{workload} has {len(prompts)} prompts in {split}: sending each once", err=True)
    target = served_target(address, settings)
    load_tokenizer(target.resolve())  # before the bar's clock runs
    with TrafficProgress(len(prompts)) as progress:
        report = run_traffic(
            address,
            prompts,
            target,
            concurrency=concurrency,
            max_new_tokens=max_new_tokens,
            capture=not (uncaptured or split == HELD_OUT),
            tenant=tenant,
            temperature=temperature,
            on_progress=progress.advance,
        )
    if json_output:
        typer.echo(json.dumps(report.to_json(per_request=True)))
    else:
        _print(report)
    if report.errors:
        raise typer.Exit(1)


def _print(report) -> None:
    length = "no speculation" if report.acceptance_length is None else f"{report.acceptance_length:.3f}"
    positions = " ".join(f"{share:.2f}" for share in report.by_position)
    typer.echo(f"requests           {report.requests} at concurrency {report.concurrency}")
    typer.echo(
        f"tokens a second    {report.tokens_per_s:.1f} ({report.completion_tokens} in {report.wall_s:.1f} s)"
    )
    typer.echo(f"acceptance length  {length}" + (f" (by position {positions})" if positions else ""))
    typer.echo(
        f"latency            p50 {report.latency_p50_s:.2f} s, p90 {report.latency_p90_s:.2f} s, "
        f"p99 {report.latency_p99_s:.2f} s"
    )
    for error in report.errors[:5]:
        typer.echo(f"failed: {error}", err=True)
    if report.errors:
        typer.echo(f"{len(report.errors)} requests failed", err=True)
