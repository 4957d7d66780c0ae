"""The verify rule ``rejection`` on stored text: the draft's probabilities, the target's, and their bounds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow import chain_logits
from tiny import forward, make_meta, prompts, random_draft, random_sample, say, tiny_model, tiny_parts

from tide_platform.capture.record import Sample
from tide_platform.evaluation.acceptance import expected_walk
from tide_platform.evaluation.chains import chains
from tide_platform.evaluation.rejection import (
    TargetChances,
    acceptance_chances,
    target_chances,
    text_log_probabilities,
    token_bounds,
)
from tide_platform.evaluation.replay import NotReplayable, not_replayable, replay

V = 30


def drawn_from(logp_V: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """What SGLang draws from: softmax at temperature, cut to top-k, then to top-p, each scaled to 1."""
    p = np.exp(logp_V / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if 0 < top_k < len(p):
        p[order[top_k:]] = 0
        p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= top_p]] = 0
        p /= p.sum()
    return p


limits = st.tuples(st.floats(0.3, 2.0), st.sampled_from([1.0, 0.9, 0.5]), st.sampled_from([-1, 1, 3, 8, 200]))


@given(st.integers(0, 10_000), limits, st.sampled_from([4, V]))
@settings(max_examples=200, deadline=None)
def test_bounds_hold_what_the_server_draws_from(
    seed: int, limit: tuple[float, float, int], kept: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=V) * rng.uniform(0.5, 4)
    logp = logits - np.log(np.exp(logits).sum())
    exact = drawn_from(logp, *limit)
    tokens = np.flatnonzero(exact)
    head = np.repeat(-np.sort(-logp)[None, :kept], len(tokens), 0)
    low, high = token_bounds(head, logp[tokens], V, *limit)
    assert (low <= np.log(exact[tokens]) + 1e-9).all() and (high >= np.log(exact[tokens]) - 1e-9).all()
    temperature, top_p, top_k = limit
    if kept == V or (top_p == 1 and (temperature == 1 or 0 < top_k <= kept)):
        assert high - low == pytest.approx(0, abs=1e-9), "exact"


def test_at_temperature_one_nothing_is_unknown() -> None:
    logp = np.log(np.full((1, 4), 0.1))
    low, high = token_bounds(logp, np.log([0.01]), V, 1.0, 1.0, -1)
    assert low == high == pytest.approx(np.log(0.01))


def test_log_probabilities_of_stored_tokens_are_those_of_the_slow_chain() -> None:
    draft, embed = random_draft(3)
    rng = np.random.default_rng(3)
    temperatures, steps = [0.7, 1.5], 3
    samples = [
        with_rule(random_sample(rng, "x", tokens, 4, 0, 0.0), temperature=temperature)
        for tokens, temperature in zip((9, 7), temperatures, strict=True)
    ]
    with torch.inference_mode():
        found = text_log_probabilities(draft, embed, chains(draft, embed, samples, steps), temperatures)
    inverse = {int(d + draft.d2t[d]): d for d in range(draft.config.draft_vocab_size)}
    outside = 0
    for sample, log_q_RK, temperature in zip(samples, found, temperatures, strict=True):
        tokens = dict(enumerate(sample.tensors["input_ids"].tolist()))
        bits = torch.from_numpy(sample.tensors["aux"].view("int16")).view(torch.bfloat16).float()
        first = sample.meta.prompt_tokens - 1
        assert log_q_RK.shape == (sample.meta.num_tokens - 2 - first, steps)
        for r in range(len(log_q_RK)):
            rows = {p: bits[p] for p in range(first + r + 1)}
            logits = chain_logits(draft, embed, tokens, rows, first + r, steps)
            for i in range(steps):
                token = tokens.get(first + r + 2 + i)
                if token is None or token not in inverse:
                    assert log_q_RK[r, i] == -np.inf
                    outside += token is not None
                    continue
                expected = (logits[i] / temperature).log_softmax(0)[inverse[token]]
                assert log_q_RK[r, i] == pytest.approx(expected.item(), abs=1e-4)
    assert outside, "tokens outside the draft's vocabulary were met"


def with_rule(sample: Sample, **changes: object) -> Sample:
    meta = make_meta(
        "x", sample.meta.num_tokens, sample.meta.prompt_tokens, verify_rule="rejection", **changes
    )
    return Sample(meta, sample.tensors)


def test_a_greedy_request_accepts_with_the_drafts_probability() -> None:
    draft, embed = random_draft(5)
    parts = tiny_parts()
    parts = type(parts)(parts.folder, parts.config, embed, embed, parts.norm_H, {})
    sample = with_rule(random_sample(np.random.default_rng(5), "x", 12, 4, 0, 0.0))
    (found,) = replay(draft, parts, [sample], 2, dtype=torch.float32)
    with torch.inference_mode():
        (log_q,) = text_log_probabilities(draft, embed, chains(draft, embed, [sample], 2), [1.0])
    expected = expected_walk(np.exp(log_q), np.ones(len(log_q), bool), 2, np.arange(len(log_q), 0, -1) + 1)
    assert found.by_k[2].rounds == pytest.approx(expected.rounds)
    assert found.by_k[2].hits == pytest.approx(expected.hits)
    assert found.slack == 0 and 0 < found.by_k[2].accepted < found.by_k[2].rounds * 2


@torch.inference_mode()
def test_the_last_hidden_state_gives_the_targets_probabilities_exactly() -> None:
    (sample,) = say(prompts(1), 12, teacher_k=4)
    ids = torch.from_numpy(sample.tensors["input_ids"].astype(np.int64))[None]
    out = tiny_model().model(input_ids=ids)  # type: ignore[operator]
    rows = sample.tensors["teacher_pos"]
    hidden = out.last_hidden_state[0, rows].to(torch.bfloat16)
    bits = hidden.view(torch.int16).numpy().view(np.uint16)
    sampled = with_rule(sample, temperature=0.7, top_p=0.8, top_k=50)
    whole = Sample(sampled.meta, sampled.tensors)
    whole.tensors["last_hidden"] = bits
    logits = forward(ids)[0][0].double().numpy()
    found, bounded = (
        target_chances(whole, tiny_parts()),
        target_chances(
            Sample(sampled.meta, {n: t for n, t in sampled.tensors.items() if n != "last_hidden"}),
            tiny_parts(),
        ),
    )
    assert found.slack == pytest.approx(0, abs=1e-6) and bounded.slack > 0
    for p in rows[:-1]:
        logp = logits[p] - np.log(np.exp(logits[p]).sum())
        exact = drawn_from(logp, 0.7, 0.8, 50)[sample.tensors["input_ids"][p + 1]]
        assert found.at(np.array([p + 1]))[0] == pytest.approx(np.log(exact), abs=0.05)  # bf16 states


def test_what_no_teacher_row_tells_ends_what_is_known() -> None:
    target = TargetChances(10, np.log(np.array([0.5, 0.5, np.nan, 0.25])), 0.0)
    chance, known = acceptance_chances(np.log(np.full((3, 2), 0.25)), target, 8)
    assert chance.tolist() == [[0.5, 0.5], [0.5, 0.0], [0.0, 1.0]]
    assert known.tolist() == [2, 1, 0]


def test_changed_probabilities_are_refused_by_name() -> None:
    sample = with_rule(random_sample(np.random.default_rng(0), "x", 12, 4, 0, 0.0), flags=("penalties",))
    assert "changed by penalties" in str(not_replayable(sample))
    draft, _ = random_draft(0)
    with pytest.raises(NotReplayable, match="sample x: the target's probabilities were changed by penalties"):
        replay(draft, tiny_parts(), [sample], 2)
    assert not_replayable(random_sample(np.random.default_rng(0), "x", 12, 4, 0, 0.0)) is None
