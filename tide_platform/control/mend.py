"""What the watchman asks for and what takes time: a rollout that died is finished or undone, servers that
came back with another draft get the champion, and a champion that fell is compared with the draft before it
on the newest samples: live acceptance alone cannot tell a worse draft from harder traffic, a replay of both
on the same samples can.
"""

from dataclasses import dataclass, replace

from tide_platform.config import Settings, TideError
from tide_platform.control.audit import SENSOR, Action, Entry
from tide_platform.control.champion import fetch_draft, means
from tide_platform.control.hands import previous_of, roll_back
from tide_platform.control.ledger import Ledger
from tide_platform.control.memory import NAME as MEMORY
from tide_platform.control.memory import Memory
from tide_platform.control.promotion import Comparison
from tide_platform.control.rollout import Means, alone, settle_locked, verified
from tide_platform.serving.drafts import mark_deployed
from tide_platform.serving.fleet import reload, served_by

LEAST_SAMPLES = 16  # to compare two drafts on


class NotMended(TideError):
    """A server does not take the champion."""

    def __init__(self, url: str, champion: str, problem: str):
        super().__init__(f"{url} does not take the champion {champion}: {problem}; it is tried again")
        self.url, self.champion, self.problem = url, champion, problem


@dataclass(frozen=True)
class Mended:
    """What was done, in words."""

    done: list[str]
    compared: Comparison | None = None  # champion: the served draft; challenger: the one before it


def mend(settings: Settings, ledger: Ledger) -> Mended:
    """May be called at any time, again and again: it looks what is wrong by itself.

    Raises :class:`NotMended`, :class:`DeploymentBusy`, and what a rollout, the store and the replay raise.
    """
    with means(settings, ledger) as given:
        done = realign(given)
    memory = Memory.from_json(ledger.controls.get(settings.deployment, MEMORY))
    if not memory.suspected:
        return Mended(done)
    if ledger.champion(settings.deployment) != memory.draft:
        return Mended([*done, _clear(settings, ledger, memory, "another draft took its place meanwhile")])
    before = previous_of(ledger, settings.deployment, memory.draft)
    if before is None:
        return Mended([*done, _clear(settings, ledger, memory, "there is no draft before it to go back to")])
    version, samples = _newest(settings, memory.draft)
    if len(samples) < LEAST_SAMPLES:
        return Mended([*done, f"{memory.suspected}: waits for {LEAST_SAMPLES} samples to compare both on"])
    compared = _compare(settings, version, samples, memory.draft, before)
    of = compared.gain
    told = (
        f"{before} would have {of.point:+.1%} [{of.lower:+.1%}, {of.upper:+.1%}] of its acceptance length on "
        f"{compared.requests} of its newest requests"
    )
    if compared.evidence is not None and compared.evidence.lower - 1 >= settings.watch.rollback_gain:
        roll_back(settings, ledger, SENSOR, f"{memory.suspected}; {told}")
        return Mended([*done, f"rolled back: {told}"], compared)
    if len(samples) < settings.watch.replay_samples and _may_be_worse(settings, compared):
        return Mended([*done, f"{memory.suspected}: undecided, waits for more samples: {told}"], compared)
    return Mended([*done, _clear(settings, ledger, memory, told)], compared)


def realign(means: Means) -> list[str]:
    """One draft on all servers, the one that the ledger, the alias and the pointer name; what was done."""
    deployment, done = means.settings.deployment, []
    with alone(means.settings, means.ledger):
        settled = settle_locked(means)
        if settled is not None:
            done.append(f"the rollout of {settled.challenger} was settled")
        champion = means.ledger.champion(deployment)
        wrong = {url: digest for url, digest in served_by(means.servers).items() if digest != champion}
        if champion is None or not wrong:
            return done
        folder = verified(means.fetch, champion)
        for server in means.servers:
            if server.base_url not in wrong:
                continue
            _, problem = reload(server, folder, champion)
            if problem is not None:
                raise NotMended(server.base_url, champion, problem)
            text = f"{server.base_url} served {wrong[server.base_url]}"
            means.ledger.note(Entry(deployment, SENSOR, Action.MENDED, text, digest=champion))
            done.append(f"{text}, serves {champion} again")
        mark_deployed(means.settings, champion)
        means.promote(champion)
    return done


def _may_be_worse(settings: Settings, compared: Comparison) -> bool:
    """Whether more samples may still show that the draft before is better."""
    return compared.evidence is not None and compared.evidence.upper - 1 >= settings.watch.rollback_gain


def _clear(settings: Settings, ledger: Ledger, memory: Memory, why: str) -> str:
    """The draft is not worse: what was seen so far is not held against it again."""
    seen = max((one["at"] for one in memory.requests), default=memory.since)
    now = Memory.from_json(ledger.controls.get(settings.deployment, MEMORY))  # the sensor went on meanwhile
    if now.draft == memory.draft:
        cleared = replace(now, suspected="", cleared=seen)
        ledger.controls.put(settings.deployment, MEMORY, cleared.to_json())
    reason = f"{memory.suspected}; {why}"
    ledger.note(Entry(settings.deployment, SENSOR, Action.CLEARED, reason, digest=memory.draft))
    return f"cleared: {reason}"


def _newest(settings: Settings, draft: str) -> tuple[int, list[str]]:
    """Version of the dataset, ids of the newest samples that ``draft`` was captured with."""
    from tide_platform.capture.split import REFERENCE_TENANT
    from tide_platform.store.hidden_states import open_store

    store = open_store(settings)
    version = store.tip().version
    where = f"draft_version_end = '{draft}' AND tenant != '{REFERENCE_TENANT}'"
    return version, [ref.sample_id for ref in store.refs(version, where)][-settings.watch.replay_samples :]


def _compare(settings: Settings, version: int, samples: list[str], served: str, before: str) -> Comparison:
    """Both drafts on these samples."""
    from tide_platform.control.judge import compare_drafts

    folders = fetch_draft(settings, served), fetch_draft(settings, before)
    margin, confidence = settings.watch.rollback_gain, settings.watch.confidence
    return compare_drafts(settings, version, samples, folders, margin=margin, confidence=confidence)
