"""The served draft's short cut against the trainer's draft, in fp32."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tide_platform.draft.config import DraftConfig
from tide_platform.draft.eagle3 import Eagle3Draft, Unroll
from tide_platform.draft.rope import rotation
from tide_platform.engine.cpu.attention import Plan
from tide_platform.engine.cpu.dense import rotate
from tide_platform.engine.cpu.draft import Rows, network, spread

VOCAB, SLOTS = 20, 64


def make_draft(seed: int, **changes: Any) -> Eagle3Draft:
    config = DraftConfig(
        hidden_size=8, target_hidden_size=8, intermediate_size=12, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, rms_norm_eps=1e-5, vocab_size=VOCAB, draft_vocab_size=9,
        aux_layer_ids=(1, 2, 3), **changes,
    )  # fmt: skip
    draft = Eagle3Draft(config).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for p in draft.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * 0.5)
    return draft


def as_served(draft: Eagle3Draft, embed_VH: torch.Tensor) -> Any:
    """The attributes of SGLang's model that the short cut reads, holding the same weights."""
    config, layer = draft.config, draft.midlayer

    def linear(*weights: torch.Tensor) -> Any:
        module = torch.nn.Module()
        module.register_buffer("weight", torch.cat(weights))
        module.__dict__["bias"] = None
        return module

    def norm(of: Any) -> Any:
        module = torch.nn.Module()
        module.register_buffer("weight", of.weight.detach())
        module.__dict__["variance_epsilon"] = of.eps
        return module

    cos, sin = rotation(torch.arange(128), draft.inv_freq)
    half = config.head_dim // 2
    table = torch.cat((cos[..., :half], sin[..., :half]), -1).view(128, -1)
    attention = layer.self_attn
    served = SimpleNamespace(
        qkv_proj=linear(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
        o_proj=linear(attention.o_proj.weight),
        q_size=config.num_attention_heads * config.head_dim,
        kv_size=config.num_key_value_heads * config.head_dim,
        num_heads=config.num_attention_heads,
        scaling=config.head_dim**-0.5,
        rotary_emb=lambda positions, q, k: rotate(positions, q, k, table, config.head_dim),
    )
    mlp = SimpleNamespace(
        gate_up_proj=linear(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight),
        down_proj=linear(layer.mlp.down_proj.weight),
    )
    inner = SimpleNamespace(
        layers=[
            SimpleNamespace(
                self_attn=served,
                mlp=mlp,
                input_layernorm=norm(layer.input_layernorm),
                hidden_norm=norm(layer.hidden_norm),
                post_attention_layernorm=norm(layer.post_attention_layernorm),
            )
        ],
        embed_tokens=SimpleNamespace(weight=embed_VH),
        fc=linear(draft.fc.weight),
        fc_norm=None if draft.fc_norm is None else [norm(of) for of in draft.fc_norm],
        norm=norm(draft.norm),
        norm_output=config.norm_output,
    )
    return SimpleNamespace(model=inner, lm_head=linear(draft.lm_head.weight))


@pytest.mark.parametrize("changes", [{}, {"fc_norm": True}, {"norm_output": True}])
def test_a_verified_row_and_the_steps_after_it_are_the_trainers(changes: dict[str, Any]) -> None:
    """Two requests, of which the last 3 and 1 of 3 rows were accepted; then two draft steps."""
    generator = torch.Generator().manual_seed(1)
    draft = make_draft(0, **changes)
    embed_VH = torch.randn(VOCAB, 8, generator=generator)
    model = as_served(draft, embed_VH)
    keys, values = torch.zeros(SLOTS, 2, 4), torch.zeros(SLOTS, 2, 4)
    table = torch.randperm(SLOTS - 1, generator=generator)[:40].view(2, 20).int() + 1
    tokens = torch.randint(0, VOCAB, (2, 12), generator=generator)
    aux = torch.randn(2, 12, 24, generator=generator)
    before, counts, width = [6, 4], torch.tensor([3, 1]), 3
    requests = torch.arange(2)

    def slots(of: int, start: int, count: int) -> torch.Tensor:
        return table[of, start : start + count].long()

    with torch.inference_mode():
        for b, length in enumerate(before):  # what earlier rounds have written
            plan = Plan.build(table, requests[b : b + 1], [length - 1], [1], 2, torch.float32)
            first = Rows(
                tokens[b, :length],
                aux[b, :length],
                torch.arange(length),
                slots(b, 0, length),
                torch.tensor([length - 1]),
            )
            network(model, first, keys, values, plan)
        rows = Rows(
            torch.cat([tokens[b, n : n + width] for b, n in enumerate(before)]),
            torch.cat([aux[b, n : n + width] for b, n in enumerate(before)]),
            torch.cat([torch.arange(n, n + width) for n in before]),
            torch.cat([slots(b, n, width) for b, n in enumerate(before)]),
            torch.arange(2) * width + counts - 1,
        )
        ends = [n + int(c) for n, c in zip(before, counts, strict=True)]
        plan = Plan.build(table, requests, [end - 1 for end in ends], [1, 1], 2, torch.float32)
        found = [network(model, rows, keys, values, plan)]
        proposals = torch.tensor([5, 11])
        for step in range(2):
            at = [end + step for end in ends]
            plan = Plan.build(table, requests, at, [1, 1], 2, torch.float32)
            where = torch.stack([table[b, n] for b, n in enumerate(at)]).long()
            rows = Rows(proposals, found[-1][1], torch.tensor(at), where, None)
            found.append(network(model, rows, keys, values, plan))
        for b, end in enumerate(ends):
            unroll = Unroll(draft, torch.arange(end)[None], torch.ones(1, end, dtype=torch.bool), 1)
            hidden = unroll.first(F.embedding(tokens[b : b + 1, :end], embed_VH), aux[b : b + 1, :end])
            expected = [draft.lm_head(draft.norm(hidden))[0, 0]]
            for _ in range(2):
                hidden = unroll.next(F.embedding(proposals[b].view(1, 1), embed_VH), hidden)
                expected.append(draft.lm_head(draft.norm(hidden))[0, 0])
            for (logits, _), wanted in zip(found, expected, strict=True):
                assert torch.allclose(logits[b], wanted, atol=1e-4)


def test_wanted_rows_lie_where_they_are_looked_for() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    out = spread(values, torch.tensor([2, 3]), 6)
    assert out.shape == (6, 2) and torch.equal(out[torch.tensor([2, 3])], values) and out.sum() == 10
