"""The replay experiment on the tiny target: pieces are kept, and agreement is told from disagreement."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import AUX_LAYERS, TINY, prompts, say, tiny_parts

from tide_platform.bench import replay as bench
from tide_platform.bench.captured import request_id
from tide_platform.bench.replay import Piece
from tide_platform.capture.record import Sample
from tide_platform.config import Settings
from tide_platform.draft.checkpoint import load_draft, new_draft, save_draft
from tide_platform.evaluation.replay import replay
from tide_platform.serving.drafts import resolve_draft

PROMPTS, NEW = 6, 24


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    draft = tmp_path_factory.mktemp("draft") / "base"
    save_draft(draft, new_draft(tiny_parts(), np.arange(20, 140), AUX_LAYERS), {})
    return Settings(target=TINY, draft=draft, state=draft.parent / "state")


@functools.cache
def said() -> list[Sample]:
    return say(prompts(PROMPTS), NEW)


def stored(tenant: str) -> list[Sample]:
    """What a server would have captured of a tenant's requests, without its counts."""
    names = [request_id(tenant, number) for number in range(PROMPTS)]
    return [
        Sample(replace(sample.meta, request_id=name, sample_id=name), sample.tensors)
        for name, sample in zip(names, said(), strict=True)
    ]


def counted(settings: Settings, tenant: str) -> list[Sample]:
    """With them."""
    of = answers(settings, tenant, bench.SAMPLED_K)
    return [
        Sample(
            replace(
                sample.meta,
                verify_rounds=of[sample.meta.request_id]["rounds"],
                accepted_drafts=of[sample.meta.request_id]["accepted"],
            ),
            sample.tensors,
        )
        for sample in stored(tenant)
    ]


def answers(settings: Settings, tenant: str, k: int, more: int = 0) -> dict[str, dict[str, Any]]:
    """What a server at ``k`` would have counted; ``more`` accepted drafts a request."""
    samples = stored(tenant)
    draft = load_draft(resolve_draft(settings))
    found = {}
    for sample, each in zip(
        samples, replay(draft, tiny_parts(), samples, k, dtype=torch.float32), strict=True
    ):
        of = each.by_k[k]
        found[each.request_id] = {
            "rounds": of.rounds,
            "accepted": of.accepted + more,
            "rounds_by_accepted": [],
            "output_ids": sample.tensors["input_ids"][sample.meta.prompt_tokens :].tolist(),
        }
    return found


@pytest.fixture
def served(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str]]]:
    """Servers that a run started, with what they were asked."""
    started: list[tuple[int, list[str]]] = []

    def captured(own: Settings, folder: Path, sent: dict[str, Any], **_: Any) -> dict[str, list[Sample]]:
        assert own.serving.dtype == "float32" and not own.serving.radix_cache
        return {tenant: counted(settings, tenant)[: len(of)] for tenant, of in sent.items()}

    def serve(own: Settings, folder: Path, k: int, pieces: list[Piece], *_: Any) -> None:
        started.append((k, [piece.tenant for piece in pieces]))
        for piece in pieces:
            piece.path(folder).parent.mkdir(parents=True, exist_ok=True)
            more = 2 if piece.workload == "code" else 0
            piece.path(folder).write_text(json.dumps(answers(settings, piece.tenant, k, more)))

    monkeypatch.setattr(bench, "captured", captured)
    monkeypatch.setattr(bench, "_serve", serve)
    return started


def test_pieces_are_served_once_and_a_disagreement_shows(
    settings: Settings, tmp_path: Path, served: list[tuple[int, list[str]]]
) -> None:
    def run(most: int | None) -> bench.Report:
        return bench.run(
            settings,
            tmp_path,
            workloads=("maths", "code"),
            ks=(1, 2),
            prompts=PROMPTS,
            most=most,
            say=lambda _: None,
        )

    first = run(1)
    assert served == [(1, ["code-t0"])] and set(first.ratios) == {"live_code_k1", "packed_code_k1"}
    report = run(None)
    assert served[1:] == [
        (1, ["maths-t0"]),
        (2, ["code-t0", "maths-t0"]),
        (2, ["code-t0.7", "maths-t0.7"]),
    ]
    assert report.ratios["live_maths_k1"] == report.ratios["live_maths_k2"] == pytest.approx(1)
    assert report.intervals["live_maths_k2"] == (pytest.approx(1), pytest.approx(1))
    assert report.raw["cases"]["live_maths_k2"]["same_text"] == 1
    assert report.ratios["live_code_k2"] < 0.95, "more was accepted live: replay reads low"
    assert report.intervals["live_code_k2"][1] < 1
    assert 0.8 < report.ratios["packed_maths_k2"] < 1.2
    assert report.ratios["own_code_k2"] == pytest.approx(1)
    assert {name.partition("_")[0] for name in report.ratios} == {"live", "packed", "sampled", "own"}
    assert run(None).ratios == report.ratios and len(served) == 4


def test_what_a_piece_lacks_is_told_by_prompt(tmp_path: Path) -> None:
    piece = Piece(1, 0.0, "maths")
    assert piece.missing(tmp_path, 3) == [0, 1, 2]
    piece.path(tmp_path).parent.mkdir()
    piece.path(tmp_path).write_text(json.dumps({request_id("maths-t0", n): {} for n in (1, 5)}))
    assert piece.missing(tmp_path, 3) == [0, 2]
    assert list(piece.answers(tmp_path, 3)) == ["maths-t0-0001"]


def test_rounds_without_a_stored_round_are_an_error_unless_they_were_drawn_again(settings: Settings) -> None:
    report = bench.Report("replay", {}, raw={"cases": {}}, conditions={})
    one = {"rounds": 3, "accepted": 1, "rounds_by_accepted": [2, 1], "output_ids": [1, 2, 3]}
    answered = {"a": one, "b": one}
    live = bench._live(answered, 1)
    (stored,) = bench._live({"b": answered["b"]}, 1)
    bench._add(report, "case", live, [stored], 1, drawn_again=True)
    assert list(report.raw["cases"]["case"]["requests"]) == ["b"]
    with pytest.raises(bench.AnswersDiffer, match="a: answered live in several rounds"):
        bench._add(report, "case", live, [], 1)
