"""The HTTP process's view of a server with several data-parallel ranks: each answers for itself, and users
are told of one server. With one rank all of it is that rank's own answer.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tide_platform.engine.live import MOST, Newest

Reply = dict[str, Any]

_SUMS = ("samples", "rows", "bytes", "open")
_SUMS_BY_NAME = ("dropped", "skipped", "ignored", "cost")


class Ranks(Protocol):
    """The way to all data-parallel ranks of a server (the adapter's ``Link``)."""

    async def call(self, message: dict[str, Any]) -> list[Reply]:
        """A reply of each rank, by rank."""
        ...


def in_order(replies: Sequence[Reply]) -> list[Reply]:
    """By rank: they come in any order."""
    return sorted(replies, key=lambda reply: reply.get("dp_rank", 0))


def refusal(replies: Sequence[Reply]) -> Reply | None:
    """The first refusal, which says where there are several ranks which of them it is."""
    for reply in replies:
        if "error" in reply and "type" in reply:
            rank = f"rank {reply['dp_rank']}: " if len(replies) > 1 else ""
            return {"error": f"{rank}{reply['error']}", "type": reply["type"]}
    return None


def merged_status(replies: Sequence[Reply]) -> Reply:
    """Of the whole server. Where drafts differ, ``draft_digest`` names all of them: it is no draft's."""
    if len(replies) == 1:
        return replies[0]
    if (refused := refusal(replies)) is not None:
        return refused
    told = ("dp_rank", "scheduler_pid", "draft_digest", "weights_checksum")
    digests = list(dict.fromkeys(str(reply["draft_digest"]) for reply in replies))
    return replies[0] | {
        "draft_digest": replies[0]["draft_digest"] if len(digests) == 1 else "|".join(digests),
        "missing_hooks": sorted({name for reply in replies for name in reply["missing_hooks"]}),
        "capture": merged_capture([reply["capture"] for reply in replies]),
        "dp_ranks": [{name: reply[name] for name in told} for reply in replies],
    }


def merged_capture(replies: Sequence[Reply]) -> Reply:
    """Counts are sums; it is live where it is on every rank, and the first error is told."""
    if len(replies) == 1:
        return replies[0]
    first = replies[0]
    sums = {name: sum(r[name] for r in replies) for name in _SUMS if name in first}
    by_name = {name: _added([r[name] for r in replies]) for name in _SUMS_BY_NAME if name in first}
    return {
        **first,
        **sums,
        **by_name,
        "live": all(r["live"] for r in replies),
        "enabled": all(r["enabled"] for r in replies),
        "error": next((r["error"] for r in replies if r["error"]), None),
    }


async def reload(ranks: Ranks, message: dict[str, Any]) -> Reply:
    """On every rank or on none: where one cannot, the others go back to the draft of before. Called while
    no batch runs.
    """
    replies = await ranks.call(message)
    refused = refusal(replies)
    settled = await ranks.call({"op": "settle", "keep": refused is None})
    if (refused := refused or refusal(settled)) is not None:
        return refused
    checksums = [checksum for reply in replies for checksum in reply["ranks"]]
    return replies[0] | {"copy_s": max(reply["copy_s"] for reply in replies), "ranks": checksums}


class Requests:
    """Finished requests of all ranks under one numbering, in which they are told of."""

    def __init__(self, ranks: Ranks):
        self._ranks, self._newest = ranks, Newest()
        self._read: list[int] = []  # of each rank, up to which number
        self._one = asyncio.Lock()

    async def since(self, number: int) -> Reply:
        """As ``Live.since``."""
        async with self._one:
            while True:
                replies = await self._ranks.call({"op": "requests", "after": self._read})
                if (refused := refusal(replies)) is not None:
                    return refused
                self._take(replies)
                if all(len(reply["requests"]) < MOST for reply in replies):
                    break
            steps = _added([reply["rounds_by_batch"] for reply in replies])
            return {
                "draft": replies[0]["draft"],
                "started_at": replies[0]["started_at"],
                "rounds_by_batch": dict(sorted(steps.items(), key=lambda each: int(each[0]))),
            } | self._newest.since(number)

    def _take(self, replies: Sequence[Reply]) -> None:
        self._read = [
            reply["requests"][-1]["number"] if reply["requests"] else before
            for reply, before in zip(replies, self._read or [0] * len(replies), strict=True)
        ]
        self._newest.skip(sum(reply["missed"] for reply in replies))
        for one in sorted((one for reply in replies for one in reply["requests"]), key=lambda one: one["at"]):
            self._newest.add(one)


def _added(counts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    total = Counter[str]()
    for each in counts:
        total.update(each)  # pyright: ignore[reportCallIssue, reportArgumentType] (seconds as well)
    return dict(total)
