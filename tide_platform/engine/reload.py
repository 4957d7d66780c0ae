"""Puts a checked draft's weights into the running server, in place: all of them on all ranks, or none.

Called on the scheduler's thread, between two batches, under an in-place pause. CUDA graphs hold the addresses
of the weights and of the vocabulary map, so nothing is rebound: what is loaded is copied into what is there.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tide_platform.config import TideError
from tide_platform.engine.checksums import sampled_checksum, whole_checksum
from tide_platform.engine.draft_file import UNUSED, VOCABULARY, file_stamp, tensor_name

# parameters that SGLang packs from several tensors of the file
PACKED = {
    ".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."),
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
}


class ReloadFailed(TideError):
    """The draft was not changed: what was wrong, with the weights of before back in place."""

    def __init__(self, what: str):
        super().__init__(f"{what}; the draft of before is still served")
        self.what = what


@dataclass
class ServedDraft:
    """The models of one rank, as the adapter finds them."""

    target: torch.nn.Module
    draft: torch.nn.Module
    # SGLang's own loading of (name, tensor) pairs into the draft: sharding and packing are its business
    load: Callable[[Iterable[tuple[str, torch.Tensor]]], None]
    vocabulary_holders: list[tuple[Any, str]] = field(
        default_factory=list
    )  # (object, attribute) of target ids
    after_load: Callable[[], None] = lambda: None  # drops whatever was derived from the weights
    # gathers a value of every rank; a server with one rank has only its own
    gather: Callable[[Any], list[Any]] = lambda value: [value]

    def shared_storages(self) -> set[int]:
        """Addresses of the target's storages that the draft uses too (embeddings, a borrowed head)."""
        target = {p.untyped_storage().data_ptr() for p in self.target.parameters()}
        return target & {p.untyped_storage().data_ptr() for p in self.draft.parameters()}

    def own_parameters(self) -> dict[str, torch.nn.Parameter]:
        shared = self.shared_storages()
        named = self.draft.named_parameters()
        return {name: p for name, p in named if p.untyped_storage().data_ptr() not in shared}

    def vocabulary(self) -> torch.Tensor | None:
        """Target ids of the draft vocabulary; ``None`` where both vocabularies are one."""
        return getattr(*self.vocabulary_holders[0]) if self.vocabulary_holders else None

    def draft_checksum(self) -> str:
        named: dict[str, torch.Tensor] = dict(self.own_parameters())
        if (vocabulary := self.vocabulary()) is not None:
            named[VOCABULARY] = vocabulary
        return whole_checksum(named.items())

    def target_checksum(self) -> str:
        heads = {id(m.weight): m.weight for m in _heads(self.target)}
        whole = self.shared_storages() | {w.untyped_storage().data_ptr() for w in heads.values()}
        return sampled_checksum(self.target.named_parameters(), whole)


@dataclass(frozen=True)
class Reloaded:
    weights_checksum: str  # of this rank's draft, read back from memory
    target_checksum_before: str
    target_checksum_after: str
    copy_s: float
    ranks: list[str]  # weights_checksum of every rank of its group
    undo: Callable[[], None]  # puts the weights of before back; holds a copy of them


def reload_draft(served: ServedDraft, folder: Path, stamp: list[int], ignored: list[str]) -> Reloaded:
    """Loads ``model.safetensors`` of ``folder``, which passed ``draft_file.check_draft`` with that ``stamp``.

    Raises :class:`ReloadFailed`, with everything as before, on every rank.
    """
    tensors: dict[str, torch.Tensor] = {}
    problem = None
    try:
        tensors = _read(folder, stamp, ignored)
        _check_complete(tensors, served)
    except (OSError, ReloadFailed) as error:
        problem = str(error)
    _agree(served, problem)
    before = served.target_checksum()
    kept = _Kept(served)
    started = time.perf_counter()
    try:
        served.load(tensors.items())
        kept.put_vocabulary_in_place()
        served.after_load()
        kept.check_addresses()
        if (after := served.target_checksum()) != before:
            raise ReloadFailed(f"the target's checksum went from {before} to {after}")
    except Exception as error:  # noqa: BLE001 (whatever SGLang's loading raises, the weights of before go back)
        problem = str(error) or type(error).__name__
    copy_s = time.perf_counter() - started
    try:
        _agree(served, problem)
    except ReloadFailed:
        kept.restore()
        raise
    checksum = served.draft_checksum()
    return Reloaded(checksum, before, before, copy_s, served.gather(checksum), kept.restore)


def _agree(served: ServedDraft, problem: str | None) -> None:
    """Raises on every rank where one has a problem."""
    problems = [p for p in served.gather(problem) if p]
    if problems:
        raise ReloadFailed(problems[0].removesuffix("; the draft of before is still served"))


def _read(folder: Path, stamp: list[int], ignored: list[str]) -> dict[str, torch.Tensor]:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    if file_stamp(path) != stamp:
        raise ReloadFailed(f"{path} changed after its digest was taken")
    dropped = {*ignored, UNUSED}
    return {name: tensor for name, tensor in tensors.items() if tensor_name(name) not in dropped}


def _check_complete(tensors: dict[str, torch.Tensor], served: ServedDraft) -> None:
    """Every parameter of the draft that is its own is filled by the file, and the map keeps its length."""
    present = {tensor_name(name) for name in tensors}
    wanted = {part for name in served.own_parameters() for part in file_names(name)}
    vocabulary = served.vocabulary()
    wanted |= {VOCABULARY} if vocabulary is not None else set()
    if missing := sorted(wanted - present):
        raise ReloadFailed(f"tensors missing in the file: {', '.join(missing)}")
    if unknown := sorted(present - wanted):
        raise ReloadFailed(f"tensors that the served draft has no place for: {', '.join(unknown)}")
    if vocabulary is not None:
        offsets = tensors[VOCABULARY]
        if offsets.shape != vocabulary.shape:
            raise ReloadFailed(f"d2t has {offsets.numel()} entries, the served draft {vocabulary.numel()}")
        ids = offsets + torch.arange(len(offsets))
        size = served.target.config.vocab_size  # type: ignore[union-attr]
        if int(ids.min()) < 0 or int(ids.max()) >= int(size):  # type: ignore[arg-type]
            raise ReloadFailed(f"d2t names target ids outside 0 … {size}")


def file_names(parameter: str) -> list[str]:
    """The tensors of a draft's file that fill a parameter of SGLang's model."""
    name = parameter.removeprefix("model.")
    for packed, parts in PACKED.items():
        if packed in name:
            return [name.replace(packed, part) for part in parts]
    return [name]


def _heads(model: torch.nn.Module) -> list[Any]:
    """Modules as wide as the vocabulary: embeddings and output head."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    weights = [(m, getattr(m, "weight", None)) for m in model.modules()]
    return [m for m, w in weights if isinstance(w, torch.Tensor) and w.dim() == 2 and w.shape[0] == size]


class _Kept:
    """What the draft was before: values, addresses and the tensors that hold the vocabulary map."""

    def __init__(self, served: ServedDraft):
        self.served = served
        self.parameters = served.own_parameters()
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.addresses = {name: p.data_ptr() for name, p in self.parameters.items()}
        self.maps = [getattr(*holder) for holder in served.vocabulary_holders]
        self.map_values = [ids.clone() for ids in self.maps]

    def put_vocabulary_in_place(self) -> None:
        """SGLang's loading binds a new map to the model, the worker's copy stays old: copy, bind the old."""
        if not self.maps:
            return
        fresh = self.served.vocabulary()
        assert fresh is not None
        for ids in self.maps:
            ids.copy_(fresh)
        self._bind_maps()

    def check_addresses(self) -> None:
        now = dict(self.served.draft.named_parameters())
        moved = [name for name, address in self.addresses.items() if now[name].data_ptr() != address]
        if moved:
            raise ReloadFailed(f"loading moved {', '.join(moved)} to other addresses")

    def restore(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.values[name])
        for ids, value in zip(self.maps, self.map_values, strict=True):
            ids.copy_(value)
        self._bind_maps()
        self.served.after_load()

    def _bind_maps(self) -> None:
        for (owner, attribute), ids in zip(self.served.vocabulary_holders, self.maps, strict=True):
            setattr(owner, attribute, ids)
