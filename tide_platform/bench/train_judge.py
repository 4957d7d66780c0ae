"""Held-out acceptance of the drafts that ``tide bench train`` made: by replay, and on one live server that
reloads them one after another. Rounds and accepted drafts of each request; every draft's are a file.
"""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tide_platform.bench.counts import Counts, counts_of
from tide_platform.bench.train_samples import CONCURRENCY, HELD_OUT, NEW_TOKENS, K, prompts
from tide_platform.capture.record import Sample
from tide_platform.config import Settings
from tide_platform.config.files import write_json
from tide_platform.serving.client import GenerateRequest
from tide_platform.serving.own_server import served


def judge(
    settings: Settings,
    root: Path,
    drafts: dict[str, Path],
    target: Path,
    held_out: Sequence[Sample],
    live: bool,
    say: Callable[[str], None],
) -> dict[str, dict[str, Counts]]:
    """What is known of each draft by now, ``replay`` and ``live``; ``live``: ask the server for the rest."""
    folder = root / "judged"
    folder.mkdir(exist_ok=True)

    def path(how: str, name: str) -> Path:
        return folder / f"{how}-{name}.json"

    replayed = {name: of for name, of in drafts.items() if not path("replay", name).exists()}
    for name, found in _replayed(replayed, target, held_out, say):
        write_json(path("replay", name), found)
    left = {name: of for name, of in drafts.items() if not path("live", name).exists()}
    if live and left:
        for name, found in _measured(settings, root, left, len(held_out), say):
            write_json(path("live", name), found)
    return {
        name: {
            how: json.loads(path(how, name).read_text())
            for how in ("replay", "live")
            if path(how, name).exists()
        }
        for name in drafts
    }


def acceptance_length(counts: Counts) -> float:
    """``1 + accepted / rounds``, sums over the requests."""
    return 1 + sum(a for _, a in counts.values()) / sum(r for r, _ in counts.values())


def _replayed(
    drafts: dict[str, Path], target: Path, held_out: Sequence[Sample], say: Callable[[str], None]
) -> Iterator[tuple[str, Counts]]:
    from tide_platform.draft.checkpoint import load_draft, load_target_parts
    from tide_platform.evaluation.replay import replay

    parts = load_target_parts(target)
    for name, folder in drafts.items():
        found = counts_of(replay(load_draft(folder), parts, held_out, K), K)
        say(f"{name}: replayed acceptance length {acceptance_length(found):.3f}")
        yield name, found


def _measured(
    settings: Settings, root: Path, drafts: dict[str, Path], count: int, say: Callable[[str], None]
) -> Iterator[tuple[str, Counts]]:
    """On ``count`` held-out prompts, greedy and uncaptured; by the prompt's number.

    Raises :class:`~tide_platform.serving.traffic.TrafficFailed` where a request fails.
    """
    from tide_platform.serving.drafts import stage_draft
    from tide_platform.serving.traffic import TrafficFailed, send

    own = settings.model_copy(deep=True)
    own.serving.k, own.serving.radix_cache, own.capture.enabled = K, False, False
    with served(own, root / "live") as server:
        inputs = prompts(settings, HELD_OUT, count)
        for name, folder in drafts.items():
            staged, digest = stage_draft(server.settings, folder)
            server.client.reload_draft(staged, digest)
            requests = [
                GenerateRequest(ids, NEW_TOKENS, capture=False, tenant="bench", rid=f"{name}-{i}")
                for i, ids in enumerate(inputs)
            ]
            report = asyncio.run(send(server.url, requests, CONCURRENCY))
            if report.errors:
                raise TrafficFailed(f"{name}: {len(report.errors)} requests failed: {report.errors[0]}")
            found: Counts = {
                one.rid.removeprefix(f"{name}-"): [one.verify_rounds, one.accepted_drafts]
                for one in report.per_request
            }
            say(f"{name}: live acceptance length {acceptance_length(found):.3f}")
            yield name, found
