"""What one captured request is, between the server's process, the spool, the dataset and the trainer.

Numpy only: this module runs beside SGLang and must not pull in Lance, torch or the platform.

Shapes: T tokens of the sample, R captured rows, M teacher rows, K kept log-probabilities a row,
H hidden size.
bfloat16 has no numpy type: bf16 arrays are held as their bit pattern, ``uint16``.
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

FORMAT_VERSION = 2
TargetSignal = Literal["topk", "last_hidden"]

# name -> (dtype, dimensions) of the tensors of a sample
TENSORS: dict[str, tuple[str, int]] = {
    "input_ids": ("int32", 1),  # [T] tokens at start_pos .. start_pos+T-1
    "row_pos": ("int32", 1),  # [R] absolute position of each captured row, ascending
    # [R, 3H] bf16 bits: residual stream entering the aux layers; uint8 [n] where packed (packing.py)
    "aux": ("uint16", 2),
    "teacher_pos": ("int32", 1),  # [M] absolute position p of each teacher row: log p(. given x[0..p])
    "teacher_ids": ("int32", 2),  # [M, K] most likely target ids, descending
    "teacher_logp": ("float16", 2),  # [M, K] their log-probabilities, raw (temperature 1, no penalties)
    "token_logp": ("float16", 1),  # [M] log-probability of x[p+1], the emitted token; NaN where none was
}
# those that only some streams have (:attr:`StreamMeta.tensors`)
OPTIONAL: dict[str, tuple[str, int]] = {
    # [M, H] bf16 bits: what the target's head multiplies at each teacher row, its final state after the norm
    "last_hidden": ("uint16", 2),
}
KINDS = TENSORS | OPTIONAL


@dataclass(frozen=True)
class StreamMeta:
    """What all samples of one server have in common; a dataset refuses samples of another."""

    target_digest: str
    hidden_size: int  # H
    vocab_size: int  # of the target
    aux_layer_ids: tuple[
        int, ...
    ]  # the three layers i whose input is captured (Hugging Face's hidden_states[i])
    teacher_k: int  # K
    format_version: int = FORMAT_VERSION
    target_signal: TargetSignal = "topk"  # last_hidden: samples hold that tensor beside the top K

    @property
    def last_width(self) -> int:
        """Columns of ``last_hidden``: H, 0 where the stream has none."""
        return self.hidden_size if self.target_signal == "last_hidden" else 0

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors that each of its samples holds."""
        return (*TENSORS, *(OPTIONAL if self.last_width else ()))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"aux_layer_ids": list(self.aux_layer_ids)}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "StreamMeta":
        fields: dict[str, Any] = raw | {"aux_layer_ids": tuple(raw["aux_layer_ids"])}
        return cls(**fields)


@dataclass(frozen=True)
class SampleMeta:
    """The plain columns of a sample (design 4.2)."""

    sample_id: str  # unique; the idempotency key
    request_id: str
    captured_at: float  # Unix time, seconds, when the request ended
    target_digest: str
    draft_version_start: str  # digest of the draft that served its first round
    draft_version_end: str
    verify_rule: str  # greedy | target_only | rejection
    tenant: str
    start_pos: int  # absolute position of input_ids[0]
    num_tokens: int  # T
    prompt_tokens: int  # tokens of the whole request's prompt; the response starts at this absolute position
    temperature: float
    top_p: float
    top_k: int
    k: int  # speculative steps of its rounds
    verify_rounds: int
    accepted_drafts: int
    finish_reason: str
    dp_rank: int = 0
    adapter: str = ""
    aux_format: str = "bf16"  # bf16 | int8 | int4: how ``aux`` is held
    # truncated_context, penalties, grammar, thinking, tool_calls, adaptive_k, aborted, retracted, stretch
    flags: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"flags": list(self.flags)}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "SampleMeta":
        fields: dict[str, Any] = raw | {"flags": tuple(raw["flags"])}
        return cls(**fields)


@dataclass(frozen=True)
class Sample:
    """One captured request, or one stretch of it."""

    meta: SampleMeta
    tensors: dict[str, np.ndarray]
    # crc32c by tensor, where it was computed on the way; of a sample that is packed again, none of ``aux``
    checksums: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        present = {name: KINDS[name] for name in OPTIONAL if name in self.tensors}
        for name, (dtype, ndim) in (TENSORS | present).items():
            array = self.tensors[name]
            if name == "aux" and self.meta.aux_format != "bf16":
                dtype, ndim = "uint8", 1
            if array.dtype != np.dtype(dtype) or array.ndim != ndim:
                raise ValueError(f"{name}: {array.dtype}[{array.ndim}d], a sample holds {dtype}[{ndim}d]")
        if len(self.tensors["input_ids"]) != self.meta.num_tokens:
            raise ValueError(
                f"num_tokens {self.meta.num_tokens} != {len(self.tensors['input_ids'])} input_ids"
            )
        for name in present:
            if len(self.tensors[name]) != len(self.tensors["teacher_pos"]):
                teachers = len(self.tensors["teacher_pos"])
                raise ValueError(f"{name}: {len(self.tensors[name])} rows for {teachers} teacher rows")
