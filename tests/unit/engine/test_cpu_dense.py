"""Dense layers against their definitions."""

import pytest
import torch

from tide_platform.engine.cpu import unpack
from tide_platform.engine.cpu.dense import packed_linear, rms_norm, rotate


class Norm(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.variance_epsilon = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_follow_a_reload_only_after_unpack(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(32, 48, bias=False).to(dtype)
    x = torch.randn(3, 32).to(dtype)
    with torch.inference_mode():
        assert torch.allclose(packed_linear(layer, x), layer(x), atol=1e-2)
        layer.weight.data.mul_(2.0)
        assert not torch.allclose(packed_linear(layer, x), layer(x), atol=1e-2)
        unpack(layer)
        assert torch.allclose(packed_linear(layer, x), layer(x), atol=2e-2)


def test_the_residual_stream_stays_fp32() -> None:
    """1/8 added to 2e4 is lost in bf16; the stream keeps it, what leaves the norm has the model's dtype."""
    norm = Norm(torch.ones(4, dtype=torch.bfloat16))
    stream = torch.tensor([[2e4, 1.0, -3.0, 0.5]])
    with torch.inference_mode():
        out, total = rms_norm(norm, torch.full((1, 4), 0.125, dtype=torch.bfloat16), stream)
    assert out.dtype == torch.bfloat16 and total.dtype == torch.float32
    assert torch.equal(total, stream + 0.125)


def test_rms_norm_is_its_definition() -> None:
    norm = Norm(torch.rand(16))
    x, residual = torch.randn(3, 16), torch.randn(3, 16)
    with torch.inference_mode():
        out, total = rms_norm(norm, x, residual)
        alone = rms_norm(norm, x)
    exact = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    assert torch.allclose(total, x + residual) and torch.allclose(out, exact, atol=1e-6)
    assert torch.allclose(alone, x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight, atol=1e-6)


@pytest.mark.parametrize("adjacent", [True, False])
def test_rotation_turns_each_pair_of_halves(adjacent: bool) -> None:
    heads, keys, size = 4, 2, 8
    qkv = torch.randn(5, (heads + 2 * keys) * size)
    query, key, _ = qkv.split([heads * size, keys * size, keys * size], -1)
    if not adjacent:
        query, key = query.clone(), key.clone()
    angles = torch.rand(50, size // 2)
    positions = torch.tensor([3, 0, 49, 7, 7])
    turned_q, turned_k = rotate(positions, query, key, torch.cat([angles.cos(), angles.sin()], -1), size)
    phase = torch.polar(torch.ones_like(angles), angles)[positions].unsqueeze(1)
    for before, after in ((query, turned_q), (key, turned_k)):
        low, high = before.view(5, -1, size).chunk(2, -1)
        exact = torch.complex(low, high) * phase
        assert torch.allclose(after, torch.cat([exact.real, exact.imag], -1).view(5, -1), atol=1e-5)
