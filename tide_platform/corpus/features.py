"""Samples of a prepared file's own answers: one teacher-forced pass of the target, no server.

Each answer becomes one sample of the format of captured ones, its whole beginning as the prompt: a
conversation of several answers is expanded into as many samples. With an answer at [S, E), E tokens in all,
a sample has aux rows 0 … E-2 and teacher rows S … E-2, which are the rows that capture always has.

Shapes: B texts of a batch, T tokens, F = 3H aux width, R teacher rows, V vocabulary, K kept
log-probabilities.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tide_platform.capture.packing import AuxFormat, pack
from tide_platform.capture.record import Sample, SampleMeta, StreamMeta
from tide_platform.capture.split import kept_whole
from tide_platform.corpus.append import append_new, stored_ids
from tide_platform.corpus.errors import StatesNotFinite
from tide_platform.corpus.prepared import Example, Header, read_examples
from tide_platform.draft.target_model import TargetModel, padded
from tide_platform.engine.teacher import bf16_bits, teacher_rows
from tide_platform.store.hidden_states import HiddenStates

ADAPTER = "tide data features"
NO_DRAFT = "none"  # no draft took part
_HEAD_ROWS = 256  # logits of this many rows exist at a time
_POOL_ANSWERS = 512  # sorted by length together, at most


@dataclass(frozen=True)
class FeaturePlan:
    """How the pass is run."""

    tenant: str
    batch_tokens: int  # padded positions of a forward pass: bounds its memory
    pool_bytes: int  # of tensors that are held and committed at a time, about
    aux_format: AuxFormat
    validation_share: float  # of the requests whose states stay bf16, as the spool keeps them


@dataclass
class FeatureCounts:
    """Of answers."""

    answers: int = 0
    appended: int = 0
    known: int = 0  # the dataset holds them already
    too_short: int = 0  # fewer than two tokens, or nothing before it: no draft step to learn from
    tokens: int = 0  # of the samples that were made
    response_tokens: int = 0


@dataclass(frozen=True)
class Answer:
    """One answer with all that stands before it."""

    sample_id: str
    request_id: str  # of its conversation: all its answers validate or train together
    input_ids: np.ndarray  # int64 [E]
    start: int  # S


def build_features(
    prepared: Path,
    header: Header,
    store: HiddenStates,
    stream: StreamMeta,
    load_target: Callable[[], TargetModel],
    end_ids: frozenset[int],
    plan: FeaturePlan,
    on_progress: Callable[[FeatureCounts], None] = lambda counts: None,
) -> FeatureCounts:
    """Appends the samples that the dataset lacks under ``plan.tenant``. The target is loaded only if there
    are any.

    Raises :class:`StreamMismatch` before the target is loaded, :class:`StatesNotFinite`, and what the store
    raises. What was appended before an error stays, and the next run goes on behind it.
    """
    store.ensure(stream)
    counts, target = FeatureCounts(), None
    answers = _answers(read_examples(prepared), stream, plan.tenant, counts)
    for pool in pools(answers, plan.pool_bytes, 2 * 3 * stream.hidden_size + 6 * stream.teacher_k):
        known = stored_ids(store, [answer.sample_id for answer in pool])
        new = {answer.sample_id: answer for answer in pool if answer.sample_id not in known}
        if new:
            target = target or load_target()
            samples = [
                packed
                for batch in batches(list(new.values()), plan.batch_tokens)
                for packed in _packed(run_batch(target, batch, stream, plan.tenant, header, end_ids), plan)
            ]
            appended = append_new(store, samples)
            counts.appended += appended
            counts.tokens += sum(s.meta.num_tokens for s in samples)
            counts.response_tokens += sum(s.meta.num_tokens - s.meta.prompt_tokens for s in samples)
            counts.known += len(new) - appended
        counts.known += len(pool) - len(new)
        on_progress(counts)
    return counts


def _answers(
    examples: Iterator[Example], stream: StreamMeta, tenant: str, counts: FeatureCounts
) -> Iterator[Answer]:
    for example in examples:
        for start, end in example.answers:
            counts.answers += 1
            if end - start < 2 or start == 0:
                counts.too_short += 1
                continue
            ids = example.input_ids[:end]
            yield Answer(sample_name(stream, tenant, ids, start), f"file-{example.id}", ids, start)


def sample_name(stream: StreamMeta, tenant: str, ids: np.ndarray, start: int) -> str:
    """By what the sample is made of, so that a second run finds it stored."""
    of = [tenant, stream.target_digest, *stream.aux_layer_ids, stream.teacher_k, start]
    digest = hashlib.sha256("\n".join(map(str, of)).encode() + b"\n" + ids.astype("<i4").tobytes())
    return digest.hexdigest()[:32]


def pools(answers: Iterator[Answer], pool_bytes: int, token_bytes: int) -> Iterator[list[Answer]]:
    """Answers that are held together: about ``pool_bytes`` of tensors, at least one."""
    pool: list[Answer] = []
    held = 0
    for answer in answers:
        size = len(answer.input_ids) * token_bytes
        if pool and (held + size > pool_bytes or len(pool) == _POOL_ANSWERS):
            yield pool
            pool, held = [], 0
        pool.append(answer)
        held += size
    if pool:
        yield pool


def batches(pool: Sequence[Answer], batch_tokens: int) -> Iterator[list[Answer]]:
    """Of like length, at most ``batch_tokens`` padded positions, at least one answer."""
    batch: list[Answer] = []
    for answer in sorted(pool, key=lambda answer: (len(answer.input_ids), answer.sample_id)):
        if batch and (len(batch) + 1) * len(answer.input_ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(answer)
    if batch:
        yield batch


def run_batch(
    target: TargetModel,
    batch: Sequence[Answer],
    stream: StreamMeta,
    tenant: str,
    header: Header,
    end_ids: frozenset[int],
) -> Iterator[Sample]:
    """One pass over ``batch``, padded on the right, and its samples. Raises :class:`StatesNotFinite`."""
    ids_BT, mask_BT = padded([answer.input_ids for answer in batch])
    device = target.model.device
    states = target.states(ids_BT.to(device), mask_BT.to(device))
    for row, answer in enumerate(batch):
        end, dtype = len(answer.input_ids), str(states.aux_BTF.dtype).removeprefix("torch.")
        aux_TF = states.aux_BTF[row, : end - 1]
        _require_finite(aux_TF, answer, 0, "aux states", dtype)
        hidden_RH = states.last_hidden_BTH[row, answer.start : end - 1]
        _require_finite(hidden_RH, answer, answer.start, "last hidden states", dtype)
        emitted_R = torch.from_numpy(answer.input_ids[answer.start + 1 :]).to(device)
        parts = []
        for at in range(0, len(emitted_R), _HEAD_ROWS):
            logits_RV = target.logits(hidden_RH[at : at + _HEAD_ROWS])
            _require_finite(logits_RV, answer, answer.start + at, "logits", dtype)
            parts.append(teacher_rows(logits_RV, stream.teacher_k, emitted_R[at : at + _HEAD_ROWS]))
        tensors = {
            "input_ids": answer.input_ids.astype(np.int32),
            "row_pos": np.arange(end - 1, dtype=np.int32),
            "aux": bf16_bits(aux_TF),
            "teacher_pos": np.arange(answer.start, end - 1, dtype=np.int32),
            "teacher_ids": np.concatenate([part.ids for part in parts]),
            "teacher_logp": np.concatenate([part.logp for part in parts]),
            "token_logp": np.concatenate([part.token_logp for part in parts]),
        }
        finish = "stop" if int(answer.input_ids[-1]) in end_ids else "length"
        yield Sample(_meta(answer, stream, tenant, header.created_at, finish), tensors)


def _meta(
    answer: Answer, stream: StreamMeta, tenant: str, captured_at: float, finish_reason: str
) -> SampleMeta:
    """Teacher-forced text is read as sampled text is: a draft token is right iff it is the text's own."""
    return SampleMeta(
        sample_id=answer.sample_id,
        request_id=answer.request_id,
        captured_at=captured_at,
        target_digest=stream.target_digest,
        draft_version_start=NO_DRAFT,
        draft_version_end=NO_DRAFT,
        verify_rule="target_only",
        tenant=tenant,
        start_pos=0,
        num_tokens=len(answer.input_ids),
        prompt_tokens=answer.start,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        k=0,
        verify_rounds=0,
        accepted_drafts=0,
        finish_reason=finish_reason,
        adapter=ADAPTER,
    )


def _packed(samples: Iterator[Sample], plan: FeaturePlan) -> Iterator[Sample]:
    """As the spool stores them: states of samples that judge a draft stay bf16."""
    for sample in samples:
        whole = kept_whole(sample.meta.request_id, sample.meta.tenant, plan.validation_share)
        yield sample if whole else pack(sample, plan.aux_format)


def _require_finite(states: torch.Tensor, answer: Answer, first: int, what: str, dtype: str) -> None:
    finite = torch.isfinite(states).all(-1)
    if not bool(finite.all()):
        at = first + int((~finite).nonzero()[0])
        raise StatesNotFinite(answer.sample_id, what, at, dtype)
