"""Checks of the draft's folder alone: ``files``, ``target`` and ``rope``. Milliseconds to seconds, no
server.
"""

import json
from pathlib import Path
from typing import Any

from tide_platform.config import TideError, target_digest
from tide_platform.draft.check import check_draft
from tide_platform.draft.config import PROVENANCE, DraftConfig, read_config, rope_of, text_config
from tide_platform.draft.errors import BadVocabularyMap, DraftMismatch
from tide_platform.gate.report import Check, failed, passed
from tide_platform.gate.server_rules import LoadedDraft, load_as_sglang, trainer_name

# what a draft has unlike its target -> the check whose fault it is
_CHECK_OF = {"rope": "rope", "rope_theta": "rope", "rope_type": "rope", "target_digest": "target"}


def check_files(draft: Path, target: Path) -> tuple[Check, LoadedDraft | None]:
    """Whether SGLang would load every tensor of the folder, and find every tensor that it needs; then all
    that :func:`~tide_platform.draft.check.check_draft` refuses, under the name of the check whose fault it
    is. The draft as loaded, where it can be.
    """
    try:
        raw, vocab = read_config(draft), text_config(read_config(target))["vocab_size"]
        loaded = load_as_sglang(draft, raw, vocab)
    except TideError as error:
        return failed("files", "draft", str(error)), None
    except KeyError as error:
        return failed("files", "draft", f"{draft}: config.json has no {error.args[0]}"), None
    problems = _renamed(loaded) + _lost(loaded)
    if not problems:
        try:
            check_draft(draft, target)
        except BadVocabularyMap as error:
            return failed("map", "draft", f"stale d2t or t2d: {error}"), None
        except DraftMismatch as error:
            return failed(_CHECK_OF.get(error.what.partition(" ")[0], "files"), "draft", str(error)), None
        except TideError as error:
            problems = [str(error)]
    if problems:
        return failed("files", "draft", "; ".join(problems), {"skipped": sorted(loaded.skipped)}), None
    count = len(loaded.tensors) + 2
    return passed("files", "draft", f"{count} tensors, all of them loaded by SGLang's rules"), loaded


def _renamed(loaded: LoadedDraft) -> list[str]:
    """Skipped tensors that have the shape of a parameter which stays unset: they were renamed."""
    problems = []
    for name in sorted(loaded.skipped):
        shape = loaded.skipped[name]
        twin = next((p for p in sorted(loaded.unset) if loaded.unset[p] == shape), None)
        if twin is None:
            continue
        del loaded.unset[twin], loaded.skipped[name]
        problems.append(
            f"tensor {name} is skipped silently by SGLang, which knows no such name, and "
            f"{trainer_name(twin)} of that shape {list(shape)} stays random: rename it"
        )
    return problems


def _lost(loaded: LoadedDraft) -> list[str]:
    problems = []
    if loaded.skipped:
        names = ", ".join(sorted(loaded.skipped))
        problems.append(f"SGLang skips silently: {names}; what they hold is not served, leave them out")
    if loaded.unset:
        names = ", ".join(sorted(map(trainer_name, loaded.unset)))
        problems.append(f"missing {names}: SGLang leaves them random and accepts nothing; export them")
    for name, (found, wanted) in sorted(loaded.misshapen.items()):
        problems.append(f"{name} has shape {list(found)}, config.json implies {list(wanted)}")
    if loaded.hot_ids_D is None:
        problems.append("missing d2t: SGLang takes draft ids for the target's first ids; export the map")
    return problems


def check_target_of(draft: Path, target: Path) -> Check:
    """Whether the draft says that it was trained for this target, by digest."""
    named = provenance(draft).get("target_digest")
    found = target_digest(target)
    if named is None:
        return passed("target", "draft", "the draft does not say which target it was trained for")
    if named != found:
        return failed(
            "target",
            "draft",
            f"the draft was trained for target {named}, {target} is {found}: weights, tokenizer or chat "
            "template differ; serve the target that it was trained for, or train it on this one",
        )
    return passed("target", "draft", f"trained for target {found}")


def check_rope(draft: Path, target: Path, parent: Path | None = None) -> Check:
    """Whether the draft turns positions as the target does, or as the parent that it was trained from."""
    raw, theirs = read_config(draft), rope_of(text_config(read_config(target)))
    ours = rope_of(raw)
    old, new = raw.get("rope_theta"), (raw.get("rope_parameters") or {}).get("rope_theta")
    if old is not None and new is not None and old != new:
        return failed(
            "rope",
            "draft",
            f"config.json says rope_theta {old} and rope_parameters.rope_theta {new}: engines differ in "
            "which one they read; make them equal",
        )
    if ours == theirs:
        return passed("rope", "draft", f"rope {_shown(ours)}, as the target's")
    if raw.get("rope_differs"):
        return passed("rope", "draft", f"rope {_shown(ours)}, unlike the target's on purpose (rope_differs)")
    if parent is not None and rope_of(read_config(parent)) == ours:
        return passed(
            "rope", "draft", f"rope {_shown(ours)}, as the parent's; the target's is {_shown(theirs)}"
        )
    differing = ", ".join(
        f"{name} {ours.get(name)} (target {theirs.get(name)})"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )
    return failed(
        "rope",
        "draft",
        f"the draft's rope is unlike the target's: {differing}; a draft is trained with the target's: write "
        "the target's into config.json, or name the parent whose rope it was trained with",
    )


def check_layer_ids(draft: Path, target: Path, parent: Path | None = None) -> Check:
    """Whether the aux layers are the parent's."""
    layers = text_config(read_config(target))["num_hidden_layers"]
    ours = DraftConfig.from_json(read_config(draft), layers).aux_layer_ids
    if parent is None:
        return passed(
            "layers", "draft", f"aux layers {list(ours)} (entry of layer i); no parent to compare with"
        )
    theirs = DraftConfig.from_json(read_config(parent), layers).aux_layer_ids
    if ours == theirs:
        return passed("layers", "draft", f"aux layers {list(ours)}, as the parent's")
    steps = {a - b for a, b in zip(ours, theirs, strict=False)}
    off = f"all off by {steps.pop():+d}: " if len(steps) == 1 else ""
    return failed(
        "layers",
        "draft",
        f"{off}aux layers {list(ours)} (entry of layer i), the parent was trained on {list(theirs)}; in "
        "config.json SGLang's ids are one lower",
    )


def provenance(draft: Path) -> dict[str, Any]:
    """``tide.json`` of a draft, empty where there is none or it is not JSON."""
    try:
        found = json.loads((draft / PROVENANCE).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _shown(rope: dict[str, Any]) -> str:
    return ", ".join(f"{name.removeprefix('rope_')} {value}" for name, value in sorted(rope.items()))
