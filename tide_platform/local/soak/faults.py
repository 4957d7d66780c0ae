"""What the soak does to the loop: samples whose teacher lies, a draft that never hits."""

import shutil
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tide_platform.capture.record import Sample
from tide_platform.config import Settings, draft_digest

POISONER = "poisoned"  # tenant of the ruined samples


def poison(settings: Settings, count: int, seed: int = 0) -> int:
    """Appends copies of the newest ``count`` samples whose teacher rows stand at other positions than they
    belong to: a draft that learns from them proposes what the target does not say there. How many were
    appended, in one commit.
    """
    from tide_platform.capture.split import REFERENCE_TENANT
    from tide_platform.store.hidden_states import open_store

    store = open_store(settings)
    refs = store.refs(where=f"tenant != '{REFERENCE_TENANT}'")[-count:]
    draw = np.random.default_rng(seed)
    samples = [_ruined(sample, draw) for sample in store.load(refs)]
    store.append(samples, [f"{POISONER}-{seed}"])
    return len(samples)


def _ruined(sample: Sample, draw: np.random.Generator) -> Sample:
    name = f"{POISONER}-{sample.meta.sample_id}"
    meta = replace(
        sample.meta,
        sample_id=name,
        request_id=name,
        tenant=POISONER,
        captured_at=time.time(),
        aux_format="bf16",
    )
    order = draw.permutation(len(sample.tensors["teacher_pos"]))
    moved = {part: sample.tensors[part][order] for part in ("teacher_ids", "teacher_logp")}
    return Sample(meta, sample.tensors | moved)


def sabotaged(settings: Settings, champion: str) -> str:
    """Registers the champion with the signs of its head turned, so that it proposes what is least likely; the
    digest.
    """
    from safetensors.torch import load_file, save_file

    from tide_platform.control.champion import fetch_draft, store_draft
    from tide_platform.registry.mlflow_registry import DraftRegistry

    with TemporaryDirectory(prefix="tide-sabotage-") as work:
        folder = Path(work) / "draft"
        shutil.copytree(fetch_draft(settings, champion), folder)
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = -weights["lm_head.weight"]
        save_file(weights, folder / "model.safetensors")
        digest = draft_digest(folder)
        registry = DraftRegistry(settings)
        run_id = registry.begin(f"sabotaged {champion}", {"digest": digest}, {})
        registry.register(run_id, folder, digest, store_draft(settings, folder, digest), {}, {})
        registry.end(run_id)
    return digest
