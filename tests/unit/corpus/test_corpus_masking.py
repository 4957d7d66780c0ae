"""The mask by offsets, against character by character."""

import itertools

import numpy as np
import pytest
from chat_targets import END, bpe_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from tide_platform.corpus.masking import exact_offsets, marked_spans, mask_text, spans_of

WORDS = st.lists(
    st.sampled_from(["the", " quick", " lazy", "é", "漢字", "\n", " ", END, "x", "🙂", "dog", "  "]),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module", params=[False, True], ids=["offsets", "trimmed offsets"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Byte-level; some of them report tokens without the space that they begin with."""
    plain = bpe_tokenizer()
    if request.param:
        plain.post_processor = processors.ByteLevel(trim_offsets=True)
    return exact_offsets(PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=END))


def decoded(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


@settings(max_examples=120, deadline=None)
@given(before=WORDS, answer=WORDS, after=WORDS)
def test_a_token_is_a_response_iff_all_its_bytes_are(tokenizer, before: str, answer: str, after: str):
    text = before + answer + after
    span = (len(before), len(before + answer))
    found = mask_text(tokenizer, text, [span], ())
    first, last = (len(text[:at].encode()) for at in span)
    at, expected, merged = 0, [], 0
    for token in map(tokenizer.id_to_token, found.input_ids):
        size = len(token.encode()) if token == END else len(token)  # byte-level: a character a byte
        expected.append(first <= at and at + size <= last)
        merged += at < last and at + size > first and not expected[-1]
        at += size
    assert at == len(text.encode())
    assert found.mask.tolist() == expected and found.merged == merged


def test_a_merge_across_the_edge_is_prompt_and_counted(tokenizer):
    text = "the quick"
    whole = mask_text(tokenizer, text, [(3, len(text))], ())
    assert whole.merged == 0 and decoded(tokenizer, whole.input_ids[whole.mask]) == " quick"
    inside = mask_text(tokenizer, text, [(4, len(text))], ())  # the space before `quick` is the prompt's
    assert inside.merged == 1 and not inside.mask.any()


def test_what_follows_the_end_token_is_no_response(tokenizer):
    text = f"the dog{END}\n"
    assert decoded(tokenizer, mask_text(tokenizer, text, [(3, len(text))], [1]).input_ids) == text
    found = mask_text(tokenizer, text, [(3, len(text))], [tokenizer.token_to_id(END)])
    assert decoded(tokenizer, found.input_ids[found.mask]) == f" dog{END}"


def test_an_end_token_in_the_middle_of_an_answer_does_not_end_it(tokenizer):
    text = f"the {END} dog"
    found = mask_text(tokenizer, text, [(3, len(text))], [tokenizer.token_to_id(END)])
    assert decoded(tokenizer, found.input_ids[found.mask]).endswith("dog")


def test_marked_spans_are_found_and_the_last_may_be_open():
    text = "U:a A:b; U:c A:d"
    assert [text[a:b] for a, b in marked_spans(text, "A:", ";")] == ["b;", "d"]
    assert marked_spans("U:a", "A:", ";") == []


@given(st.lists(st.booleans(), max_size=20))
def test_spans_of_a_mask_are_its_runs(mask: list[bool]):
    again = np.zeros(len(mask), bool)
    spans = spans_of(np.array(mask, bool))
    for first, last in spans:
        assert first < last
        again[first:last] = True
    assert again.tolist() == mask
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))


def test_the_tokenizer_of_the_test_does_merge():
    assert len(bpe_tokenizer().encode(" quick").ids) == 1
