"""``tide draft``: make, train from scratch, bring in and check drafts."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tide_platform.config import Settings
    from tide_platform.training.progress import StepRecord

app = typer.Typer(no_args_is_help=True, help=__doc__)

Target = Annotated[Path, typer.Option("--target", help="the target's Hugging Face folder")]
Out = Annotated[Path, typer.Option("--out", help="folder to write (replaced as a whole)")]


@app.command()
def init(
    target: Target,
    out: Out,
    vocab: Annotated[int, typer.Option(help="size of the draft's vocabulary: target ids 0 .. N-1")] = 12288,
    seed: int = 0,
    vocab_from: Annotated[
        Path | None, typer.Option(help="counts by `tide data vocab`: the most frequent ids instead")
    ] = None,
) -> None:
    """An untrained draft that starts from the target's last layer: enough to serve, and so to capture."""
    import numpy as np

    from tide_platform.config import target_digest
    from tide_platform.draft.check import check_draft
    from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft

    parts = load_target_parts(target)
    size = min(vocab, parts.embed_VH.shape[0])
    chosen = np.arange(size)
    if vocab_from:
        from tide_platform.corpus.vocabulary import read_counts
        from tide_platform.draft.vocab import choose_vocabulary

        counts = read_counts(vocab_from, target_digest(target), parts.embed_VH.shape[0])
        chosen = choose_vocabulary(counts, size)
    draft = new_draft(parts, chosen, seed=seed)
    digest = save_draft(
        out, draft, {"made_by": "tide draft init", "target_digest": target_digest(target), "seed": seed}
    )
    check_draft(out, target)
    typer.echo(f"{out}: untrained draft {digest}, {size} tokens")


@app.command()
def check(draft: Path, target: Target) -> None:
    """Does this draft fit this target? Names the first thing that does not."""
    from tide_platform.config import draft_digest
    from tide_platform.draft.check import check_draft

    config = check_draft(draft, target)
    typer.echo(f"{draft}: {draft_digest(draft)}, {config.draft_vocab_size} tokens, fits {target}")


@app.command("import")
def import_(
    draft: Path,
    target: Target,
    out: Out,
    accept_rope: Annotated[
        bool,
        typer.Option("--accept-rope", help="its rope differs from the target's because it was trained so"),
    ] = False,
) -> None:
    """Bring in a draft made elsewhere (SpecForge, EAGLE, speculators), completed where nothing must be
    guessed.
    """
    from tide_platform.draft.importer import import_draft

    report = import_draft(draft, target, out, accept_rope)
    for line in report.repairs:
        typer.echo(f"completed: {line}")
    for line in report.warnings:
        typer.echo(f"warning: {line}", err=True)
    typer.echo(f"{out}: {report.digest} ({report.layout} layout)")


@app.command()
def pretrain(
    target: Target,
    out: Out,
    tenant: Annotated[str, typer.Option(help="train on the samples of this tenant")] = "general",
    vocab_size: Annotated[
        int, typer.Option(help="tokens of the draft's vocabulary, the most frequent ones")
    ] = 12288,
    epochs_k1: Annotated[int, typer.Option(help="epochs of one-step warm-up")] = 1,
    epochs: Annotated[int, typer.Option(help="epochs with the whole unroll")] = 3,
    lr_k1: float = 1.5e-3,
    lr: float = 8e-4,
    held_out: Annotated[int, typer.Option(help="samples kept for measuring, at most")] = 64,
    batch_size: int = 8,
    seed: int = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="begin anew what was interrupted")] = False,
    config: Annotated[Path | None, typer.Option("--config", help="the deployment's configuration")] = None,
) -> None:
    """Train a first draft from captured samples; prints and writes its held-out acceptance. Interrupted, the
    same command goes on.
    """
    from tide_platform.cli.train import Ended, Ending
    from tide_platform.config import load_settings
    from tide_platform.training.progress import Stopped

    ending = Ending()
    ending.listen()
    plan = (vocab_size, epochs_k1, epochs, lr_k1, lr, held_out, seed)
    settings = load_settings(config)
    settings.training.batch_size = batch_size
    try:
        figures = _pretrain(settings, target, out, tenant, plan, fresh, ending.asked)
    except Ended:
        ending.leave(f"{out}: ended at once; the same command goes on")
    except Stopped as error:
        ending.leave(f"{out}: {error}, all of them kept; the same command goes on from there")
    typer.echo(
        f"{out}: {figures['digest']}, held-out acceptance length {figures['held_out']['acceptance_length']}"
    )


def _pretrain(
    settings: "Settings",
    target: Path,
    out: Path,
    tenant: str,
    plan: tuple[Any, ...],
    fresh: bool,
    stop: Callable[[], bool],
) -> dict[str, Any]:
    from tide_platform.store.hidden_states import open_store
    from tide_platform.training.pretrain import Hooks, PretrainPlan, TooFewSamples, pretrain
    from tide_platform.training.samples import StoredSamples

    store = open_store(settings)
    version = store.tip().version
    refs = store.refs(version or None, "tenant = '{}'".format(tenant.replace("'", "''")))
    if not refs:
        raise TooFewSamples(0, 20)
    typer.echo(f"{len(refs)} samples of tenant {tenant}, version {version} of the dataset")
    return pretrain(
        StoredSamples(store, refs, version),
        target,
        store.stream_meta().aux_layer_ids,
        out,
        PretrainPlan(*plan),
        settings.training,
        Hooks(_progress, typer.echo, stop),
        fresh,
    )


def _progress(stage: str, record: "StepRecord") -> None:
    if record.step % max(1, record.steps // 40) == 0 or record.step == record.steps:
        accuracy = " ".join(f"{a:.3f}" for a in record.accuracy)
        typer.echo(
            f"{stage} {record.step}/{record.steps}: {record.loss:.3f} nats, accuracy {accuracy}, "
            f"{record.seconds:.0f} s"
        )
