"""The controlled example without a server: answers, samples and rounds as a server would give them."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.tiny import AUX_LAYERS, TINY, prompts, say, tiny_parts
from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.config import target_digest
from tide_platform.config.schema import Training
from tide_platform.draft.checkpoint import load_draft, new_draft, save_draft
from tide_platform.draft.config import read_config
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.draft.vocab import inverse_map, to_maps
from tide_platform.gate.example import Answer, Example, Seen
from tide_platform.gate.proposals import _context, _round
from tide_platform.gate.reference import Reference, TransformersReference
from tide_platform.gate.server_draft import ServerDraft
from tide_platform.gate.server_rules import LoadedDraft, load_as_sglang
from tide_platform.training.data import prepare_all
from tide_platform.training.trainer import train

Tensors = dict[str, torch.Tensor]
NEW_TOKENS, K = 26, 2
VOCABULARY = np.arange(32, 127)  # printable ASCII


def draft_folder(folder: Path) -> Path:
    """A draft of the tiny target that was trained a little, with its provenance."""
    save_draft(folder, trained(), {"made_by": "test", "target_digest": target_digest(TINY)})
    return folder


@functools.cache
def trained() -> Eagle3Draft:
    torch.set_num_threads(1)
    draft = new_draft(tiny_parts(), VOCABULARY, AUX_LAYERS, seed=0)
    inverse = inverse_map(draft.d2t.numpy(), 256)
    examples, _ = prepare_all(say(prompts(16, seed=3), 24), inverse, K, 512)
    settings = Training(unroll_steps=K, epochs=4, batch_size=8, learning_rate=1e-3, autocast=False, threads=1)
    train(draft, tiny_parts().embed_VH.float(), examples, settings, seed=0)
    return draft


def loaded(folder: Path) -> LoadedDraft:
    return load_as_sglang(folder, read_config(folder), 256)


@functools.cache
def samples() -> tuple[Sample, ...]:
    return tuple(say(prompts(2, seed=7), NEW_TOKENS))


def references(found: list[Example]) -> list[Reference]:
    model = TransformersReference(TINY, AUX_LAYERS)
    return [model.run([*e.answer.prompt, *e.answer.output]) for e in found]


def examples(folder: Path) -> list[Example]:
    """What a server of the draft in ``folder`` would have done: its rounds by the server's rules."""
    draft, stream = load_draft(folder), StreamMeta("t", 96, 256, AUX_LAYERS, 16)
    rules = ServerDraft(loaded(folder), tiny_parts().embed_VH)
    assert draft.config.aux_layer_ids == AUX_LAYERS
    return [_served(rules, sample, stream) for sample in samples()]


def _served(rules: ServerDraft, sample: Sample, stream: StreamMeta) -> Example:
    split, text = sample.meta.prompt_tokens, sample.tensors["input_ids"].tolist()
    seen = [Seen(())]
    counts = [0] * (K + 1)
    plain = Example(
        Answer(sample.meta.request_id, tuple(text[:split]), tuple(text[split:]), ()), sample, stream
    )
    context, root = _context(rules, plain), split - 1
    while root < len(text) - 2:
        hits, _, _ = _round(rules, context, text, root, K)
        counts[hits] += 1
        seen.append(Seen(tuple(counts)))
        root += hits + 1
    meta = replace(sample.meta, verify_rounds=seen[-1].rounds, accepted_drafts=seen[-1].accepted)
    answer = replace(plain.answer, seen=tuple(seen))
    return Example(answer, Sample(meta, sample.tensors), stream)


def changed(example: Example, meta: dict | None = None, **tensors: np.ndarray) -> Example:
    """The example with something else captured than was."""
    sample = example.sample
    return replace(example, sample=Sample(replace(sample.meta, **(meta or {})), sample.tensors | tensors))


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def stale(tensors: Tensors) -> None:
    """The map of another vocabulary, coherent in itself."""
    d2t, t2d = to_maps(VOCABULARY + 20, 256)
    tensors |= {"d2t": torch.from_numpy(d2t), "t2d": torch.from_numpy(t2d)}
