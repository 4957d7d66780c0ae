"""The chain operations against the loops that the GPU kernels are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tide_platform.engine.cpu.errors import UnsupportedOnCpu
from tide_platform.engine.cpu.speculative_ops import (
    Launchable,
    assign_slots,
    bonus_tokens,
    build_chain,
    draft_slots,
    verify_chain_greedy,
    verify_slots,
)


def tables(batch: int, nodes: int) -> list[torch.Tensor]:
    return [torch.full((batch, nodes), -9) for _ in range(3)]


@pytest.mark.parametrize("k", [1, 2, 8])
def test_a_chain_is_a_tree_of_only_children(k: int) -> None:
    nodes = k + 1
    positions = torch.empty(2 * nodes, dtype=torch.long)
    index, child, sibling = tables(2, nodes)
    nothing = torch.empty(0)
    build_chain(
        nothing, nothing, torch.tensor([5, 9]), nothing, positions, index, child, sibling, 1, k, nodes, 0
    )
    assert positions.tolist() == [*range(5, 5 + nodes), *range(9, 9 + nodes)]
    assert index.flatten().tolist() == list(range(2 * nodes))
    assert child.tolist() == [[*range(1, nodes), -1]] * 2
    assert sibling.unique().tolist() == [-1]


def test_trees_are_refused_by_name() -> None:
    nothing = torch.empty(0)
    with pytest.raises(UnsupportedOnCpu, match="eagle-topk 4"):
        build_chain(
            nothing, nothing, torch.tensor([5]), nothing, nothing, nothing, nothing, nothing, 4, 2, 3, 0
        )


@settings(max_examples=80, deadline=None)
@given(batch=st.integers(1, 5), k=st.integers(1, 8), seed=st.integers(0, 10_000))
def test_greedy_verification_is_the_obvious_loop(batch: int, k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nodes = k + 1
    candidates = torch.randint(0, 2, (batch, nodes), generator=generator)
    target = torch.randint(0, 2, (batch, nodes), generator=generator)
    predicts = torch.zeros(batch * nodes, dtype=torch.int32)
    index = torch.full((batch, nodes), -1, dtype=torch.int32)
    accepted = torch.empty(batch, dtype=torch.int32)
    verify_chain_greedy(predicts, index, accepted, candidates, *tables(batch, nodes), target)

    bonus = torch.empty(batch, dtype=torch.int32)
    bonus_tokens(predicts[index], accepted + 1, bonus, nodes)
    for b in range(batch):
        count = 0
        while count < k and candidates[b, count + 1] == target[b, count]:
            count += 1
        assert accepted[b] == count
        assert index[b].tolist() == [b * nodes + i if i <= count else -1 for i in range(nodes)]
        assert bonus[b] == target[b, count]


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_slots_are_assigned_and_read_back(counts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = len(counts)
    rows = torch.randperm(8, generator=generator)[:batch]
    start = torch.randint(0, 10, (batch,), generator=generator, dtype=torch.int32)
    end = start + torch.tensor(counts, dtype=torch.int32)
    fresh = 100 + torch.arange(sum(counts))
    table = torch.zeros(8, 32, dtype=torch.int32)
    assign_slots(rows, table, start, end, fresh, batch)

    expected = torch.zeros_like(table)
    taken = 0
    for row, first, count in zip(rows.tolist(), start.tolist(), counts, strict=True):
        expected[row, first : first + count] = fresh[taken : taken + count].int()
        taken += count
    assert torch.equal(table, expected)

    read = verify_slots(rows, table, start, start + 3, batch, 3, "cpu")
    out = torch.empty(batch * 3, dtype=torch.long)
    Launchable(draft_slots)[(batch,)](rows, table, start, out, 32, 1, 3)
    wanted = [table[r, s : s + 3].tolist() for r, s in zip(rows.tolist(), start.tolist(), strict=True)]
    assert read.view(batch, 3).tolist() == out.view(batch, 3).tolist() == wanted
