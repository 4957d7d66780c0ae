"""What the servers log: an external asset, written by `tide ingest`, never by Dagster."""

import dagster as dg

from assets.partitions import windows

hidden_states = dg.AssetSpec(
    "hidden_states",
    partitions_def=windows,
    group_name="capture",
    kinds={"lance", "s3"},
    description="Samples captured by the SGLang server, in Lance; a partition is one window of them.",
)
