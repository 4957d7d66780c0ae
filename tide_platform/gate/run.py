"""``tide gate``: the order of events. Files first; then one server: capture, compare, train, export, reload.

Nothing is left running, whatever ends it, and the server's folder is removed unless the gate itself broke.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tide_platform.config import Settings, TideError, draft_digest, target_digest
from tide_platform.draft.checkpoint import TargetParts, load_draft, load_target_parts, save_draft
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.draft.vocab import inverse_map
from tide_platform.gate import draft_files, learning, overfit, states, vocabulary
from tide_platform.gate.example import Example, ReferenceKind, ask, capture_examples, gate_settings
from tide_platform.gate.export import check_export
from tide_platform.gate.proposals import check_live, check_logits
from tide_platform.gate.reference import Reference, TransformersReference
from tide_platform.gate.reference_engine import engine_reference
from tide_platform.gate.report import Check, GateReport, failed
from tide_platform.gate.server_draft import ServerDraft
from tide_platform.gate.server_rules import LoadedDraft
from tide_platform.serving.client import ServerRefused
from tide_platform.serving.drafts import stage_draft
from tide_platform.serving.own_server import Served, served
from tide_platform.serving.target import resolve_target
from tide_platform.serving.target_folder import check_target

Say = Callable[[str], None]


class GateImpossible(TideError):
    """What was asked of the gate cannot be done; says nothing of the draft."""


@dataclass
class Bench:
    """What the checks share."""

    settings: Settings
    draft_folder: Path
    target_folder: Path
    reference: ReferenceKind
    k: int
    target: TargetParts
    loaded: LoadedDraft
    draft: Eagle3Draft
    examples: list[Example] = field(default_factory=list)

    @property
    def inverse(self) -> np.ndarray:
        return inverse_map(self.draft.d2t.numpy(), len(self.target.embed_VH))


def run_gate(
    settings: Settings,
    draft: Path,
    target: Path | None = None,
    parent: Path | None = None,
    reference: ReferenceKind = "transformers",
    say: Say = lambda line: None,
    own_server: bool = True,
) -> GateReport:
    """Does capture, training, export and serving agree on this draft and target?

    ``own_server`` false: only what the draft's folder tells; seconds, nothing is started.

    ``parent``: the draft that it was trained from, whose map, rope and aux layers it must have kept. A fault
    of the folder ends the run before a server is started. Raises :class:`GateImpossible`, ``TargetUnusable``,
    ``DraftMissing``, and what the server's start raises; a fault of the draft is never raised.
    """
    began = time.monotonic()
    if not settings.serving.k:
        raise GateImpossible("serving.k is 0: nothing is speculated, so there is nothing to compare; set it")
    folder = check_target(target or resolve_target(settings)).folder.absolute()
    if not (draft / "config.json").is_file():
        raise GateImpossible(f"draft {draft}: no config.json there; give the folder of a draft")
    checks: list[Check] = []
    for check in _checks(settings, draft.absolute(), folder, parent, reference, say, own_server):
        checks.append(check)
        mark = "ok  " if check.status == "pass" else check.status.upper()
        say(f"{mark} {check.name} ({check.on}): {check.message}")
    weights = draft / "model.safetensors"
    return GateReport(
        draft=str(draft),
        draft_digest=draft_digest(draft) if weights.is_file() else "",
        target=str(folder),
        target_digest=target_digest(folder),
        reference=reference,
        k=settings.serving.k,
        seconds=round(time.monotonic() - began, 1),
        checks=tuple(checks),
    )


def _checks(
    settings: Settings,
    draft: Path,
    target: Path,
    parent: Path | None,
    reference: ReferenceKind,
    say: Say,
    own_server: bool,
) -> Iterator[Check]:
    files, loaded = draft_files.check_files(draft, target)
    yield files
    if loaded is None:
        yield _not_run("all others", "the server cannot be given this folder")
        return
    parts = load_target_parts(target)
    static = list(folder_checks(loaded, parts, target, parent))
    yield from static
    if not own_server:
        return
    if any(check.status == "fail" for check in static):
        yield _not_run("layers, norm, teacher, mask, logits, live, overfit", "the folder is at fault already")
        return
    bench = Bench(settings, draft, target, reference, settings.serving.k, parts, loaded, load_draft(draft))
    work = settings.state / "gate"
    work.mkdir(parents=True, exist_ok=True)
    room = Path(tempfile.mkdtemp(prefix="run-", dir=work))
    say(f"starting a server of the gate's own, its logs in {room} until the gate has ended")
    with served(gate_settings(settings, draft, target, reference), room) as server:
        yield from server_checks(bench, server, say)
    shutil.rmtree(room, ignore_errors=True)


def folder_checks(
    loaded: LoadedDraft, parts: TargetParts, target: Path, parent: Path | None
) -> Iterator[Check]:
    """What the draft's folder tells beyond its tensors' names and shapes."""
    draft = loaded.folder
    yield draft_files.check_target_of(draft, target)
    yield draft_files.check_rope(draft, target, parent)
    yield draft_files.check_layer_ids(draft, target, parent)
    by_map = vocabulary.check_map(loaded, parts, parent)
    yield by_map
    yield vocabulary.check_head(loaded, parts, map_known=by_map.status == "pass")


def server_checks(bench: Bench, server: Served, say: Say) -> Iterator[Check]:
    """Capture and serving, on a running server that serves the draft."""
    say(f"serving at {server.url}; asking the controlled example")
    bench.examples = capture_examples(server)
    whole = states.check_capture(bench.examples, bench.draft.config.aux_layer_ids)
    yield whole
    if whole.status == "fail":
        yield _not_run(
            "layers, norm, teacher, mask, logits, live, overfit", "the example was not captured whole"
        )
        return
    yield from capture_checks(bench, references(bench, server))
    yield from draft_checks(bench)
    yield from overfit_checks(bench, server, say)


def references(bench: Bench, server: Served) -> list[Reference]:
    """One for each example."""
    texts = [[*e.answer.prompt, *e.answer.output] for e in bench.examples]
    if bench.reference == "engine":
        return [engine_reference(server, bench.examples[n], text) for n, text in enumerate(texts)]
    model = TransformersReference(bench.target_folder, bench.draft.config.aux_layer_ids)
    return [model.run(text) for text in texts]


def capture_checks(bench: Bench, known: Sequence[Reference]) -> Iterator[Check]:
    """The captured samples against the reference, and what a trainer makes of them."""
    layers = bench.draft.config.aux_layer_ids
    yield from states.check_layers(bench.examples, known, layers)
    yield states.check_norm(bench.examples, known, layers)
    yield learning.check_teacher(bench.examples, known)
    yield learning.check_mask(
        bench.examples, bench.inverse, max(bench.k, bench.settings.training.unroll_steps)
    )


def draft_checks(bench: Bench) -> Iterator[Check]:
    """The draft's proposals: the trainer's, the files', the live server's."""
    rules = ServerDraft(bench.loaded, bench.target.embed_VH)
    yield check_logits(bench.draft, rules, bench.target.embed_VH, bench.examples, bench.k, "draft")
    yield check_live(rules, bench.draft, bench.target, bench.examples, bench.k, bench.reference)


def overfit_checks(bench: Bench, server: Served, say: Say) -> Iterator[Check]:
    """Learn one sample by heart, export it, compare the export, reload it, ask again."""
    lesson = overfit.choose_lesson(bench.examples, bench.inverse, bench.k)
    if lesson is None:
        yield failed(
            "overfit",
            "export",
            f"the draft's vocabulary of {bench.draft.config.draft_vocab_size} tokens covers no answer of the "
            f"controlled example for two rounds of {bench.k + 1} tokens; choose a vocabulary from the "
            "traffic",
        )
        return
    say(f"learning {lesson.new_tokens} tokens by heart")
    trained, accuracy = overfit.learn(
        bench.draft, bench.target, lesson, bench.inverse, bench.settings.training, bench.k
    )
    if accuracy < 1.0:
        yield failed(
            "overfit",
            "export",
            f"one sample was not learnt by heart: accuracy {accuracy:.1%} after "
            f"{overfit.EPOCHS * overfit.TRIES} steps; its mask or teacher rows contradict each other",
        )
        return
    folder = server.settings.state / "overfit"
    save_draft(folder, trained, {"made_by": "tide gate"})
    export = check_export(
        trained, folder, bench.target_folder, bench.target, [lesson.example], max(bench.k, 1)
    )
    yield from export
    if any(check.status == "fail" for check in export):
        yield _not_run("overfit", "the export is at fault already")
        return
    staged, digest = stage_draft(server.settings, folder)
    try:
        server.client.reload_draft(staged, digest)
    except ServerRefused as error:
        yield failed("overfit", "server", f"the server refuses what was trained from its own draft: {error}")
        return
    answer = ask(server, "gate-overfit", lesson.example.answer.prompt, lesson.new_tokens, capture=False)
    yield overfit.check_served(answer, lesson, bench.k, exact=bench.reference == "transformers")


def _not_run(name: str, why: str) -> Check:
    return Check(name, "server", "not run", f"not run: {why}")
