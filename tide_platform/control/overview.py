"""A deployment at a glance (`tide status`): what is served, since when, how well; windows and verdicts."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tide_platform.config import Settings
from tide_platform.control.collection import NAME as COLLECTION
from tide_platform.control.collection import Collection
from tide_platform.control.drift import Drift
from tide_platform.control.guard import Held
from tide_platform.control.ledger import Ledger
from tide_platform.control.memory import NAME as MEMORY
from tide_platform.control.memory import Memory
from tide_platform.control.promotion import Verdict
from tide_platform.control.rollouts import Rollout
from tide_platform.control.watch import Live, summarize, whole
from tide_platform.serving.client import ServerRefused, ServerUnreachable
from tide_platform.serving.fleet import finished, glance_at_all

LAST_VERDICTS = 5


@dataclass(frozen=True)
class ServerView:
    """One server. ``live``: finished requests that its draft served whole, as far as it remembers them."""

    url: str
    draft: str | None
    capturing: bool
    live: Live | None
    problem: str = ""


@dataclass(frozen=True)
class Overview:
    """All of it. ``at_promotion``: the champion's acceptance length when it was promoted, and where that is
    from.
    """

    deployment: str
    servers: list[ServerView]
    champion: str | None
    since: float | None  # Unix time, seconds
    at_promotion: float | None
    windows: Counter[str]
    verdicts: list[Verdict] = field(default_factory=list)  # newest last
    frozen: Held | None = None
    unfinished: Rollout | None = None
    fallen: list[str] = field(default_factory=list)  # slices whose acceptance fell since the promotion
    suspected: str = ""  # why the champion may be worse than the draft before it
    collection: Collection = field(
        default_factory=Collection
    )  # whether the platform wants the servers to capture

    @property
    def agreed(self) -> bool:
        """Whether every server answers and serves one draft."""
        return len({server.draft for server in self.servers}) == 1 and None not in {
            server.draft for server in self.servers
        }


def look(settings: Settings, ledger: Ledger) -> Overview:
    """Asks servers and ledger; a server that does not answer is told as such."""
    deployment = settings.deployment
    with glance_at_all(settings) as servers:
        views = [_server(server) for server in servers]
    history = ledger.deployments(deployment)
    last = history[-1] if history else None
    windows = ledger.windows(deployment)
    verdicts = [Verdict.from_json(each.evidence) for each in ledger.last_verdicts(deployment, LAST_VERDICTS)]
    drafts = {view.draft for view in views if view.draft}
    memory = Memory.from_json(ledger.controls.get(deployment, MEMORY))
    return Overview(
        deployment=deployment,
        servers=views,
        champion=last["served"] if last else (drafts.pop() if len(drafts) == 1 else None),
        since=last["deployed_at"] if last else None,
        at_promotion=acceptance_at_promotion(last, verdicts),
        windows=Counter(record.state.value for record in windows),
        verdicts=verdicts,
        frozen=ledger.guard.frozen(deployment),
        unfinished=ledger.rollouts.unfinished(deployment),
        fallen=[str(Drift(**drift)) for drift in memory.drifted.values()],
        suspected=memory.suspected,
        collection=Collection.from_json(ledger.controls.get(deployment, COLLECTION)),
    )


def _server(server: Any) -> ServerView:
    try:
        status, told = server.status(), finished(server)
    except (ServerUnreachable, ServerRefused) as error:
        return ServerView(server.base_url, None, False, None, str(error))
    draft = status["draft_digest"]
    live = summarize(whole(told, draft)) if draft else None
    return ServerView(server.base_url, draft, bool(status["capture"].get("enabled")), live)


def acceptance_at_promotion(last: dict[str, Any] | None, verdicts: list[Verdict]) -> float | None:
    """Of the last deployment's draft: on the canary's live requests, else by the replay of its verdict."""
    if last is None:
        return None
    watched = (last["evidence"] or {}).get("watched") or {}
    if (length := watched.get("challenger", {}).get("acceptance_length")) is not None:
        return length
    for verdict in reversed(verdicts):
        if verdict.challenger == last["served"] and verdict.on_window is not None:
            return verdict.on_window.challenger.acceptance_length
    return None
