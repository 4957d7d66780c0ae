"""Aux hidden states in fewer bytes: int8 or int4 in blocks of 32 features, each with a float16 scale.

Packed in the spool's process, never on the server's thread, and stored as it was packed from there on:
segment and dataset pass the bytes through, so what a trainer unpacks is what the spool packed.

A packed tensor is one ``uint8`` array::

    uint32          rows kept whole, E
    int32  [E]      their indices among the R rows, ascending
    uint16 [E, F]   their bf16 bits
    float16 [R-E, B]  scales of the other rows, B = ceil(F / 32) blocks
    int8   [R-E, 32 B] values (int8), or uint8 [R-E, 16 B], two values a byte, the even one low (int4)

Kept whole are the row of position 0, whose activations reach 2e4, and rows that no float16 scale can hold.
Shapes: R rows, F = 3H features.
"""

from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from tide_platform.capture.record import Sample
from tide_platform.config import TideError

AuxFormat = Literal["bf16", "int8", "int4"]
BLOCK = 32
_LARGEST = {"int8": 127, "int4": 7}
_ROWS_AT_ONCE = 64  # stay in the cache
_SCALE_LIMIT = float(np.finfo(np.float16).max)


class PackedCorrupt(TideError):
    """A packed tensor whose length does not fit its sample."""

    def __init__(self, sample_id: str, found: int, wanted: int):
        super().__init__(f"sample {sample_id}: packed aux states of {found} bytes, {wanted} were expected")
        self.sample_id, self.found, self.wanted = sample_id, found, wanted


def pack(sample: Sample, form: AuxFormat) -> Sample:
    """The sample with its aux states packed. Raises ``ValueError`` for one that is packed already."""
    if form not in get_args(AuxFormat):
        raise ValueError(f"{form}: an aux format is one of {', '.join(get_args(AuxFormat))}")
    if sample.meta.aux_format != "bf16":
        raise ValueError(f"sample {sample.meta.sample_id} is packed as {sample.meta.aux_format}")
    if form == "bf16":
        return sample
    bits_RF, positions_R = sample.tensors["aux"], sample.tensors["row_pos"]
    largest = _LARGEST[form]
    whole_R = positions_R == 0
    blocks = -(-bits_RF.shape[1] // BLOCK)
    scales_RB = np.zeros((len(bits_RF), blocks), np.float16)
    values_RN = np.zeros((len(bits_RF), blocks * BLOCK), np.int8)
    for first in range(0, len(bits_RF), _ROWS_AT_ONCE):
        of = slice(first, first + _ROWS_AT_ONCE)
        x_RBb = _blocks(bits_RF[of], blocks)
        with np.errstate(invalid="ignore", over="ignore"):  # such rows are kept whole
            scale = np.abs(x_RBb).max(-1) / largest
            whole_R[of] |= ~(scale <= _SCALE_LIMIT).all(-1)
            scales_RB[of] = scale
            # divided by the scale that is stored; rounding it down may push the largest value over the edge
            divisor = np.maximum(scales_RB[of].astype(np.float32), np.float32(1e-30))[..., None]
            quotient = np.nan_to_num(np.rint(x_RBb / divisor), nan=0.0, posinf=0.0, neginf=0.0)
        values_RN[of] = np.clip(quotient, -largest, largest).reshape(len(x_RBb), -1)
    exceptions = np.flatnonzero(whole_R).astype(np.int32)
    values = values_RN[~whole_R]
    if form == "int4":
        nibbles = (values & 0xF).astype(np.uint8)
        values = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    parts = [
        np.array([len(exceptions)], np.uint32),
        exceptions,
        bits_RF[whole_R],
        scales_RB[~whole_R],
        values,
    ]
    packed = np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts])
    return Sample(replace(sample.meta, aux_format=form), sample.tensors | {"aux": packed})


def unpack(sample: Sample, features: int) -> Sample:
    """The sample with bf16 bits again, uint16 [R, ``features``]; ``meta.aux_format`` becomes ``bf16``.

    Raises :class:`PackedCorrupt`.
    """
    form = sample.meta.aux_format
    if form == "bf16":
        return sample
    packed, rows = sample.tensors["aux"], len(sample.tensors["row_pos"])
    kept = int(packed[:4].view(np.uint32)[0]) if len(packed) >= 4 else 0
    wanted = packed_bytes(form, rows, features, kept)
    if len(packed) != wanted or kept > rows:
        raise PackedCorrupt(sample.meta.sample_id, len(packed), wanted)
    blocks = -(-features // BLOCK)
    at = 4

    def take(dtype: type, *shape: int) -> np.ndarray:
        nonlocal at
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        part = packed[at : at + size].copy().view(dtype).reshape(shape)
        at += size
        return part

    exceptions = take(np.int32, kept)
    whole = take(np.uint16, kept, features)
    scales = take(np.float16, rows - kept, blocks).astype(np.float32)
    if form == "int8":
        values = take(np.int8, rows - kept, blocks * BLOCK)
    else:
        pairs = take(np.uint8, rows - kept, blocks * BLOCK // 2)
        values = np.empty((rows - kept, blocks * BLOCK), np.int8)
        values[:, 0::2] = ((pairs & 0xF) ^ 8).astype(np.int8) - 8
        values[:, 1::2] = ((pairs >> 4) ^ 8).astype(np.int8) - 8
    x = values.reshape(rows - kept, blocks, BLOCK).astype(np.float32) * scales[..., None]
    bits = np.empty((rows, features), np.uint16)
    packed_rows = np.ones(rows, bool)
    packed_rows[exceptions] = False
    bits[exceptions] = whole
    bits[packed_rows] = _bf16_bits(x.reshape(rows - kept, blocks * BLOCK)[:, :features])
    return Sample(replace(sample.meta, aux_format="bf16"), sample.tensors | {"aux": bits})


def packed_bytes(form: str, rows: int, features: int, kept: int = 0) -> int:
    """Bytes of a packed tensor of ``rows`` rows, ``kept`` of them whole."""
    blocks = -(-features // BLOCK)
    row = blocks * (2 + (BLOCK if form == "int8" else BLOCK // 2))
    return 4 + kept * (4 + 2 * features) + (rows - kept) * row


def _blocks(bits_RF: np.ndarray, blocks: int) -> np.ndarray:
    """float32 [R, B, 32], zeros behind the last feature."""
    x = np.zeros((len(bits_RF), blocks * BLOCK), np.uint32)
    x[:, : bits_RF.shape[1]] = bits_RF
    x <<= 16
    return x.view(np.float32).reshape(len(bits_RF), blocks, BLOCK)


def _bf16_bits(x: np.ndarray) -> np.ndarray:
    """Finite float32 rounded to the nearest bf16, ties to even, as bits."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
