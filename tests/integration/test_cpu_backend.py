"""The CPU backend on a real server: speculation changes nothing that is said (fp32; bf16 ties may turn)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_server import EngineServer

pytestmark = pytest.mark.integration

QUESTIONS = (
    "What is the capital of France?",
    "Hello!",
    "Write a Python function that reverses a string, and explain each line of it to somebody who has never"
    " seen a program: what it is given, what it does with it, and what it gives back in the end.",
    "Say the word banana twenty times.",
    "Name three fruits.",
)


@pytest.fixture(scope="module")
def prompts(target: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    return [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def plain(server: Callable[..., EngineServer], prompts: list[list[int]]) -> list[str]:
    """What the target says without a draft."""
    one = server(None)
    try:
        replies = one.generate(prompts, {"max_new_tokens": 40}, [f"plain-{i}" for i in range(len(prompts))])
        return [reply["text"] for reply in replies]
    finally:
        one.end()


def ask(server: EngineServer, prompts: list[list[int]], name: str, sampling: Any) -> list[dict[str, Any]]:
    return server.generate(prompts, sampling, [f"cpu-{name}-{i}" for i in range(len(prompts))])


def test_greedy_text_is_the_plain_servers(
    speculative: EngineServer, prompts: list[list[int]], plain: list[str]
) -> None:
    """A batch of unequal lengths, prompts in chunks, then again from the prefix cache and one at a time."""
    replies = ask(speculative, prompts, "batch", {"max_new_tokens": 40})
    assert [reply["text"] for reply in replies] == plain
    assert sum(reply["meta_info"]["spec_num_correct_drafts"] for reply in replies) > 0
    again = [
        ask(speculative, [prompt], f"alone-{i}", {"max_new_tokens": 40})[0]
        for i, prompt in enumerate(prompts)
    ]
    assert [reply["text"] for reply in again] == plain
    assert all(reply["meta_info"]["cached_tokens"] > 0 for reply in again)


def test_a_greedy_request_is_not_touched_by_sampled_neighbours(
    speculative: EngineServer, prompts: list[list[int]], plain: list[str]
) -> None:
    greedy, sampled = (
        {"max_new_tokens": 40},
        {"max_new_tokens": 40, "temperature": 0.9, "top_p": 0.8, "top_k": 50},
    )
    replies = ask(speculative, prompts, "mixed", [greedy, sampled, greedy, sampled, greedy])
    assert [reply["text"] for reply in replies][::2] == plain[::2]


@pytest.mark.parametrize(
    "sampling",
    [
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {"28": 3.0}},
        {"temperature": 1.0, "min_p": 0.1},
        {"max_new_tokens": 1},
    ],
    ids=["penalties", "logit-bias", "min-p", "one-token"],
)
def test_serves_what_changes_the_logits(
    speculative: EngineServer, prompts: list[list[int]], sampling: dict[str, Any]
) -> None:
    wanted = {"max_new_tokens": 8, "ignore_eos": True} | sampling
    replies = ask(speculative, prompts[:2], "-".join(sampling), wanted)
    assert [reply["meta_info"]["completion_tokens"] for reply in replies] == [wanted["max_new_tokens"]] * 2
