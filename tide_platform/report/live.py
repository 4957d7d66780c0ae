"""Live requests added up by time, draft, batch and tenant. Pure."""

from collections import defaultdict
from collections.abc import Sequence

from tide_platform.control.history import MIXED, Block, total
from tide_platform.report.figures import Cell

POINTS = 60  # of a line over time, about
# the history keeps hours of what is older than a day: a bin between them would stand empty
WIDTHS_S = (10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 10_800.0, 21_600.0, 43_200.0, 86_400.0, 604_800.0)


def bin_width(blocks: Sequence[Block], points: int = POINTS) -> float:
    """Seconds of a bin, such that the blocks' time has no more than ``points`` of them."""
    if not blocks:
        return WIDTHS_S[0]
    span = max(b.ended_at for b in blocks) - min(b.began_at for b in blocks)
    return next((width for width in WIDTHS_S if span <= width * points), WIDTHS_S[-1])


def label_of_width(seconds: float) -> str:
    """``5 minutes``; of one, ``hour``."""
    for name, size in (("week", 604_800), ("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds >= size:
            count = round(seconds / size)
            return name if count == 1 else f"{count} {name}s"
    return f"{seconds:g} seconds"


def cells(
    blocks: Sequence[Block],
    *,
    bin_s: float | None = None,
    draft: bool = False,
    batch: bool = False,
    tenant: bool = False,
) -> list[Cell]:
    """Sums by what is asked for, in order of time, then batch, tenant and the draft's first appearance.

    By draft, requests that straddled a reload are left out: they are nobody's.
    """
    groups: dict[tuple[float, int, str, str], list[Block]] = defaultdict(list)
    order = {name: i for i, name in enumerate(dict.fromkeys(b.draft for b in blocks))}
    for b in blocks:
        if draft and b.draft == MIXED:
            continue
        at = b.ended_at // bin_s if bin_s else 0.0
        groups[at, b.batch if batch else 0, b.tenant if tenant else "", b.draft if draft else ""].append(b)
    return [
        cell(of, draft=key[3] if draft else None, batch=key[1] or None, tenant=key[2] if tenant else None)
        for key, of in sorted(groups.items(), key=lambda item: (*item[0][:3], order.get(item[0][3], 0)))
    ]


def cell(
    blocks: Sequence[Block], draft: str | None = None, batch: int | None = None, tenant: str | None = None
) -> Cell:
    """All of the blocks as one. Raises ``ValueError`` of nothing."""
    b = total(blocks)
    ms = b.mean_token_ms
    return Cell(
        began_at=b.began_at,
        ended_at=b.ended_at,
        draft=draft,
        batch=batch,
        tenant=tenant,
        requests=b.requests,
        aborted=b.aborted,
        tokens=b.tokens,
        rounds=b.rounds,
        accepted=b.accepted,
        acceptance_length=b.acceptance_length,
        mean_token_ms=ms,
        token_ms_p50=b.quantile_ms(0.5),
        token_ms_p99=b.quantile_ms(0.99),
        tokens_per_s=batch * 1000 / ms if batch and ms else None,
    )
