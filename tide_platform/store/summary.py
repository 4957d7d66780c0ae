"""What `tide samples stats` says of the stored samples; numbers only, no printing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tide_platform.capture.record import SampleMeta


@dataclass
class Summary:
    """Sums over samples; positions count once, however many stretches a request left."""

    samples: int = 0
    tokens: int = 0
    verify_rounds: int = 0
    accepted_drafts: int = 0
    first: float | None = None  # Unix seconds
    last: float | None = None
    tenants: Counter[str] = field(default_factory=Counter)
    drafts: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)

    @property
    def acceptance_length(self) -> float | None:
        return acceptance_length(self.accepted_drafts, self.verify_rounds)


def acceptance_length(accepted_drafts: int, verify_rounds: int) -> float | None:
    """Mean tokens a verify round, the bonus token included; None where there was no round."""
    return 1 + accepted_drafts / verify_rounds if verify_rounds else None


def response_tokens(meta: SampleMeta) -> int:
    """Tokens of the sample that the model emitted."""
    return max(0, meta.start_pos + meta.num_tokens - max(meta.start_pos, meta.prompt_tokens))


def summarize(metas: Sequence[SampleMeta]) -> Summary:
    summary = Summary(len(metas))
    for meta in metas:
        summary.tokens += meta.num_tokens
        summary.verify_rounds += meta.verify_rounds
        summary.accepted_drafts += meta.accepted_drafts
        summary.tenants[meta.tenant] += 1
        summary.drafts[meta.draft_version_end] += 1
        summary.flags.update(meta.flags)
    if metas:
        summary.first = min(meta.captured_at for meta in metas)
        summary.last = max(meta.captured_at for meta in metas)
    return summary
