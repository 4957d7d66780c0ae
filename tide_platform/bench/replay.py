"""Acceptance replay against the live server, on the same prompts.

Prompts that were never traffic are captured once, greedily and at temperature 0.7, by a server in float32.
Then a server at each k answers the same prompts uncaptured, and the acceptance length that it counted stands
beside the one that replay computes from the stored samples, for all k at once. Everything that was served is
a file: an interrupted experiment goes on where it was.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_platform.bench.captured import captured, request_id
from tide_platform.bench.report import Report
from tide_platform.capture.packing import pack, unpack
from tide_platform.capture.record import Sample
from tide_platform.config import Settings, TideError
from tide_platform.evaluation.acceptance import (
    KReplay,
    RequestReplay,
    acceptance_by_position,
)
from tide_platform.evaluation.statistics import compare

if TYPE_CHECKING:
    from tide_platform.bench.server import Served
    from tide_platform.draft.checkpoint import TargetParts
    from tide_platform.draft.eagle3 import Eagle3Draft
    from tide_platform.serving.workloads import Prompt

WORKLOADS = ("general", "maths", "code")
KS = (1, 2, 3, 4, 5)
PROMPTS = 64  # of each workload
NEW_TOKENS, CONCURRENCY = 64, 16
TEMPERATURE = 0.7
SAMPLED_K = 2  # served at temperature 0.7; also what the captured requests were served at
PACKED = "int4"


class AnswersDiffer(TideError):
    """The live server answered a prompt with rounds, of which the stored sample has none."""

    def __init__(self, request: str):
        super().__init__(
            f"{request}: answered live in several rounds, stored as one token; remove the folder"
        )
        self.request = request


@dataclass(frozen=True, order=True)
class Piece:
    """One workload, served at one k and temperature."""

    k: int
    temperature: float
    workload: str

    @property
    def tenant(self) -> str:
        return tenant_of(self.workload, self.temperature)

    def path(self, folder: Path) -> Path:
        return folder / "live" / f"k{self.k}-{self.tenant}.json"


def run(
    settings: Settings,
    folder: Path,
    *,
    workloads: Sequence[str] = WORKLOADS,
    ks: Sequence[int] = KS,
    prompts: int = PROMPTS,
    most: int | None = None,
    say: Callable[[str], None],
) -> Report:
    """Captures into ``folder`` what is not there, serves at most ``most`` of the pieces that are left, and
    reports on all that were served.

    ``ratios``, replay over live, with intervals over requests: ``live_<workload>_k<k>`` greedy;
    ``packed_<workload>_k<k>`` the same from states stored as int4; ``sampled_<workload>_k<k>`` at temperature
    0.7, where the live run draws other tokens; ``own_<workload>_k<k>`` at temperature 0.7 against what the
    server counted of the very requests that were captured. Raises
    :class:`~tide_platform.bench.captured.NotCaptured` and :class:`AnswersDiffer`.
    """
    own = settings.model_copy(deep=True)
    own.serving.dtype, own.serving.k = "float32", SAMPLED_K
    own.serving.radix_cache = False  # no holes: they would blur what is compared
    sent = _prompts(workloads, prompts)
    samples = captured(
        own,
        folder,
        sent,
        new_tokens=NEW_TOKENS,
        concurrency=CONCURRENCY,
        temperatures={tenant_of(workload, TEMPERATURE): TEMPERATURE for workload in workloads},
        say=say,
    )
    pieces = [Piece(k, 0.0, workload) for k in ks for workload in workloads]
    pieces += [Piece(SAMPLED_K, TEMPERATURE, workload) for workload in workloads if SAMPLED_K in ks]
    left = sorted(piece for piece in pieces if not piece.path(folder).exists())
    for k, of in groupby(left[:most], lambda piece: piece.k):
        _serve(own, folder, k, list(of), sent, say)
    done = [piece for piece in pieces if piece.path(folder).exists()]
    return _report(own, folder, done, samples, max(ks))


def tenant_of(workload: str, temperature: float) -> str:
    """The tenant that a workload's prompts are sent as; of this experiment only."""
    return f"{workload}-t{temperature:g}"


def _prompts(workloads: Sequence[str], count: int) -> "dict[str, list[Prompt]]":
    from tide_platform.serving.workloads import load_workload

    return {
        tenant_of(workload, temperature): load_workload(workload, "held_out", count)
        for temperature in (0.0, TEMPERATURE)
        for workload in workloads
    }


def _serve(
    settings: Settings,
    folder: Path,
    k: int,
    pieces: "Sequence[Piece]",
    prompts: "dict[str, list[Prompt]]",
    say: Callable[[str], None],
) -> None:
    """A server at ``k`` answers the pieces, uncaptured; each becomes a file."""
    from tide_platform.bench.server import served

    own = settings.model_copy(deep=True)
    own.serving.k, own.capture.enabled = k, False
    with served(own, folder / "servers" / f"k{k}") as server:
        for piece in pieces:
            answers = _answers(server, piece, prompts[piece.tenant])
            path = piece.path(folder)
            path.parent.mkdir(exist_ok=True)
            work = path.with_suffix(".new")
            work.write_text(json.dumps(answers) + "\n")
            work.replace(path)
            say(f"served {len(answers)} prompts of {piece.tenant} at k = {k}")


def _answers(server: "Served", piece: Piece, prompts: "Sequence[Prompt]") -> dict[str, dict[str, Any]]:
    """By request: rounds, accepted drafts, rounds by accepted drafts, and the answer's tokens."""
    from tide_platform.serving.chat import encode_prompts
    from tide_platform.serving.client import GenerateRequest
    from tide_platform.serving.traffic import TrafficFailed, send

    requests = [
        GenerateRequest(
            ids, NEW_TOKENS, piece.temperature, capture=False, rid=request_id(piece.tenant, number)
        )
        for number, ids in enumerate(encode_prompts(server.target, prompts))
    ]
    found = asyncio.run(send(server.url, requests, CONCURRENCY))
    if found.errors:
        raise TrafficFailed(f"{len(found.errors)} requests failed, the first: {found.errors[0]}")
    return {
        g.rid: {
            "rounds": g.verify_rounds,
            "accepted": g.accepted_drafts,
            "rounds_by_accepted": g.rounds_by_accepted,
            "output_ids": g.output_ids,
        }
        for g in found.per_request
    }


def _report(
    settings: Settings, folder: Path, done: Sequence[Piece], samples: dict[str, list[Sample]], k_max: int
) -> Report:
    import torch

    from tide_platform.draft.checkpoint import load_draft, load_target_parts
    from tide_platform.serving.drafts import resolve_draft
    from tide_platform.serving.target import resolve_target

    torch.set_num_threads(settings.training.threads)
    draft, target = load_draft(resolve_draft(settings)), load_target_parts(resolve_target(settings))
    report = Report(
        "replay", {}, raw={"dtype": settings.serving.dtype, "server_threads": settings.serving.threads}
    )
    report.raw |= {"prompts": PROMPTS, "new_tokens": NEW_TOKENS, "cases": {}}
    for tenant in dict.fromkeys(piece.tenant for piece in done):
        of = [piece for piece in done if piece.tenant == tenant]
        stored = samples[tenant]
        replays = _replays(draft, target, stored, k_max)
        packed = _replays(draft, target, _packed(stored), k_max) if not of[0].temperature else None
        for piece in of:
            answers = json.loads(piece.path(folder).read_text())
            kind, case = ("sampled" if piece.temperature else "live"), f"{piece.workload}_k{piece.k}"
            live = _live(answers, piece.k)
            _add(report, f"{kind}_{case}", live, replays, piece.k)
            report.raw["cases"][f"{kind}_{case}"]["same_text"] = _same_text(answers, stored)
            if packed is not None:
                _add(report, f"packed_{case}", live, packed, piece.k)
        if of[0].temperature:
            own = {
                s.meta.request_id: {"rounds": s.meta.verify_rounds, "accepted": s.meta.accepted_drafts}
                for s in stored
            }
            _add(report, f"own_{of[0].workload}_k{SAMPLED_K}", _live(own, SAMPLED_K), replays, SAMPLED_K)
    return report


def _replays(
    draft: "Eagle3Draft", target: "TargetParts", samples: Iterable[Sample], k_max: int
) -> list[RequestReplay]:
    """In the precision of the server."""
    import torch

    from tide_platform.evaluation.replay import replay

    return [
        replace(each, sample_id=each.request_id)
        for each in replay(draft, target, samples, k_max, batch_positions=4096, dtype=torch.float32)
    ]


def _packed(samples: Sequence[Sample]) -> list[Sample]:
    """As they come back from a dataset of packed states."""
    return [unpack(pack(sample, PACKED), sample.tensors["aux"].shape[1]) for sample in samples]


def _live(answers: dict[str, dict[str, Any]], k: int) -> list[RequestReplay]:
    """What the server counted, in replay's form; without ``rounds_by_accepted`` nothing by position."""
    found = []
    for request, of in answers.items():
        by_accepted = of.get("rounds_by_accepted", [])
        hits = tuple(sum(by_accepted[i + 1 :]) for i in range(k)) if by_accepted else ()
        by_k = {k: KReplay(of["rounds"], of["accepted"], hits)}
        found.append(RequestReplay(request, request, len(of.get("output_ids", [])), by_k))
    return found


def _add(
    report: Report, case: str, live: Sequence[RequestReplay], replays: Sequence[RequestReplay], k: int
) -> None:
    replayed = {each.request_id for each in replays}
    for each in live:
        if each.request_id not in replayed and each.by_k[k].rounds:
            raise AnswersDiffer(each.request_id)
    both = [each for each in live if each.request_id in replayed]
    found = compare(both, replays, k, confidence=0.975)
    report.ratios[case], report.intervals[case] = found.ratio, (found.lower, found.upper)
    of_replay = {each.request_id: each.by_k[k] for each in replays}
    report.raw["cases"][case] = {
        "live": found.champion,
        "replay": found.challenger,
        "live_by_position": acceptance_by_position(both, k) if all(r.by_k[k].hits for r in both) else None,
        "replay_by_position": acceptance_by_position(replays, k),
        "columns": ["live rounds", "live accepted", "replay rounds", "replay accepted", "rounds cut"],
        "requests": {each.request_id: _row(each.by_k[k], of_replay[each.request_id]) for each in both},
    }


def _row(live: KReplay, replayed: KReplay) -> list[float]:
    return [live.rounds, live.accepted, replayed.rounds, replayed.accepted, sum(replayed.cut)]


def _same_text(answers: dict[str, dict[str, Any]], samples: Sequence[Sample]) -> float:
    """Share of the answers that are the stored ones, token for token."""
    same = 0
    for sample in samples:
        answer = sample.tensors["input_ids"][sample.meta.prompt_tokens :].tolist()
        same += answers[sample.meta.request_id]["output_ids"] == answer
    return same / len(samples)
