"""How often each token is a response, and how much of that a draft's vocabulary of a size covers."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tide_platform.config.files import write_json
from tide_platform.corpus.errors import CorpusError
from tide_platform.corpus.prepared import read_examples, read_header
from tide_platform.draft.vocab import choose_vocabulary, count_tokens, coverage, to_maps

SIZES = (4096, 8192, 12288, 16384, 32768)
FORMAT_VERSION = 1


class BadCounts(CorpusError):
    """A file that holds no token counts for this target."""


@dataclass(frozen=True)
class SizeCoverage:
    size: int
    share: float  # of the response tokens that such a vocabulary covers, 0..1
    unused: int  # of its tokens, those that never occur: the lowest ids fill it up


def count_prepared(path: Path) -> np.ndarray:
    """Occurrences of each target id under the mask: int64 [V]. Raises :class:`NotPrepared`."""
    vocab_size = read_header(path).vocab_size
    return count_tokens((e.input_ids[e.mask] for e in read_examples(path)), vocab_size)


def coverage_by_size(counts: np.ndarray, sizes: tuple[int, ...]) -> list[SizeCoverage]:
    """For each of ``sizes``, none larger than the target's vocabulary."""
    distinct = int((counts > 0).sum())
    found = []
    for size in sorted({min(size, len(counts)) for size in sizes}):
        _, t2d = to_maps(choose_vocabulary(counts, size), len(counts))
        found.append(SizeCoverage(size, coverage(counts, t2d), max(0, size - distinct)))
    return found


def write_counts(path: Path, prepared: Path, counts: np.ndarray) -> None:
    """JSON: of the tokens that occur, id -> occurrences; for ``tide draft init --vocab-from``."""
    header = read_header(prepared)
    occurring = np.flatnonzero(counts)
    write_json(
        path,
        {
            "format_version": FORMAT_VERSION,
            "made_by": "tide data vocab",
            "source": str(prepared),
            "target_digest": header.target_digest,
            "tokenizer_digest": header.tokenizer_digest,
            "vocab_size": len(counts),
            "tokens": int(counts.sum()),
            "distinct": len(occurring),
            "counts": {str(i): int(counts[i]) for i in occurring},
        },
        indent=1,
    )


def read_counts(path: Path, target_digest: str, vocab_size: int) -> np.ndarray:
    """int64 [V] of a file that :func:`write_counts` wrote for this target. Raises :class:`BadCounts`."""
    try:
        raw = json.loads(path.read_text())
        version, digest, size = raw["format_version"], raw["target_digest"], raw["vocab_size"]
        pairs = [(int(i), int(n)) for i, n in raw["counts"].items()]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BadCounts(path, f"no token counts ({error}); make them with `tide data vocab`") from error
    if version != FORMAT_VERSION:
        raise BadCounts(path, f"format version {version}, this is {FORMAT_VERSION}; make it again")
    if digest != target_digest or size > vocab_size:
        raise BadCounts(
            path, f"counted for target {digest}, this is {target_digest}; prepare and count for this target"
        )
    if pairs and max(i for i, _ in pairs) >= vocab_size:
        raise BadCounts(path, f"counts a token beyond the vocabulary of {vocab_size}; make it again")
    counts = np.zeros(vocab_size, np.int64)
    for index, occurrences in pairs:
        counts[index] = occurrences
    return counts
