"""One run of our trainer for ``tide bench train``, in a process of its own.

``python -m tide_platform.bench.train_worker SPEC.json`` writes ``<out>/result.json``. Kinds: ``ours``, the
samples of the peer's comparison from memory, the draft saved; ``memory`` and ``store``, a whole run of the
deployment's trainer with its samples at hand, or in the dataset; ``recompute``, one with the states that the
target computes again, ``times`` times over.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tide_platform.bench.train_samples import plain, read, store_settings, top_k
from tide_platform.capture.packing import unpack
from tide_platform.capture.record import Sample
from tide_platform.config import Settings, draft_digest, target_digest
from tide_platform.config.files import write_json
from tide_platform.draft.check import check_draft
from tide_platform.draft.checkpoint import load_draft, load_target_parts, save_draft
from tide_platform.draft.target_model import TargetModel, padded
from tide_platform.draft.vocab import inverse_map
from tide_platform.engine.teacher import bf16_bits
from tide_platform.training.data import prepare_all
from tide_platform.training.trainer import StepRecord, train

TEXTS_A_PASS = 8


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """The result of a spec: ``kind``, ``settings``, ``folder``, ``target``, ``draft``, ``seed``, ``out``."""
    settings, folder = Settings.model_validate(spec["settings"]), Path(spec["folder"])
    torch.set_num_threads(settings.training.threads)
    if spec["kind"] == "store":
        return _from_store(settings, spec)
    stream, samples = read(folder, spec["sample_ids"])
    if spec["kind"] == "ours":
        return _trained(settings, spec, [top_k(sample) for sample in samples]).to_json()
    features = 3 * stream.hidden_size
    samples = [unpack(plain(sample, settings), features) for sample in samples]
    if spec["kind"] == "memory":
        began = time.perf_counter()
        trained = _trained(settings, spec, samples)
        return trained.to_json() | {"whole_s": time.perf_counter() - began}
    model = TargetModel(Path(spec["target"]), stream.aux_layer_ids, getattr(torch, settings.serving.dtype))
    began = time.perf_counter()
    for _ in range(spec["times"]):
        samples = recomputed(model, samples, stream.teacher_k)
    seconds = time.perf_counter() - began
    trained = _trained(settings, spec, samples)
    return trained.to_json() | {"whole_s": time.perf_counter() - began, "recompute_s": seconds}


@dataclass(frozen=True)
class Trained:
    """Records of a run's steps, and the process's CPU seconds at the loop's start and after each of them."""

    records: list[StepRecord]
    cpu: list[float]

    def to_json(self) -> dict[str, Any]:
        """Wall and CPU seconds and supervised tokens (of the first unroll step) of each optimizer step."""
        ends, tokens = ([0, *(getattr(r, of) for r in self.records)] for of in ("seconds", "tokens"))
        return {
            "seconds": np.diff(ends).tolist(),
            "cpu_seconds": np.diff(self.cpu).tolist(),
            "supervised": np.diff(tokens).tolist(),
            "losses": [r.loss for r in self.records],
        }


def _trained(settings: Settings, spec: dict[str, Any], samples: Sequence[Sample]) -> Trained:
    """From the base draft on, with what a run of the deployment does beside: checks, digests, checkpoint."""
    parent, target_folder = Path(spec["draft"]), Path(spec["target"])
    check_draft(parent, target_folder)
    target, draft = load_target_parts(target_folder), load_draft(parent)
    inverse = inverse_map(draft.d2t.numpy(), draft.config.vocab_size)
    recipe = settings.training
    examples, _ = prepare_all(samples, inverse, recipe.unroll_steps, recipe.max_length)
    cpu = [time.process_time()]
    records = train(
        draft, target.embed_VH, examples, recipe, spec["seed"], lambda _: cpu.append(time.process_time())
    )
    provenance = {"made_by": "tide bench train", "seed": spec["seed"], "parent": draft_digest(parent)}
    provenance |= {"target_digest": target_digest(target_folder), "training": recipe.model_dump()}
    save_draft(Path(spec["out"]) / "draft", draft, provenance)
    return Trained(records, cpu)


def _from_store(settings: Settings, spec: dict[str, Any]) -> dict[str, Any]:
    """The deployment's own command: everything between its job file and its checkpoint."""
    import tide_platform.store.hidden_states  # noqa: F401 (its import is not what is measured)
    from tide_platform.training.job import TrainJob
    from tide_platform.training.run import run_job

    job = TrainJob(
        settings=store_settings(settings, Path(spec["folder"])),
        target=Path(spec["target"]),
        parent=Path(spec["draft"]),
        lance_version=spec["lance_version"],
        train_sample_ids=spec["sample_ids"],
        out=Path(spec["out"]),
        seed=spec["seed"],
    )
    began = time.perf_counter()
    result = run_job(job)
    return {"whole_s": time.perf_counter() - began, "tokens": result.tokens, "loop_s": result.seconds}


def recomputed(model: TargetModel, samples: Sequence[Sample], teacher_k: int) -> list[Sample]:
    """The samples with states and teacher rows that the target computes of their tokens, in their order:
    what a pipeline that stores no hidden states pays before it can train.
    """
    order = sorted(range(len(samples)), key=lambda i: samples[i].meta.num_tokens)
    made: dict[int, Sample] = {}
    for at in range(0, len(order), TEXTS_A_PASS):
        part = order[at : at + TEXTS_A_PASS]
        states = model.states(*padded([samples[i].tensors["input_ids"] for i in part]))
        for row, i in enumerate(part):
            made[i] = _with_states(
                model, samples[i], states.aux_BTF[row], states.last_hidden_BTH[row], teacher_k
            )
    return [made[i] for i in range(len(samples))]


def _with_states(
    model: TargetModel, sample: Sample, aux: torch.Tensor, last: torch.Tensor, teacher_k: int
) -> Sample:
    of, start = sample.tensors, sample.meta.start_pos
    rows, teachers = (
        torch.from_numpy(of[name].astype(np.int64) - start) for name in ("row_pos", "teacher_pos")
    )
    logp = model.logits(last[teachers]).float().log_softmax(-1)
    best, ids = logp.topk(teacher_k, -1)
    tensors = {
        "aux": bf16_bits(aux[rows]),
        "teacher_ids": ids.to(torch.int32).numpy(),
        "teacher_logp": best.half().numpy(),
    }
    return Sample(sample.meta, of | tensors)


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    out = Path(spec["out"])
    out.mkdir(parents=True, exist_ok=True)
    result = run(spec)
    write_json(out / "result.json", result | {"threads": torch.get_num_threads()})


if __name__ == "__main__":
    main()
