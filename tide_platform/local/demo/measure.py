"""Speed and acceptance of a running server on fixed prompts, uncaptured, and of two drafts in turn."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tide_platform.local.demo.report import Moment, Speed, median
from tide_platform.local.demo.screen import Screen
from tide_platform.local.errors import StackError
from tide_platform.serving.client import Generation, ServerRefused, SglangClient
from tide_platform.serving.report import acceptance_by_position, acceptance_length
from tide_platform.serving.traffic import TrafficReport, run_traffic
from tide_platform.serving.workloads import Prompt

_FLUSH_S = 60.0


class WrongDraft(StackError):
    """The server serves another draft than the one just loaded."""

    def __init__(self, wanted: str, found: str | None):
        super().__init__(f"the server serves draft {found} after loading {wanted}; see .tide/logs/sglang.log")
        self.wanted, self.found = wanted, found


class RequestsFailed(StackError):
    """Requests of a measurement failed, so its figures would be of other prompts."""

    def __init__(self, failed: int, total: int, first: str):
        super().__init__(
            f"{failed} of {total} requests failed, the first: {first}; see .tide/logs/sglang.log"
        )
        self.failed, self.total = failed, total


@dataclass(frozen=True)
class Load:
    """One way to send the held_out prompts. ``required``: not left out when time runs short."""

    concurrency: int
    prompts: int
    new_tokens: int
    required: bool = False


@dataclass
class Figures:
    """Everything measured of one draft (or of none) on one set of prompts."""

    who: str
    reports: list[TrafficReport] = field(default_factory=list)

    def tokens_per_s(self, concurrency: int) -> float:
        """Median over the passes at this concurrency."""
        return median([report.tokens_per_s for report in self.reports if report.concurrency == concurrency])

    def acceptance_length(self, concurrency: int) -> float:
        """Ratio of sums over the passes at this concurrency; 1 where no round took place."""
        reports = [report for report in self.reports if report.concurrency == concurrency]
        rounds, accepted = (
            sum(getattr(r, name) for r in reports) for name in ("verify_rounds", "accepted_drafts")
        )
        return acceptance_length(rounds, accepted) or 1.0

    def by_position(self) -> list[float]:
        requests = [generation for report in self.reports for generation in report.per_request]
        return acceptance_by_position([generation.rounds_by_accepted for generation in requests])

    def speeds(self) -> list[Speed]:
        return [Speed(self.who, report.concurrency, report.tokens_per_s) for report in self.reports]


class Bench:
    """Measures one server. ``began``: monotonic time that the moments count from."""

    def __init__(self, client: SglangClient, target: Path, screen: Screen, began: float):
        self._client, self._target, self._screen, self._began = client, target, screen, began
        self.moments: list[Moment] = []

    def run(self, who: str, prompts: Sequence[Prompt], load: Load, phase: str) -> TrafficReport:
        """Send the first ``load.prompts`` uncaptured, from an empty prefix cache.

        Raises :class:`RequestsFailed`.
        """
        self._warm_up(prompts[:1])
        self._flush()
        return self.send(who, prompts[: load.prompts], load.concurrency, load.new_tokens, phase)

    def send(
        self,
        who: str,
        prompts: Sequence[Prompt],
        concurrency: int,
        new_tokens: int,
        phase: str,
        tenant: str | None = None,
    ) -> TrafficReport:
        """Send ``prompts``; captured for ``tenant``, uncaptured where it is None.

        Raises :class:`RequestsFailed`.
        """
        began, tokens, rounds, accepted = time.monotonic(), 0, 0, 0
        title = (
            f"{phase}: {who}, {concurrency} at a time" if who != phase else f"{who}, {concurrency} at a time"
        )
        with self._screen.bar(title, len(prompts)) as step:

            def progress(done: Generation) -> None:
                nonlocal tokens, rounds, accepted
                tokens, rounds = tokens + done.completion_tokens, rounds + done.verify_rounds
                accepted += done.accepted_drafts
                now = time.monotonic()
                if done.verify_rounds:
                    moment = Moment(now - self._began, who, phase, done.verify_rounds, done.accepted_drafts)
                    self.moments.append(moment)
                length = acceptance_length(rounds, accepted)
                words = f"{tokens / (now - began):.1f} tok/s"
                step(f"{words}, acceptance length {length:.2f}" if length else words)

            report = run_traffic(
                self._client.base_url,
                prompts,
                self._target,
                concurrency=concurrency,
                max_new_tokens=new_tokens,
                capture=tenant is not None,
                tenant=tenant or "demo",
                on_progress=progress,
            )
        if report.errors:
            raise RequestsFailed(len(report.errors), len(prompts), report.errors[0])
        return report

    def _warm_up(self, prompts: Sequence[Prompt]) -> None:
        """A few uncounted tokens: weights are packed at their first use after a start or a reload."""
        run_traffic(
            self._client.base_url, prompts, self._target, concurrency=1, max_new_tokens=8, capture=False
        )

    def _flush(self) -> None:
        """Empty the prefix cache; the server refuses while a request runs, a health check's included."""
        deadline = time.monotonic() + _FLUSH_S
        while True:
            try:
                self._client.flush_cache()
            except ServerRefused:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
            else:
                return

    def load_draft(self, folder: Path, digest: str) -> None:
        """Load a draft into the running server and read its digest back. Raises :class:`WrongDraft`."""
        if self.served() != digest:
            self._client.reload_draft(folder.absolute(), digest)
        found = self.served()
        if found != digest:
            raise WrongDraft(digest, found)

    def served(self) -> str | None:
        """Digest of the draft that is served now."""
        return self._client.status()["draft_digest"]
