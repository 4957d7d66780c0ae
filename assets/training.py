"""Fine-tuning of the draft."""

import dagster as dg

from assets.capture import hidden_states
from assets.partitions import windows
from resources.cycle import Cycle
from resources.trainer import Trainer


@dg.asset(
    deps=[hidden_states],
    partitions_def=windows,
    group_name="training",
    kinds={"torch", "mlflow"},
    pool="training",
)
def draft_checkpoint(
    context: dg.AssetExecutionContext, cycle: Cycle, trainer: Trainer
) -> dg.MaterializeResult:
    """The served draft fine-tuned on one window: stored, registered, alias challenger. Trained by `tide
    train`.
    """
    trained = cycle.train(context, trainer)
    return dg.MaterializeResult(
        metadata=trained.metadata(),
        data_version=dg.DataVersion(trained.challenger),
        tags={"digest": trained.challenger},
    )
