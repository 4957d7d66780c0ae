"""The doctor on what is stored: the store, the dataset's stream, samples as a trainer would see them."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from tide_platform.capture.record import Sample
from tide_platform.config import Settings
from tide_platform.draft.vocab import count_tokens, coverage, inverse_map
from tide_platform.gate.doctor import Finding
from tide_platform.gate.doctor_serving import Serving
from tide_platform.serving.chat import encode_messages
from tide_platform.store.hidden_states import HiddenStates, open_store
from tide_platform.store.objects import ObjectStore
from tide_platform.store.summary import response_tokens
from tide_platform.training.data import prepare

SAMPLES = 64  # the newest so many are read
COVERED = 0.9  # share of the responses' tokens that the draft's vocabulary should hold
_CONTENTS = ("What is this?", "Tell me more of the other one, please.")


class Stored:
    """One dataset, opened once; its newest samples, read once."""

    def __init__(self, settings: Settings, serving: Serving):
        self._settings, self._serving = settings, serving
        self._store: HiddenStates | None = None  # None: there is none, or it can't be read
        self._samples: list[Sample] = []
        self.mean_tokens: float | None = None  # a sample, of all that are stored

    def conditional_puts(self) -> Iterator[Finding]:
        objects = ObjectStore(self._settings.storage)
        objects.probe_conditional_put()
        yield Finding("store", "ok", f"{objects.uri('')} is reachable and honours conditional puts")

    def dataset(self) -> Iterator[Finding]:
        store = open_store(self._settings)
        tip = store.tip()
        if not tip.version:
            yield Finding("dataset", "ok", f"{store.uri}: none yet, made with the first sample")
            return
        self._store = store
        differing = list(self._stream(store))
        yield from differing
        if not differing:
            yield Finding("dataset", "ok", f"{store.uri}: {tip.rows} samples of this target and these layers")

    def samples(self) -> Iterator[Finding]:
        if self._store is None:
            return
        refs = self._store.refs()
        if not refs:
            yield Finding("samples", "ok", "no samples are stored yet: mask and vocabulary are not judged")
            return
        self.mean_tokens = sum(ref.num_tokens for ref in refs) / len(refs)
        self._samples = list(self._store.load(refs[-SAMPLES:]))
        if self._serving.loaded is None or self._serving.target is None:
            return
        hot_D = self._serving.loaded.hot_ids_D
        assert hot_D is not None
        ids = hot_D.numpy()
        vocab = self._serving.target.vocab_size
        inverse = inverse_map(ids - np.arange(len(ids)), vocab)
        yield self._mask(inverse)
        yield self._vocabulary(inverse, vocab)

    def template(self) -> Iterator[Finding]:
        """The dataset knows the target by a digest that a changed template changes, but not the template.
        What it does hold is prompts: as rendered, they end as their template ends a prompt.
        """
        prompts = [
            s.tensors["input_ids"][: s.meta.prompt_tokens - s.meta.start_pos]
            for s in self._samples
            if s.meta.start_pos < s.meta.prompt_tokens
        ]
        if not prompts or self._serving.target is None:
            return
        ending = prompt_ending(self._serving)
        if not len(ending):
            yield Finding(
                "template", "ok", "the chat template ends no prompt in a way of its own: not judged"
            )
            return
        same = sum(np.array_equal(p[-len(ending) :], ending) for p in prompts)
        text = f"{same} of {len(prompts)} stored prompts end as the target's chat template ends a prompt"
        if same == len(prompts):
            yield Finding("template", "ok", text)
        else:
            grade = "error" if not same else "warn"
            mend = (
                "template drift: restore the template that served them, or begin anew under another "
                "`deployment`; prompts sent without a template (/generate) look alike"
            )
            yield Finding("template", grade, text, mend)

    def _stream(self, store: HiddenStates) -> Iterator[Finding]:
        """What a server of this configuration would write unlike the dataset: ingest would refuse it."""
        stream, target, config = store.stream_meta(), self._serving.target, self._serving.draft_config
        rows: list[tuple[str, object, object, str]] = [
            ("teacher_k", stream.teacher_k, self._settings.capture.teacher_k, "set capture.teacher_k to it"),
        ]
        if target is not None:
            elsewhere = "serve another target under its own `deployment` name, or the one that was captured"
            rows += [
                ("target_digest", stream.target_digest, target.digest, elsewhere),
                ("hidden_size", stream.hidden_size, target.hidden_size, elsewhere),
                ("vocab_size", stream.vocab_size, target.vocab_size, elsewhere),
            ]
        if config is not None:
            mend = "serve a draft of the layers that were captured (ids here: entry of layer i)"
            rows.append(("aux_layer_ids", stream.aux_layer_ids, config.aux_layer_ids, mend))
        for name, theirs, ours, mend in rows:
            if theirs != ours:
                text = (
                    f"{store.uri} holds samples of {name} {theirs}, a server started now would write {ours}"
                )
                yield Finding("dataset", "error", text, mend)

    def _mask(self, inverse: np.ndarray) -> Finding:
        """Supervised positions of the samples, of those that a first draft step could learn from."""
        training = self._settings.training
        supervised = possible = 0
        reasons: Counter[str] = Counter()
        for sample in self._samples:
            possible += max(0, response_tokens(sample.meta) - 1)
            found = prepare(sample, inverse, training.unroll_steps, training.max_length)
            if isinstance(found, str):
                reasons[self._reason(sample, found)] += 1
            else:
                supervised += found.response_tokens
        share = supervised / possible if possible else 0.0
        why = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        text = f"mask coverage {share:.0%} of the responses in the newest {len(self._samples)} samples"
        if not supervised:
            return Finding("samples", "error", f"{text}: {why}", "nothing would be learnt; see the reasons")
        if share < 0.5:
            return Finding("samples", "warn", f"{text}: {why or 'out of the vocabulary, or cut'}", _CUT)
        return Finding("samples", "ok", text + (f" (left out: {why})" if why else ""))

    def _reason(self, sample: Sample, reason: str) -> str:
        """Why the trainer leaves it out, with what it can't know itself."""
        limit = self._settings.training.max_length
        if sample.meta.prompt_tokens - sample.meta.start_pos >= limit:
            return f"cut before the response (training.max_length {limit})"
        if response_tokens(sample.meta) < 2:
            return "no response of two tokens: prompt_tokens covers the whole sample (a wrong chat template?)"
        return reason

    def _vocabulary(self, inverse: np.ndarray, vocab: int) -> Finding:
        split = [max(0, s.meta.prompt_tokens - s.meta.start_pos) for s in self._samples]
        responses = [s.tensors["input_ids"][at:] for s, at in zip(self._samples, split, strict=True)]
        share = coverage(count_tokens(responses, vocab), inverse >= 0)
        text = f"the draft's vocabulary holds {share:.1%} of the response tokens"
        if share >= COVERED:
            return Finding("samples", "ok", text)
        mend = "choose the vocabulary from this traffic: `tide draft pretrain`"
        return Finding("samples", "warn", f"{text}, at least {COVERED:.0%} is wanted", mend)


_CUT = "raise training.max_length, or choose the draft's vocabulary from this traffic"


def prompt_ending(serving: Serving) -> np.ndarray:
    """Token ids with which the target's template ends every prompt, whatever it says."""
    first, second = (
        encode_messages(serving.target_folder, [{"role": "user", "content": text}]) for text in _CONTENTS
    )
    count = 0
    while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return np.array(first[len(first) - count :])
