"""The demo in small: the tiny target, few prompts. ``python small_demo.py STATE DRAFT WORKLOAD``."""

import sys
from pathlib import Path

from tide_platform.config import Settings, load_settings
from tide_platform.local.demo import plan, samples
from tide_platform.local.demo.measure import Load
from tide_platform.local.demo.run import run_demo, show_summary
from tide_platform.local.demo.screen import Screen
from tide_platform.local.interrupt import EXIT_STATUS, Interrupted, interruptible

TINY = Path(__file__).parents[1] / "fixtures" / "tiny_target"
SAMPLES = 32


def small_settings(state: Path, draft: Path) -> Settings:
    """Settings that fit the tiny target; the gate lets any gain pass."""
    settings = load_settings(environ={})
    settings.state, settings.draft, settings.target = state, draft, TINY
    settings.serving.threads, settings.serving.context_length = 1, 256
    settings.serving.max_total_tokens = 4096
    settings.capture.ring_bytes, settings.capture.segment_bytes = 16 << 20, 1 << 20
    settings.capture.segment_seconds = 0.5
    settings.training.epochs, settings.training.learning_rate, settings.training.threads = 6, 3e-3, 1
    settings.gate.min_gain, settings.gate.confidence = 0.0, 0.6
    settings.window.sensor_seconds = 2
    settings.serving.ready_timeout_s = settings.stack.ready_timeout_s = 500
    return settings


def shrink_plan() -> None:
    """The same phases with less of everything."""
    plan.HEADLINE = Load(concurrency=8, prompts=8, new_tokens=32, required=True)
    plan.LOADS = (plan.HEADLINE, Load(1, 2, 16))
    plan.GENERAL_LOAD, plan.GENERAL_PROMPTS = Load(8, 4, 32, required=True), 4
    plan.REFERENCE_SAMPLES = 12
    samples.NEW_TOKENS = 40


def main() -> int:
    state, draft, workload = (Path(word) for word in sys.argv[1:])
    shrink_plan()
    screen = Screen()
    try:
        with interruptible():
            options = plan.Options(str(workload), SAMPLES)
            summary, addresses = run_demo(small_settings(state, draft), options, screen, auto_ports=True)
            show_summary(summary, state / "demo", addresses, screen)
    except Interrupted:
        return EXIT_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())
