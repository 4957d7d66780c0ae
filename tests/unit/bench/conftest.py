"""Makes the helpers of tests/fixtures importable; what the experiments on the tiny target share."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tide_platform.capture.record import Sample
from tide_platform.config import Settings
from tide_platform.draft.checkpoint import new_draft, save_draft

sys.path.insert(0, str(Path(__file__).parents[2] / "fixtures"))

from tiny import AUX_LAYERS, TINY, prompts, say, tiny_parts


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    draft = tmp_path_factory.mktemp("draft") / "base"
    save_draft(draft, new_draft(tiny_parts(), np.arange(20, 140), AUX_LAYERS), {})
    settings = Settings(target=TINY, draft=draft, state=draft.parent / "state")
    settings.training.epochs, settings.training.learning_rate, settings.training.threads = 3, 3e-3, 1
    return settings


@pytest.fixture(scope="module")
def by_tenant() -> dict[str, list[Sample]]:
    """What an experiment captures of ``maths`` and of general prompts."""
    return {
        "maths": say(prompts(24), 40),
        "maths-held": say(prompts(12, seed=4), 40),
        "reference": say(prompts(24, seed=5), 40),
        "general-held": say(prompts(8, seed=6), 40),
    }
