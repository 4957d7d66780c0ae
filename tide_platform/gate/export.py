"""Checks ``map``, ``head`` and ``logits`` of an export: the draft that the trainer holds in memory against
the folder that it wrote. Here both sides are known, so every difference is the export's.

Shapes: Vd draft vocabulary, V the target's, h hidden size.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import torch

from tide_platform.draft.checkpoint import TargetParts
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.gate.draft_files import check_files
from tide_platform.gate.example import Example
from tide_platform.gate.proposals import check_logits
from tide_platform.gate.report import Check, failed, passed
from tide_platform.gate.server_draft import ServerDraft
from tide_platform.gate.server_rules import HEAD, LoadedDraft, trainer_name
from tide_platform.gate.vocabulary import copied_table


def check_export(
    trained: Eagle3Draft,
    folder: Path,
    target_folder: Path,
    target: TargetParts,
    examples: Sequence[Example],
    steps: int,
) -> list[Check]:
    """``trained``: the draft as it was written to ``folder``."""
    files, loaded = check_files(folder, target_folder)
    if loaded is None:
        return [Check(files.name, "export", files.status, files.message)]
    checks = [_map(trained, loaded), _head(trained, loaded, target), _others(trained, loaded)]
    rounded = _rounded(trained)
    server = ServerDraft(loaded, target.embed_VH)
    return [*checks, check_logits(rounded, server, target.embed_VH, examples, steps, "export")]


def _map(trained: Eagle3Draft, loaded: LoadedDraft) -> Check:
    ours_D = trained.d2t + torch.arange(len(trained.d2t))
    theirs_D = loaded.hot_ids_D
    assert theirs_D is not None
    if torch.equal(ours_D, theirs_D):
        return passed("map", "export", f"{len(ours_D)} tokens, the map that was trained with")
    at = (ours_D != theirs_D).nonzero()[:, 0]
    first = int(at[0])
    return failed(
        "map",
        "export",
        f"stale d2t: {len(at)} of {len(ours_D)} draft ids lead elsewhere than in training (draft id {first} "
        f"to {int(theirs_D[first])}, trained as {int(ours_D[first])}); export the trainer's own map",
    )


def _head(trained: Eagle3Draft, loaded: LoadedDraft, target: TargetParts) -> Check:
    ours, theirs = trained.lm_head.weight.detach().to(torch.bfloat16), loaded.tensors[HEAD].to(torch.bfloat16)
    if torch.equal(ours, theirs):
        return passed("head", "export", "lm_head.weight is the trainer's")
    assert loaded.hot_ids_D is not None
    table = copied_table(theirs, loaded.hot_ids_D, target)
    named = {None: "rows of another head", "": "the target's own rows, as before training"}
    rows = int((ours != theirs).any(1).sum())
    return failed(
        "head",
        "export",
        f"head exported from the wrong table: {rows} of {len(ours)} rows are not the trainer's; "
        f"lm_head.weight holds {named.get(table, table)}; export the trainer's lm_head",
    )


def _others(trained: Eagle3Draft, loaded: LoadedDraft) -> Check:
    """Every other tensor, to the bit of bf16."""
    own = trained.state_dict()
    differing = [
        name
        for parameter, tensor in loaded.tensors.items()
        if parameter != HEAD and (name := trainer_name(parameter)) in own
        if not torch.equal(own[name].to(torch.bfloat16), tensor.to(torch.bfloat16))
    ]
    if differing:
        names = ", ".join(sorted(differing))
        text = f"not the trainer's values: {names}; export the weights of the last step"
        return failed("files", "export", text)
    return passed("files", "export", f"{len(loaded.tensors)} tensors are the trainer's, rounded to bf16")


@torch.no_grad()
def _rounded(draft: Eagle3Draft) -> Eagle3Draft:
    """A copy with the weights that the files can hold."""
    rounded = copy.deepcopy(draft)
    for parameter in rounded.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    return rounded
