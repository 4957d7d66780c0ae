"""The soak, phase by phase. It sends traffic and does harm; the loop is left to itself."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from tide_platform.config import Settings, TideError
from tide_platform.control import hands
from tide_platform.control.audit import Action
from tide_platform.control.ledger import Ledger
from tide_platform.control.records import WindowRecord
from tide_platform.control.states import State
from tide_platform.local import services
from tide_platform.local.demo.clock import Clock
from tide_platform.local.demo.measure import Bench
from tide_platform.local.demo.samples import captured_traffic, dropped_samples, wait_landed
from tide_platform.local.demo.screen import Screen
from tide_platform.local.graphql import Dagster
from tide_platform.local.ready import dagster_url, server_url
from tide_platform.local.soak import plan
from tide_platform.local.soak.eyes import Eyes
from tide_platform.local.soak.faults import poison, sabotaged
from tide_platform.local.soak.figures import Check, Result, agreed, nothing_lost
from tide_platform.local.soak.traffic import Users
from tide_platform.local.stack import Stack
from tide_platform.serving.client import SglangClient
from tide_platform.serving.target import prepare_target, resolve_target
from tide_platform.serving.workloads import TRAFFIC, load_workload


def run_soak(settings: Settings, screen: Screen, *, auto_ports: bool) -> Result:
    """The whole soak on a stack of its own, below ``settings.state``: it begins with the first draft,
    whatever was adapted there. Writes ``STATE/soak/soak.json`` and ``report.html``, whatever happens. All
    that was started has ended when it returns.
    """
    if settings.target is None:
        prepare_target(screen.say)
    result = Result()
    own = plan.soak_settings(settings)
    with Stack(own, lambda line: screen.say(f"  {line}"), auto_ports=auto_ports) as stack:
        soak = Soak(stack, screen, result)
        try:
            soak.run()
        except TideError as error:
            result.problem = str(error)
        finally:
            soak.close()
            result.seconds = soak.clock.total()
            result.write(soak.folder / "soak.json", drafts=soak.drafts)
        soak.write_report()
    return result


class Soak:
    """One soak on one stack."""

    def __init__(self, stack: Stack, screen: Screen, result: Result):
        self.stack, self.screen, self.result = stack, screen, result
        self.clock = Clock(plan.PHASES, screen.say)
        self.drafts: dict[str, str] = {}  # what for -> digest
        self.poisoned = 0
        self._closing: list[Callable[[], None]] = []

    @property
    def folder(self) -> Path:
        return self.stack.layout.state.parent

    def close(self) -> None:
        for close in reversed(self._closing):
            close()

    def write_report(self) -> None:
        """``report.html``: what `tide report` says of this hour."""
        from tide_platform.control.ledger import opened
        from tide_platform.report.gather import gather
        from tide_platform.report.page import write_report

        settings = self.stack.settings
        with opened(settings.ledger.url) as ledger:
            write_report(self.folder / "report.html", gather(settings, ledger, plan.LIMIT_S))

    def run(self) -> None:
        """All phases. Raises a TideError where one cannot go on."""
        for name, phase in (
            ("start", self._start),
            ("reference", self._reference),
            ("general", self._general),
            ("maths", lambda: self._shift("maths")),
            ("code", lambda: self._shift("code")),
            ("return", self._return),
            ("poison", self._poison),
            ("sabotage", self._sabotage),
            ("report", self._report),
        ):
            with self.clock.phase(name):
                phase()

    # --- phases

    def _start(self) -> None:
        self.stack.open(die_with_parent=True, fresh=True)
        self.stack.start(services.ALL)
        self.settings = self.stack.settings
        self.ledger = Ledger(self.settings.ledger.url)
        self._closing.append(self.ledger.close)
        self.client = SglangClient(server_url(self.settings), os.environ["TIDE_ADMIN_KEY"])
        self._closing.append(self.client.close)
        target = resolve_target(self.settings)
        self.bench = Bench(self.client, target, self.screen, self.clock.began)
        self.users = Users(server_url(self.settings), target)
        self._closing.append(self.users.close)
        self.eyes = Eyes(self.settings, self.ledger, self.client, self.users, self.clock, self.screen)
        self.drafts["static"] = self.eyes.served()

    def _reference(self) -> None:
        # from the end: the base draft was trained on the first of them (drafts/README.md)
        prompts = load_workload("general", TRAFFIC)[-plan.REFERENCE :]
        captured_traffic(self.bench, prompts, "static", plan.REFERENCE_CONCURRENCY, "reference")
        with self.screen.status() as show:
            wait_landed(self.settings, "reference", len(prompts), show)

    def _general(self) -> None:
        self.users.send("general", plan.GENERAL)

    def _shift(self, workload: str) -> None:
        """Users begin to ask something else: it drifts, trains and promotes by itself."""
        began, before = time.time(), self.eyes.served()
        self.users.want(workload)
        self._event(f"traffic is {workload}")
        drifted = self.eyes.until(
            f"a drift to {workload}", lambda: self.eyes.since(began, Action.DRIFTED), plan.SHIFT_S
        )
        self._event(f"drifted: {drifted.reason}")
        deployed = self.eyes.until(
            f"a draft for {workload}", lambda: self.eyes.deployed_of_new_window(began), plan.SHIFT_S
        )
        self._event(f"deployed: {deployed.digest}")
        served = deployed.digest or ""
        self.eyes.until(
            "its first requests",
            lambda: self.eyes.live(served, workload, deployed.at)["requests"] >= plan.SETTLED or None,
            plan.SHIFT_S,
        )
        self.drafts[workload] = served
        old, new = self.eyes.live(before, workload, began), self.eyes.live(served, workload, deployed.at)
        gain = (new["acceptance_length"] or 0) / (old["acceptance_length"] or 1)
        figures = {
            "drift": drifted.reason,
            "seconds_to_drift": drifted.at - began,
            "seconds_to_deployment": deployed.at - began,
            "before": old,
            "after": new,
            "gain": gain,
            "by": deployed.actor,
        }
        self._check(f"{workload}: drifted, trained, promoted by itself", gain > 1, figures)

    def _return(self) -> None:
        """Of the first prompts, before any new training, both drafts are replayed on the very samples."""
        self.users.want(None)
        self.eyes.quiet()
        began, served = time.time(), self.eyes.served()
        self._event("traffic is maths again")
        self.users.send("maths", plan.RETURN)
        live = self.eyes.settled_live(served, "maths", began, plan.RETURN)
        self._check(
            "return to maths: better than the static draft before any new training",
            *self._against_static(served, began, live),
        )

    def _against_static(self, served: str, began: float, live: dict) -> tuple[bool, dict]:
        from tide_platform.control.champion import fetch_draft
        from tide_platform.control.judge import compare_drafts
        from tide_platform.store.hidden_states import open_store

        store = open_store(self.settings)
        where = f"tenant = 'maths' AND captured_at >= {began}"
        refs = self.eyes.until(
            "the samples of the return",
            lambda: found if len(found := store.refs(where=where)) >= plan.RETURN else None,
            plan.POISON_S,
        )
        ids = [ref.sample_id for ref in refs]
        drafts = fetch_draft(self.settings, self.drafts["static"]), fetch_draft(self.settings, served)
        version, confidence = store.tip().version, self.settings.gate.confidence
        compared = compare_drafts(self.settings, version, ids, drafts, margin=0.0, confidence=confidence)
        figures = {
            "draft": served,
            "requests": compared.requests,
            "static": compared.champion.acceptance_length,
            "served": compared.challenger.acceptance_length,
            "gain": vars(compared.gain),
            "live": live,
        }
        return compared.gain.lower > 0 and self.eyes.served() == served, figures

    def _poison(self) -> None:
        """The window of ruined samples must be rejected; what was pending is in it, or in one before it."""
        known = {record.key for record in self.ledger.windows(self.settings.deployment)}
        self.poisoned = poison(self.settings, 2 * plan.POISON)
        committed = time.time()
        self._event(f"{self.poisoned} poisoned samples")

        def ended() -> list[WindowRecord] | None:
            windows = self.ledger.windows(self.settings.deployment)
            new = [record for record in windows if record.key not in known]
            done = new and all(record.state.final for record in new)
            return new if done else None

        windows = self.eyes.until("the end of the poisoned window", ended, plan.POISON_S)
        ends = {record.key.window: (record.state.value, record.samples, record.reason) for record in windows}
        judged = [record for record in windows if record.state not in (State.MERGED, State.SUPERSEDED)]
        self._event(f"poisoned: {ends}")
        holds = bool(judged) and all(record.state is State.REJECTED for record in judged)
        self._check("a poisoned window is rejected", holds, {"windows": ends, "samples": self.poisoned})
        self._latency(committed, judged)

    def _latency(self, committed: float, windows: list[WindowRecord]) -> None:
        """From the commit that crossed the threshold, the only one meanwhile, to the first run."""
        runs = {run.run_id: run.created for run in Dagster(dagster_url(self.settings)).runs(50)}
        created = [runs[record.run_id] for record in windows if record.run_id in runs]
        limit = 2 * self.settings.window.sensor_seconds + 5
        seconds = min(created, default=float("inf")) - committed
        figures = {"seconds": seconds, "limit": limit, "sensor_seconds": self.settings.window.sensor_seconds}
        self._check("from commit to run within two sensor intervals and 5 s", seconds <= limit, figures)

    def _sabotage(self) -> None:
        """Served by a mistaken hand, without a watch: live acceptance tells, a replay proves."""
        self.users.want("maths")
        champion = self.eyes.served()
        self.eyes.until(
            "requests of the champion",
            lambda: self.eyes.live(champion, "maths", 0.0)["requests"] >= plan.SETTLED or None,
            plan.SABOTAGE_S,
        )
        ruined = sabotaged(self.settings, champion)
        began = time.time()
        hands.promote(self.settings, self.ledger, ruined, "soak", "sabotaged on purpose", watched=False)
        self._event(f"sabotaged: {ruined} is served")
        back = self.eyes.until(
            "the rollback", lambda: self.eyes.since(began, Action.ROLLED_BACK), plan.SABOTAGE_S
        )
        self._event(f"rolled back: {back.reason}")
        held = self.ledger.guard.barred(self.settings.deployment, ruined)
        figures = {
            "sabotaged": ruined,
            "seconds_to_rollback": back.at - began,
            "reason": back.reason,
            "by": back.actor,
            "sabotaged_live": self.eyes.live(ruined, "maths", began),
            "champion_live": self.eyes.live(champion, "maths", 0.0),
            "barred": held is not None,
        }
        holds = self.eyes.served() == champion and held is not None and back.actor == "sensor"
        self._check("a sabotaged draft is rolled back by live acceptance", holds, figures)

    def _report(self) -> None:
        self.users.want(None)
        self.eyes.quiet()
        status = self.client.status()["capture"]
        captured = int(status["samples"])
        with self.screen.status() as show:
            show(f"waiting for {captured} samples in the dataset")
            time.sleep(10 * self.settings.ingest.commit_seconds)
        dropped = dropped_samples(self.client, self.settings)
        self.result.checks.append(nothing_lost(self.settings, captured, dropped, self.poisoned))
        self.result.checks.append(agreed(self.settings, self.ledger, [self.eyes.served()]))
        for check in self.result.checks[-2:]:
            self._event(f"{check.name}: {'holds' if check.holds else 'DOES NOT HOLD'}")

    def _event(self, text: str) -> None:
        self.result.events.append((round(self.clock.elapsed, 1), text))
        self.screen.say(f"  {text}")

    def _check(self, name: str, holds: bool, figures: dict) -> None:
        self.result.checks.append(Check(name, holds, figures))
        self.screen.say(f"  {'holds' if holds else 'DOES NOT HOLD'}: {name}")
