"""``tide samples``: what was captured and stored."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_platform.config import Settings, TideError, load_settings, target_digest

if TYPE_CHECKING:
    from tide_platform.capture.record import Sample

app = typer.Typer(no_args_is_help=True, help="Captured samples in the dataset.")
Config = Annotated[Path | None, typer.Option("--config", help="configuration file")]


@app.command("list")
def list_samples(
    limit: Annotated[int, typer.Option(min=1, help="newest so many")] = 20,
    tenant: Annotated[str | None, typer.Option(help="of this tenant only")] = None,
    config: Config = None,
) -> None:
    """The newest samples, one a line."""
    from rich.console import Console
    from rich.table import Table

    from tide_platform.store.hidden_states import open_store
    from tide_platform.store.summary import acceptance_length, response_tokens

    where = None if tenant is None else "tenant = '{}'".format(tenant.replace("'", "''"))
    refs = open_store(load_settings(config)).refs(where=where)
    table = Table("sample", "captured", "tenant", "tokens", "response", "k", "acceptance", "draft", "flags")
    for ref in reversed(refs[-limit:]):
        length = acceptance_length(ref.accepted_drafts, ref.verify_rounds)
        table.add_row(
            ref.sample_id,
            _time(ref.captured_at),
            ref.tenant,
            str(ref.num_tokens),
            str(response_tokens(ref)),
            str(ref.k),
            f"{length:.2f}" if length else "-",
            ref.draft_version_end[:12],
            " ".join(ref.flags),
        )
    Console().print(table)
    typer.echo(f"{min(limit, len(refs))} of {len(refs)} samples")


@app.command()
def show(
    sample_id: Annotated[str, typer.Argument(metavar="ID")],
    config: Config = None,
) -> None:
    """Everything stored of one sample; its text where the target's tokenizer is at hand."""
    from tide_platform.store.hidden_states import open_store

    settings = load_settings(config)
    (sample,) = open_store(settings).load([sample_id])
    for name, value in sample.meta.to_json().items():
        shown = f"{value} ({_time(value)})" if name == "captured_at" else value
        typer.echo(f"{name:20} {' '.join(value) or '-' if isinstance(value, list) else shown}")
    for name, array in sample.tensors.items():
        typer.echo(f"{name:20} {array.dtype}{list(array.shape)} {_positions(name, array)}")
    split = max(0, sample.meta.prompt_tokens - sample.meta.start_pos)
    ids = sample.tensors["input_ids"].tolist()
    typer.echo(f"prompt tokens        {ids[:split]}")
    typer.echo(f"response tokens      {ids[split:]}")
    tokenizer = _tokenizer(settings, sample)
    if tokenizer is None:
        typer.echo("text                 (the tokenizer of its target is not at hand)")
        return
    typer.echo(f"prompt               {tokenizer.decode(ids[:split], skip_special_tokens=False)!r}")
    typer.echo(f"response             {tokenizer.decode(ids[split:], skip_special_tokens=False)!r}")


@app.command()
def stats(config: Config = None) -> None:
    """Sums over all samples, and what waits or was dropped on the way to the dataset."""
    from tide_platform.capture.folder import STATUS_FILE as SPOOL
    from tide_platform.capture.folder import sealed_segments
    from tide_platform.store.hidden_states import open_store
    from tide_platform.store.summary import summarize

    settings = load_settings(config)
    store = open_store(settings)
    summary, tip = summarize(store.refs()), store.tip()
    length = summary.acceptance_length
    lines: dict[str, Any] = {
        "dataset": f"{store.uri} (version {tip.version})",
        "samples": summary.samples,
        "tokens": summary.tokens,
        "verify rounds": summary.verify_rounds,
        "acceptance length": f"{length:.3f}" if length else "-",
        "captured": f"{_time(summary.first)} … {_time(summary.last)}" if summary.first else "-",
        "tenants": _counts(summary.tenants),
        "drafts": _counts(summary.drafts),
        "flags": _counts(summary.flags),
        "segments waiting": len(sealed_segments(settings.spool_folder)),
    }
    lines["spool"] = _status(settings.spool_folder / SPOOL)
    for path in sorted(settings.spool_folder.glob("ingest*.json")):  # one a worker
        lines[path.stem] = _status(path)
    for name, value in lines.items():
        typer.echo(f"{name:20} {value}")


def _time(seconds: float | None) -> str:
    return datetime.fromtimestamp(seconds or 0, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "-"


def _positions(name: str, array: Any) -> str:
    return f"{array[0]} … {array[-1]}" if name in ("row_pos", "teacher_pos") and len(array) else ""


def _status(path: Path) -> str:
    """The counters that a process leaves beside the segments."""
    if not path.is_file():
        return "-"
    status = json.loads(path.read_text())
    dropped = status.pop("dropped", {})
    since = _time(status.pop("at"))
    status.pop("pid", None)
    counts = _counts({name.replace("_", " "): value for name, value in status.items() if value})
    return f"{counts}; dropped: {_counts(dropped)} (at {since})" if dropped else f"{counts} (at {since})"


def _tokenizer(settings: Settings, sample: "Sample") -> Any:
    """The tokenizer of the sample's own target, else None."""
    from tokenizers import Tokenizer

    from tide_platform.serving.target import resolve_target

    folder = resolve_target(settings)
    try:
        if target_digest(folder) != sample.meta.target_digest:
            return None
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except (TideError, OSError):
        return None
