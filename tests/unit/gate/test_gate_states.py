"""Captured states, teacher rows and mask against a reference: a good example passes, faults have names."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import tide_platform.training.data as data
from tests.fixtures.tiny import AUX_LAYERS, bf16_bits
from tests.unit.gate.gate_examples import VOCABULARY, K, changed, draft_folder, examples, references
from tide_platform.capture.record import Sample
from tide_platform.draft.vocab import inverse_map, to_maps
from tide_platform.gate import learning, states
from tide_platform.gate.example import Example
from tide_platform.gate.reference import Reference

INVERSE = inverse_map(to_maps(VOCABULARY, 256)[0], 256)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> list[Example]:
    return examples(draft_folder(tmp_path_factory.mktemp("gate") / "draft"))


@pytest.fixture(scope="module")
def known(good: list[Example]) -> list[Reference]:
    return references(good)


def with_aux(
    good: list[Example], known: list[Reference], *of: Callable[[Reference], torch.Tensor]
) -> list[Example]:
    """The examples as they would be had these states been captured."""
    return [
        changed(e, aux=bf16_bits(torch.cat([one(r) for one in of], -1))[: len(e.sample.tensors["row_pos"])])
        for e, r in zip(good, known, strict=True)
    ]


def test_a_good_example_passes_every_check(good: list[Example], known: list[Reference]) -> None:
    found = [
        states.check_capture(good, AUX_LAYERS),
        *states.check_layers(good, known, AUX_LAYERS),
        states.check_norm(good, known, AUX_LAYERS),
        learning.check_teacher(good, known),
        learning.check_mask(good, INVERSE, 3),
    ]
    assert [(c.name, c.message) for c in found if c.status != "pass"] == []
    for check in found[1:4]:
        assert check.value is not None and check.tolerance is not None and 0 < check.value < check.tolerance


@pytest.mark.parametrize("number", [0, 1])
def test_layer_ids_off_by_one_are_named(good: list[Example], known: list[Reference], number: int) -> None:
    captured = [layer + (n == number) for n, layer in enumerate(AUX_LAYERS)]
    wrong = with_aux(good, known, *(lambda r, at=layer: r.entering[at] for layer in captured))
    checks = states.check_layers(wrong, known, AUX_LAYERS)
    assert [c.status for c in checks] == ["fail" if n == number else "pass" for n in range(3)]
    said = f"matches the input of layer {captured[number]}, the configuration says {AUX_LAYERS[number]}"
    assert said in checks[number].message and "off by +1" in checks[number].message


def test_states_of_no_layer_are_named(good: list[Example], known: list[Reference]) -> None:
    wrong = with_aux(good, known, *(lambda r, at=layer: 0.9 * r.entering[at] for layer in AUX_LAYERS))
    assert "state of no layer" in states.check_layers(wrong, known, AUX_LAYERS)[0].message


def test_aux_states_behind_a_norm_are_named(good: list[Example], known: list[Reference]) -> None:
    wrong = with_aux(good, known, *(lambda r, at=layer: r.normed[at] for layer in AUX_LAYERS))
    check = states.check_norm(wrong, known, AUX_LAYERS)
    assert check.status == "fail" and "post-norm, after layer 1's input norm" in check.message


def test_a_last_state_taken_pre_norm_is_named(good: list[Example], known: list[Reference]) -> None:
    def stored(pick: Callable[[Reference], torch.Tensor | None]) -> list[Example]:
        found = []
        for example, reference in zip(good, known, strict=True):
            state = pick(reference)
            assert state is not None
            rows = state[torch.from_numpy(example.sample.tensors["teacher_pos"]).long()]
            found.append(changed(example, last_hidden=bf16_bits(rows)))
        return found

    right = states.check_norm(stored(lambda r: r.last_hidden_TH), known, AUX_LAYERS)
    assert right.status == "pass" and right.value is not None
    wrong = states.check_norm(stored(lambda r: r.before_norm_TH), known, AUX_LAYERS)
    assert wrong.status == "fail" and "pre-norm for post-norm" in wrong.message


def test_a_teacher_taken_pre_norm_is_named(good: list[Example], known: list[Reference]) -> None:
    wrong = [with_teacher(e, r.logp_before_norm_TV) for e, r in zip(good, known, strict=True)]
    check = learning.check_teacher(wrong, known)
    assert check.status == "fail" and "pre-norm for post-norm" in check.message


def test_teacher_rows_of_the_next_position_are_named(good: list[Example], known: list[Reference]) -> None:
    wrong = []
    for example in good:
        tensors = example.sample.tensors
        names = ("teacher_ids", "teacher_logp", "token_logp")
        later = {name: np.concatenate([tensors[name][1:], tensors[name][-1:]]) for name in names}
        cut = {name: array[:-1] for name, array in later.items()}
        wrong.append(changed(example, teacher_pos=tensors["teacher_pos"][:-1], **cut))
    check = learning.check_teacher(wrong, known)
    assert check.status == "fail" and "position +1: teacher rows are shifted" in check.message


def test_a_teacher_of_another_temperature_fails(good: list[Example], known: list[Reference]) -> None:
    wrong = [with_teacher(e, (r.logp_TV / 0.7).log_softmax(-1)) for e, r in zip(good, known, strict=True)]
    check = learning.check_teacher(wrong, known)
    assert check.status == "fail" and "temperature" in check.message


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_mask_is_named(good: list[Example], shift: int) -> None:
    wrong = [changed(e, {"prompt_tokens": e.sample.meta.prompt_tokens + shift}) for e in good]
    check = learning.check_mask(wrong, INVERSE, K)
    assert check.status == "fail" and "shifted mask" in check.message


def test_a_trainer_that_does_not_shift_its_mask_is_named(
    good: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SpecForge #885: the mask of x[t] in place of x[t + 1]."""
    right = data.supervision

    def unshifted(sample: Sample, *rest: object) -> list[np.ndarray]:
        pairs = right(sample, *rest)  # type: ignore[arg-type]
        return [pair[1:] for pair in pairs]

    monkeypatch.setattr(data, "supervision", unshifted)
    check = learning.check_mask(good, INVERSE, K)
    assert check.status == "fail" and "shifted mask" in check.message


def test_a_mask_that_covers_nothing_is_found(good: list[Example]) -> None:
    nothing = np.full(256, -1)
    nothing[5] = 0
    check = learning.check_mask(good, nothing, K)
    assert check.status == "fail" and "mask coverage is 0 %" in check.message


def test_holes_and_other_texts_are_found(good: list[Example]) -> None:
    tensors = good[0].sample.tensors
    hole = changed(good[0], row_pos=tensors["row_pos"][3:], aux=tensors["aux"][3:])
    assert "no row of positions [0, 1, 2]" in states.check_capture([hole], AUX_LAYERS).message
    other = tensors["input_ids"].copy()
    other[-1] += 1
    text = states.check_capture([changed(good[0], input_ids=other)], AUX_LAYERS)
    assert "not those of the answer" in text.message
    assert "aux layers [1, 2, 3]" in states.check_capture(good, (2, 3, 4)).message


def with_teacher(example: Example, logp_TV: torch.Tensor | None) -> Example:
    assert logp_TV is not None
    at = torch.from_numpy(example.sample.tensors["teacher_pos"]).long()
    top = logp_TV[at].topk(16)
    return changed(
        example,
        teacher_ids=top.indices.numpy().astype(np.int32),
        teacher_logp=top.values.numpy().astype(np.float16),
    )
