"""Cheap checksums of weights where they lie, to tell that a reload changed the draft and nothing else."""

import hashlib
from collections.abc import Iterable

import torch

_SAMPLES = 1024


def bit_sum(tensor: torch.Tensor) -> int:
    """Sum of a tensor's elements read as integers of their width, modulo 2^64: exact in any order."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(integers).sum(dtype=torch.int64))


def sampled(tensor: torch.Tensor) -> bytes:
    """About a thousand elements, evenly spread, as bytes."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().view(torch.uint8).cpu().numpy().tobytes()


def sampled_checksum(named: Iterable[tuple[str, torch.Tensor]], whole: set[int]) -> str:
    """Checksum of a model too large to read in a pause: about a thousand elements of each tensor, and every
    bit of the tensors whose storage address is in ``whole`` (those that a draft shares)."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}".encode())
        digest.update(sampled(tensor))
        if tensor.untyped_storage().data_ptr() in whole:
            digest.update(str(bit_sum(tensor)).encode())
    return digest.hexdigest()[:16]


def whole_checksum(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Checksum over every bit of each tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{bit_sum(tensor)}".encode())
        digest.update(sampled(tensor))
    return digest.hexdigest()[:16]
