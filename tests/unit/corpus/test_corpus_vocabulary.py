"""Counts of response tokens, and what a draft's vocabulary covers of them."""

from pathlib import Path

import numpy as np
import pytest
from chat_targets import CHATML, chat_target, conversation, write_jsonl

from tide_platform.config import target_digest
from tide_platform.corpus.prepare import PreparePlan, prepare
from tide_platform.corpus.prepared import read_examples
from tide_platform.corpus.vocabulary import (
    BadCounts,
    count_prepared,
    coverage_by_size,
    read_counts,
    write_counts,
)


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Path, Path]:
    target = chat_target(tmp_path / "target", CHATML)
    source = write_jsonl(
        tmp_path / "in.jsonl", [conversation("prompts do not count", "aab"), conversation("x", "a")]
    )
    prepare(source, tmp_path / "p.jsonl", target, PreparePlan(None, "all", 100, 0))
    return tmp_path / "p.jsonl", target


def test_only_responses_are_counted(prepared: tuple[Path, Path]):
    path, _ = prepared
    counts = count_prepared(path)
    assert counts.sum() == sum(e.mask.sum() for e in read_examples(path)) == 6  # a a b end, a end
    assert sorted(counts[counts > 0].tolist()) == [1, 2, 3]


def test_coverage_grows_with_the_size_and_a_small_corpus_is_said():
    counts = np.zeros(100, np.int64)
    counts[[7, 50, 3]] = [6, 3, 1]
    rows = coverage_by_size(counts, (1, 2, 8, 5000))
    assert [(r.size, r.share, r.unused) for r in rows] == [
        (1, 0.6, 0),
        (2, 0.9, 0),
        (8, 1.0, 5),
        (100, 1.0, 97),
    ]


def test_counts_are_read_back_for_their_target_only(tmp_path: Path, prepared: tuple[Path, Path]):
    path, target = prepared
    digest, counts, file = target_digest(target), count_prepared(path), tmp_path / "counts.json"
    write_counts(file, path, counts)
    assert read_counts(file, digest, 340).tolist() == counts.tolist()
    assert len(read_counts(file, digest, 352)) == 352  # the head may be padded
    with pytest.raises(BadCounts, match="counted for target"):
        read_counts(file, "another", 340)
    with pytest.raises(BadCounts):
        read_counts(tmp_path / "none.json", digest, 340)
    file.write_text('{"counts": []}')
    with pytest.raises(BadCounts, match="tide data vocab"):
        read_counts(file, digest, 340)
