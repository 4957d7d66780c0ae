"""``tide workload``: prompt sets for traffic and for measuring."""

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Workloads: prompts to send and to measure with.")


@app.command()
def build(
    names: Annotated[
        list[str] | None, typer.Argument(help="general, maths, code; none: all of them.")
    ] = None,
    again: Annotated[bool, typer.Option(help="Build also what is there already.")] = False,
) -> None:
    """Build workloads into the cache (moved by TIDE_HOME)."""
    from tide_platform.serving.workloads.build import BUILDERS, build_workload, counts, read_workload

    for name in names or BUILDERS:
        path = build_workload(name, again)
        split = counts(read_workload(name))
        typer.echo(f"{name}: {split['traffic']} traffic, {split['held_out']} held_out: {path}")


@app.command("list")
def list_() -> None:
    """The workloads that there are."""
    from tide_platform.serving.workloads.build import BUILDERS, workload_file

    for name, builder in BUILDERS.items():
        built = "built" if workload_file(name).is_file() else "not built yet"
        typer.echo(f"{name:8} {builder.summary}; {built}")


@app.command()
def show(
    workload: Annotated[str, typer.Argument(help="A workload, or a JSONL file of yours.")],
    split: Annotated[str, typer.Option(help="traffic or held_out.")] = "traffic",
    limit: Annotated[int, typer.Option(min=1, help="Prompts to print.")] = 5,
) -> None:
    """Print the first prompts of a split."""
    from tide_platform.serving.workloads import load_workload

    prompts = load_workload(workload, split)
    typer.echo(f"{len(prompts)} prompts in {split}")
    for prompt in prompts[:limit]:
        typer.echo(f"\n{prompt.id}")
        for message in prompt.messages:
            typer.echo(f"  {message['role']}: {message['content']}")
