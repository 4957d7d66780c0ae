"""Champion against challenger, and the gate that a challenger must pass."""

import dagster as dg

from assets.partitions import windows
from assets.training import draft_checkpoint
from resources.cycle import Cycle


@dg.asset(deps=[draft_checkpoint], partitions_def=windows, group_name="validation", kinds={"torch", "mlflow"})
def acceptance_report(context: dg.AssetExecutionContext, cycle: Cycle) -> dg.MaterializeResult:
    """Acceptance replay of both drafts, paired, on the window's validation samples and on the reference
    set.
    """
    verdict = cycle.judge(context)
    return dg.MaterializeResult(metadata=cycle.report_metadata(context, verdict))


@dg.asset_check(asset=acceptance_report, partitions_def=windows, blocking=True)
def challenger_is_better(context: dg.AssetCheckExecutionContext, cycle: Cycle) -> dg.AssetCheckResult:
    """Passes when the window's challenger beats the champion and has not forgotten the reference set.

    A failure is a valid end: the window is rejected, nothing is deployed and nothing tried again.
    """
    verdict = cycle.last_verdict(context.partition_key)
    return dg.AssetCheckResult(
        passed=verdict.passed, description=verdict.summary, metadata=cycle.verdict_metadata(verdict)
    )


@dg.asset_check(asset=acceptance_report, partitions_def=windows)
def reference_is_held(context: dg.AssetCheckExecutionContext, cycle: Cycle) -> dg.AssetCheckResult:
    """A warning where the challenger forgot the reference set (`gate.reference_floor`), told apart from a
    gain that was too small; `challenger_is_better` is what stops a run.
    """
    verdict = cycle.last_verdict(context.partition_key)
    held = verdict.on_reference
    return dg.AssetCheckResult(
        passed=held is not None and held.ratio >= verdict.reference_floor,
        severity=dg.AssetCheckSeverity.WARN,
        metadata={"floor": verdict.reference_floor, **({"ratio": held.ratio} if held else {})},
    )
