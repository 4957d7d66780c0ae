"""What the loop saved: the time that the deployment's first draft would have taken for the tokens that later
drafts served, less the time that they took. Pure.

How long a token takes with the first draft is known from its own requests at the same batch band; at a band
that it has not served, nothing is claimed. A request's seconds are shared by all that run beside it, so a
server's seconds are the requests' over the batch: the upper end of the band, which understates.
"""

from collections.abc import Sequence

from tide_platform.control.history import MIXED, Block, total
from tide_platform.report.figures import Baseline, Saved, Stretch

HOUR_S = 3600.0


def saved(
    first: str | None,
    blocks: Sequence[Block],
    of_first: Sequence[Block],
    bin_s: float,
) -> Saved:
    """``blocks``: of the report's time; ``of_first``: all that is known of the first draft, however old."""
    if first is None:
        return Saved(None, "Nothing is claimed: no draft but the first has been served.")
    known = {each.batch: each for each in baselines(of_first)}
    timed = [b for b in blocks if b.draft not in (first, MIXED) and b.decoded]
    if not timed:
        return Saved(first, "Nothing is claimed: no later draft has live requests here.", [*known.values()])
    stretches = _stretches(timed, known, bin_s)
    tokens = sum(b.decoded for b in timed)
    compared = sum(each.tokens for each in stretches)
    missing = sorted({b.batch for b in timed} - known.keys())
    taken = sum(each.taken_s for each in stretches)
    would = sum(each.would_s for each in stretches)
    return Saved(
        first=first,
        words=_words(known, missing, compared, tokens),
        baselines=[*known.values()],
        stretches=stretches,
        tokens=tokens,
        compared=compared,
        missing=missing,
        taken_hours=taken / HOUR_S,
        would_hours=would / HOUR_S,
        saved_hours=(would - taken) / HOUR_S,
        share=(would - taken) / would if would else None,
    )


def baselines(of_first: Sequence[Block]) -> list[Baseline]:
    """By batch band, of the bands in which tokens were timed."""
    found = []
    for batch in sorted({b.batch for b in of_first}):
        one = total([b for b in of_first if b.batch == batch])
        if one.mean_token_ms is not None:
            found.append(Baseline(batch, one.requests, one.decoded, one.mean_token_ms))
    return found


def _stretches(timed: Sequence[Block], known: dict[int, Baseline], bin_s: float) -> list[Stretch]:
    groups: dict[tuple[float, str, int], list[Block]] = {}
    for b in timed:
        if b.batch in known:
            groups.setdefault((b.ended_at // bin_s, b.draft, b.batch), []).append(b)
    found = []
    for (_, draft, batch), of in sorted(groups.items(), key=lambda item: item[0]):
        one = total(of)
        would = one.decoded * known[batch].token_ms / 1000 / batch
        found.append(
            Stretch(one.began_at, one.ended_at, draft, batch, one.decoded, one.decode_s / batch, would)
        )
    return found


def _words(known: dict[int, Baseline], missing: Sequence[int], compared: int, tokens: int) -> str:
    if not compared:
        return (
            "Nothing is claimed: the first draft has no timed live requests at the batch bands that later "
            f"drafts served ({_list(missing)})."
        )
    requests = sum(each.requests for each in known.values())
    words = (
        f"An estimate. It rests on {requests} live requests of the first draft: their time a token at the "
        "same number of requests at a time is taken for what the first draft would have taken for later "
        "traffic. If traffic became easier or harder to guess since, or the machine faster or slower, that "
        "is in the figure too."
    )
    if missing:
        words += (
            f" {1 - compared / tokens:.1%} of later tokens ran at bands that the first draft has not served "
            f"({_list(missing)}): for these nothing is claimed."
        )
    return words


def _list(bands: Sequence[int]) -> str:
    return "up to " + ", ".join(map(str, bands)) + " at a time"
