"""Acceptance by slice of the traffic: who asked, how long the prompt was, which draft served, how it was
drawn. Pure: no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tide_platform.capture.record import SampleMeta
from tide_platform.evaluation.acceptance import RequestReplay, acceptance_length

PROMPT_LENGTHS = (64, 256, 1024, 4096)  # upper ends of the buckets, tokens
TEMPERATURES = (0.0, 0.5, 1.0)
NO_FLAG = "none"


@dataclass(frozen=True)
class Slice:
    """Both drafts on the requests of one slice."""

    dimension: str  # tenant | prompt_tokens | draft_version | flags | temperature
    value: str
    requests: int
    champion: float  # acceptance lengths at the served k
    challenger: float

    @property
    def gain(self) -> float:
        return self.challenger / self.champion - 1


def labels(meta: SampleMeta) -> dict[str, tuple[str, ...]]:
    """The slices that a sample belongs to; of ``flags`` it may be several."""
    return {
        "tenant": (meta.tenant,),
        "prompt_tokens": (_bucket(meta.prompt_tokens, PROMPT_LENGTHS),),
        "draft_version": (meta.draft_version_start[:12],),
        "flags": meta.flags or (NO_FLAG,),
        "temperature": (_bucket(meta.temperature, TEMPERATURES),),
    }


def by_slice(champion: Sequence[RequestReplay], challenger: Sequence[RequestReplay], k: int) -> list[Slice]:
    """Every slice that has a verify round, by dimension and value. Both sequences hold the same samples."""
    found: dict[tuple[str, str], tuple[list[RequestReplay], list[RequestReplay]]] = {}
    other = {(r.request_id, r.sample_id): r for r in challenger}
    for each in champion:
        for dimension, values in each.labels.items():
            for value in values:
                of_both = found.setdefault((dimension, value), ([], []))
                of_both[0].append(each)
                of_both[1].append(other[each.request_id, each.sample_id])
    return [
        Slice(
            dimension,
            value,
            len({r.request_id for r in of_champion}),
            acceptance_length(of_champion, k),
            acceptance_length(of_challenger, k),
        )
        for (dimension, value), (of_champion, of_challenger) in sorted(found.items())
        if any(r.by_k[k].rounds for r in of_champion) and any(r.by_k[k].rounds for r in of_challenger)
    ]


def _bucket(value: float, ends: Sequence[float]) -> str:
    """``"<= 64"``, ..., ``"> 4096"``; an end of 0 is a bucket of its own."""
    for end in ends:
        if value <= end:
            return f"{end:g}" if end == 0 else f"<= {end:g}"
    return f"> {ends[-1]:g}"
