"""The samples of ``tide bench train``: captured once through the real server, with last hidden states.

Kept in the benchmark's folder as the spool sealed them, and once more as a dataset in the deployment's own
format, so that a rerun captures nothing. Shapes: T tokens of a sample, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide_platform.bench.bytes import NotCaptured
from tide_platform.capture.packing import pack
from tide_platform.capture.record import OPTIONAL, Sample, StreamMeta
from tide_platform.capture.split import point
from tide_platform.config import Settings

WORKLOAD, HELD_OUT = "maths", "maths-held"  # tenants
NEW_TOKENS, CONCURRENCY, K = 96, 16, 2


def collect(
    settings: Settings, folder: Path, counts: dict[str, int], say: Callable[[str], None]
) -> tuple[StreamMeta, dict[str, list[Sample]]]:
    """``counts`` of samples by tenant, in an order that a rerun finds again. Raises
    :class:`~tide_platform.bench.bytes.NotCaptured`.
    """
    if missing := [tenant for tenant, of in _found(folder)[1].items() if not of]:
        _capture(settings, folder, {tenant: counts[tenant] for tenant in missing}, say)
    stream, found = _found(folder)
    for tenant, wanted in counts.items():
        if stream is None or len(found[tenant]) < wanted:
            raise NotCaptured(tenant, len(found[tenant]), wanted)
        found[tenant] = sorted(found[tenant], key=lambda s: point(s.meta.request_id, "bench"))[:wanted]
    assert stream is not None
    return stream, found


def prompts(count: int) -> list[Any]:
    """Held-out prompts of the workload, never captured for training."""
    from tide_platform.serving.workloads import load_workload

    return load_workload(WORKLOAD, "held_out", count)


def _found(folder: Path) -> tuple[StreamMeta | None, dict[str, list[Sample]]]:
    from tide_platform.capture.segment import read_segment
    from tide_platform.capture.spool import sealed_segments

    spool, stream = folder / "state" / "spool", None
    by_tenant: dict[str, list[Sample]] = {WORKLOAD: [], HELD_OUT: []}
    for path in sealed_segments(spool) if spool.exists() else []:
        stream, samples = read_segment(path)
        for sample in samples:
            by_tenant.setdefault(sample.meta.tenant, []).append(sample)
    return stream, by_tenant


def _capture(settings: Settings, folder: Path, counts: dict[str, int], say: Callable[[str], None]) -> None:
    from tide_platform.bench.server import served
    from tide_platform.serving.traffic import run_traffic
    from tide_platform.serving.workloads import load_workload

    own = settings.model_copy(deep=True)
    own.serving.k, own.serving.radix_cache = K, False  # no holes: the peer knows of none
    own.capture.target_signal, own.capture.aux_format = "last_hidden", "bf16"
    split = {WORKLOAD: "traffic", HELD_OUT: "held_out"}
    asked = {tenant: load_workload(WORKLOAD, split[tenant], count) for tenant, count in counts.items()}
    with served(own, folder) as server:
        for tenant, of in asked.items():
            say(f"capturing {len(of)} samples of tenant {tenant}")
            run_traffic(
                server.url,
                of,
                server.target,
                concurrency=CONCURRENCY,
                max_new_tokens=NEW_TOKENS,
                capture=True,
                tenant=tenant,
            )


def features(samples: Sequence[Sample], max_length: int) -> dict[str, torch.Tensor]:
    """What the peer learns from, ``<i>.<name>`` of sample i, the first ``max_length`` tokens of it.

    ``input_ids`` int64 [T]; ``hidden_states`` bf16 [T, 3H] and ``verifier_last_hidden_states`` bf16 [T, H],
    zeros where no row was captured; ``loss_mask`` bool [T]: a response token whose teacher row is there.
    """
    tensors: dict[str, torch.Tensor] = {}
    for i, sample in enumerate(samples):
        meta, of = sample.meta, sample.tensors
        length = min(meta.num_tokens, max_length)
        mask = np.zeros(length, bool)
        teacher = of["teacher_pos"] - meta.start_pos
        mask[teacher[(teacher >= 0) & (teacher < length)]] = True
        mask &= np.arange(meta.start_pos, meta.start_pos + length) >= meta.prompt_tokens
        tensors |= {
            f"{i}.input_ids": torch.from_numpy(of["input_ids"][:length].astype(np.int64)),
            f"{i}.hidden_states": _rows(of["aux"], of["row_pos"] - meta.start_pos, length),
            f"{i}.verifier_last_hidden_states": _rows(of["last_hidden"], teacher, length),
            f"{i}.loss_mask": torch.from_numpy(mask),
        }
    return tensors


def _rows(bits: np.ndarray, at: np.ndarray, length: int) -> torch.Tensor:
    rows = np.zeros((length, bits.shape[1]), np.uint16)
    keep = (at >= 0) & (at < length)
    rows[at[keep]] = bits[keep]
    return torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)


def store_settings(settings: Settings, folder: Path) -> Settings:
    """The settings under which the samples lie in a dataset of their own."""
    own = settings.model_copy(deep=True)
    own.storage.uri, own.deployment = str((folder / "store").absolute()), "bench-train"
    return own


def stored(settings: Settings, folder: Path, stream: StreamMeta, samples: Sequence[Sample]) -> int:
    """The dataset's version with these samples in it, as the deployment would hold them: aux states in its
    format, no last hidden states. Written at the first call.
    """
    from tide_platform.store.hidden_states import open_store

    store = open_store(store_settings(settings, folder))
    store.ensure(replace(stream, target_signal="topk"))
    if store.tip().rows < len(samples):
        store.append([plain(sample, settings) for sample in samples], ["bench-train"])
    return store.tip().version


def plain(sample: Sample, settings: Settings) -> Sample:
    """As a deployment of the default signal stores it."""
    return pack(top_k(sample), settings.capture.aux_format)


def top_k(sample: Sample) -> Sample:
    """Without last hidden states: what our trainer learns from by default."""
    tensors = {name: array for name, array in sample.tensors.items() if name not in OPTIONAL}
    return Sample(sample.meta, tensors)
