"""What the demo does, how much of it, and how long that is expected to take on two cores."""

from dataclasses import dataclass

from tide_platform.local.demo.clock import Phase
from tide_platform.local.demo.measure import Load

LIMIT_S = 20 * 60.0  # all phases together
NEW_TOKENS = 96
GENERAL_PROMPTS = 24
REFERENCE_SAMPLES, REFERENCE_CONCURRENCY = 240, 16
TRAFFIC_LEVELS = (4, 8, 16)
HEADLINE = Load(concurrency=8, prompts=32, new_tokens=NEW_TOKENS, required=True)
# the figures at other levels are for the plot: left out when time runs short
LOADS = (
    HEADLINE,
    Load(concurrency=4, prompts=32, new_tokens=NEW_TOKENS),
    Load(concurrency=1, prompts=6, new_tokens=48),
)
GENERAL_LOAD = Load(concurrency=8, prompts=GENERAL_PROMPTS, new_tokens=NEW_TOKENS, required=True)
WINDOW_TIMEOUT_S, CYCLE_TIMEOUT_S = 90.0, 900.0
# tokens a second expected of the speculative server, for the budget only
_RATE = {1: 20.0, 4: 65.0, 8: 100.0, 16: 120.0}


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    workload: str  # a name, or a JSONL file
    samples: int
    keep: bool = False

    @property
    def tenant(self) -> str:
        """Captured samples carry the workload's name."""
        from pathlib import Path

        return Path(self.workload).stem


def level_sizes(samples: int) -> dict[int, int]:
    """Concurrency -> how many samples are sent at it: proportional, so that each lasts about as long."""
    total = sum(TRAFFIC_LEVELS)
    sizes = {level: samples * level // total for level in TRAFFIC_LEVELS}
    sizes[TRAFFIC_LEVELS[-1]] += samples - sum(sizes.values())
    return {level: size for level, size in sizes.items() if size}


def phases(options: Options) -> list[Phase]:
    """The phases in order. Expected seconds: of an idle machine with two cores."""
    passes = sum(load_seconds(load) for load in LOADS)
    traffic = sum(size * NEW_TOKENS / _RATE[level] for level, size in level_sizes(options.samples).items())
    reference = REFERENCE_SAMPLES * 70 / _RATE[REFERENCE_CONCURRENCY]  # general answers are shorter
    train = 30 + 0.8 * options.samples
    return [
        Phase("stack", "starting object storage, MLflow, Dagster and the server without speculation", 60),
        Phase("plain", "measuring the server without speculation", passes),
        Phase("server", "starting the server with its draft", 45),
        Phase("recovery", "finishing the window that an earlier demo left", 0),
        Phase("reference", "capturing the reference set (general prompts), once a stack", reference),
        Phase("static", "measuring the static draft", load_seconds(HEADLINE) + load_seconds(GENERAL_LOAD)),
        Phase("traffic", f"sending {options.samples} {options.tenant} prompts, captured", traffic),
        Phase("cycle", "watching: window, training, validation, deployment", 25 + train),
        Phase(
            "adapted",
            "measuring both drafts in turn",
            2 * passes + 2 * load_seconds(HEADLINE) + load_seconds(GENERAL_LOAD),
        ),
        Phase("report", "writing summary and page, ending the stack", 15),
    ]


def load_seconds(load: Load) -> float:
    """Expected seconds of one pass."""
    return load.prompts * load.new_tokens * 0.95 / _RATE[load.concurrency]
