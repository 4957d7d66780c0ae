"""Faults planted in what a real server captured, or in an export on its way to it: each is named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gate_settings import K

import tide_platform.gate.run as run
from tests.fixtures.tiny import bf16_bits, tiny_parts
from tests.unit.gate.gate_examples import VOCABULARY, Tensors, changed, rewrite, stale
from tide_platform.draft.checkpoint import load_draft, save_draft
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.gate import states
from tide_platform.gate.example import Example
from tide_platform.gate.reference import Reference
from tide_platform.gate.report import Check
from tide_platform.gate.run import Bench
from tide_platform.serving.own_server import Served


@pytest.fixture(scope="module")
def known(bench: Bench, server: Served) -> list[Reference]:
    return run.references(bench, server)


def by_name(checks: list[Check]) -> dict[str, list[Check]]:
    found: dict[str, list[Check]] = {}
    for check in checks:
        found.setdefault(check.name, []).append(check)
    return found


def failing(checks: list[Check]) -> set[str]:
    return {check.name for check in checks if check.status == "fail"}


def test_what_the_server_captured_and_ran_is_sound(bench: Bench, known: list[Reference]) -> None:
    assert states.check_capture(bench.examples, bench.draft.config.aux_layer_ids).status == "pass"
    assert failing([*run.capture_checks(bench, known), *run.draft_checks(bench)]) == set()


def test_a_config_whose_layer_ids_are_off_by_one(
    bench: Bench, known: list[Reference], tmp_path: Path
) -> None:
    """SGLang's numbering taken for ours: the server captured layers 1 and 2, the config says 2 and 3."""
    shutil.copytree(bench.draft_folder, tmp_path / "draft")
    raw = json.loads((tmp_path / "draft" / "config.json").read_text())
    raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2, 2]
    (tmp_path / "draft" / "config.json").write_text(json.dumps(raw))
    other = replace(bench, draft=load_draft(tmp_path / "draft"))
    checks = by_name(list(run.capture_checks(other, known)))["layers"]
    assert [c.status for c in checks] == ["fail", "fail", "pass"]
    assert (
        "matches the input of layer 1, the configuration says 2: layer ids are off by -1" in checks[0].message
    )
    assert (
        "samples say aux layers [1, 2, 3], the draft [2, 3, 3]"
        in states.check_capture(bench.examples, other.draft.config.aux_layer_ids).message
    )


def test_the_engines_own_reference_agrees_and_finds_other_states(bench: Bench, server: Served) -> None:
    by_engine = replace(bench, reference="engine")
    known = run.references(by_engine, server)
    found = list(run.capture_checks(by_engine, known))
    assert failing(found) == set()
    measured = {check.name: check.value for check in found if check.value is not None}
    assert measured["layers"] < 6e-3 and measured["teacher"] < 0.05  # fp32 here, so far below the limits
    assert all(len(reference.entering) == 3 and len(reference.logp) > 40 for reference in known)
    swapped = captured_as(by_engine, known, lambda r, layer: r.entering[{1: 2, 2: 1}.get(layer, layer)])
    checks = by_name(list(run.capture_checks(swapped, known)))["layers"]
    assert "matches the input of layer 2, the configuration says 1" in checks[0].message


def captured_as(bench: Bench, known: list[Reference], of: Callable[[Reference, int], torch.Tensor]) -> Bench:
    """The bench as it would be, had these states been captured in place of the right ones."""
    found: list[Example] = []
    for example, reference in zip(bench.examples, known, strict=True):
        aux = torch.cat([of(reference, layer) for layer in bench.draft.config.aux_layer_ids], -1)
        found.append(changed(example, aux=bf16_bits(aux)[: len(example.sample.tensors["row_pos"])]))
    return replace(bench, examples=found)


def test_states_captured_behind_a_norm(bench: Bench, known: list[Reference]) -> None:
    wrong = captured_as(bench, known, lambda reference, layer: reference.normed[layer])
    (check,) = by_name(list(run.capture_checks(wrong, known)))["norm"]
    assert check.status == "fail" and "captured states are post-norm" in check.message


def test_states_of_the_layer_above(bench: Bench, known: list[Reference]) -> None:
    wrong = captured_as(bench, known, lambda r, layer: r.entering[min(layer + 1, 3)])
    checks = by_name(list(run.capture_checks(wrong, known)))["layers"]
    assert [c.status for c in checks] == ["fail", "fail", "pass"]
    assert "matches the input of layer 3, the configuration says 2" in checks[1].message


def test_a_shifted_mask(bench: Bench, known: list[Reference]) -> None:
    shifted = [changed(e, {"prompt_tokens": e.sample.meta.prompt_tokens + 1}) for e in bench.examples]
    found = list(run.capture_checks(replace(bench, examples=shifted), known))
    assert failing(found) == {"mask"} and "shifted mask" in by_name(found)["mask"][0].message


def test_a_live_server_of_another_draft(bench: Bench) -> None:
    """The folder says one draft, the server ran another: its rounds give it away."""
    other = load_draft(bench.draft_folder)
    torch.manual_seed(1)
    other.fc.weight.data.normal_(std=0.05)
    loaded = replace(
        bench.loaded, tensors=bench.loaded.tensors | {"model.fc.weight": other.fc.weight.detach()}
    )
    found = by_name(list(run.draft_checks(replace(bench, draft=other, loaded=loaded))))
    assert found["logits"][0].status == "pass"  # trainer and files agree with one another
    assert (
        found["live"][0].status == "fail" and "not those that the files predict" in found["live"][0].message
    )


FAULTS: list[tuple[str, str, Callable[[Tensors], Any]]] = [
    ("map", "stale d2t", stale),
    (
        "head",
        "head exported from the wrong table",
        lambda t: t.update({"lm_head.weight": tiny_parts().lm_head_VH[: len(VOCABULARY)].clone()}),
    ),
    ("files", "skipped silently by SGLang", lambda t: t.update({"fusion.weight": t.pop("fc.weight")})),
]


@pytest.mark.parametrize(("name", "said", "change"), FAULTS)
def test_a_fault_of_the_export_is_named_and_not_served(
    bench: Bench,
    server: Served,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    said: str,
    change: Callable[[Tensors], Any],
) -> None:
    def broken(folder: Path, draft: Eagle3Draft, provenance: dict[str, Any]) -> str:
        digest = save_draft(folder, draft, provenance)
        rewrite(folder, change)
        return digest

    monkeypatch.setattr(run, "save_draft", broken)
    served_before = server.client.status()["draft_digest"]
    found = list(run.overfit_checks(bench, server, lambda line: None))
    assert name in failing(found) and any(said in check.message for check in found)
    assert found[-1].status != "pass" and server.client.status()["draft_digest"] == served_before


def test_a_draft_that_was_not_learnt_is_not_accepted_at_full_length(
    bench: Bench, server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft under test in place of the learnt one: what the last check measures is the server."""
    monkeypatch.setattr(run.overfit, "learn", lambda parent, *rest: (parent, 1.0))
    last = list(run.overfit_checks(bench, server, lambda line: None))[-1]
    assert (last.name, last.status) == ("overfit", "fail") and "accepted at" in last.message


def test_one_sample_learnt_by_heart_is_accepted_at_full_length(bench: Bench, server: Served) -> None:
    found = list(run.overfit_checks(bench, server, lambda line: None))
    assert failing(found) == set()
    assert found[-1].details["accepted"] == K * found[-1].details["rounds"] > 0
