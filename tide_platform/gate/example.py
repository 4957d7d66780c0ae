"""The controlled example: a few fixed prompts, answered greedily by a server of the gate's own and captured.

The server is the deployment's, but for what would blur a comparison: no prefix cache (every row is computed),
aux states kept whole, everything captured, the number of draft steps fixed, and fp32 where the reference is.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from tide_platform.capture.folder import sealed_segments
from tide_platform.capture.packing import unpack
from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.capture.segment import read_segment
from tide_platform.config import Settings, TideError
from tide_platform.serving.chat import encode_messages
from tide_platform.serving.client import GENERATE_TIMEOUT_S, GenerateRequest, ServerRefused, ServerUnreachable
from tide_platform.serving.own_server import Served

PROMPTS = (
    "Name the months of the year in order.",
    "Count from one to twenty in words.",
    "Write the word 'river' twelve times, with a comma after each.",
)
NEW_TOKENS = 32
SEALED_PATIENCE_S = 60.0

ReferenceKind = Literal["transformers", "engine"]


class NotCaptured(TideError):
    """The gate's server answered, but its spool sealed no sample of the request."""

    def __init__(self, rids: Sequence[str], folder: Path):
        super().__init__(
            f"no captured sample of {', '.join(rids)} in {folder} after {SEALED_PATIENCE_S:.0f} s; see "
            "spool.log and sglang.log beside it"
        )
        self.rids, self.folder = tuple(rids), folder


@dataclass(frozen=True)
class Seen:
    """How far a request was when a part of its answer arrived, since its start."""

    by_accepted: tuple[int, ...]  # [i]: verify rounds in which exactly i draft tokens were accepted

    @property
    def rounds(self) -> int:
        return sum(self.by_accepted)

    @property
    def accepted(self) -> int:
        return sum(i * count for i, count in enumerate(self.by_accepted))


@dataclass(frozen=True)
class Answer:
    """What the server said of one request, to the client."""

    rid: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    seen: tuple[Seen, ...]  # in order; a part may hold more than one round, on a busy machine many

    @property
    def rounds(self) -> int:
        return self.seen[-1].rounds

    @property
    def accepted(self) -> int:
        return self.seen[-1].accepted


@dataclass(frozen=True)
class Example:
    """One request: what the client saw of it, and what was captured of it, with aux states as bf16 bits."""

    answer: Answer
    sample: Sample
    stream: StreamMeta


def gate_settings(settings: Settings, draft: Path, target: Path, reference: ReferenceKind) -> Settings:
    """The deployment's settings, as the gate's server runs with them."""
    own = settings.model_copy(deep=True)
    own.draft, own.target = draft, target
    own.serving.radix_cache = own.serving.adaptive = False
    if reference == "transformers":
        own.serving.dtype = "float32"
    capture = own.capture
    capture.enabled, capture.default, capture.sampling_rate = True, "allow", 1.0
    capture.deny_tenants, capture.allow_tenants, capture.bytes_per_second = [], None, None
    capture.prompt_tail_tokens = capture.max_request_tokens = None
    capture.aux_format, capture.segment_seconds = "bf16", 0.2
    return own


def capture_examples(server: Served, prompts: Sequence[str] = PROMPTS) -> list[Example]:
    """Asks the prompts one after another. Raises :class:`NotCaptured` and the client's errors."""
    encoded = [encode_messages(server.target, [{"role": "user", "content": text}], text) for text in prompts]
    answers = [
        ask(server, f"gate-{number}", tuple(prompt), NEW_TOKENS) for number, prompt in enumerate(encoded)
    ]
    captured = collect(server, [answer.rid for answer in answers])
    return [Example(answer, *captured[answer.rid]) for answer in answers]


def ask(server: Served, rid: str, prompt: tuple[int, ...], new_tokens: int, capture: bool = True) -> Answer:
    """One greedy request of exactly ``new_tokens`` tokens, its rounds as they come (SSE of ``/generate``)."""
    request = GenerateRequest(prompt, new_tokens, capture=capture, rid=rid, sampling={"ignore_eos": True})
    seen: list[Seen] = []
    last: dict = {}
    with httpx.Client(base_url=server.url, timeout=GENERATE_TIMEOUT_S, trust_env=False) as http:
        try:
            with http.stream("POST", "/generate", json=request.body() | {"stream": True}) as reply:
                if reply.status_code != 200:
                    raise ServerRefused("/generate", reply.status_code, reply.read().decode()[:300])
                for line in reply.iter_lines():
                    if line.startswith("data: {"):
                        last = json.loads(line.removeprefix("data: "))
                        counts = last["meta_info"].get("spec_correct_drafts_histogram") or []
                        seen.append(Seen(tuple(counts)))
        except httpx.HTTPError as error:
            raise ServerUnreachable(server.url, error) from error
    if "output_ids" not in last:
        raise ServerRefused("/generate", 200, f"an answer without tokens: {last}")
    return Answer(rid, prompt, tuple(last["output_ids"]), tuple(seen))


def collect(server: Served, rids: Sequence[str]) -> dict[str, tuple[Sample, StreamMeta]]:
    """What the spool sealed of these requests, waited for."""
    folder = server.settings.spool_folder
    until = time.monotonic() + SEALED_PATIENCE_S
    while True:
        found: dict[str, tuple[Sample, StreamMeta]] = {}
        for path in sealed_segments(folder):
            stream, samples = read_segment(path)
            whole = {s.meta.request_id: unpack(s, 3 * stream.hidden_size) for s in samples}
            found |= {rid: (sample, stream) for rid, sample in whole.items()}
        if set(rids) <= found.keys():
            return found
        if time.monotonic() > until:
            raise NotCaptured(sorted(set(rids) - found.keys()), folder)
        time.sleep(0.2)
