"""A file becomes tokens with a mask, or what is wrong with it is named; its own header says for whom."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_targets import CHATML, FORGETFUL, chat_target, conversation, write_jsonl

from tide_platform.config import TideError, target_digest
from tide_platform.corpus import rejects
from tide_platform.corpus.errors import (
    AllTruncated,
    FormatMismatch,
    NothingMasked,
    NotPrepared,
    OtherTarget,
    TooManyRejected,
)
from tide_platform.corpus.formats import Kind
from tide_platform.corpus.prepare import Counts, PreparePlan, prepare
from tide_platform.corpus.prepared import Example, read_examples, read_header, require_target
from tide_platform.corpus.template import ChatTemplate

PLAN = PreparePlan(format=None, turns="all", max_length=200, max_rejected=0.1)
GOOD = [conversation(f"the {i} dogs", f"once upon {i}", "why", "time") for i in range(20)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_target(tmp_path_factory.mktemp("targets") / "chatml", CHATML)


def run(
    tmp_path: Path, target: Path, records: list[Any], plan: PreparePlan = PLAN
) -> tuple[Counts, list[Example]]:
    out = tmp_path / "out.jsonl"
    counts = prepare(write_jsonl(tmp_path / "in.jsonl", records), out, target, plan)
    return counts, list(read_examples(out))


def said(target: Path, example: Example) -> list[str]:
    """Its answers as text."""
    tokenizer = ChatTemplate(target).tokenizer
    return [tokenizer.decode(example.input_ids[a:b]) for a, b in example.answers]


def test_both_chat_formats_give_the_same_tokens(tmp_path: Path, target: Path):
    turns = [{"from": "gpt" if i % 2 else "human", "value": t} for i, t in enumerate(["a", "b", "c", "d"])]
    _, first = run(tmp_path, target, [{"conversations": turns}])
    _, second = run(tmp_path, target, [conversation("a", "b", "c", "d")])
    assert first[0].input_ids.tolist() == second[0].input_ids.tolist()
    assert first[0].mask.tolist() == second[0].mask.tolist()
    assert said(target, first[0]) == ["b<|im_end|>", "d<|im_end|>"]


def test_what_was_prepared_is_itself_a_file_of_tokens(tmp_path: Path, target: Path):
    counts, first = run(tmp_path, target, GOOD)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    again, second = run(tmp_path, target, lines)
    assert (again.tokens, again.response_tokens, again.answers) == (
        counts.tokens,
        counts.response_tokens,
        counts.answers,
    )
    assert [e.input_ids.tolist() for e in first] == [e.input_ids.tolist() for e in second]


@pytest.mark.parametrize("tokens", [False, True])
def test_only_the_last_answer_where_that_is_asked(tmp_path: Path, target: Path, tokens: bool):
    records: list[Any] = GOOD[:1]
    if tokens:
        run(tmp_path, target, records)
        records = [json.loads((tmp_path / "out.jsonl").read_text())]
    counts, (example,) = run(tmp_path, target, records, replace(PLAN, turns="last"))
    assert said(target, example) == ["time<|im_end|>"] and counts.answers == 1


def test_preformatted_texts_are_masked_alike(tmp_path: Path, target: Path):
    template = ChatTemplate(target)
    _, expected = run(tmp_path, target, GOOD)
    texts = [{"text": template.render(record["messages"])} for record in GOOD]
    counts, found = run(tmp_path, target, texts, replace(PLAN, format=Kind.TEXT))
    assert [e.input_ids.tolist() for e in found] == [e.input_ids.tolist() for e in expected]
    assert [e.mask.tolist() for e in found] == [e.mask.tolist() for e in expected]
    assert counts.answers == 40


def test_the_header_says_for_whom_and_what_was_counted(tmp_path: Path, target: Path):
    counts, examples = run(tmp_path, target, GOOD)
    header = read_header(tmp_path / "out.jsonl")
    template = ChatTemplate(target)
    assert (header.target_digest, header.template_digest) == (target_digest(target), template.digest)
    assert header.tokenizer_digest == template.tokenizer_digest and header.source_format == "openai"
    assert header.counts["records"] == 20 == counts.prepared
    assert header.counts["response_tokens"] == sum(int(e.mask.sum()) for e in examples)
    assert header.counts["tokens"] == sum(len(e.input_ids) for e in examples)
    assert 0 < header.counts["coverage"] < 1


def test_a_file_prepared_for_another_target_is_refused(tmp_path: Path, target: Path):
    run(tmp_path, target, GOOD)
    other = chat_target(tmp_path / "other", CHATML + "{# another #}")
    header = read_header(tmp_path / "out.jsonl")
    require_target(tmp_path / "out.jsonl", header, target)
    with pytest.raises(OtherTarget):
        require_target(tmp_path / "out.jsonl", header, other)


def test_one_poisoned_record_is_set_aside_with_its_line_and_reason(tmp_path: Path, target: Path):
    records = [*GOOD[:7], '{"messages": [', *GOOD[7:]]
    counts, examples = run(tmp_path, target, records)
    assert (counts.records, counts.prepared, counts.rejected) == (21, 20, 1) and len(examples) == 20
    (line,) = (tmp_path / "out.jsonl.rejected.jsonl").read_text().splitlines()
    rejected = json.loads(line)
    assert rejected["record"] == 8 and "not JSON" in rejected["reason"]
    assert rejected["text"].startswith('{"messages": [')
    run(tmp_path, target, GOOD)
    assert not (tmp_path / "out.jsonl.rejected.jsonl").exists()


def test_too_many_poisoned_records_are_an_error_and_nothing_is_written(tmp_path: Path, target: Path):
    records = [*GOOD[:17], *[{"messages": [{"role": "user", "content": ""}]}] * 3]
    with pytest.raises(TooManyRejected, match="3 of 20") as caught:
        run(tmp_path, target, records)
    assert (caught.value.rejected, caught.value.records) == (3, 20) and "record 18" in str(caught.value)
    assert not (tmp_path / "out.jsonl").exists()
    assert len((tmp_path / "out.jsonl.rejected.jsonl").read_text().splitlines()) == 3
    counts, _ = run(tmp_path, target, records, replace(PLAN, max_rejected=0.15))
    assert counts.rejected == 3


def test_a_long_file_that_is_mostly_bad_is_given_up_early(tmp_path: Path, target: Path, monkeypatch):
    monkeypatch.setattr(rejects, "_EARLY", 10)
    with pytest.raises(TooManyRejected) as caught:
        run(tmp_path, target, [GOOD[0], *["x"] * 99])
    assert caught.value.records == 10


def test_a_failed_run_leaves_the_former_output_alone(tmp_path: Path, target: Path):
    run(tmp_path, target, GOOD)
    before = (tmp_path / "out.jsonl").read_text()
    with pytest.raises(TooManyRejected):
        run(tmp_path, target, [GOOD[0], "x"])
    assert (tmp_path / "out.jsonl").read_text() == before and read_header(tmp_path / "out.jsonl")
    assert not list(tmp_path.glob(".out.jsonl*"))


def test_another_templates_texts_have_no_mask_and_the_mend_is_said(tmp_path: Path, target: Path):
    records = [{"text": f"[INST] the dog {i} [/INST] once"} for i in range(3)]
    with pytest.raises(
        NothingMasked, match=r"mask coverage is 0 %.*another template.*give the conversations"
    ):
        run(tmp_path, target, records, replace(PLAN, format=Kind.TEXT))


def test_tokens_without_a_response_have_no_mask(tmp_path: Path, target: Path):
    with pytest.raises(NothingMasked, match="loss_mask"):
        run(tmp_path, target, [{"input_ids": [1, 2], "loss_mask": [0, 0]}])


def test_a_template_that_renders_no_answer_is_named(tmp_path: Path):
    silent = CHATML.replace("m['content']", "(m['content'] if m['role'] != 'assistant' else '')")
    silent = "{% generation %}{% endgeneration %}" + silent
    folder = chat_target(tmp_path / "silent", silent)
    with pytest.raises(NothingMasked, match="check the chat template"):
        run(tmp_path, folder, GOOD)


def test_truncation_is_counted_and_cuts_the_mask_too(tmp_path: Path, target: Path):
    counts, examples = run(
        tmp_path, target, [conversation("a", "b " * 50), *GOOD[:3]], replace(PLAN, max_length=60)
    )
    assert counts.truncated == 4 - sum(len(e.input_ids) < 60 for e in examples)
    assert len(examples[0].input_ids) == 60 and examples[0].mask[-1]


def test_all_truncated_before_the_answer_is_named(tmp_path: Path, target: Path):
    with pytest.raises(AllTruncated, match="all 3 records are truncated at 8 tokens"):
        run(tmp_path, target, [conversation("long " * 20, "b")] * 3, replace(PLAN, max_length=8))


def test_some_truncated_before_the_answer_are_left_out_and_counted(tmp_path: Path, target: Path):
    counts, examples = run(tmp_path, target, [conversation("long " * 90, "b"), GOOD[0]])
    assert (counts.truncated_away, len(examples)) == (1, 1)


def test_a_template_that_forgets_is_said_and_counted(tmp_path: Path):
    folder = chat_target(tmp_path / "forgetful", FORGETFUL)
    counts, examples = run(tmp_path, folder, [conversation("a", "hm</think>b", "c", "d"), *GOOD[:2]])
    assert counts.last_turn_only == 1 and "message 2" in counts.last_turn_reason
    assert said(folder, examples[0]) == ["d<|im_end|>"] and len(examples[1].answers) == 2


def test_the_preformatted_flag_over_conversations_is_named_before_anything_is_written(
    tmp_path: Path, target: Path
):
    with pytest.raises(FormatMismatch):
        run(tmp_path, target, GOOD, replace(PLAN, format=Kind.TEXT))
    assert not (tmp_path / "out.jsonl").exists()


def test_tokens_of_another_vocabulary_are_rejected(tmp_path: Path, target: Path):
    good = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    with pytest.raises(TooManyRejected, match="340"):
        run(tmp_path, target, [good, good | {"input_ids": [1, 2, 340]}])


def test_a_prompt_alone_is_sent_to_the_target(tmp_path: Path, target: Path):
    with pytest.raises(TooManyRejected, match="tide data regenerate"):
        run(tmp_path, target, [{"input_ids": [1, 2]}])


def test_an_unfinished_file_is_refused(tmp_path: Path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"id": "a"}])
    with pytest.raises(NotPrepared, match="tide data prepare"):
        read_header(path)
    (tmp_path / "x.jsonl.header.json").write_text('{"format_version": 0}')
    with pytest.raises(TideError, match="version 0"):
        read_header(path)
