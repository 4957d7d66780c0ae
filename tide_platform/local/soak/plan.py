"""What the soak does and how long it may take on two cores."""

from tide_platform.config import Settings
from tide_platform.local.demo.clock import Phase

LIMIT_S = 75 * 60.0
NEW_TOKENS, CONCURRENCY = 96, 4
REFERENCE, REFERENCE_CONCURRENCY = 200, 16
GENERAL = 120  # requests before the first shift: what the first draft's acceptance is compared with
REFERENCE_OF_DRAFT = 64  # requests that a new champion's later acceptance is compared with
SETTLED = REFERENCE_OF_DRAFT + 16  # requests of a workload before the next shift
RETURN = 64  # prompts by which the return is judged
POISON = 192  # samples
WATCHED = 40  # requests that the canary is watched for
SHIFT_S, POISON_S, SABOTAGE_S = 1500.0, 1200.0, 600.0  # until a phase is given up

PHASES = [
    Phase("start", "starting the stack", 100),
    Phase("reference", "capturing the reference set", 110),
    Phase("general", "general traffic", 110),
    Phase("maths", "traffic shifts to maths; only watching", 780),
    Phase("code", "traffic shifts to code; only watching", 900),
    Phase("return", "traffic returns to maths", 300),
    Phase("poison", "a window whose teacher was ruined on purpose", 600),
    Phase("sabotage", "a ruined draft is served past the gate and its watch", 200),
    Phase("report", "adding up, ending the stack", 60),
]


def soak_settings(settings: Settings) -> Settings:
    """``settings`` with windows, watch and rollout of a size that fits an hour, and a state of its own."""
    own = settings.model_copy(deep=True)
    own.state = settings.state.absolute() / "soak" / "state"
    # users never stop: each core has one of server and trainer, or both wait for each other's threads
    own.serving.threads = own.training.threads = 1
    own.window.min_samples, own.window.drift_samples = POISON, POISON // 2
    own.watch.reference_requests, own.watch.recent_requests = REFERENCE_OF_DRAFT, REFERENCE_OF_DRAFT
    own.watch.sensor_seconds, own.watch.mend_seconds = 5, 10.0
    own.rollout.watch_requests, own.rollout.watch_seconds = WATCHED, 60.0
    return own
