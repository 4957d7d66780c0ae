"""The draft that is served."""

import dagster as dg

from assets.partitions import windows
from assets.pools import DEPLOYMENT
from assets.validation import acceptance_report
from resources.cycle import Cycle


@dg.asset(
    deps=[acceptance_report],
    partitions_def=windows,
    group_name="serving",
    kinds={"sglang"},
    pool=DEPLOYMENT,
)
def serving_draft(context: dg.AssetExecutionContext, cycle: Cycle) -> dg.MaterializeResult:
    """The challenger reloaded into the running server, read back, and made champion.

    Reads the verdict again, against the draft that is served now: without a pass nothing is reloaded.
    """
    deployed = cycle.deploy(context)
    return dg.MaterializeResult(
        metadata=cycle.deployed_metadata(context, deployed), data_version=dg.DataVersion(deployed.served)
    )
