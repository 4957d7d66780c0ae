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
from tide_platform.config.files import write_json
from tide_platform.evaluation.acceptance import (
    KReplay,
    RequestReplay,
    acceptance_by_position,
)
from tide_platform.evaluation.statistics import compare

if TYPE_CHECKING:
    from tide_platform.draft.checkpoint import TargetParts
    from tide_platform.draft.eagle3 import Eagle3Draft
    from tide_platform.serving.own_server import Served
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

    def answers(self, folder: Path, prompts: int | None = None) -> dict[str, dict[str, Any]]:
        """By request, of the first ``prompts`` prompts: rounds, accepted drafts, rounds by accepted drafts,
        the answer's tokens.
        """
        path = self.path(folder)
        found = json.loads(path.read_text()) if path.exists() else {}
        if prompts is None:
            return found
        wanted = [request_id(self.tenant, number) for number in range(prompts)]
        return {request: found[request] for request in wanted if request in found}

    def missing(self, folder: Path, prompts: int) -> list[int]:
        """Numbers of the prompts that have no answer."""
        found = self.answers(folder)
        return [number for number in range(prompts) if request_id(self.tenant, number) not in found]


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
    greedy = [Piece(k, 0.0, workload) for workload in workloads for k in ks]
    sampled = [Piece(SAMPLED_K, TEMPERATURE, workload) for workload in workloads if SAMPLED_K in ks]
    done: dict[Piece, dict[str, Any]] = {}
    samples: dict[str, list[Sample]] = {}
    for pieces in (greedy, sampled):  # greedy to the end first
        sent = {piece.tenant: _prompts(piece.workload, prompts) for piece in pieces}
        left = sorted(piece for piece in pieces if piece.missing(folder, prompts))
        if most is not None:
            left = left[:most]
            most -= len(left)
        asked = {piece.tenant for piece in pieces if piece in left or piece.answers(folder, prompts)}
        samples |= captured(
            own,
            folder,
            {tenant: of for tenant, of in sent.items() if tenant in asked},
            new_tokens=NEW_TOKENS,
            concurrency=CONCURRENCY,
            temperatures={tenant_of(workload, TEMPERATURE): TEMPERATURE for workload in workloads},
            say=say,
        )
        for k, of in groupby(left, lambda piece: piece.k):
            _serve(own, folder, k, list(of), sent, say)
        answered = {piece: piece.answers(folder, prompts) for piece in pieces}
        done |= {piece: answers for piece, answers in answered.items() if answers}
    return _report(own, done, samples, max(ks))


def tenant_of(workload: str, temperature: float) -> str:
    """The tenant that a workload's prompts are sent as; of this experiment only."""
    return f"{workload}-t{temperature:g}"


def _prompts(workload: str, count: int) -> "list[Prompt]":
    from tide_platform.serving.workloads import load_workload

    return load_workload(workload, "held_out", count)


def _serve(
    settings: Settings,
    folder: Path,
    k: int,
    pieces: Sequence[Piece],
    prompts: "dict[str, list[Prompt]]",
    say: Callable[[str], None],
) -> None:
    """A server at ``k`` answers what is missing of the pieces, uncaptured."""
    from tide_platform.serving.own_server import served

    own = settings.model_copy(deep=True)
    own.serving.k, own.capture.enabled = k, False
    with served(own, folder / "servers" / f"k{k}") as server:
        for piece in pieces:
            answered = _ask(server, folder, piece, prompts[piece.tenant])
            say(f"served {answered} prompts of {piece.tenant} at k = {k}")


def _ask(server: "Served", folder: Path, piece: Piece, prompts: "Sequence[Prompt]") -> int:
    """Sends the prompts that are missing; what was answered is kept, whatever ends this."""
    from tide_platform.serving.chat import encode_prompts
    from tide_platform.serving.client import GenerateRequest, Generation
    from tide_platform.serving.traffic import TrafficFailed, send

    missing = piece.missing(folder, len(prompts))
    requests = [
        GenerateRequest(
            ids, NEW_TOKENS, piece.temperature, capture=False, rid=request_id(piece.tenant, number)
        )
        for number, ids in zip(
            missing, encode_prompts(server.target, [prompts[n] for n in missing]), strict=True
        )
    ]
    answers = piece.answers(folder)

    def keep(g: Generation) -> None:
        answers[g.rid] = {
            "rounds": g.verify_rounds,
            "accepted": g.accepted_drafts,
            "rounds_by_accepted": g.rounds_by_accepted,
            "output_ids": g.output_ids,
        }

    try:
        found = asyncio.run(send(server.url, requests, CONCURRENCY, on_progress=keep))
    finally:
        write_json(piece.path(folder), answers)
    if found.errors:
        raise TrafficFailed(f"{len(found.errors)} requests failed, the first: {found.errors[0]}")
    return len(missing)


def _report(
    settings: Settings, done: dict[Piece, dict[str, Any]], samples: dict[str, list[Sample]], k_max: int
) -> Report:
    import torch

    from tide_platform.draft.checkpoint import load_draft, load_target_parts
    from tide_platform.serving.drafts import resolve_draft
    from tide_platform.serving.target import resolve_target

    torch.set_num_threads(settings.training.threads)
    draft, target = load_draft(resolve_draft(settings)), load_target_parts(resolve_target(settings))
    report = Report("replay", {}, raw={"new_tokens": NEW_TOKENS, "cases": {}})
    report.raw |= {"dtype": settings.serving.dtype, "server_threads": settings.serving.threads}
    for tenant in dict.fromkeys(piece.tenant for piece in done):
        of_tenant = {piece: answers for piece, answers in done.items() if piece.tenant == tenant}
        stored, sampled = samples[tenant], tenant.endswith(f"{TEMPERATURE:g}")
        replays = _replays(draft, target, stored, k_max)
        packed = [] if sampled else _replays(draft, target, _packed(stored), k_max)
        for piece, answers in of_tenant.items():
            case = f"{piece.workload}_k{piece.k}"
            live = _live(answers, piece.k)
            name = f"{'sampled' if sampled else 'live'}_{case}"
            _add(report, name, live, replays, piece.k, drawn_again=sampled)
            report.raw["cases"][name]["same_text"] = _same_text(answers, stored)
            if packed:
                _add(report, f"packed_{case}", live, packed, piece.k)
            if sampled:
                _add(report, f"own_{case}", _live(_counted(stored), piece.k), replays, piece.k)
    return report


def _counted(samples: Iterable[Sample]) -> dict[str, dict[str, Any]]:
    """What the server counted of the captured requests themselves."""
    metas = [sample.meta for sample in samples]
    return {m.request_id: {"rounds": m.verify_rounds, "accepted": m.accepted_drafts} for m in metas}


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
    report: Report,
    case: str,
    live: Sequence[RequestReplay],
    replays: Sequence[RequestReplay],
    k: int,
    drawn_again: bool = False,
) -> None:
    """``drawn_again``: the live answers are other draws; those to a prompt whose stored one has no round are
    left out.
    """
    of_replay = {each.request_id: each.by_k[k] for each in replays}
    for each in live:
        if each.request_id not in of_replay and each.by_k[k].rounds and not drawn_again:
            raise AnswersDiffer(each.request_id)
    both = [each for each in live if each.request_id in of_replay]
    asked = {each.request_id for each in both}
    replays = [each for each in replays if each.request_id in asked]
    found = compare(both, replays, k, confidence=0.975)
    report.ratios[case], report.intervals[case] = found.ratio, (found.lower, found.upper)
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
    stored = {s.meta.request_id: s.tensors["input_ids"][s.meta.prompt_tokens :].tolist() for s in samples}
    same = [of["output_ids"] == stored[request] for request, of in answers.items()]
    return sum(same) / len(same)
