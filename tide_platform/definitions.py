"""Everything that Dagster runs, in one place. Imports no torch, Lance or MLflow: those load where they are
used.
"""

import dagster as dg

from assets.capture import hidden_states
from assets.deployment import serving_draft
from assets.jobs import adapt_draft
from assets.sensors import enough_hidden_states
from assets.training import draft_checkpoint
from assets.validation import acceptance_report, challenger_is_better
from resources.cycle import Cycle
from resources.trainer import Trainer
from tide_platform.config import load_settings

defs = dg.Definitions(
    assets=[hidden_states, draft_checkpoint, acceptance_report, serving_draft],
    asset_checks=[challenger_is_better],
    jobs=[adapt_draft],
    sensors=[enough_hidden_states(load_settings().window.sensor_seconds)],
    resources={"cycle": Cycle(), "trainer": Trainer()},
)
