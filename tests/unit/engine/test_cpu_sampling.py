"""The chain sampler against exact probabilities."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_platform.engine.cpu.sampling import (
    top_k_renorm_prob,
    top_p_renorm_prob,
    tree_speculative_sampling_target_only,
)

VOCABULARY = 6
TRIALS = 200_000


def run_chain(
    candidates: torch.Tensor, probs: torch.Tensor, coins: torch.Tensor, final: torch.Tensor, **kw: float
):
    """Emitted tokens [B, N] (-1: none) and accepted draft tokens [B]."""
    batch, nodes = candidates.shape
    predicts = torch.full((batch * nodes,), -1, dtype=torch.int32)
    accept_index = torch.full((batch, nodes), -7, dtype=torch.int32)
    accepted = torch.empty(batch, dtype=torch.int32)
    nothing = torch.empty(0)
    tree_speculative_sampling_target_only(
        predicts,
        accept_index,
        accepted,
        candidates,
        nothing,
        nothing,
        nothing,
        coins,
        final,
        probs,
        nothing,
        **kw,
    )
    depth = torch.arange(nodes)
    expected = torch.where(
        depth <= accepted.unsqueeze(1), torch.arange(batch).unsqueeze(1) * nodes + depth, -1
    )
    assert torch.equal(accept_index, expected.int())
    return predicts.view(batch, nodes), accepted


def chain_of(tokens: list[int], rows: torch.Tensor, trials: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    candidates = torch.tensor([[0, *tokens]]).expand(trials, -1)
    probs = rows.unsqueeze(0).expand(trials, -1, -1)
    coins = torch.rand(trials, len(tokens) + 1, generator=generator)
    return run_chain(candidates, probs, coins, torch.rand(trials, generator=generator))


def test_emitted_tokens_are_distributed_as_the_targets() -> None:
    """Token i has the target's distribution, given the tokens before it, whatever was proposed."""
    rows = torch.softmax(torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(3)), -1)
    draft = [2, 4]
    emitted, accepted = chain_of(draft, rows, TRIALS, seed=0)

    first = torch.bincount(emitted[:, 0].long(), minlength=VOCABULARY) / TRIALS
    assert torch.allclose(first, rows[0], atol=4 * (0.25 / TRIALS) ** 0.5)
    through = accepted >= 1
    assert torch.equal(emitted[through, 0], torch.full_like(emitted[through, 0], draft[0]))
    second = torch.bincount(emitted[through, 1].long(), minlength=VOCABULARY) / through.sum()
    assert torch.allclose(second, rows[1], atol=4 * (0.25 / int(through.sum())) ** 0.5)
    all_through = accepted == 2
    third = torch.bincount(emitted[all_through, 2].long(), minlength=VOCABULARY) / all_through.sum()
    assert torch.allclose(third, rows[2], atol=4 * (0.25 / int(all_through.sum())) ** 0.5)

    exact = torch.tensor([1 - rows[0, 2], rows[0, 2] * (1 - rows[1, 4]), rows[0, 2] * rows[1, 4]])
    assert torch.allclose(
        torch.bincount(accepted, minlength=3) / TRIALS, exact, atol=4 * (0.25 / TRIALS) ** 0.5
    )


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(1, 8),
    coin=st.sampled_from([0.0, 0.5, 1 - 2**-24]),
    final=st.sampled_from([0.0, 0.3, 1 - 2**-24]),
    seed=st.integers(0, 1000),
)
def test_never_emits_a_token_of_probability_zero(k: int, coin: float, final: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(4, k + 1, VOCABULARY, generator=generator)
    rows[torch.rand(rows.shape, generator=generator) < 0.6] = 0.0
    rows[..., 3] += 1e-3
    rows /= rows.sum(-1, keepdim=True)
    candidates = torch.randint(0, VOCABULARY, (4, k + 1), generator=generator)
    emitted, accepted = run_chain(candidates, rows, torch.full((4, k + 1), coin), torch.full((4,), final))
    for b in range(4):
        for i in range(int(accepted[b]) + 1):
            assert rows[b, i, emitted[b, i]] > 0
        assert (emitted[b, int(accepted[b]) + 1 :] == -1).all()


def test_a_sure_token_is_accepted_and_an_impossible_one_refused() -> None:
    sure = torch.zeros(1, 3, VOCABULARY)
    sure[0, :, 2] = 1.0
    worst = torch.full((1, 3), 1 - 2**-24)
    emitted, accepted = run_chain(torch.tensor([[0, 2, 2]]), sure, worst, torch.zeros(1))
    assert accepted.tolist() == [2] and emitted.tolist() == [[2, 2, 2]]
    emitted, accepted = run_chain(torch.tensor([[0, 3, 2]]), sure, torch.zeros(1, 3), torch.zeros(1))
    assert accepted.tolist() == [0] and emitted[0, 0] == 2


def test_a_lossy_threshold_accepts_more() -> None:
    rows = torch.full((1, 2, VOCABULARY), 1 / VOCABULARY)
    coins = torch.tensor([[0.3, 0.0]])
    assert run_chain(torch.tensor([[0, 1]]), rows, coins, torch.zeros(1))[1].tolist() == [0]
    assert run_chain(torch.tensor([[0, 1]]), rows, coins, torch.zeros(1), threshold_acc=0.5)[1].tolist() == [
        1
    ]
    assert run_chain(torch.tensor([[0, 1]]), rows, coins, torch.zeros(1), threshold_single=0.1)[
        1
    ].tolist() == [1]


def test_top_k_keeps_the_best_and_leaves_unlimited_rows_alone() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.2, 0.3]] * 3)
    kept = top_k_renorm_prob(probs, torch.tensor([2, 1, 1 << 30]))
    assert torch.allclose(kept[0], torch.tensor([0, 4 / 7, 0, 3 / 7]))
    assert kept[1].tolist() == [0, 1, 0, 0]
    assert torch.equal(kept[2], probs[2])
    tied = torch.tensor([[0.2, 0.4, 0.4]])
    assert top_k_renorm_prob(tied, torch.tensor([1])).tolist() == [[0, 1, 0]]


@settings(max_examples=40, deadline=None)
@given(mass=st.floats(0.05, 1.0), seed=st.integers(0, 100), size=st.sampled_from([5, 1500]))
def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass(mass: float, seed: int, size: int) -> None:
    probs = torch.softmax(torch.randn(2, size, generator=torch.Generator().manual_seed(seed)), -1)
    kept = top_p_renorm_prob(probs, torch.tensor([mass, 1.0]))
    assert torch.equal(kept[1], probs[1])
    chosen = probs[0][kept[0] > 0].sort(descending=True).values
    assert float(kept[0].sum()) == pytest.approx(1.0, abs=1e-4)
    assert float(chosen.sum()) >= mass - 1e-4
    assert float(chosen[:-1].sum()) < mass + 1e-4
