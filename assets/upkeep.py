"""Upkeep of what is stored."""

import dagster as dg

from resources.cycle import Cycle


@dg.asset(group_name="capture", kinds={"lance", "s3"})
def dataset_upkeep(cycle: Cycle) -> dg.MaterializeResult:
    """One whole pass over the dataset (as `tide maintain --once`) and over the history of live requests."""
    return dg.MaterializeResult(metadata=cycle.maintain())
