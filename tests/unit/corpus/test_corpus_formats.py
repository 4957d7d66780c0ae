"""Formats are recognised, or what is wrong is named; records of each become the same messages."""

from pathlib import Path
from typing import Any

import pytest
from chat_targets import conversation

from tide_platform.corpus.errors import BadRecord, FormatMismatch, MixedFormats, UnknownFormat
from tide_platform.corpus.formats import Conversation, Kind, Tokens, parse, recognise
from tide_platform.corpus.reading import Record

PATH = Path("x.jsonl")
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]}
OPENAI = conversation("Hi", "Yes")
TOKENS = {"input_ids": [1, 2], "loss_mask": [0, 1]}
TEXT = {"text": "<|im_start|>user"}


def records(*values: Any) -> list[Record]:
    return [Record(number, value) for number, value in enumerate(values, 1)]


def messages_of(value: Any, kind: Kind = Kind.OPENAI) -> list[dict[str, Any]]:
    parsed = parse(Record(1, value), kind)
    assert isinstance(parsed, Conversation)
    return parsed.messages


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (SHAREGPT, Kind.SHAREGPT),
        (OPENAI, Kind.OPENAI),
        ({"conversations": OPENAI["messages"]}, Kind.OPENAI),
        (TOKENS, Kind.TOKENS),
    ],
)
def test_a_format_is_recognised_past_a_broken_record(value: Any, kind: Kind):
    head = [Record(1, "{", "not JSON"), *records(3, {"other": 1}, value, value)]
    assert recognise(PATH, head, None) is kind


def test_mixed_records_are_refused_with_where_each_begins():
    with pytest.raises(MixedFormats, match=r"sharegpt \(first: record 1\), openai \(first: record 2\)"):
        recognise(PATH, records(SHAREGPT, OPENAI, SHAREGPT), None)


def test_named_by_the_user_a_mixed_file_goes_and_the_others_are_rejected():
    assert recognise(PATH, records(SHAREGPT, OPENAI), Kind.OPENAI) is Kind.OPENAI
    with pytest.raises(BadRecord, match="is sharegpt"):
        parse(Record(1, SHAREGPT), Kind.OPENAI)


def test_unknown_columns_are_named():
    with pytest.raises(UnknownFormat, match="answer, question"):
        recognise(PATH, records({"question": "a", "answer": "b"}), None)


def test_the_preformatted_flag_over_conversations_is_named():
    with pytest.raises(FormatMismatch, match="leave --preformatted out") as caught:
        recognise(PATH, records(SHAREGPT), Kind.TEXT)
    assert caught.value.columns == ("conversations",)


@pytest.mark.parametrize("asked", [None, Kind.SHAREGPT])
def test_preformatted_texts_without_the_flag_are_named(asked: Kind | None):
    with pytest.raises(FormatMismatch, match="give --preformatted"):
        recognise(PATH, records(TEXT), asked)


def test_sharegpt_roles_have_many_names():
    turns = [
        ("system", "S"),
        ("human", "a"),
        ("gpt", "b"),
        ("User", "c"),
        ("observation", "d"),
        ("model", "e"),
    ]
    value = {"conversations": [{"from": name, "value": text} for name, text in turns]}
    found = messages_of(value, Kind.SHAREGPT)
    assert [m["role"] for m in found] == ["system", "user", "assistant", "user", "tool", "assistant"]
    assert [m["content"] for m in found] == list("Sabcde")


def test_a_system_column_comes_first():
    assert messages_of(SHAREGPT | {"system": "Be brief."}, Kind.SHAREGPT)[0] == {
        "role": "system",
        "content": "Be brief.",
    }


def test_parts_of_text_are_joined_and_other_parts_refused():
    parts: list[Any] = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    value = conversation("x", "Yes")
    value["messages"][0]["content"] = parts
    assert messages_of(value)[0]["content"] == "ab"
    value["messages"][0]["content"] = [*parts, {"type": "image_url", "image_url": {}}]
    with pytest.raises(BadRecord, match="'image_url' is not text"):
        parse(Record(1, value), Kind.OPENAI)


def test_tool_calls_of_any_shape_stand_side_by_side():
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": null}]}'}},
        {"function": {"name": "g", "arguments": {"x": 1.5}}},
        {"name": "h"},
        {"function": {"name": "i", "arguments": "plain"}},
    ]
    value = conversation("x", "")
    value["messages"][1] |= {"content": None, "tool_calls": calls}
    value["messages"] += [
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "3"},
    ]
    found = messages_of(value)
    assert [c["function"]["arguments"] for c in found[1]["tool_calls"]] == [
        {"a": [1, {"b": None}]},
        {"x": 1.5},
        {},
        "plain",
    ]
    assert found[1]["content"] == "" and found[1]["tool_calls"][0]["id"] == "1"
    assert found[2]["tool_call_id"] == "1"


def test_a_function_call_of_the_older_form_is_a_tool_call():
    value = conversation("x", "")
    value["messages"][1]["function_call"] = {"name": "f", "arguments": "{}"}
    assert messages_of(value)[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_a_last_prompt_without_an_answer_is_left_out():
    assert [m["content"] for m in messages_of(conversation("a", "b", "c"))] == ["a", "b"]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no answer"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "follows no prompt"),
        (conversation("x", "  "), "empty"),
        ({"messages": [{"role": "user", "content": 3}]}, "`content`"),
        ({"messages": [{"role": "user", "content": "x"}, 4]}, "message 2"),
        (conversation("x", "y", tools="all"), "`tools`"),
        (conversation("x", "y") | {"messages": [{"role": "user", "content": "x", "tool_calls": 1}]}, "list"),
        (conversation("x") | {"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "`name`"),
    ],
)
def test_why_a_record_is_bad(value: Any, says: str):
    with pytest.raises(BadRecord, match=says):
        parse(Record(1, value), Kind.OPENAI)


@pytest.mark.parametrize(
    "value",
    [
        {"input_ids": []},
        {"input_ids": [1, -1]},
        {"input_ids": [1, True]},
        {"input_ids": [1, 2], "loss_mask": [1]},
        {"input_ids": [1, 2], "loss_mask": [0, 2]},
    ],
)
def test_tokens_that_are_none(value: Any):
    with pytest.raises(BadRecord, match="must be a list"):
        parse(Record(1, value), Kind.TOKENS)


def test_tokens_with_and_without_a_mask():
    assert parse(Record(1, TOKENS), Kind.TOKENS) == Tokens([1, 2], [False, True])
    assert parse(Record(1, {"input_ids": [5]}), Kind.TOKENS) == Tokens([5], None)
