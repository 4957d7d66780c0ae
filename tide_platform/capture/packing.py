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

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from tide_platform.capture.disk import aligned
from tide_platform.capture.record import Sample
from tide_platform.config import TideError

AuxFormat = Literal["bf16", "int8", "int4"]
BLOCK = 32
_LARGEST = {"int8": 127, "int4": 7}
_ROWS_AT_ONCE = 32
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
    bits_RF, whole_R = sample.tensors["aux"], sample.tensors["row_pos"] == 0
    while True:
        packed, unfit_R = _packed(bits_RF, whole_R, form)
        if not unfit_R.any():
            break
        whole_R |= unfit_R  # rare: such activations are those of position 0
    others = {name: crc for name, crc in sample.checksums.items() if name != "aux"}
    return Sample(replace(sample.meta, aux_format=form), sample.tensors | {"aux": packed}, others)


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
        part = packed[at : at + size].view(dtype).reshape(shape)
        at += size
        return part

    exceptions = take(np.int32, kept)
    whole = take(np.uint16, kept, features)
    scales_RB = take(np.float16, rows - kept, blocks)
    values_RN = take(np.uint8, rows - kept, blocks * (BLOCK if form == "int8" else BLOCK // 2))
    bits_RF = np.empty((rows, features), np.uint16)
    bits_RF[exceptions] = whole
    others = np.ones(rows, bool)
    others[exceptions] = False
    work = _Work(blocks, features)
    for rows_of, rows_at in _chunks(others):
        work.unpack(values_RN[rows_of], scales_RB[rows_of], bits_RF, rows_at)
    return Sample(replace(sample.meta, aux_format="bf16"), sample.tensors | {"aux": bits_RF})


def packed_bytes(form: str, rows: int, features: int, kept: int = 0) -> int:
    """Bytes of a packed tensor of ``rows`` rows, ``kept`` of them whole."""
    blocks = -(-features // BLOCK)
    row = blocks * (2 + (BLOCK if form == "int8" else BLOCK // 2))
    return 4 + kept * (4 + 2 * features) + (rows - kept) * row


def _packed(bits_RF: np.ndarray, whole_R: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray]:
    """The packed tensor, and which rows no float16 scale can hold (the tensor is of no use then)."""
    rows, features = bits_RF.shape
    blocks = -(-features // BLOCK)
    exceptions = np.flatnonzero(whole_R).astype(np.int32)
    others = rows - len(exceptions)
    packed = aligned(packed_bytes(form, rows, features, len(exceptions)))
    at = 0

    def put(array: np.ndarray) -> None:
        nonlocal at
        packed[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        at += array.nbytes

    put(np.array([len(exceptions)], np.uint32))
    put(exceptions)
    put(bits_RF[exceptions])
    middle = at + others * blocks * 2
    scales_RB = packed[at:middle].view(np.float16).reshape(others, blocks)
    values_RN = packed[middle:].reshape(others, blocks * (BLOCK if form == "int8" else BLOCK // 2))
    unfit_R, work = np.zeros(rows, bool), _Work(blocks, features)
    for of, rows_of in _chunks(~whole_R):
        unfit_R[rows_of] = work.pack(bits_RF[rows_of], scales_RB[of], values_RN[of], _LARGEST[form])
    return packed, unfit_R


def _chunks(wanted_R: np.ndarray) -> Iterator[tuple[slice, slice | np.ndarray]]:
    """Wanted rows, a few at a time: where they are among the wanted ones, and among all."""
    at_R = np.flatnonzero(wanted_R)
    for first in range(0, len(at_R), _ROWS_AT_ONCE):
        at = at_R[first : first + _ROWS_AT_ONCE]
        adjacent = at[-1] - at[0] + 1 == len(at)
        yield slice(first, first + len(at)), slice(int(at[0]), int(at[-1]) + 1) if adjacent else at


class _Work:
    """Arrays for a few rows, used again and again: what is at work stays in the processor's cache."""

    def __init__(self, blocks: int, features: int):
        self._blocks, self._features = blocks, features
        shape = (_ROWS_AT_ONCE, blocks * BLOCK)
        self._x = np.zeros(shape, np.float32)  # zeros behind the last feature
        self._y = np.empty(shape, np.float32)
        self._small = np.zeros(shape, np.uint16)

    def pack(self, bits: np.ndarray, scales: np.ndarray, values: np.ndarray, largest: int) -> np.ndarray:
        """Fills ``scales`` float16 [r, B] and ``values`` uint8 of r rows; returns which rows do not fit."""
        r = len(bits)
        x, y, small = self._x[:r], self._y[:r], self._small[:r]
        # without their sign, bf16 bits are ordered as their values are, infinities and NaN last
        np.bitwise_and(bits, 0x7FFF, out=small[:, : self._features])
        most = np.ascontiguousarray(small.reshape(-1, BLOCK).T).max(0).reshape(r, -1)
        with np.errstate(invalid="ignore", over="ignore"):  # such rows are kept whole
            scale = (most.astype(np.uint32) << 16).view(np.float32) / largest
            scales[...] = scale
            unfit = ~(scale <= _SCALE_LIMIT).all(-1)
            np.copyto(x.view(np.uint32)[:, : self._features], bits)
            np.left_shift(x.view(np.uint32), 16, out=x.view(np.uint32))
            # divided by the scale that is stored; rounding it down may push the largest value over the edge
            divisor = np.maximum(scales.astype(np.float32), np.float32(1e-30))
            np.divide(_by_block(x), divisor[..., None], out=_by_block(y))
            np.rint(y, out=y)
            np.clip(y, -largest, largest, out=y)
            if largest == _LARGEST["int8"]:
                np.copyto(values.view(np.int8), y, casting="unsafe")
            else:
                pairs = y.astype(np.int8).view(np.uint16)
                np.copyto(values, (pairs & 0xF) | ((pairs >> 4) & 0xF0), casting="unsafe")
        return unfit

    def unpack(
        self, values: np.ndarray, scales: np.ndarray, bits: np.ndarray, at: slice | np.ndarray
    ) -> None:
        """Rows ``at`` of ``bits`` uint16 [R, F], rounded to the nearest bf16, ties to even."""
        r = len(values)
        x, y = self._x[:r], self._y[:r]
        if values.shape[1] < x.shape[1]:
            pairs = values.astype(np.uint16)
            pairs = (pairs | (pairs << 4)) & 0x0F0F
            np.subtract((pairs ^ 0x0808).view(np.int8), 8, out=x, casting="unsafe")
        else:
            np.copyto(x, values.view(np.int8))
        np.multiply(_by_block(x), scales.astype(np.float32)[..., None], out=_by_block(x))
        wide, rounded = x.view(np.uint32), y.view(np.uint32)
        np.right_shift(wide, 16, out=rounded)
        rounded &= 1
        rounded += 0x7FFF
        rounded += wide
        rounded >>= 16
        if isinstance(at, slice):
            np.copyto(bits[at], rounded[:, : self._features], casting="unsafe")
        else:
            bits[at] = rounded[:, : self._features]


def _by_block(rows: np.ndarray) -> np.ndarray:
    """[r, 32 B] as [r, B, 32]."""
    return rows.reshape(len(rows), -1, BLOCK)
