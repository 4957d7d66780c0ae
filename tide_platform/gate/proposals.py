"""Checks of what a draft proposes: ``logits`` (the trainer's draft against the files by the server's rules)
and ``live`` (the running server's rounds against what the files predict, and acceptance replay against both).

Shapes: C context positions, S steps, Vd draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tide_platform.draft.checkpoint import TargetParts
from tide_platform.draft.eagle3 import Eagle3Draft, Unroll
from tide_platform.evaluation.replay import replay
from tide_platform.gate.example import Example, Seen
from tide_platform.gate.report import Check, Tolerance, failed, judged
from tide_platform.gate.server_draft import Context, ServerDraft
from tide_platform.gate.states import to_float

LOGITS = Tolerance(1e-3, "of the largest logit; two fp32 programs that sum in another order")
# of the largest logit: bf16 states move a draft's logits by less; a round that hangs on less may go either
# way
TIE = {"transformers": 5e-3, "engine": 2e-2}
# of the rounds
LIVE = {
    "transformers": Tolerance(0.0, "every round, but for those that a near tie decides (counted)"),
    "engine": Tolerance(0.1, "of the rounds; target and draft of the server run in bf16"),
}


def check_logits(
    draft: Eagle3Draft,
    server: ServerDraft,
    embed_VH: torch.Tensor,
    examples: Sequence[Example],
    steps: int,
    on: str,
) -> Check:
    """Draft logits of each unroll step at every root of the answers, teacher-forced, both ways."""
    worst, where = 0.0, ""
    for example in examples:
        text, root = _text(example), len(example.answer.prompt) - 1
        last = len(text) - 1 - steps  # its deepest step embeds the text's last token
        theirs = trainer_logits(draft, embed_VH, example, steps)
        context = _context(server, example)
        for t in range(root, last):
            _, ours_SD = server.chain(context, t, steps, text[t + 2 : t + 1 + steps])
            error_S = (ours_SD - theirs[:, t]).abs().amax(1) / ours_SD.abs().amax()
            if not error_S.isfinite().all() or float(error_S.max()) > worst:
                worst = float(error_S.max()) if error_S.isfinite().all() else float("inf")
                where = f"step {int(error_S.argmax())} of the chain at position {t} of {example.answer.rid}"
    return judged(
        "logits",
        on,
        worst,
        LOGITS,
        f"the trainer's draft logits are those of the files by SGLang's rules, {steps} steps",
        f"the trainer computes another draft than the files hold by SGLang's rules: {worst:.1%} of the "
        f"largest logit apart at {where}",
    )


@torch.inference_mode()
def trainer_logits(draft: Eagle3Draft, embed_VH: torch.Tensor, example: Example, steps: int) -> torch.Tensor:
    """fp32 [S, C, Vd] by the trainer's draft and unroll, teacher-forced chains rooted at every position."""
    text = _text(example)
    tokens, embed_VH = torch.tensor([*text, *[0] * steps]), embed_VH.float()
    length = len(text) - 1
    mask_BC = torch.ones(1, length, dtype=torch.bool)
    unroll = Unroll(draft, torch.arange(length)[None], mask_BC, length)
    aux_BCF = to_float(example.sample.tensors["aux"][:length])[None]
    hidden = [unroll.first(F.embedding(tokens[1 : 1 + length], embed_VH)[None], aux_BCF)]
    for j in range(1, steps):
        hidden.append(unroll.next(F.embedding(tokens[1 + j : 1 + j + length], embed_VH)[None], hidden[-1]))
    return torch.stack([draft.lm_head(draft.norm(h))[0] for h in hidden]).float()


@dataclass
class _Walk:
    """Rounds of the live server that were predicted, and those that were not."""

    rounds: int = 0
    accepted: int = 0
    ties: int = 0
    wrong: int = 0
    first: str = ""  # the first wrong one


def check_live(
    server: ServerDraft,
    draft: Eagle3Draft,
    target: TargetParts,
    examples: Sequence[Example],
    k: int,
    kind: str,
) -> Check:
    """Every round that the server ran against the chain that the files predict at its root; and the rounds of
    acceptance replay against them.
    """
    walk = _Walk()
    for example in examples:
        _follow(server, example, k, TIE[kind], walk)
    replayed = [
        r.by_k[k] for r in replay(draft, target, [e.sample for e in examples], k, dtype=torch.float32)
    ]
    details = {
        "rounds": walk.rounds,
        "accepted": walk.accepted,
        "decided_by_near_ties": walk.ties,
        "replay_rounds": sum(r.rounds for r in replayed),
        "live_rounds": sum(e.answer.rounds for e in examples),
    }
    if not walk.rounds:
        return failed("live", "server", "the server ran no verify round: nothing was speculated", details)
    apart = abs(details["replay_rounds"] - details["live_rounds"])
    unclear = walk.ties + len(examples) + LIVE[kind].limit * details["live_rounds"]
    if walk.wrong == 0 and apart > unclear:
        return failed(
            "live",
            "server",
            f"the server took {details['live_rounds']} rounds, as its files predict; acceptance replay says "
            f"{details['replay_rounds']}: replay walks otherwise than the server",
            details,
        )
    return judged(
        "live",
        "server",
        walk.wrong / walk.rounds,
        LIVE[kind],
        f"{walk.rounds} rounds, {walk.accepted} drafts accepted, each as the files predict",
        f"{walk.wrong} of {walk.rounds} rounds are not those that the files predict: {walk.first}; the "
        "server serves another draft than its files, or other states than were captured",
        details,
    )


def _follow(server: ServerDraft, example: Example, k: int, tie: float, walk: _Walk) -> None:
    """Compares part by part; the next root is where the *server* got to, so one surprise makes no second.

    Of a part of several rounds SGLang tells how many accepted 0, 1, … drafts, not in which order.
    """
    text, context = _text(example), _context(server, example)
    root, before = len(example.answer.prompt) - 1, Seen(())
    for seen in example.answer.seen:
        found, before = _new_rounds(seen, before), seen
        if not found:  # the prefill's part
            continue
        predicted, near, chain = _predict(server, context, text, root, len(found), k, tie)
        final = root + len(found) + sum(found) >= len(text) - 2
        apart = _apart(predicted, found, final)
        walk.rounds, walk.accepted = walk.rounds + len(found), walk.accepted + sum(found)
        if apart <= 2 * near:  # a round that went the other way moves the next one
            walk.ties += apart
        else:
            walk.wrong += apart
            walk.first = walk.first or (
                f"from position {root} of {example.answer.rid} on the server accepted {found}, the files "
                f"predict {predicted} (they propose {chain} there)"
            )
        root += len(found) + sum(found)


def _new_rounds(seen: Seen, before: Seen) -> list[int]:
    """Accepted drafts of each round between two parts, ascending."""
    found: list[int] = []
    for accepted, count in enumerate(seen.by_accepted):
        known = before.by_accepted[accepted] if accepted < len(before.by_accepted) else 0
        found += [accepted] * (count - known)
    return found


def _predict(
    server: ServerDraft, context: Context, text: list[int], root: int, rounds: int, k: int, tie: float
) -> tuple[list[int], int, list[int]]:
    """Accepted drafts of so many rounds from ``root`` on (fewer where the text ends), how many of them hang
    on a near tie, and the first chain.
    """
    predicted: list[int] = []
    near, first = 0, []
    while len(predicted) < rounds and root < len(text) - 2:
        hits, lead, chain = _round(server, context, text, root, k)
        predicted, near, first = [*predicted, hits], near + (lead < tie), first or chain
        root += hits + 1
    return predicted, near, first


def _apart(predicted: list[int], found: list[int], final: bool) -> int:
    """Rounds that were found and not predicted. The last round of an answer may accept past its end, where
    nothing is stored to predict it by.
    """
    left = sorted(found)
    for accepted in predicted[:-1] if final else predicted:
        if accepted in left:
            left.remove(accepted)
    if final and predicted and left and left[-1] >= predicted[-1]:
        left.pop()
    return len(left)


def _round(
    server: ServerDraft, context: Context, text: list[int], root: int, k: int
) -> tuple[int, float, list[int]]:
    """Accepted drafts; the smallest lead of a deciding token over the next one, of the largest logit; the
    whole chain.
    """
    chain, logits_SD = server.chain(context, root, k)
    hits = 0
    while hits < k and root + 2 + hits < len(text) and chain[hits] == text[root + 2 + hits]:
        hits += 1
    top_S2 = logits_SD[: hits + 1].topk(2).values  # steps beyond the first miss decide nothing
    lead = (top_S2[:, 0] - top_S2[:, 1]) / logits_SD[: hits + 1].abs().amax(1)
    return hits, float(lead.min()), chain


def _context(server: ServerDraft, example: Example) -> Context:
    text = _text(example)
    length = len(text) - 1
    return server.prefill(torch.tensor(text[1:]), to_float(example.sample.tensors["aux"][:length]))


def _text(example: Example) -> list[int]:
    return [*example.answer.prompt, *example.answer.output]
