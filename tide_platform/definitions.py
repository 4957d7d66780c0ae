"""Everything that Dagster runs, in one place. Imports no torch, Lance or MLflow: those load where they are
used.
"""

import dagster as dg

from assets.alerts import tell_of_failed_runs, tell_what_happened
from assets.capture import hidden_states
from assets.deployment import serving_draft
from assets.evaluation import reference_acceptance
from assets.jobs import adapt_draft, evaluate_champion, maintain_dataset
from assets.leftovers import pods_left_behind
from assets.mending import mend_deployment
from assets.schedules import schedules, watched
from assets.sensors import enough_hidden_states
from assets.training import draft_checkpoint, draft_is_consistent
from assets.upkeep import dataset_upkeep
from assets.validation import acceptance_report, challenger_is_better, reference_is_held
from assets.watching import watch_champion
from resources.cycle import Cycle
from resources.step_pods import executor
from resources.trainer import Trainer
from tide_platform.config import load_settings

settings = load_settings()

defs = dg.Definitions(
    assets=dg.map_asset_specs(
        lambda spec: watched(spec, settings.schedule),
        [
            hidden_states,
            draft_checkpoint,
            acceptance_report,
            serving_draft,
            reference_acceptance,
            dataset_upkeep,
        ],
    ),
    asset_checks=[draft_is_consistent, challenger_is_better, reference_is_held],
    jobs=[adapt_draft, evaluate_champion, maintain_dataset, mend_deployment],
    schedules=schedules(settings.schedule),
    sensors=[
        enough_hidden_states(settings.window.sensor_seconds),
        watch_champion(settings.watch.sensor_seconds),
        tell_what_happened(settings.notify.sensor_seconds),
        tell_of_failed_runs(settings.notify.sensor_seconds),
        *pods_left_behind(settings),
    ],
    # of runs that a hand starts as well
    executor=executor(settings),
    resources={"cycle": Cycle(), "trainer": Trainer()},
)
