"""Whether speculation pays: the measured speed-up over the target alone, by batch size, and an alarm where it
falls under 1. SGLang itself changes or stops speculation (``serving.adaptive``); this tells people.
"""

from tide_platform.config import Settings
from tide_platform.control.audit import SENSOR, Action, Entry
from tide_platform.control.ledger import Ledger
from tide_platform.evaluation.cost_model import NoCostModel, of_deployment
from tide_platform.evaluation.speculation import alarm, measured

NAME = "speedup"  # under which it is kept: batch size (as text) -> speed-up
HYSTERESIS = 0.05


def watch_speed(settings: Settings, ledger: Ledger, target_digest: str, draft: str, now: float) -> list[str]:
    """Over the last ``watch.speed_minutes`` of the served draft's requests; batch sizes in alarm, in words.

    Without a cost model of this target nothing is known, and nothing told. ``now``: Unix time, seconds.
    """
    try:
        model, _ = of_deployment(settings, target_digest)
    except NoCostModel as error:
        return [str(error)]
    if model is None:
        return []
    deployment, of = settings.deployment, settings.watch
    blocks = ledger.history.blocks(deployment, now - of.speed_minutes * 60)
    speedups = measured(model, [block for block in blocks if block.draft == draft])
    before = ledger.controls.get(deployment, NAME) or {}
    found = alarm(before, speedups, of.speed_requests, HYSTERESIS)
    for batch in found.slower:
        fell = speedups[batch]
        reason = (
            f"with {batch} requests at a time speculation is {fell.value:.2f} times as fast as none "
            f"({fell.token_ms:.1f} ms a token, {fell.plain_ms:.1f} without; {fell.requests} requests)"
        )
        ledger.note(Entry(deployment, SENSOR, Action.SLOWER, reason, digest=draft))
    for batch in found.recovered:
        reason = f"with {batch} requests at a time speculation pays again: {speedups[batch].value:.2f}"
        ledger.note(Entry(deployment, SENSOR, Action.FASTER, reason, digest=draft))
    if found.values != before:
        ledger.controls.put(deployment, NAME, found.values)
    slow = {batch: value for batch, value in found.values.items() if value < 1}
    return [f"speculation is slower than none at batch size {b}: {v:.2f}" for b, v in slow.items()]
