"""What ``make gpu`` does on a GPU, step by step (``gpu.py`` has the plan)."""

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tide_platform.bench import capture_cost, load
from tide_platform.capture.folder import sealed_segments
from tide_platform.capture.record import Sample
from tide_platform.capture.segment import read_segment
from tide_platform.config import Settings, TideError
from tide_platform.serving.drafts import resolve_draft, stage_draft
from tide_platform.serving.own_server import Served, served

PROMPTS, NEW_TOKENS = 16, 64
MAX_ERROR = 0.05  # relative, of a layer's states: both sides round to bf16, in another order
MIN_AGREEMENT = 0.95  # of the most likely tokens
CONCURRENCIES = (1, 4, 16, 64, 256)
BLOCKS = 20
PATIENCE_S = 120.0


class StepFailed(TideError):
    """A check on the GPU found something wrong."""


@dataclass(frozen=True)
class Context:
    """What every step works with."""

    settings: Settings  # device, target and draft of the box
    python: Path  # that has SGLang
    folder: Path

    def whole(self, **serving: Any) -> Settings:
        """With overlap and radix cache on; graphs are SGLang's default."""
        own = self.settings.model_copy(deep=True)
        own.serving.overlap_schedule, own.serving.radix_cache = True, True
        own.capture.enabled, own.capture.sampling_rate, own.capture.default = True, 1.0, "allow"
        own.capture.aux_format = "bf16"
        for name, value in serving.items():
            setattr(own.serving, name, value)
        return own


def run_module(python: Path, module: str, *arguments: str, seconds: float = 600) -> str:
    """Last line of its output. Raises :class:`StepFailed` with the last line of what it complained."""
    command = [str(python), "-m", f"tide_platform.bench.{module}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise StepFailed(f"{module}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def ring_graph(context: Context) -> dict[str, Any]:
    """Rows of a CUDA graph through staging and ring, bit by bit."""
    return json.loads(run_module(context.python, "gpu_ring", str(context.folder)))


def capture_truth(context: Context, **serving: Any) -> dict[str, Any]:
    """Captured rows of a server with graphs, overlap and radix cache against transformers."""
    settings = context.whole(**serving)
    with served(settings, context.folder) as server:
        load.flow(server, load.prompts(server, PROMPTS), NEW_TOKENS, PROMPTS, capture=True)
        _wait_for_samples(server, PROMPTS)
        layers = read_layers(server)
        target, spool = server.target, server.settings.spool_folder
    samples = [sample for path in sealed_segments(spool) for sample in read_segment(path)[1]]
    tokens, out = context.folder / "tokens.npz", context.folder / "reference.npz"
    ids: dict[str, Any] = {s.meta.sample_id: s.tensors["input_ids"] for s in samples}
    np.savez(tokens, **ids)
    run_module(context.python, "gpu_reference", str(target), str(tokens), str(out), layers)
    with np.load(out) as reference:
        return judged(compare(samples, dict(reference)))


def two_ranks(context: Context) -> dict[str, Any]:
    """The same on two devices."""
    return capture_truth(context, tp_size=2)


def attention_ranks(context: Context) -> dict[str, Any]:
    """The same, and a reload, under DP attention."""
    return _truth_and_reload(context, tp_size=2, dp_size=2, dp_attention=True)


def replicas(context: Context) -> dict[str, Any]:
    """The same of two replicas behind one server."""
    return _truth_and_reload(context, dp_size=2)


def _truth_and_reload(context: Context, **serving: Any) -> dict[str, Any]:
    folders = [context.folder / name for name in ("truth", "reload")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    truth, changed = (replace(context, folder=folder) for folder in folders)
    return {"truth": capture_truth(truth, **serving), "reload": reload(changed, **serving)}


def read_layers(server: Served) -> str:
    path = server.settings.state / "engine.json"
    return ",".join(str(layer) for layer in json.loads(path.read_text())["aux_layer_ids"])


def compare(samples: Sequence[Sample], reference: dict[str, np.ndarray]) -> dict[str, Any]:
    """``error_low``, ``_middle``, ``_high``: relative error (L2) of a sample's median row, by aux layer, the
    largest over the samples; ``agreement``: share of teacher rows with the reference's most likely token.
    """
    errors: list[list[float]] = []
    agreed = rows = 0
    for sample in samples:
        aux, best = reference[f"{sample.meta.sample_id}.aux"], reference[f"{sample.meta.sample_id}.best"]
        start = sample.meta.start_pos
        captured = (sample.tensors["aux"].astype(np.uint32) << 16).view(np.float32)
        wanted = aux[sample.tensors["row_pos"] - start].astype(np.float32)
        split = np.split(captured - wanted, 3, axis=1), np.split(wanted, 3, axis=1)
        norms = [
            np.linalg.norm(d, axis=1) / np.maximum(np.linalg.norm(w, axis=1), 1e-6)
            for d, w in zip(*split, strict=True)
        ]
        errors.append([float(np.median(norm)) for norm in norms])
        teacher = sample.tensors["teacher_ids"][:, 0]
        agreed += int((teacher == best[sample.tensors["teacher_pos"] - start]).sum())
        rows += len(teacher)
    worst = np.max(errors, axis=0) if errors else np.full(3, np.inf)
    named = {f"error_{name}": float(worst[i]) for i, name in enumerate(("low", "middle", "high"))}
    return named | {"agreement": agreed / max(1, rows), "samples": len(samples), "teacher_rows": rows}


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Raises :class:`StepFailed` for figures that are out of bounds."""
    wrong = [name for name, value in found.items() if name.startswith("error_") and not value <= MAX_ERROR]
    if wrong or found["agreement"] < MIN_AGREEMENT or not found["samples"]:
        raise StepFailed(f"captured rows are not the model's: {found}")
    return found


def reload(context: Context, **serving: Any) -> dict[str, Any]:
    """Another draft under traffic; the target stays as it is."""
    settings = context.whole(**serving)
    with served(settings, context.folder) as server:
        before = server.client.status()
        folder, digest = stage_draft(server.settings, changed_draft(resolve_draft(settings), context.folder))
        reply = server.client.reload_draft(folder, digest)
        load.at_once(server, load.prompts(server, 4), NEW_TOKENS)
        after = server.client.status()
    if reply["target_checksum_before"] != reply["target_checksum_after"]:
        raise StepFailed("the reload changed the target")
    if after["draft_digest"] != digest or after["weights_checksum"] == before["weights_checksum"]:
        raise StepFailed(f"the server says that it serves {after['draft_digest']}, not {digest}")
    return {name: reply[name] for name in ("copy_s", "pause_s", "ranks")}


def changed_draft(draft: Path, folder: Path) -> Path:
    """A copy whose weights differ a little."""
    from safetensors.torch import load_file, save_file

    copy = folder / "changed-draft"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(draft, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"] * 1.01
    save_file(tensors, copy / "model.safetensors")
    return copy


def cost(context: Context) -> dict[str, Any]:
    """``tide bench capture`` up to 256 at a time."""
    settings = context.whole(max_running_requests=max(CONCURRENCIES))
    report = capture_cost.run(settings, concurrencies=CONCURRENCIES, blocks=BLOCKS)
    return {"ratios": report.ratios, "intervals": report.intervals, "notes": report.notes}


def _wait_for_samples(server: Served, count: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while server.client.status()["capture"]["samples"] < count:
        if time.monotonic() > until:
            raise StepFailed(f"{count} requests, captured: {server.client.status()['capture']}")
        time.sleep(0.5)
