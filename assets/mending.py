"""The job that brings servers, registry and ledger to one draft, and takes a champion back that is worse."""

import dagster as dg

from resources.cycle import Cycle


@dg.op
def mend(context: dg.OpExecutionContext, cycle: Cycle) -> list[str]:
    """Settles a dead rollout, gives the champion to servers that serve another draft, and compares a champion
    that fell with the draft before it.
    """
    mended = cycle.mend()
    for line in mended.done or ["nothing was wrong"]:
        context.log.info(line)
    return mended.done


@dg.job(
    tags={"dagster/max_retries": "0"},  # the sensor asks again
    description="Bring all servers to the champion; take one back that is worse than the draft before it.",
)
def mend_deployment() -> None:
    """Asked for by the sensor ``watch_champion``, or started by hand."""
    mend()
