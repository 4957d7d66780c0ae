"""Replay against a slow simulated server, and the walk's accounting."""

import dataclasses

import numpy as np
import pytest
import torch
from slow import chain_logits
from tiny import AUX_LAYERS, forward, make_meta, prompts, random_draft, random_sample, say, tiny_parts

from tide_platform.capture.record import Sample
from tide_platform.config.schema import Training
from tide_platform.draft.checkpoint import new_draft
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.draft.vocab import inverse_map
from tide_platform.evaluation.acceptance import NothingToReplay
from tide_platform.evaluation.chains import match_chains
from tide_platform.evaluation.replay import (
    UnsupportedVerifyRule,
    acceptance_by_position,
    acceptance_length,
    replay,
)
from tide_platform.training.data import prepare_all
from tide_platform.training.trainer import train


@pytest.fixture(scope="module")
def trained() -> Eagle3Draft:
    """A draft of the tiny target, trained for seconds: good enough to be accepted at times."""
    draft = new_draft(tiny_parts(), np.arange(20, 140), AUX_LAYERS)
    inverse = inverse_map(draft.d2t.numpy(), 256)
    examples, _ = prepare_all(say(prompts(48), 48), inverse, 3, 512)
    train(
        draft,
        tiny_parts().embed_VH,
        examples,
        Training(epochs=6, learning_rate=3e-3, autocast=False, threads=1),
        0,
    )
    return draft


def serve(draft: Eagle3Draft, sample: Sample, k: int) -> tuple[int, int]:
    """``(rounds, accepted)`` of a greedy speculative decoder, one token and one position at a time.

    It decodes from the prompt alone, verifies with the target's own forward pass, and stops at the length of
    the sample; drafts past that length are not proposed.
    """
    meta, embed = sample.meta, tiny_parts().embed_VH.float()
    ids = sample.tensors["input_ids"][: meta.prompt_tokens].tolist()
    logits, aux = forward(torch.tensor([ids]))
    ids.append(int(logits[0, -1].argmax()))
    rounds = accepted = 0
    while len(ids) < meta.num_tokens:
        root = len(ids) - 2
        rows = {p: aux[0, p].float() for p in range(root + 1)}
        proposed: list[int] = []

        def choose(_step: int, draft_logits: torch.Tensor, proposed: list[int] = proposed) -> int:
            best = int(draft_logits.argmax())
            proposed.append(best + int(draft.d2t[best]))
            return proposed[-1]

        last = chain_logits(draft, embed, dict(enumerate(ids)), rows, root, k, choose)[-1]
        choose(k, last)
        proposed = proposed[: meta.num_tokens - len(ids)]
        logits, aux = forward(torch.tensor([ids + proposed]))
        target = logits[0, len(ids) - 1 :].argmax(-1).tolist()
        hits = 0
        while hits < len(proposed) and proposed[hits] == target[hits]:
            hits += 1
        ids = (ids + target[: hits + 1])[: meta.num_tokens]
        rounds, accepted = rounds + 1, accepted + hits
    assert ids == sample.tensors["input_ids"].tolist()  # speculation changed nothing
    return rounds, accepted


def test_replay_is_the_simulated_server(trained: Eagle3Draft) -> None:
    samples = say(prompts(3, seed=9), 20)
    with torch.inference_mode():
        replays = replay(trained, tiny_parts(), samples, 3, dtype=torch.float32)
        for k in (1, 3):
            expected = [serve(trained, s, k) for s in samples]
            assert [(r.by_k[k].rounds, r.by_k[k].accepted) for r in replays] == expected
    assert acceptance_length(replays, 3) > 1.2  # and it does hit
    first = acceptance_by_position(replays, 3)[0]
    assert first == sum(r.by_k[3].hits[0] for r in replays) / sum(r.by_k[3].rounds for r in replays)


def test_training_raises_held_out_acceptance(trained: Eagle3Draft) -> None:
    samples = say(prompts(16, seed=5), 48)
    untrained = new_draft(tiny_parts(), np.arange(20, 140), AUX_LAYERS)
    before = acceptance_length(replay(untrained, tiny_parts(), samples, 2), 2)
    after = acceptance_length(replay(trained, tiny_parts(), samples, 2), 2)
    assert before < 1.2 and after > before + 0.25


def test_replay_does_not_depend_on_batching(trained: Eagle3Draft) -> None:
    samples = say(prompts(6, seed=7), 16) + say(prompts(2, length=40, seed=8), 30, prefix="long")
    one, many = (replay(trained, tiny_parts(), samples, 2, n, torch.float32) for n in (1, 10_000))
    assert one == many
    assert [r.sample_id for r in one] == [s.meta.sample_id for s in samples]


def ended(sample: Sample, tokens: int, last_row: bool) -> Sample:
    """The sample as it would be had the request ended ``tokens`` earlier; ``last_row``: within a run of
    accepted tokens, so that the row of its last token was kept.
    """
    end = sample.meta.num_tokens - tokens
    tensors = dict(sample.tensors)
    tensors["input_ids"] = tensors["input_ids"][:end]
    for position, names in (
        ("row_pos", ("aux",)),
        ("teacher_pos", ("teacher_ids", "teacher_logp", "token_logp")),
    ):
        keep = tensors[position] < end - 1 + last_row
        for name in (position, *names):
            tensors[name] = tensors[name][keep]
    return Sample(dataclasses.replace(sample.meta, num_tokens=end), tensors)


@pytest.mark.parametrize(("last_row", "beyond"), [(True, 1), (False, 0)])
def test_what_was_accepted_past_the_end_counts_as_far_as_it_is_known(
    trained: Eagle3Draft, last_row: bool, beyond: int
) -> None:
    k, samples = 3, say(prompts(24, seed=11), 12)
    with torch.inference_mode():
        matches = match_chains(trained, tiny_parts().embed_VH.float(), samples, k)
    short = [ended(sample, 4, last_row) for sample in samples]
    found = replay(trained, tiny_parts(), short, k, dtype=torch.float32)
    cut = 0
    for match_RK, each in zip(matches, found, strict=True):
        roots, r, rounds, accepted = len(match_RK) - 4, 0, 0, 0
        while r < roots:
            lead = int(match_RK[r].cumprod().sum())
            rounds, accepted = rounds + 1, accepted + min(lead, roots - r + beyond)
            cut += lead >= roots - r + beyond and roots - r + beyond < k
            r += lead + 1
        assert (each.by_k[k].rounds, each.by_k[k].accepted) == (rounds, accepted)
    assert sum(sum(each.by_k[k].cut) for each in found) == cut > 0


def test_holes_and_stretches_are_replayed() -> None:
    draft, embed = random_draft(0)
    parts = tiny_parts()
    parts = type(parts)(parts.folder, parts.config, embed, embed, parts.norm_H, {})
    rng = np.random.default_rng(1)
    samples = [random_sample(rng, "a", 12, 4, 0, 0.4), random_sample(rng, "b", 9, 4, 50, 0.0)]
    a, b = replay(draft, parts, samples, 2, dtype=torch.float32)
    assert (a.tokens, b.tokens) == (8, 9)
    assert b.by_k[1].rounds + b.by_k[1].accepted >= 7  # roots 0..6 of the stretch are all response


def test_named_errors() -> None:
    draft, _ = random_draft(0)
    sample = random_sample(np.random.default_rng(0), "x", 12, 4, 0, 0.0)
    odd = Sample(make_meta("x", 12, 4, verify_rule="typical"), sample.tensors)
    with pytest.raises(UnsupportedVerifyRule, match="typical"):
        replay(draft, tiny_parts(), [odd], 2)
    with pytest.raises(NothingToReplay):
        acceptance_length([], 2)
