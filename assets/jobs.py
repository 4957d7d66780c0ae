"""The job that adapts the draft to one window, and those that the clock starts."""

import dagster as dg

from assets.deployment import serving_draft
from assets.evaluation import reference_acceptance
from assets.training import draft_checkpoint, draft_is_consistent
from assets.upkeep import dataset_upkeep
from assets.validation import acceptance_report, challenger_is_better, reference_is_held

adapt_draft = dg.define_asset_job(
    "adapt_draft",
    selection=dg.AssetSelection.assets(draft_checkpoint, acceptance_report, serving_draft)
    | dg.AssetSelection.checks(draft_is_consistent, challenger_is_better, reference_is_held),
    # the sensor and its ledger try again, nobody else: their attempts are counted and bounded
    tags={"dagster/max_retries": "0"},
    description="Fine-tune the draft on a window, judge it against the champion, deploy it if it is better.",
)

evaluate_champion = dg.define_asset_job(
    "evaluate_champion",
    selection=dg.AssetSelection.assets(reference_acceptance),
    tags={"dagster/max_retries": "0"},
    description="Replay the served draft on the reference samples that are kept for judging.",
)

maintain_dataset = dg.define_asset_job(
    "maintain_dataset",
    selection=dg.AssetSelection.assets(dataset_upkeep),
    tags={"dagster/max_retries": "0"},
    description="One whole pass of upkeep: expire, compact, clean up the dataset; thin the live history.",
)
