"""One adaptation cycle of a window, step by step: train, judge, deploy. Each step may die and be called
again.

A step claims the window in the ledger first and keeps its hold while it works; a step whose result is there
already finds it and returns.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tide_platform.config import Settings
from tide_platform.config.redact import shown_settings
from tide_platform.control.audit import by_run
from tide_platform.control.champion import ensure_champion, fetch_draft, means, served_digest, store_draft
from tide_platform.control.dataset import PastData, WindowData, read_past, read_window
from tide_platform.control.guard import Barred
from tide_platform.control.history import histogram
from tide_platform.control.hold import Hold, hold
from tide_platform.control.ledger import Ledger
from tide_platform.control.progress import LiveMetrics
from tide_platform.control.promotion import Verdict
from tide_platform.control.records import WindowRecord
from tide_platform.control.rollout import Deployed, NotJudged, WorseLive, roll_out
from tide_platform.control.rollouts import Order
from tide_platform.control.states import NotTrained, State, WindowKey
from tide_platform.control.told import of_verdict, training_params, training_tags


class TrainCommand(Protocol):
    """Runs ``tide train --job FILE`` somewhere and waits for it.

    ``on_step`` gets each optimizer step's record; ``stop()`` true asks to end early. Raises when it failed.
    """

    def __call__(
        self, job: Path, on_step: Callable[[dict[str, Any]], None], stop: Callable[[], bool]
    ) -> None: ...


@dataclass(frozen=True)
class Turn:
    """A run's turn on a window. ``attempt`` is None for a run that was started by hand."""

    settings: Settings
    ledger: Ledger
    key: WindowKey
    run_id: str
    attempt: int | None = None

    def hold(self):
        """The claim on the window, renewed while the block runs."""
        return hold(self.ledger, self.key, self.run_id, self.attempt, self.settings.window.lease_s)


@dataclass(frozen=True)
class Trained:
    """The challenger of a window."""

    challenger: str
    parent: str
    mlflow_run: str
    version: str
    lance_version: int
    samples: int  # of the window
    resumed: bool  # an earlier attempt had trained it
    summary: dict[str, Any]  # of the trainer's result; empty where resumed

    def metadata(self) -> dict[str, Any]:
        """For people: the summary and this, flat."""
        own = {key: value for key, value in vars(self).items() if key != "summary"}
        return {**self.summary, **own}


def train_window(turn: Turn, command: TrainCommand) -> Trained:
    """Fine-tune the served draft on the window; store, register and name the challenger.

    A checkpoint that an earlier attempt stored is taken as it is, and a run that an earlier attempt began is
    gone on with, as long as parent, samples and settings are the same. Raises what the command, the store and
    the registry raise, and the ledger's errors.
    """
    from tide_platform.registry.mlflow_registry import CHALLENGER, DraftRegistry

    registry = DraftRegistry(turn.settings)
    with turn.hold() as held:
        record = held.record
        if record.state is not State.RUNNING:
            return _already_trained(registry, record)
        champion = ensure_champion(turn.settings, turn.ledger)
        data = read_window(turn.settings, record)
        past = read_past(turn.settings, turn.ledger, record, data)
        counts = {name: len(ids) for name, ids in vars(data.division).items()} | {"past": len(past.train)}
        tags = training_tags(record, turn.run_id, champion.digest, champion.version.version)
        params = {
            **training_params(turn.settings),
            **{f"samples_{name}": count for name, count in counts.items()},
            "samples_lost": data.lost,
            "samples_lost_past": past.lost,
        }
        run_id = registry.begin(
            str(turn.key),
            tags,
            params,
            {"settings.yaml": shown_settings(turn.settings)},
        )
        done = False
        try:
            # one folder a window: a later attempt finds what an earlier one left
            work = turn.settings.state / "work" / f"{turn.key.deployment}-{turn.key.window}"
            job = _write_job(turn, record, data, past, champion.folder, work)
            with LiveMetrics(registry, run_id) as metrics:
                command(job, metrics.on_step, held.lost.is_set)
            trained = _keep(turn, held, registry, run_id, tags, params, work)
            registry.point(CHALLENGER, registry.version_of(trained.challenger) or champion.version)
            shutil.rmtree(work, ignore_errors=True)
            done = True
            return trained
        finally:
            registry.end(run_id, succeeded=done)


def judge_window(turn: Turn) -> Verdict:
    """Judge the challenger against the draft that is served now, and store the verdict.

    A verdict on just this pair is not made again. Raises the ledger's errors, and those of replay.
    """
    from tide_platform.control.judge import judge
    from tide_platform.registry.mlflow_registry import DraftRegistry

    with turn.hold() as held:
        challenger = _challenger(held.record)
        champion = ensure_champion(turn.settings, turn.ledger)
        served = champion.digest
        known = [Verdict.from_json(each.evidence) for each in turn.ledger.verdicts_of(turn.key)]
        for verdict in reversed(known):
            passed = verdict.passed and verdict.challenger == challenger
            # served already: a dead run had reloaded it, on the strength of this verdict
            if (passed and challenger == served) or (passed and verdict.champion == served):
                return verdict
        earlier = sum(verdict.challenger == challenger for verdict in known)
        drafts = champion.folder, fetch_draft(turn.settings, challenger)
        verdict = judge(turn.settings, held.record, *drafts, steps=batch_sizes(turn), earlier=earlier)
        held.check()
        registry = DraftRegistry(turn.settings)
        version = registry.version_of(challenger)
        if version is not None:
            registry.tell(version, **vars(of_verdict(verdict)))
        turn.ledger.judged(
            turn.key,
            turn.run_id,
            champion=verdict.champion,
            passed=verdict.passed,
            evidence=verdict.to_json(),
            reason=verdict.summary,
        )
        return verdict


def batch_sizes(turn: Turn) -> dict[int, int]:
    """Decode steps of the deployment's servers by batch size, of the newest ``gate.histogram_hours``."""
    since = time.time() - turn.settings.gate.histogram_hours * 3600
    return histogram(turn.ledger.history.steps(turn.key.deployment, since))


def deploy_window(turn: Turn) -> Deployed:
    """Serve the window's challenger on all servers, by :func:`tide_platform.control.rollout.roll_out`.

    A window whose challenger live traffic shows to be worse is rejected. Raises what the rollout raises,
    :class:`Frozen`, :class:`Barred`, :class:`NotJudged`, and the ledger's errors.
    """
    deployment = turn.key.deployment
    with turn.hold() as held, means(turn.settings, turn.ledger) as given:
        challenger = _challenger(held.record)
        served_digest(turn.settings)  # waits for a server that is just starting again

        def fence(champion: str) -> None:
            held.check()
            turn.ledger.guard.check(deployment, challenger)
            verdict = turn.ledger.verdict(deployment, challenger, champion)
            if champion != challenger and (verdict is None or not verdict.passed):
                raise NotJudged(challenger, champion)

        order = Order(
            challenger,
            by_run(turn.run_id),
            held.record.reason or "the gate passed",
            window=turn.key.window,
            run_id=turn.run_id,
        )
        try:
            return roll_out(given, order, fence=fence)
        except (WorseLive, Barred) as error:  # trying again would end the same way
            turn.ledger.refused(turn.key, turn.run_id, str(error))
            raise


@dataclass(frozen=True)
class WindowStatus:
    """A window as a person wants to see it."""

    record: WindowRecord
    verdict: Verdict | None  # the last one

    @property
    def state(self) -> State:
        return self.record.state


def status(settings: Settings) -> list[WindowStatus]:
    """The deployment's windows, oldest first: reads of the ledger alone, cheap enough to poll."""
    ledger = Ledger(settings.ledger.url)
    try:
        found = []
        for record in ledger.windows(settings.deployment):
            verdicts = ledger.verdicts_of(record.key)
            found.append(WindowStatus(record, Verdict.from_json(verdicts[-1].evidence) if verdicts else None))
        return found
    finally:
        ledger.close()


def _write_job(
    turn: Turn, record: WindowRecord, data: WindowData, past: PastData, parent: Path, work: Path
) -> Path:
    from tide_platform.serving.target import resolve_target
    from tide_platform.training.job import TrainJob, without_secrets

    job = TrainJob(
        settings=without_secrets(turn.settings),
        target=resolve_target(turn.settings).resolve(),
        parent=parent.resolve(),
        lance_version=data.version,
        train_sample_ids=data.division.train,
        reference_sample_ids=data.division.reference_train,
        past_sample_ids=past.train,
        out=work.resolve(),
        restart=True,
        seed=turn.settings.training.seed,
        provenance={
            "window": str(record.key),
            "window_samples_lost": data.lost,
            "past_windows": past.windows,
            "past_samples_lost": past.lost,
            "attempt": record.attempt,
            "dagster_run_id": turn.run_id,
        },
    )
    path = work / "job.json"
    job.write(path)
    return path.resolve()


def _keep(
    turn: Turn,
    held: Hold,
    registry: Any,
    run_id: str,
    tags: dict[str, str],
    params: dict[str, Any],
    work: Path,
) -> Trained:
    """Store and register what the trainer left in ``work``, then tell the ledger."""
    import json

    from tide_platform.config import draft_digest
    from tide_platform.training.job import RESULT

    folder, record = work / "draft", held.record
    summary = {
        key: value for key, value in json.loads((work / RESULT).read_text()).items() if key != "history"
    }
    summary.pop("folder", None)  # it is gone when anybody reads this
    digest = draft_digest(folder)
    held.check()
    uri = store_draft(turn.settings, folder, digest)
    version, parent = registry.register(run_id, folder, digest, uri, tags, params), tags["parent"]
    turn.ledger.trained(turn.key, turn.run_id, challenger=digest, parent=parent, mlflow_run=version.run_id)
    return Trained(
        challenger=digest,
        parent=parent,
        mlflow_run=version.run_id,
        version=version.version,
        lance_version=record.lance_version,
        samples=record.samples,
        resumed=False,
        summary=summary,
    )


def _already_trained(registry: Any, record: WindowRecord) -> Trained:
    challenger = _challenger(record)
    version = registry.version_of(challenger)
    return Trained(
        challenger=challenger,
        parent=record.parent or "",
        mlflow_run=record.mlflow_run or "",
        version=version.version if version else "",
        lance_version=record.lance_version,
        samples=record.samples,
        resumed=True,
        summary={},
    )


def _challenger(record: WindowRecord) -> str:
    if record.challenger is None:
        raise NotTrained(record.key)
    return record.challenger
