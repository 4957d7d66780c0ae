"""The served draft, looked at daily."""

import dagster as dg

from assets.deployment import serving_draft
from resources.cycle import Cycle


@dg.asset(deps=[serving_draft], group_name="validation", kinds={"torch", "mlflow"})
def reference_acceptance(context: dg.AssetExecutionContext, cycle: Cycle) -> dg.MaterializeResult:
    """Acceptance replay of the champion on the reference samples that are kept for judging, at the served
    number of speculative steps and at all others.
    """
    evaluation = cycle.evaluate()
    return dg.MaterializeResult(
        metadata=cycle.evaluation_metadata(context, evaluation), tags={"digest": evaluation.champion}
    )
