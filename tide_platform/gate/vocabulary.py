"""Checks ``map`` and ``head``: that each row of the draft's head belongs to the token that ``d2t`` says.

Wrong in either, the server proposes well-chosen draft ids and says other words for them. What a map was, the
parent's file or a digest in ``tide.json`` tells; without either, the head itself does: a head that began as
rows of the target's (``new_draft``, and what was trained from it) still points where those rows point.

Shapes: Vd draft vocabulary, V the target's, h hidden size, P rows that are looked at.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from tide_platform.draft.checkpoint import TargetParts, read_tensors
from tide_platform.draft.vocab import map_digest
from tide_platform.gate.draft_files import provenance
from tide_platform.gate.report import Check, Tolerance, failed, judged, passed
from tide_platform.gate.server_rules import HEAD, LoadedDraft

ROWS = 256  # of the head, evenly spread
DERIVED = 0.8  # cosine beyond which a row is taken for one that began as the target's
ALIGNED = Tolerance(0.1, "a trained row may come nearer to a synonym's; of the shipped draft none does")


@dataclass(frozen=True)
class Alignment:
    """Which target row each of P rows of the draft's head is nearest to, by cosine."""

    draft_ids_P: torch.Tensor
    said_P: torch.Tensor  # the target id that d2t gives
    nearest_P: torch.Tensor  # the target id whose row is nearest
    cosine_P: torch.Tensor  # of the nearest
    other_P: torch.Tensor  # bool: nearer to another row than to the one that d2t gives

    @property
    def derived(self) -> bool:
        """Whether the head is one that began as rows of the target's."""
        return float((self.cosine_P > DERIVED).float().mean()) >= 0.5

    @property
    def stray(self) -> float:
        """Share of the rows that belong to another token than d2t says."""
        return float(self.other_P.float().mean())

    def example(self) -> str:
        at = int(self.other_P.float().argmax())
        ids = int(self.draft_ids_P[at]), int(self.nearest_P[at]), int(self.said_P[at])
        return "draft id {} is the row of target id {}, d2t says {}".format(*ids)


def align(loaded: LoadedDraft, target: TargetParts) -> Alignment:
    head_Dh, hot_D = loaded.tensors[HEAD].float(), loaded.hot_ids_D
    assert hot_D is not None
    ids_P = torch.linspace(0, len(head_Dh) - 1, min(ROWS, len(head_Dh))).long()
    table_Vh = torch.nn.functional.normalize(target.lm_head_VH.float(), dim=1)
    cosine_PV = torch.nn.functional.normalize(head_Dh[ids_P], dim=1) @ table_Vh.T
    best_P, nearest_P = cosine_PV.max(1)
    said_P = hot_D[ids_P]
    own_P = cosine_PV.gather(1, said_P[:, None])[:, 0]
    return Alignment(ids_P, said_P, nearest_P, best_P, own_P < best_P - 1e-3)  # tables repeat unused rows


def check_map(loaded: LoadedDraft, target: TargetParts, parent: Path | None = None) -> Check:
    """``d2t`` against the parent's map, else the digest in ``tide.json``, else the rows of the head."""
    hot_D = loaded.hot_ids_D
    assert hot_D is not None
    if parent is not None:
        theirs_D = read_tensors(parent, {"d2t"})["d2t"]
        theirs_D = theirs_D + torch.arange(len(theirs_D))
        if not torch.equal(theirs_D, hot_D):
            return failed("map", "draft", f"stale d2t: {_differing(hot_D, theirs_D)} the parent's; {_MEND}")
        return passed("map", "draft", f"{len(hot_D)} tokens, the parent's map")
    named = provenance(loaded.folder).get("map_digest")
    if named is not None:
        found = digest_of(hot_D)
        if found != named:
            return failed(
                "map", "draft", f"stale d2t: its digest is {found}, tide.json says {named}; {_MEND}"
            )
        return passed("map", "draft", f"{len(hot_D)} tokens, the map that tide.json names ({named})")
    alignment = align(loaded, target)
    if not alignment.derived:
        return passed(
            "map",
            "draft",
            f"{len(hot_D)} tokens; the head shares nothing with the target's, so only a parent's map or a "
            "digest in tide.json could tell a stale one",
        )
    return judged(
        "map",
        "draft",
        alignment.stray,
        ALIGNED,
        f"{len(hot_D)} tokens; head rows point to the tokens that d2t gives",
        f"stale d2t: {alignment.stray:.0%} of the head's rows are other tokens' ({alignment.example()}); "
        f"{_MEND}",
    )


_MEND = "export the draft with the map that its head was trained with"


def check_head(loaded: LoadedDraft, target: TargetParts, map_known: bool) -> Check:
    """Whether the head is a trained head: finite, and no plain copy of rows of a table of the target's.

    ``map_known``: the map was confirmed by a parent or a digest, so rows of other tokens are the head's
    fault.
    """
    head_Dh, hot_D = loaded.tensors[HEAD], loaded.hot_ids_D
    assert hot_D is not None
    if not head_Dh.isfinite().all():
        return failed(
            "head", "draft", "lm_head.weight holds infinities or NaN; train again from a good parent"
        )
    copied = copied_table(head_Dh, hot_D, target)
    if copied == "":
        return passed("head", "draft", "lm_head.weight holds the target's own rows: an untrained head")
    if copied is not None:
        text = f"head exported from the wrong table: lm_head.weight is {copied}; {_HEAD}"
        return failed("head", "draft", text)
    if not map_known or not (alignment := align(loaded, target)).derived:
        return passed("head", "draft", "lm_head.weight holds rows of its own")
    return judged(
        "head",
        "draft",
        alignment.stray,
        ALIGNED,
        "head rows point to their tokens",
        f"head exported from the wrong table: {alignment.stray:.0%} of its rows are other tokens' "
        f"({alignment.example()}), and the map is the right one; {_HEAD}",
    )


_HEAD = "export the trainer's lm_head"


def copied_table(head_Dh: torch.Tensor, hot_D: torch.Tensor, target: TargetParts) -> str | None:
    """Which rows of which table of the target's the head is, to the bit of bf16; "" for the right ones (an
    untrained head); None where it is no copy.
    """
    head = head_Dh.to(torch.bfloat16)
    tables = {"lm_head": target.lm_head_VH, "embed_tokens": target.embed_VH}
    first = torch.arange(len(hot_D))
    for name, table in tables.items():
        rows = table.to(torch.bfloat16)
        if torch.equal(head, rows[hot_D]):
            return "" if name == "lm_head" else "the target's embed_tokens"
        if not torch.equal(hot_D, first) and torch.equal(head, rows[first]):
            return f"rows 0 to {len(first) - 1} of the target's {name}, not those that d2t gives"
    return None


def digest_of(hot_D: torch.Tensor) -> str:
    """Digest of the map that leads to these target ids."""
    return map_digest((hot_D - torch.arange(len(hot_D))).numpy())


def _differing(ours_D: torch.Tensor, theirs_D: torch.Tensor) -> str:
    if len(ours_D) != len(theirs_D):
        return f"{len(ours_D)} draft ids, {len(theirs_D)} in"
    at = (ours_D != theirs_D).nonzero()[:, 0]
    first = int(at[0])
    return (
        f"{len(at)} of {len(ours_D)} draft ids lead elsewhere (draft id {first} to {int(ours_D[first])}, not "
        f"{int(theirs_D[first])}) than in"
    )
