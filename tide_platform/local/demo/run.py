"""The demo itself, phase by phase. It sends traffic and measures; the loop is left to itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide_platform.config import Settings
from tide_platform.control.records import WindowRecord
from tide_platform.control.states import State
from tide_platform.local import services
from tide_platform.local.demo import plan
from tide_platform.local.demo.clock import Clock, Pace
from tide_platform.local.demo.finish import Outcome, conclude
from tide_platform.local.demo.measure import Bench, Figures, Load
from tide_platform.local.demo.samples import (
    NothingCut,
    captured_traffic,
    dropped_samples,
    missing_reference,
    pending_samples,
    wait_landed,
)
from tide_platform.local.demo.screen import Screen
from tide_platform.local.demo.summary import Summary
from tide_platform.local.demo.watch import Watcher
from tide_platform.local.graphql import Dagster
from tide_platform.local.ready import dagster_url, server_url
from tide_platform.local.stack import Stack
from tide_platform.serving.client import SglangClient
from tide_platform.serving.deployment_lock import deployment_lock
from tide_platform.serving.target import prepare_target, resolve_target
from tide_platform.serving.workloads import HELD_OUT, TRAFFIC, Prompt, load_workload


@dataclass(frozen=True)
class Prompts:
    """What is sent. ``held_out`` of the workload and of general prompts; never captured."""

    traffic: list[Prompt]
    held_out: list[Prompt]
    general: list[Prompt]
    reference: list[Prompt]


def run_demo(
    settings: Settings, options: plan.Options, screen: Screen, *, auto_ports: bool
) -> tuple[Summary, dict[str, str]]:
    """The whole demo on the stack of ``settings.state``: its summary and the addresses of the services.

    Everything that was started has ended when it returns, unless ``options.keep``.
    Raises a :class:`~tide_platform.config.TideError` where a phase fails; a rejected challenger is none.
    """
    prompts = load_prompts(settings, options, screen)
    with Stack(settings, lambda line: screen.say(f"  {line}"), auto_ports=auto_ports) as stack:
        demo = Demo(stack, options, prompts, screen)
        try:
            summary = demo.run()
        finally:
            demo.close()
        if options.keep:
            stack.keep()
        return summary, stack.addresses()


def load_prompts(settings: Settings, options: plan.Options, screen: Screen) -> Prompts:
    """Target and workloads, prepared where they are not there yet: set-up, not counted in the demo's time."""
    if settings.target is None:
        prepare_target(screen.say)
    general = load_workload("general", TRAFFIC)
    return Prompts(
        traffic=load_workload(options.workload, TRAFFIC),
        held_out=load_workload(options.workload, HELD_OUT, plan.HEADLINE.prompts),
        general=load_workload("general", HELD_OUT, plan.GENERAL_PROMPTS),
        # from the end: the base draft was trained on the first of them (drafts/README.md), and a reference
        # that a draft knows by heart measures its memory, which any fine-tuning loses
        reference=general[-plan.REFERENCE_SAMPLES :],
    )


class Demo:
    """One run of the demo on one stack."""

    def __init__(self, stack: Stack, options: plan.Options, prompts: Prompts, screen: Screen):
        self.stack, self.options, self.prompts, self.screen = stack, options, prompts, screen
        self.clock, self.pace = Clock(plan.phases(options), screen.say), Pace()
        self.plain, self.static, self.adapted = Figures("plain"), Figures("static"), Figures("adapted")
        self.general: dict[str, float] = {}
        self._clients: list[Callable[[], None]] = []

    def close(self) -> None:
        """Close what was opened towards the stack; before the stack ends."""
        for close in reversed(self._clients):
            close()

    def run(self) -> Summary:
        """All phases. Raises a TideError."""
        expected = sum(phase.expected_s for phase in plan.phases(self.options))
        self.screen.say(f"about {expected / 60:.0f} minutes on two idle cores")
        self._start()
        self._measure_plain()
        self._start_server()
        static = self._static_draft()
        self._capture_reference()
        self._measure_static()
        window = self._adapt()
        self._measure_adapted(window, static)
        with self.clock.phase("report"):
            return conclude(self._outcome(window, static))

    # --- the stack

    def _start(self) -> None:
        with self.clock.phase("stack"):
            self.stack.open(die_with_parent=not self.options.keep)
            self.stack.start([services.STORAGE])
            self.settings = self.stack.settings
            # a window is all of this demo's samples and those that an interrupted one left
            waiting = pending_samples(self.settings)
            self.settings.window.min_samples = waiting + self.options.samples
            self.stack.write_settings()
            self.target = resolve_target(self.settings)
            self.watcher = Watcher(self.settings, Dagster(dagster_url(self.settings)))
            self._clients.append(self.watcher.close)
            platform = [name for name in services.PLATFORM if name != services.STORAGE]
            self.leftover = self.watcher.open_windows()
            # with work left over the loop needs the real server at once: a draft is deployed to it
            first = [services.SERVER, services.INGEST] if self.leftover else [services.PLAIN]
            self.stack.start([*platform, *first])
            self._connect()
        if self.leftover:
            self._finish_leftover()

    def _connect(self) -> None:
        import os

        self.client = SglangClient(server_url(self.settings), os.environ["TIDE_ADMIN_KEY"])
        self._clients.append(self.client.close)
        self.bench = Bench(self.client, self.target, self.screen, self.clock.began)

    def _finish_leftover(self) -> None:
        """Let the loop finish what an interrupted demo left, before anything is measured."""
        with self.clock.phase("recovery"), self.screen.status() as show:
            while open_windows := self.watcher.open_windows():
                ended = self.watcher.until_final(open_windows[0], plan.CYCLE_TIMEOUT_S, show)
                self.screen.say(f"  window {ended.key.window} of an earlier demo: {ended.state}")
            self.watcher.until_quiet(plan.CYCLE_TIMEOUT_S, show)
        self.stack.stop(services.SERVER)
        self.stack.start([services.PLAIN])

    def _start_server(self) -> None:
        with self.clock.phase("server"):
            self.stack.stop(services.PLAIN)
            self.stack.start([services.SERVER, services.INGEST])

    # --- measuring

    def _measure_plain(self) -> None:
        with self.clock.phase("plain"):
            for load in plan.LOADS:
                self._measure(self.plain, load, "plain")

    def _measure_static(self) -> None:
        with self.clock.phase("static"):
            self._quiet()
            self._measure(self.static, plan.HEADLINE, "static")
            self._measure_general("before", "static")

    def _measure_adapted(self, window: WindowRecord, static: str) -> None:
        """Adapted, static, static, adapted: what drifts over time falls on both alike."""
        if window.state is not State.DEPLOYED:
            return
        adapted = window.challenger or ""
        folders = {digest: self.settings.drafts_folder / digest for digest in (static, adapted)}
        self.static.reports.clear()  # speed is compared within these turns only
        with self.clock.phase("adapted"), deployment_lock(self.settings):
            self._quiet()
            self.bench.load_draft(folders[adapted], adapted)
            self._measure_general("after", "adapted")
            for turn, figures in enumerate([self.adapted, self.static, self.static, self.adapted]):
                digest = adapted if figures is self.adapted else static
                self.bench.load_draft(folders[digest], digest)
                to_come = (3 - turn) * plan.load_seconds(plan.HEADLINE)
                for load in plan.LOADS if turn < 2 else [plan.HEADLINE]:
                    self._measure(figures, load, "adapted", to_come)
            self.bench.load_draft(folders[adapted], adapted)

    def _measure(self, figures: Figures, load: Load, phase: str, to_come_s: float = 0.0) -> None:
        """One pass; left out when the demo would be late with it. ``to_come_s``: of the phase after it."""
        expected = plan.load_seconds(load)
        ahead = expected + to_come_s + self.clock.left_after(phase)
        if not load.required and self.clock.elapsed + self.pace.factor * ahead > plan.LIMIT_S:
            self.screen.say(f"  left out, time is short: {figures.who}, {load.concurrency} at a time")
            return
        began = time.monotonic()
        figures.reports.append(self.bench.run(figures.who, self.prompts.held_out, load, phase))
        self.pace.add(expected, time.monotonic() - began)

    def _measure_general(self, when: str, who: str) -> None:
        report = self.bench.run(who, self.prompts.general, plan.GENERAL_LOAD, "general")
        self.general[when] = report.acceptance_length or 1.0

    def _quiet(self) -> None:
        """Two cores can't train and measure: wait until no run is in progress."""
        with self.screen.status() as show:
            self.watcher.until_quiet(plan.CYCLE_TIMEOUT_S, show)

    def _static_draft(self) -> str:
        digest = self.bench.served()
        assert digest, "the readiness probe has seen a draft"
        self.screen.say(f"  static draft: {digest}")
        return digest

    # --- the loop

    def _capture_reference(self) -> None:
        """General prompts, once a stack: forgetting is judged by them, and they are replayed in training."""
        with self.clock.phase("reference"):
            missing = missing_reference(self.settings, self.prompts.reference)
            if not missing:
                self.screen.say("  the dataset has them")
                return
            captured_traffic(self.bench, missing, "static", plan.REFERENCE_CONCURRENCY, "reference")
            with self.screen.status() as show:
                wait_landed(self.settings, "reference", len(self.prompts.reference), show)

    def _adapt(self) -> WindowRecord:
        """Send the traffic; then only watch."""
        known = self.watcher.known()
        with self.clock.phase("traffic"):
            self.sent = self._send_traffic(len(known))
        with self.clock.phase("cycle"), self.screen.status() as show:
            window = self._new_window(known, show)
            window = self.watcher.until_final(window, plan.CYCLE_TIMEOUT_S, show)
            self.watcher.until_quiet(plan.CYCLE_TIMEOUT_S, show)
            self.screen.say(f"  window {window.key.window}: {window.state}")
            return window

    def _new_window(self, known: set[str], show: Callable[[str], None]) -> WindowRecord:
        """The window of this demo's samples; where some were lost, as many more are sent, once."""
        for _ in range(2):
            window = self.watcher.new_window(known, plan.WINDOW_TIMEOUT_S, show)
            if window is not None:
                return window
            lost = self.settings.window.min_samples - pending_samples(self.settings)
            if not 0 < lost <= self.options.samples // 4:
                break
            self.screen.say(f"  {lost} samples did not reach the dataset: sending as many more")
            more = self.prompts.traffic[-lost:]
            captured_traffic(
                self.bench, more, "static", plan.TRAFFIC_LEVELS[0], self.options.tenant, "traffic"
            )
        raise NothingCut(self.settings, plan.WINDOW_TIMEOUT_S, self.watcher.sensor_word())

    def _send_traffic(self, demos_before: int) -> int:
        """Prompts that earlier demos of this stack have not sent, as far as there are others."""
        prompts, first = self.prompts.traffic, demos_before * self.options.samples
        chosen = [prompts[(first + n) % len(prompts)] for n in range(self.options.samples)]
        for level, size in plan.level_sizes(len(chosen)).items():
            captured_traffic(self.bench, chosen[:size], "static", level, self.options.tenant, phase="traffic")
            chosen = chosen[size:]
        return self.options.samples

    def _outcome(self, window: WindowRecord, static: str) -> Outcome:
        return Outcome(
            settings=self.settings,
            options=self.options,
            clock=self.clock,
            window=window,
            run=self.watcher.run_of(window),
            verdict=self.watcher.verdict_of(window),
            why_failed=self.watcher.why_failed(window) if window.state is State.FAILED else [],
            static_draft=static,
            served_draft=self.bench.served() or "",
            figures={figures.who: figures for figures in (self.plain, self.static, self.adapted)},
            general=self.general,
            held_out=min(plan.HEADLINE.prompts, len(self.prompts.held_out)),
            moments=self.bench.moments,
            dropped=dropped_samples(self.client, self.settings),
            addresses=self.stack.addresses(),
            folder=self.stack.layout.demo,
        )


def show_summary(summary: Summary, folder: Path, addresses: dict[str, str], screen: Screen) -> None:
    """A short table, and where everything is."""
    from rich.table import Table

    table = Table(title=f"{summary.workload}: {summary.outcome}", title_justify="left")
    for heading, justify in (
        ("", "left"),
        ("draft", "left"),
        ("acceptance length", "right"),
        ("tokens/s", "right"),
    ):
        table.add_column(heading, justify=justify)  # pyright: ignore[reportArgumentType]
    table.add_row("no speculation", "", "", f"{summary.plain.tokens_per_s:.1f}")
    rows: list[tuple[str, Any]] = [("static", summary.static), ("adapted", summary.adapted)]
    for name, draft in rows:
        if draft:
            table.add_row(name, draft.draft, f"{draft.acceptance_length:.3f}", f"{draft.tokens_per_s:.1f}")
    if summary.ratio:
        ratio = summary.ratio
        table.add_row("ratio", "", f"{ratio.acceptance_length:.3f}", f"{ratio.tokens_per_s:.3f}")
    screen.console.print(table)
    after = f", {summary.general.after:.3f} after" if summary.general.after else ""
    screen.say(f"general prompts: acceptance length {summary.general.before:.3f} before{after}")
    if summary.verdict:
        screen.say(f"verdict: {'passed' if summary.verdict.passed else 'rejected'}")
        for reason in summary.verdict.reasons:
            screen.say(f"  {reason}")
    for name, address in addresses.items():
        screen.say(f"{name:15} {address}")
    screen.say(f"{'summary':15} {folder / 'summary.json'}")
    screen.say(f"{'page':15} {folder / 'index.html'}")
    screen.say(f"{time.strftime('%H:%M:%S')}, {summary.seconds['total']:.0f} s")
