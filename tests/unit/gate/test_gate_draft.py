"""A draft's folder and its export: a good one passes, each planted fault has its name."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fixtures.tiny import AUX_LAYERS, TINY, tiny_parts
from tests.unit.gate.gate_examples import (
    VOCABULARY,
    K,
    Tensors,
    draft_folder,
    examples,
    loaded,
    rewrite,
    stale,
    trained,
)
from tide_platform.config import Settings, TideError
from tide_platform.config.schema import Training
from tide_platform.draft.checkpoint import load_draft, new_draft, save_draft
from tide_platform.draft.vocab import inverse_map, to_maps
from tide_platform.gate import draft_files, overfit, vocabulary
from tide_platform.gate.example import Answer, Example, Seen
from tide_platform.gate.export import check_export
from tide_platform.gate.proposals import check_live, check_logits
from tide_platform.gate.report import Check
from tide_platform.gate.run import folder_checks, run_gate
from tide_platform.gate.server_draft import ServerDraft


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return draft_folder(tmp_path / "draft")


def reconfigure(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))


def note(folder: Path, **facts: object) -> None:
    (folder / "tide.json").write_text(json.dumps(draft_files.provenance(folder) | facts))


def rope(kind: str, theta: float, **others: float) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": theta, **others}


def of_folder(folder: Path, parent: Path | None = None) -> dict[str, Check]:
    found = list(folder_checks(loaded(folder), tiny_parts(), TINY, parent))
    return {check.name: check for check in found}


def failing(checks: dict[str, Check]) -> list[str]:
    return [name for name, check in checks.items() if check.status != "pass"]


def test_a_good_draft_passes(draft: Path, tmp_path: Path) -> None:
    assert draft_files.check_files(draft, TINY)[0].status == "pass"
    assert failing(of_folder(draft)) == []
    shutil.copytree(draft, tmp_path / "parent")
    assert failing(of_folder(draft, tmp_path / "parent")) == []


def test_an_untrained_draft_passes(tmp_path: Path) -> None:
    save_draft(tmp_path / "new", new_draft(tiny_parts(), VOCABULARY, AUX_LAYERS), {})
    checks = of_folder(tmp_path / "new")
    assert failing(checks) == [] and "untrained head" in checks["head"].message


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("fc.weight", "fusion.weight"),
        ("midlayer.self_attn.q_proj.weight", "midlayer.attn.q_proj.weight"),
        ("midlayer.hidden_norm.weight", "midlayer.hidden_layernorm.weight"),
    ],
)
def test_a_renamed_tensor_is_named(draft: Path, name: str, renamed: str) -> None:
    rewrite(draft, lambda tensors: tensors.update({renamed: tensors.pop(name)}))
    check, found = draft_files.check_files(draft, TINY)
    assert check.status == "fail" and found is None
    assert f"tensor {renamed} is skipped silently by SGLang" in check.message
    assert f"and {name} of that shape" in check.message


@pytest.mark.parametrize("gone", ["lm_head.weight", "d2t"])
def test_an_export_without_head_or_map_is_named(draft: Path, gone: str) -> None:
    """Case 20: SGLang would serve it with random values, or the first ids, in silence."""
    rewrite(draft, lambda tensors: tensors.pop(gone))
    check, _ = draft_files.check_files(draft, TINY)
    assert check.status == "fail" and f"missing {gone}" in check.message


def test_weights_that_nobody_serves_are_named(draft: Path) -> None:
    rewrite(draft, lambda tensors: tensors.update({"mask_hidden": torch.zeros(3)}))
    check, _ = draft_files.check_files(draft, TINY)
    assert check.status == "fail" and "SGLang skips silently: mask_hidden" in check.message


def test_a_draft_of_another_shape_is_named(draft: Path) -> None:
    reconfigure(draft, intermediate_size=128)
    check, _ = draft_files.check_files(draft, TINY)
    assert "mlp.gate_proj.weight has shape [256, 96], config.json implies [128, 96]" in check.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rope_theta": 5e5, "rope_parameters": rope("default", 5e5)},
            "rope_theta 500000.0 (target 10000.0)",
        ),
        ({"rope_parameters": rope("linear", 1e4, factor=2.0)}, "factor 2.0 (target None)"),
        ({"rope_theta": 5e5}, "rope_theta 500000.0 and rope_parameters.rope_theta 10000.0"),
    ],
)
def test_a_rope_unlike_the_targets_is_named(draft: Path, changes: dict, said: str) -> None:
    """Case 15."""
    reconfigure(draft, **changes)
    checks = of_folder(draft)
    assert failing(checks) == ["rope"] and said in checks["rope"].message


def test_a_rope_that_is_the_parents_passes(draft: Path, tmp_path: Path) -> None:
    reconfigure(draft, rope_theta=5e5, rope_parameters=rope("default", 5e5))
    shutil.copytree(draft, tmp_path / "parent")
    assert "as the parent's" in of_folder(draft, tmp_path / "parent")["rope"].message


def test_a_target_that_it_was_not_trained_for_is_named(draft: Path) -> None:
    """Case 21."""
    note(draft, target_digest="0123456789abcdef")
    checks = of_folder(draft)
    assert failing(checks) == ["target"] and "trained for target 0123456789abcdef" in checks["target"].message


def test_layer_ids_unlike_the_parents_are_named(draft: Path, tmp_path: Path) -> None:
    shutil.copytree(draft, tmp_path / "parent")
    reconfigure(tmp_path / "parent", eagle_config={"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]})
    checks = of_folder(draft, tmp_path / "parent")
    assert failing(checks) == ["layers"] and "all off by +1" in checks["layers"].message


def test_a_stale_map_is_named_by_the_head(draft: Path) -> None:
    """Case 16."""
    rewrite(draft, stale)
    note(draft, map_digest=None)
    checks = of_folder(draft)
    assert failing(checks) == ["map"]
    assert "stale d2t" in checks["map"].message and "target id 32, d2t says 52" in checks["map"].message


def test_a_stale_map_is_named_by_the_parent_and_by_the_digest(draft: Path, tmp_path: Path) -> None:
    shutil.copytree(draft, tmp_path / "parent")
    rewrite(draft, stale)
    said = of_folder(draft, tmp_path / "parent")["map"].message
    assert "stale d2t: 95 of 95 draft ids lead elsewhere (draft id 0 to 52, not 32)" in said
    note(draft, map_digest=vocabulary.digest_of(torch.from_numpy(VOCABULARY)))
    check = of_folder(draft)["map"]
    assert check.status == "fail" and "tide.json says" in check.message


def test_a_half_stale_map_is_named(draft: Path) -> None:
    d2t = torch.from_numpy(to_maps(VOCABULARY + 1, 256)[0])
    rewrite(draft, lambda tensors: tensors.update(d2t=d2t))
    check, _ = draft_files.check_files(draft, TINY)
    assert (check.name, check.status) == ("map", "fail") and "stale d2t or t2d" in check.message


def test_a_head_of_the_first_rows_is_named(draft: Path) -> None:
    rows = tiny_parts().lm_head_VH[: len(VOCABULARY)].bfloat16().contiguous()
    rewrite(draft, lambda tensors: tensors.update({"lm_head.weight": rows.clone()}))
    note(draft, map_digest=vocabulary.digest_of(torch.from_numpy(VOCABULARY)))
    checks = of_folder(draft)
    assert failing(checks) == ["head"]
    assert "wrong table: lm_head.weight is rows 0 to 94 of the target's lm_head" in checks["head"].message


def test_a_trained_head_in_another_order_is_the_heads_fault_where_the_map_is_known(draft: Path) -> None:
    rewrite(draft, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].roll(5, 0)}))
    note(draft, map_digest=vocabulary.digest_of(torch.from_numpy(VOCABULARY)))
    checks = of_folder(draft)
    assert failing(checks) == ["head"] and "the map is the right one" in checks["head"].message


def test_a_head_that_is_not_finite_is_named(draft: Path) -> None:
    rewrite(draft, lambda t: t["lm_head.weight"].fill_(float("nan")))
    assert "NaN" in of_folder(draft)["head"].message


# proposals


def test_the_trainers_logits_and_rounds_are_those_of_the_files(draft: Path) -> None:
    found, rules = examples(draft), ServerDraft(loaded(draft), tiny_parts().embed_VH)
    logits = check_logits(load_draft(draft), rules, tiny_parts().embed_VH, found, 3, "draft")
    assert logits.status == "pass" and logits.value is not None and logits.value < 1e-5
    live = check_live(rules, load_draft(draft), tiny_parts(), found, K, "transformers")
    assert live.status == "pass" and live.details["accepted"] > 5


def test_a_trainer_that_turns_positions_otherwise_has_other_logits(draft: Path) -> None:
    found, rules = examples(draft), ServerDraft(loaded(draft), tiny_parts().embed_VH)
    other = load_draft(draft)
    other.inv_freq *= 0.5
    check = check_logits(other, rules, tiny_parts().embed_VH, found, 2, "draft")
    assert check.status == "fail" and "the trainer computes another draft" in check.message


def test_a_server_that_serves_another_draft_is_named(draft: Path, tmp_path: Path) -> None:
    found = examples(draft)
    save_draft(tmp_path / "other", new_draft(tiny_parts(), VOCABULARY, AUX_LAYERS, seed=9), {})
    rules = ServerDraft(loaded(tmp_path / "other"), tiny_parts().embed_VH)
    live = check_live(rules, load_draft(tmp_path / "other"), tiny_parts(), found, K, "transformers")
    assert live.status == "fail" and "not those that the files predict" in live.message


# export


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    save_draft(tmp_path / "export", trained(), {})
    return tmp_path / "export"


def of_export(folder: Path, found: list[Example]) -> dict[str, Check]:
    return {c.name: c for c in check_export(trained(), folder, TINY, tiny_parts(), found, K)}


def test_a_good_export_passes(draft: Path, exported: Path) -> None:
    assert failing(of_export(exported, examples(draft))) == []


@pytest.mark.parametrize(
    ("name", "said", "change"),
    [
        ("map", "stale d2t", stale),
        (
            "head",
            "wrong table",
            lambda t: t.update({"lm_head.weight": tiny_parts().lm_head_VH[: len(VOCABULARY)].clone()}),
        ),
        (
            "head",
            "the target's own rows, as before training",
            lambda t: t.update({"lm_head.weight": tiny_parts().lm_head_VH[torch.from_numpy(VOCABULARY)]}),
        ),
        ("files", "midlayer.mlp.up_proj.weight", lambda t: t["midlayer.mlp.up_proj.weight"].mul_(1.5)),
        ("files", "skipped silently", lambda t: t.update({"fusion.weight": t.pop("fc.weight")})),
    ],
)
def test_a_fault_of_the_export_is_named(
    draft: Path, exported: Path, name: str, said: str, change: Callable[[Tensors], None]
) -> None:
    rewrite(exported, change)
    checks = of_export(exported, examples(draft))
    assert name in failing(checks) and said in checks[name].message


# one sample by heart


def test_one_sample_is_learnt_by_heart(draft: Path) -> None:
    found, parent = examples(draft), load_draft(draft)
    inverse = inverse_map(parent.d2t.numpy(), 256)
    lesson = overfit.choose_lesson(found, inverse, K)
    assert lesson is not None and lesson.new_tokens == 25 and lesson.rounds(K) == 8
    settings = Training(threads=1)
    before = {name: tensor.clone() for name, tensor in parent.state_dict().items()}
    learnt, accuracy = overfit.learn(parent, tiny_parts(), lesson, inverse, settings, K)
    assert accuracy == 1.0
    assert all(torch.equal(before[name], tensor) for name, tensor in parent.state_dict().items())
    assert not torch.equal(learnt.fc.weight, parent.fc.weight)


def test_what_the_vocabulary_lacks_is_not_learnt(draft: Path) -> None:
    found = examples(draft)
    assert overfit.choose_lesson(found, np.full(256, -1), K) is None


def test_a_folder_that_is_no_draft_is_an_error_of_use(tmp_path: Path) -> None:
    with pytest.raises(TideError, match=r"no config\.json there"):
        run_gate(Settings(), tmp_path, TINY)
    with pytest.raises(TideError, match=r"serving\.k is 0"):
        run_gate(Settings.model_validate({"serving": {"k": 0}}), tmp_path, TINY)


def test_rounds_that_came_in_one_part_are_compared_all_the_same(draft: Path) -> None:
    found, rules = examples(draft), ServerDraft(loaded(draft), tiny_parts().embed_VH)
    whole = [replace(e, answer=replace(e.answer, seen=e.answer.seen[-1:])) for e in found]
    live = check_live(rules, load_draft(draft), tiny_parts(), whole, K, "transformers")
    assert live.status == "pass" and live.details["rounds"] == sum(e.answer.rounds for e in found)


def test_a_round_that_accepts_one_draft_more_is_found(draft: Path) -> None:
    found, rules = examples(draft)[0], ServerDraft(loaded(draft), tiny_parts().embed_VH)
    seen, named = found.answer.seen, 0
    for at in range(1, len(seen) - 2):
        if seen[at].by_accepted[0] == (seen[at - 1].by_accepted or (0,))[0]:
            continue  # no round of no hit
        more = [Seen((s.by_accepted[0] - 1, s.by_accepted[1] + 1, s.by_accepted[2])) for s in seen[at:]]
        wrong = [replace(found, answer=replace(found.answer, seen=(*seen[:at], *more)))]
        live = check_live(rules, load_draft(draft), tiny_parts(), wrong, K, "transformers")
        named += live.status == "fail" and "on the server accepted [1], the files predict [0]" in live.message
    assert named > 5


def answered(lesson: overfit.Lesson, parts: list[tuple[int, ...]], other_from: int | None = None) -> Answer:
    """The learnt text said again, in rounds as given; ``other_from``: another token there."""
    output = list(lesson.example.answer.output[: lesson.new_tokens])
    if other_from is not None:
        output[other_from] += 1
    return Answer("again", lesson.example.answer.prompt, tuple(output), tuple(map(Seen, parts)))


def test_full_length_is_every_draft_of_every_round(draft: Path) -> None:
    lesson = overfit.choose_lesson(examples(draft), inverse_map(to_maps(VOCABULARY, 256)[0], 256), K)
    assert lesson is not None
    full = overfit.check_served(answered(lesson, [(), (0, 0, 4), (0, 0, 8)]), lesson, K, exact=True)
    assert full.status == "pass" and full.details == {"rounds": 8, "accepted": 16, "tokens": 25}
    less = overfit.check_served(answered(lesson, [(), (0, 0, 4), (1, 1, 7)]), lesson, K, exact=True)
    assert less.status == "fail" and less.value == 3 and "export, reload or serving" in less.message


def test_an_answer_that_changed_is_judged_up_to_there_in_bf16_alone(draft: Path) -> None:
    lesson = overfit.choose_lesson(examples(draft), inverse_map(to_maps(VOCABULARY, 256)[0], 256), K)
    assert lesson is not None
    changed = answered(lesson, [(), (0, 0, 4), (3, 0, 7)], other_from=14)
    exact = overfit.check_served(changed, lesson, K, exact=True)
    assert exact.status == "fail" and "from token 14 on" in exact.message
    rounded = overfit.check_served(changed, lesson, K, exact=False)
    assert rounded.status == "pass" and rounded.details["rounds"] == 4
    early = overfit.check_served(answered(lesson, [(), (0, 0, 8)], other_from=3), lesson, K, exact=False)
    assert early.status == "fail" and "nothing is shown" in early.message
