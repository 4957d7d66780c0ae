"""Reload on toy models with SGLang's names: in place, whole or not at all, the target untouched."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tide_platform.engine.draft_file import file_stamp
from tide_platform.engine.reload import Reloaded, ReloadFailed, ServedDraft, file_names, reload_draft

H, V, DRAFT_V = 8, 64, 16


class _Weight(nn.Module):
    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape), requires_grad=False)


class _Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=V)
        self.embed_tokens, self.layer, self.lm_head = _Weight(V, H), _Weight(H, H), _Weight(V, H)


class _Draft(nn.Module):
    """Packs q, k and v as SGLang does; shares the target's embeddings; binds a new map when it loads."""

    def __init__(self, target: _Target):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Module()
        self.model.embed_tokens.weight = target.embed_tokens.weight
        self.model.fc = _Weight(H, 3 * H)
        self.model.attn = nn.Module()
        self.model.attn.qkv_proj = _Weight(3 * H, H)
        self.lm_head = _Weight(DRAFT_V, H)
        self.hot_token_id = torch.arange(DRAFT_V)
        self.fault: str | None = None

    def load(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for count, (name, tensor) in enumerate(named):
            if self.fault == "raise" and count == 2:
                raise RuntimeError("disk gone")
            if name == "d2t":
                self.hot_token_id = tensor + torch.arange(len(tensor))
            elif name == "embed_tokens.weight":
                self.model.embed_tokens.weight.data.copy_(tensor)
            elif name == "fc.weight":
                self.model.fc.weight.data.copy_(tensor)
            elif name == "lm_head.weight":
                self.lm_head.weight.data.copy_(tensor)
            else:
                part = "qkv".index(name.removeprefix("attn.")[0])
                self.model.attn.qkv_proj.weight.data[part * H : (part + 1) * H].copy_(tensor)
        if self.fault == "rebind":
            self.model.fc.weight.data = self.model.fc.weight.data.clone()
        if self.fault == "target":
            self.model.embed_tokens.weight.data[0] = 0


class _World:
    """A server of one rank with its draft, and files to reload."""

    def __init__(self, folder: Path):
        torch.manual_seed(0)
        self.folder = folder
        self.target = _Target()
        self.draft = _Draft(self.target)
        self.worker = SimpleNamespace(hot_token_id=self.draft.hot_token_id.clone())
        self.unpacked = 0
        self.served = ServedDraft(
            target=self.target,
            draft=self.draft,
            load=self.draft.load,
            vocabulary_holders=[(self.draft, "hot_token_id"), (self.worker, "hot_token_id")],
            after_load=self._unpack,
        )

    def _unpack(self) -> None:
        self.unpacked += 1

    def file(self, **changed: torch.Tensor | None) -> list[int]:
        tensors = {
            "fc.weight": torch.randn(H, 3 * H),
            "attn.q_proj.weight": torch.randn(H, H),
            "attn.k_proj.weight": torch.randn(H, H),
            "attn.v_proj.weight": torch.randn(H, H),
            "lm_head.weight": torch.randn(DRAFT_V, H),
            "d2t": torch.arange(DRAFT_V),  # ids 0, 2, 4, …
            "t2d": torch.zeros(V, dtype=torch.bool),
            **changed,
        }
        path = self.folder / "model.safetensors"
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
        return file_stamp(path)

    def reload(self, stamp: list[int], ignored: list[str] | None = None) -> Reloaded:
        return reload_draft(self.served, self.folder, stamp, ignored or [])

    def everything(self) -> dict[str, torch.Tensor]:
        named = dict(self.target.named_parameters()) | dict(self.draft.named_parameters())
        maps = {"map": self.draft.hot_token_id, "worker": self.worker.hot_token_id}
        return {name: tensor.clone() for name, tensor in (named | maps).items()}


@pytest.fixture
def world(tmp_path: Path) -> _World:
    return _World(tmp_path)


def _same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_reload_changes_the_draft_in_place_and_nothing_else(world: _World) -> None:
    addresses = {name: p.data_ptr() for name, p in world.draft.named_parameters()}
    maps = (world.draft.hot_token_id, world.worker.hot_token_id)
    before = world.served.draft_checksum()
    fc = torch.randn(H, 3 * H)
    done = world.reload(world.file(**{"fc.weight": fc}))
    assert torch.equal(world.draft.model.fc.weight, fc)
    assert addresses == {name: p.data_ptr() for name, p in world.draft.named_parameters()}
    assert world.draft.hot_token_id is maps[0] and world.worker.hot_token_id is maps[1]
    assert maps[0].tolist() == maps[1].tolist() == list(range(0, 2 * DRAFT_V, 2))
    assert done.target_checksum_before == done.target_checksum_after
    assert done.weights_checksum == world.served.draft_checksum() != before
    assert done.ranks == [done.weights_checksum]
    assert world.unpacked == 1


def test_shared_embeddings_in_the_file_are_left_alone(world: _World) -> None:
    target = {name: p.clone() for name, p in world.target.named_parameters()}
    stamp = world.file(**{"embed_tokens.weight": torch.zeros(V, H)})
    world.reload(stamp, ignored=["embed_tokens.weight"])
    assert _same(target, dict(world.target.named_parameters()))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"fc.weight": None}, r"missing in the file: fc\.weight"),
        ({"attn.k_proj.weight": None}, r"attn\.k_proj"),
        ({"d2t": None}, "d2t"),
        ({"extra.weight": torch.zeros(1)}, r"no place for: extra\.weight"),
        ({"embed_tokens.weight": torch.zeros(V, H)}, "embed_tokens"),
        ({"d2t": torch.arange(DRAFT_V + 1)}, "17 entries"),
        ({"d2t": torch.full((DRAFT_V,), V)}, "outside"),
        ({"d2t": torch.full((DRAFT_V,), -1)}, "outside"),
        ({"fc.weight": torch.zeros(H, H)}, "size"),
    ],
)
def test_a_wrong_file_changes_nothing(world: _World, changed: dict, named: str) -> None:
    before = world.everything()
    with pytest.raises(ReloadFailed, match=named) as caught:
        world.reload(world.file(**changed))
    assert str(caught.value).count("still served") == 1
    assert _same(before, world.everything())


@pytest.mark.parametrize(
    ("fault", "named"), [("raise", "disk gone"), ("rebind", "addresses"), ("target", "target's checksum")]
)
def test_a_fault_while_loading_puts_the_old_draft_back(world: _World, fault: str, named: str) -> None:
    before = world.everything()
    world.draft.fault = fault
    with pytest.raises(ReloadFailed, match=named):
        world.reload(world.file())
    after = world.everything()
    if fault == "target":  # what was broken there is not ours to mend; it is said
        for tensors in (before, after):
            for name in ("embed_tokens.weight", "model.embed_tokens.weight"):
                del tensors[name]
    assert _same(before, after)


def test_a_file_that_changed_after_its_check_is_refused(world: _World) -> None:
    stamp = world.file()
    before = world.everything()
    world.file()
    with pytest.raises(ReloadFailed, match="changed after"):
        world.reload([*stamp[:2], stamp[2] - 1])
    assert _same(before, world.everything())


def test_a_problem_of_another_rank_stops_all(world: _World) -> None:
    before = world.everything()
    calls: list[object] = []

    def gather(value: object) -> list[object]:
        calls.append(value)
        return [value, "rank 1 ran out of disk"] if len(calls) == 2 else [value, None]

    world.served.gather = gather
    with pytest.raises(ReloadFailed, match="rank 1"):
        world.reload(world.file())
    assert _same(before, world.everything())


def test_packed_parameters_are_filled_from_several_tensors() -> None:
    assert file_names("model.layers.0.self_attn.qkv_proj.weight") == [
        f"layers.0.self_attn.{part}_proj.weight" for part in "qkv"
    ]
    assert file_names("model.layers.0.mlp.gate_up_proj.weight") == [
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
    ]
    assert file_names("lm_head.weight") == ["lm_head.weight"]
