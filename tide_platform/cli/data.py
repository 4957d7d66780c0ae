"""``tide data``: conversations in files as training data for a draft."""

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_platform.config import Settings, TideError, load_settings

if TYPE_CHECKING:
    from tide_platform.corpus.formats import Kind
    from tide_platform.corpus.regenerate import RegenerateCounts

app = typer.Typer(no_args_is_help=True, help=__doc__)


class Format(StrEnum):
    auto = "auto"
    sharegpt = "sharegpt"
    openai = "openai"
    tokens = "tokens"


class Turns(StrEnum):
    all = "all"
    last = "last"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"


Config = Annotated[Path | None, typer.Option("--config", help="the deployment's configuration")]
Formats = Annotated[Format, typer.Option("--format", help="of the file; auto: by its first records")]
Rejected = Annotated[
    float, typer.Option(min=0, max=1, help="share of the records that may be unusable; more is an error")
]
WhichTurns = Annotated[Turns, typer.Option(help="which answers of a conversation count")]


@app.command()
def prepare(
    file: Path,
    out: Annotated[Path, typer.Option("--out", help="JSONL to write; its header goes beside it")],
    format_: Formats = Format.auto,
    preformatted: Annotated[
        bool, typer.Option("--preformatted", help="records hold `text` that the template was applied to")
    ] = False,
    turns: WhichTurns = Turns.all,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="tokens of a record; default: training.max_length")
    ] = None,
    max_rejected: Rejected = 0.1,
    target: Annotated[
        Path | None, typer.Option(help="the target's folder; default: that of the configuration")
    ] = None,
    config: Config = None,
) -> None:
    """Conversations to token ids with a mask of the answers, by the target's own chat template."""
    from tide_platform.corpus.prepare import PreparePlan
    from tide_platform.corpus.prepare import prepare as run

    settings = load_settings(config)
    plan = PreparePlan(
        _kind(format_, preformatted), turns.value, max_length or settings.training.max_length, max_rejected
    )
    counts = run(file, out, _target(target, settings), plan, typer.echo)
    typer.echo(
        f"{out}: {counts.prepared} of {counts.records} records, {counts.answers} answers, "
        f"{counts.tokens} tokens"
    )
    typer.echo(f"mask coverage        {counts.coverage:.1%} ({counts.response_tokens} response tokens)")
    for name, count in (
        ("rejected", counts.rejected),
        ("truncated", counts.truncated),
        ("cut before the answer", counts.truncated_away),
        ("without a response", counts.without_response),
        ("merges at an edge", counts.boundary_merges),
    ):
        if count:
            typer.echo(f"{name:20} {count}")
    if counts.last_turn_only:
        typer.echo(
            f"last answer only     {counts.last_turn_only} conversations, since the chat template does not "
            f"render them incrementally: {counts.last_turn_reason}"
        )


@app.command()
def vocab(
    prepared: Path,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSON of the counts, for `tide draft init --vocab-from`")
    ] = None,
    size: Annotated[
        list[int] | None, typer.Option("--size", min=1, help="vocabulary sizes to show; may be repeated")
    ] = None,
) -> None:
    """Which share of the response tokens a draft's vocabulary of a size covers."""
    from tide_platform.corpus.vocabulary import SIZES, count_prepared, coverage_by_size, write_counts

    counts = count_prepared(prepared)
    distinct = int((counts > 0).sum())
    typer.echo(
        f"{prepared}: {counts.sum()} response tokens, {distinct} distinct of {len(counts)} in the vocabulary"
    )
    for row in coverage_by_size(counts, tuple(size) if size else SIZES):
        unused = f"; only {distinct} occur, the lowest {row.unused} other ids fill it up"
        typer.echo(f"{row.size:8} tokens: {row.share:.2%} covered" + (unused if row.unused else ""))
    if out:
        write_counts(out, prepared, counts)
        typer.echo(f"{out}: counts")


@app.command()
def regenerate(
    file: Path,
    out: Annotated[Path, typer.Option("--out", help="JSONL to write; an interrupted run goes on in it")],
    format_: Formats = Format.auto,
    turns: WhichTurns = Turns.all,
    tenant: Annotated[str, typer.Option(help="under which the server captures")] = "general",
    uncaptured: Annotated[bool, typer.Option("--uncaptured", help="keep these out of the dataset")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="conversations at a time")] = 8,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="of an answer")] = 512,
    max_rejected: Rejected = 0.1,
    url: Annotated[str | None, typer.Option(help="the server; default: that of the configuration")] = None,
    config: Config = None,
) -> None:
    """Replace the answers of a file by the target's own, through the server that captures them."""
    from tide_platform.corpus.regenerate import RegeneratePlan
    from tide_platform.corpus.regenerate import regenerate as run
    from tide_platform.serving.launch import base_url
    from tide_platform.serving.served import served_target

    settings = load_settings(config)
    address = url or base_url(settings)
    plan = RegeneratePlan(
        _kind(format_), turns.value, tenant, not uncaptured, concurrency, temperature, max_new_tokens,
        max_rejected,
    )  # fmt: skip
    counts = run(file, out, address, served_target(address, settings), plan, _Progress())
    length = counts.acceptance_length
    typer.echo(
        f"{out}: {counts.records} records = {counts.regenerated} regenerated + {counts.errors} errors + "
        f"{counts.skipped} skipped"
    )
    typer.echo(
        f"skipped              {counts.known} answered before, {counts.duplicates} duplicates, "
        f"{counts.without_answer} without an answer to replace, {counts.rejected} rejected"
    )
    typer.echo(
        f"answers              {counts.requests}, {counts.completion_tokens} tokens, "
        f"{counts.cut} cut at {max_new_tokens}, acceptance length {f'{length:.3f}' if length else '-'}"
    )
    if counts.kept_tool_calls:
        typer.echo(f"tool calls kept      {counts.kept_tool_calls}")
    if counts.errors:
        typer.echo(f"see {out}.errors.jsonl; the same command tries them again", err=True)
        raise typer.Exit(1)


@app.command()
def features(
    prepared: Path,
    tenant: Annotated[str, typer.Option(help="the samples' tenant in the deployment's dataset")],
    dtype: Annotated[
        Dtype | None, typer.Option(help="the target runs in it; default: as served (float16: bfloat16)")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="padded tokens of a pass: its memory")] = 4096,
    device: Annotated[str, typer.Option(help="cpu, or cuda where torch has it")] = "cpu",
    target: Annotated[
        Path | None, typer.Option(help="the target's folder; default: that of the configuration")
    ] = None,
    config: Config = None,
) -> None:
    """States and teacher rows of a prepared file's own answers, without a server, into the dataset."""
    from tide_platform.corpus.features import FeatureCounts, FeaturePlan, build_features
    from tide_platform.corpus.prepared import read_header, require_target
    from tide_platform.corpus.stream import stream_for
    from tide_platform.corpus.template import end_token_ids
    from tide_platform.store.hidden_states import open_store

    settings = load_settings(config)
    folder = _target(target, settings)
    header = read_header(prepared)
    require_target(prepared, header, folder)
    store = open_store(settings)
    stream = stream_for(settings, store, folder, header.target_digest)
    plan = FeaturePlan(
        tenant,
        batch_tokens,
        settings.ingest.commit_bytes,
        settings.capture.aux_format,
        settings.window.validation_share,
    )
    started = time.monotonic()

    def say(counts: FeatureCounts) -> None:
        speed = counts.tokens / max(time.monotonic() - started, 1e-9)
        typer.echo(f"{counts.appended} appended, {counts.known} known, {speed:.0f} tokens/s", err=True)

    name = dtype or ("float32" if settings.serving.dtype == "float32" else "bfloat16")
    counts = build_features(
        prepared,
        header,
        store,
        stream,
        lambda: _load(folder, stream.aux_layer_ids, name, device),
        end_token_ids(folder),
        plan,
        say,
    )
    typer.echo(
        f"{store.uri}: {counts.answers} answers = {counts.appended} appended + {counts.known} known + "
        f"{counts.too_short} too short; {counts.response_tokens} response tokens of tenant {tenant}"
    )


def _kind(format_: Format, preformatted: bool = False) -> "Kind | None":
    from tide_platform.corpus.formats import Kind

    if preformatted and format_ is not Format.auto:
        raise TideError(f"--preformatted and --format {format_}: a preformatted file holds `text`; give one")
    if preformatted:
        return Kind.TEXT
    return None if format_ is Format.auto else Kind(format_.value)


def _target(named: Path | None, settings: Settings) -> Path:
    """Its folder, checked."""
    from tide_platform.serving.target import resolve_target
    from tide_platform.serving.target_folder import check_target

    return check_target(named or resolve_target(settings)).folder


def _load(folder: Path, aux_layer_ids: tuple[int, ...], dtype: str, device: str) -> Any:
    import torch

    from tide_platform.draft.target_model import TargetModel

    typer.echo(f"loading {folder} in {dtype}", err=True)
    return TargetModel(folder, aux_layer_ids, getattr(torch, dtype), device)


class _Progress:
    """A line on stderr now and then."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, counts: "RegenerateCounts") -> None:
        if time.monotonic() - self._said >= 5:
            self._said = time.monotonic()
            typer.echo(
                f"{counts.regenerated} regenerated, {counts.errors} errors, {counts.skipped} skipped, "
                f"{counts.completion_tokens} tokens",
                err=True,
            )
