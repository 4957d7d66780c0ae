"""Packing, byte for byte against a slow reference that follows the layout's description."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.synthetic import make_meta
from tide_platform.capture.packing import PackedCorrupt, pack, packed_bytes, unpack
from tide_platform.capture.record import Sample

LARGEST = {"int8": 127, "int4": 7}
SPECIAL = [0x7F80, 0xFF80, 0x7FC0, 0x7F7F, 0x0000, 0x8000, 0x0001, 0x4B80]


def sample_of(bits, positions):
    none = np.zeros((0, 4))
    return Sample(
        make_meta("a", len(bits)),
        {
            "input_ids": np.zeros(len(bits), np.int32),
            "row_pos": np.asarray(positions, np.int32),
            "aux": bits,
            "teacher_pos": np.zeros(0, np.int32),
            "teacher_ids": none.astype(np.int32),
            "teacher_logp": none.astype(np.float16),
            "token_logp": np.zeros(0, np.float16),
        },
    )


def widened(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def reference(bits, positions, form):
    """Packed bytes, and the rows as they come back."""
    features = bits.shape[1]
    back, whole, scales, values = bits.copy(), [], [], []
    with np.errstate(all="ignore"):
        for row, position in enumerate(positions):
            x = np.zeros(-(-features // 32) * 32, np.float32)
            x[:features] = widened(bits[row])
            scale = np.abs(x.reshape(-1, 32)).max(-1) / np.float32(LARGEST[form])
            if position == 0 or not (scale <= np.finfo(np.float16).max).all():
                whole.append(row)
                continue
            half = scale.astype(np.float16)
            divisor = np.maximum(half.astype(np.float32), np.float32(1e-30))[:, None]
            value = np.clip(np.rint(x.reshape(-1, 32) / divisor), -LARGEST[form], LARGEST[form])
            value = value.astype(np.int8)
            restored = (value.astype(np.float32) * half.astype(np.float32)[:, None]).reshape(-1)[:features]
            wide = np.ascontiguousarray(restored.astype(np.float32)).view(np.uint32)
            back[row] = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
            scales.append(half)
            values.append(value.reshape(-1))
    parts = [np.array([len(whole)], np.uint32), np.array(whole, np.int32), bits[whole], *scales]
    for value in values:
        low, high = value[0::2] & 0xF, value[1::2] & 0xF
        parts.append(value if form == "int8" else (low | (high << 4)).astype(np.uint8))
    return b"".join(np.ascontiguousarray(part).tobytes() for part in parts), back


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(["int8", "int4"]),
    rows=st.integers(1, 90),
    features=st.sampled_from([1, 24, 32, 33, 96]),
    start=st.integers(0, 2),
    special=st.integers(0, 6),
    seed=st.integers(0, 999),
)
def test_packs_and_unpacks_as_the_reference(form, rows, features, start, special, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, features)) * 10 ** rng.uniform(-9, 3, size=(rows, 1))
    bits = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for _ in range(special):
        bits[rng.integers(rows), rng.integers(features)] = rng.choice(SPECIAL)
    positions = start + np.sort(rng.choice(rows * 2, rows, replace=False))
    sample = sample_of(bits, positions)
    packed = pack(sample, form)
    wanted, back = reference(bits, positions, form)
    assert packed.tensors["aux"].tobytes() == wanted
    assert packed.meta.aux_format == form
    unpacked = unpack(packed, features)
    np.testing.assert_array_equal(unpacked.tensors["aux"], back)
    assert unpacked.meta == sample.meta


def test_a_wrong_length_is_named():
    packed = pack(sample_of(np.full((3, 64), 0x3F80, np.uint16), [1, 2, 3]), "int8")
    assert len(packed.tensors["aux"]) == packed_bytes("int8", 3, 64)
    torn = Sample(packed.meta, packed.tensors | {"aux": packed.tensors["aux"][:-1]})
    with pytest.raises(PackedCorrupt, match="sample a"):
        unpack(torn, 64)


def test_bf16_is_as_it_was_and_twice_is_refused():
    sample = sample_of(np.zeros((2, 32), np.uint16), [1, 2])
    assert pack(sample, "bf16") is sample and unpack(sample, 32) is sample
    with pytest.raises(ValueError, match="packed as int4"):
        pack(pack(sample, "int4"), "int4")
