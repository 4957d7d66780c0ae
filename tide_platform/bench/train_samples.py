"""The samples of ``tide bench train``: captured once through the real server, with last hidden states.

Kept in the benchmark's folder as the spool sealed them, and once more as a dataset in the deployment's own
format, so that a rerun captures nothing. Shapes: T tokens of a sample, H hidden size.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tide_platform.bench.captured import NotCaptured
from tide_platform.capture.packing import pack
from tide_platform.capture.record import OPTIONAL, Sample, StreamMeta
from tide_platform.config import Settings

WORKLOAD, HELD_OUT = "maths", "maths-held"  # tenants
SPLIT = {WORKLOAD: "traffic", HELD_OUT: "held_out"}
NEW_TOKENS, CONCURRENCY, K = 96, 16, 2
Tokens = tuple[int, ...]


def collect(
    settings: Settings, folder: Path, counts: dict[str, int], say: Callable[[str], None]
) -> tuple[StreamMeta, dict[str, list[Sample]]]:
    """Samples of the first ``counts`` prompts of each tenant, in the prompts' order; what is not in
    ``folder`` yet is captured. Raises :class:`~tide_platform.bench.captured.NotCaptured`.
    """
    from tide_platform.serving.own_server import LOG

    asked = {tenant: prompts(settings, tenant, count) for tenant, count in counts.items()}
    _, found = _found(folder)
    missing = {tenant: [ids for ids in of if (tenant, ids) not in found] for tenant, of in asked.items()}
    errors = _capture(settings, folder, missing, say) if any(missing.values()) else []
    stream, found = _found(folder)
    for tenant, of in asked.items():
        there = sum((tenant, ids) in found for ids in of)
        if stream is None or there < len(of):
            raise NotCaptured(tenant, there, len(of), errors, folder / LOG)
    assert stream is not None
    return stream, {tenant: [found[tenant, ids] for ids in of] for tenant, of in asked.items()}


def read(folder: Path, sample_ids: Sequence[str]) -> tuple[StreamMeta, list[Sample]]:
    """Captured samples by their ids, in that order. Raises ``KeyError`` for one that is not there."""
    stream, found = _found(folder)
    by_id = {sample.meta.sample_id: sample for sample in found.values()}
    samples = [by_id[sample_id] for sample_id in sample_ids]
    assert stream is not None
    return stream, samples


def prompts(settings: Settings, tenant: str, count: int) -> list[Tokens]:
    """The tenant's prompts as the target reads them, each once."""
    from tide_platform.serving.chat import encode_prompts
    from tide_platform.serving.target import resolve_target
    from tide_platform.serving.workloads import load_workload

    encoded = encode_prompts(resolve_target(settings), load_workload(WORKLOAD, SPLIT[tenant], count))
    return list(dict.fromkeys(tuple(ids) for ids in encoded))


def _found(folder: Path) -> tuple[StreamMeta | None, dict[tuple[str, Tokens], Sample]]:
    """What was captured, by tenant and prompt."""
    from tide_platform.capture.segment import read_segment
    from tide_platform.capture.spool import sealed_segments

    spool, stream = folder / "state" / "spool", None
    by_prompt: dict[tuple[str, Tokens], Sample] = {}
    for path in sealed_segments(spool) if spool.exists() else []:
        stream, samples = read_segment(path)
        for sample in samples:
            if sample.meta.finish_reason != "abort":
                ids = sample.tensors["input_ids"][: sample.meta.prompt_tokens]
                by_prompt.setdefault((sample.meta.tenant, tuple(ids.tolist())), sample)
    return stream, by_prompt


def _capture(
    settings: Settings, folder: Path, missing: dict[str, list[Tokens]], say: Callable[[str], None]
) -> list[str]:
    """The errors of requests that failed."""
    from tide_platform.serving.client import GenerateRequest
    from tide_platform.serving.own_server import served
    from tide_platform.serving.traffic import send

    own = settings.model_copy(deep=True)
    own.serving.k, own.serving.radix_cache = K, False  # no holes: the peer knows of none
    own.capture.target_signal, own.capture.aux_format = "last_hidden", "bf16"
    errors: list[str] = []
    with served(own, folder) as server:
        for tenant, of in missing.items():
            say(f"capturing {len(of)} samples of tenant {tenant}")
            requests = [GenerateRequest(ids, NEW_TOKENS, tenant=tenant) for ids in of]
            errors += asyncio.run(send(server.url, requests, CONCURRENCY)).errors
    return errors


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
    format, no last hidden states. Those that it lacks are written.
    """
    from tide_platform.store.hidden_states import open_store

    store = open_store(store_settings(settings, folder))
    store.ensure(replace(stream, target_signal="topk"))
    there = {ref.sample_id for ref in store.refs()}
    if missing := [sample for sample in samples if sample.meta.sample_id not in there]:
        names = ",".join(sample.meta.sample_id for sample in missing)
        batch = hashlib.sha256(names.encode()).hexdigest()[:16]
        store.append([plain(sample, settings) for sample in missing], [batch])
    return store.tip().version


def plain(sample: Sample, settings: Settings) -> Sample:
    """As a deployment of the default signal stores it."""
    return pack(top_k(sample), settings.capture.aux_format)


def top_k(sample: Sample) -> Sample:
    """Without last hidden states: what our trainer learns from by default."""
    tensors = {name: array for name, array in sample.tensors.items() if name not in OPTIONAL}
    return Sample(sample.meta, tensors)
