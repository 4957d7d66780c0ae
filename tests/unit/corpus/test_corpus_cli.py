"""What `tide data` prints, and what it refuses before it begins."""

from pathlib import Path

import numpy as np
import pytest
from chat_targets import CHATML, TINY, chat_target, conversation, write_jsonl
from typer.testing import CliRunner

from tide_platform.cli import data, draft
from tide_platform.config import TideError, target_digest
from tide_platform.corpus.vocabulary import BadCounts, read_counts

RECORDS = [*[conversation(f"the {i}", "once upon a time") for i in range(19)], "{"]


def invoke(app, *words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_prepare_and_vocab_say_what_came_of_it(tmp_path: Path):
    target = chat_target(tmp_path / "target", CHATML)
    source, out = write_jsonl(tmp_path / "in.jsonl", RECORDS), tmp_path / "out.jsonl"
    said = invoke(data.app, "prepare", source, "--out", out, "--target", target)
    assert "in.jsonl: openai" in said and "19 of 20 records, 19 answers" in said
    assert "mask coverage" in said and "rejected             1" in said
    assert "truncated" not in said and "last answer only" not in said
    said = invoke(data.app, "vocab", out, "--size", 2, "--size", 300)
    assert "2 tokens:" in said and "100.00% covered; only" in said


def test_two_words_about_the_format_are_refused(tmp_path: Path):
    words = ["prepare", tmp_path / "x", "--out", tmp_path / "y", "--preformatted", "--format", "openai"]
    with pytest.raises(TideError, match="--preformatted and --format openai"):
        invoke(data.app, *words)


def test_an_untrained_draft_takes_the_vocabulary_of_a_file(tmp_path: Path):
    from safetensors import safe_open

    source, out = write_jsonl(tmp_path / "in.jsonl", RECORDS), tmp_path / "out.jsonl"
    counts = tmp_path / "counts.json"
    invoke(data.app, "prepare", source, "--out", out, "--target", TINY)
    invoke(data.app, "vocab", out, "--out", counts)
    invoke(
        draft.app, "init", "--target", TINY, "--out", tmp_path / "d", "--vocab", 10, "--vocab-from", counts
    )
    with safe_open(tmp_path / "d" / "model.safetensors", "np") as file:
        d2t = file.get_tensor("d2t")
    chosen = set((d2t + np.arange(10)).tolist())
    occurring = read_counts(counts, target_digest(TINY), 256)
    assert chosen == set(np.argsort(-occurring, kind="stable")[:10].tolist()) and ord("e") in chosen


def test_counts_of_another_target_make_no_draft(tmp_path: Path):
    target = chat_target(tmp_path / "target", CHATML)
    source, out = write_jsonl(tmp_path / "in.jsonl", RECORDS), tmp_path / "out.jsonl"
    invoke(data.app, "prepare", source, "--out", out, "--target", target)
    invoke(data.app, "vocab", out, "--out", tmp_path / "c.json")
    with pytest.raises(BadCounts):
        invoke(
            draft.app, "init", "--target", TINY, "--out", tmp_path / "d", "--vocab-from", tmp_path / "c.json"
        )
