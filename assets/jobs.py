"""The job that adapts the draft to one window."""

import dagster as dg

from assets.deployment import serving_draft
from assets.training import draft_checkpoint
from assets.validation import acceptance_report, challenger_is_better

adapt_draft = dg.define_asset_job(
    "adapt_draft",
    selection=dg.AssetSelection.assets(draft_checkpoint, acceptance_report, serving_draft)
    | dg.AssetSelection.checks(challenger_is_better),
    # one process a run: a process for each step would pay the imports four times
    executor_def=dg.in_process_executor,
    # the sensor and its ledger try again, nobody else: their attempts are counted and bounded
    tags={"dagster/max_retries": "0"},
    description="Fine-tune the draft on a window, judge it against the champion, deploy it if it is better.",
)
