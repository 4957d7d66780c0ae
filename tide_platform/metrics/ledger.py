"""Windows, verdicts, deployments, live traffic and controls, from the ledger's database."""

import time
from collections.abc import Callable
from typing import Any

from tide_platform.config import Settings, TideError
from tide_platform.control.history import Block, total
from tide_platform.control.ledger import Ledger
from tide_platform.control.overview import acceptance_at_promotion
from tide_platform.control.promotion import Verdict
from tide_platform.control.speed import NAME as SPEEDUP
from tide_platform.metrics.sheet import Sheet

SHARES = (0.5, 0.99)  # of requests: median, 99th percentile


class ControlUnreadable(TideError):
    """A control's memory is not what the exporter knows how to tell."""

    def __init__(self, deployment: str, name: str, value: Any):
        super().__init__(
            f"{deployment}: the ledger's control {name!r} holds {value!r}, expected ratios by batch size; "
            "another version of tide wrote it: update this one"
        )
        self.deployment, self.name, self.value = deployment, name, value


def read_ledger(settings: Settings, ledger: Ledger) -> Sheet:
    """Raises what the database raises."""
    sheet = Sheet()
    _windows(settings, ledger, sheet)
    _verdicts(settings, ledger, sheet)
    _deployments(settings, ledger, sheet)
    _rollout(settings, ledger, sheet)
    return sheet


def read_live(settings: Settings, ledger: Ledger, clock: Callable[[], float] = time.time) -> Sheet:
    """Counters since ever; acceptance length and times a token over the last ``metrics.live_seconds``."""
    sheet, limits, now = Sheet(), settings.metrics, clock()
    found = ledger.figures.live(settings.deployment, now - 3600 * limits.live_hours, limits.live_groups)
    names = {
        "requests": "tide_live_requests_total",
        "aborted": "tide_live_aborted_total",
        "tokens": "tide_live_tokens_total",
        "rounds": "tide_live_rounds_total",
        "accepted": "tide_live_accepted_total",
        "decode_s": "tide_live_decode_seconds_total",
        "decoded": "tide_live_decoded_tokens_total",
    }
    for group in found.groups:
        for column, name in names.items():
            sheet.put(name, group.sums[column], *group.key)
    kept = {group.key for group in found.groups}
    for key, blocks in _grouped(
        ledger.history.blocks(settings.deployment, now - limits.live_seconds)
    ).items():
        if key in kept:
            one = total(blocks)
            sheet.put("tide_live_acceptance_length", one.acceptance_length, *key)
            for share in SHARES:
                ms = one.quantile_ms(share)
                sheet.put("tide_live_token_seconds", None if ms is None else ms / 1000, *key, share)
    sheet.put("tide_live_missed_requests_total", ledger.history.missed(settings.deployment))
    sheet.put("tide_live_groups_left_out", found.left_out)
    return sheet


def read_controls(settings: Settings, ledger: Ledger) -> Sheet:
    """Raises :class:`ControlUnreadable` too."""
    sheet = Sheet()
    value = ledger.controls.get(settings.deployment, SPEEDUP)
    if not isinstance(value, dict) or not all(isinstance(each, int | float) for each in value.values()):
        raise ControlUnreadable(settings.deployment, SPEEDUP, value)
    for batch, ratio in value.items():
        sheet.put("tide_speedup_ratio", ratio, batch)
    return sheet


def _windows(settings: Settings, ledger: Ledger, sheet: Sheet) -> None:
    figures = ledger.figures.windows(settings.deployment)
    for state, count in figures.by_state.items():
        sheet.put("tide_windows", count, state)
    for state, at in figures.oldest.items():
        sheet.put("tide_windows_oldest_timestamp_seconds", at, state)
    sheet.put("tide_windows_attempt", figures.attempt)
    sheet.put("tide_windows_attempts_allowed", settings.window.max_attempts)
    sheet.put("tide_windows_retries_total", figures.retries)
    sheet.put("tide_windows_seen_timestamp_seconds", figures.seen_at)
    sheet.put("tide_windows_lease_seconds", settings.window.lease_s)
    sheet.put("tide_windows_samples_wanted", settings.window.min_samples)
    scan = ledger.scan(settings.deployment)
    sheet.put("tide_scan_rows", scan.rows)
    sheet.put("tide_scan_pending_samples", scan.pending)


def _verdicts(settings: Settings, ledger: Ledger, sheet: Sheet) -> None:
    figures = ledger.figures.verdicts(settings.deployment)
    sheet.put("tide_verdicts_total", figures.passed, "passed")
    sheet.put("tide_verdicts_total", figures.rejected, "rejected")
    sheet.put("tide_verdict_timestamp_seconds", figures.judged_at)
    if figures.evidence is not None:
        compared = Verdict.from_json(dict(figures.evidence)).on_window
        if compared is not None:
            sheet.put("tide_verdict_gain_ratio", compared.gain.point)
            sheet.put("tide_verdict_gain_lower_ratio", compared.gain.lower)


def _deployments(settings: Settings, ledger: Ledger, sheet: Sheet) -> None:
    figures = ledger.figures.deployments(settings.deployment)
    sheet.put("tide_deployments_total", figures.count)
    if figures.last is not None:
        draft = figures.last["served"]
        judged = [Verdict.from_json(dict(figures.evidence))] if figures.evidence is not None else []
        length = acceptance_at_promotion(figures.last, judged)
        sheet.put("tide_champion_info", 1, draft)
        sheet.put("tide_champion_timestamp_seconds", figures.last["deployed_at"])
        sheet.put("tide_champion_promoted_acceptance_length", length, draft)
    for action, count in ledger.figures.audit(settings.deployment).items():
        sheet.put("tide_audit_total", count, action)
    sheet.put("tide_barred_drafts", ledger.figures.barred(settings.deployment))
    sheet.put("tide_frozen", ledger.guard.frozen(settings.deployment) is not None)


def _rollout(settings: Settings, ledger: Ledger, sheet: Sheet) -> None:
    unfinished = ledger.rollouts.unfinished(settings.deployment)
    sheet.put("tide_rollout_unfinished", unfinished is not None)
    if unfinished is not None:
        sheet.put("tide_rollout_info", 1, unfinished.challenger, unfinished.step)
        sheet.put("tide_rollout_started_timestamp_seconds", unfinished.started_at)
        sheet.put("tide_rollout_step_timestamp_seconds", unfinished.updated_at)


def _grouped(blocks: list[Block]) -> dict[tuple[str, str, int], list[Block]]:
    groups: dict[tuple[str, str, int], list[Block]] = {}
    for block in blocks:
        groups.setdefault((block.draft, block.tenant, block.batch), []).append(block)
    return groups
