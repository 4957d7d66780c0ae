"""Fine-tuning of the draft, and whether what was trained is what would be served."""

import dagster as dg

from assets.capture import hidden_states
from assets.partitions import windows
from assets.pools import TRAINING
from resources.cycle import Cycle
from resources.step_pods import step_pod_tags
from resources.trainer import Trainer
from tide_platform.config import load_settings


@dg.asset(
    deps=[hidden_states],
    partitions_def=windows,
    group_name="training",
    kinds={"torch", "mlflow"},
    pool=TRAINING,
    op_tags=step_pod_tags(load_settings()),
)
def draft_checkpoint(
    context: dg.AssetExecutionContext, cycle: Cycle, trainer: Trainer
) -> dg.MaterializeResult:
    """The served draft fine-tuned on one window: stored, registered, alias challenger. Trained by `tide
    train`.
    """
    trained = cycle.train(context, trainer)
    return dg.MaterializeResult(
        metadata=cycle.trained_metadata(context, trained),
        data_version=dg.DataVersion(trained.challenger),
        tags={"digest": trained.challenger},
    )


@dg.asset_check(asset=draft_checkpoint, partitions_def=windows, blocking=True)
def draft_is_consistent(context: dg.AssetCheckExecutionContext, cycle: Cycle) -> dg.AssetCheckResult:
    """The consistency gate on the stored checkpoint (`tide gate`): its files as SGLang would load them,
    target, rope, layers, vocabulary map and head against the draft that it was trained from. A server of the
    gate's own is started where `gate.own_server` says so.
    """
    report = cycle.consistency(context.partition_key)
    return dg.AssetCheckResult(
        passed=report.passed,
        description="; ".join(f"{each.name}: {each.message}" for each in report.failures or report.checks),
        metadata={"seconds": report.seconds, "checks": len(report.checks), "report": report.to_json()},
    )
