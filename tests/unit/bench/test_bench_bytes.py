"""The bytes experiment on the tiny target: every format is stored, trained with and judged."""

from pathlib import Path

import pytest
from tiny import prompts, say, tiny_parts

from tide_platform.bench import bytes as bench
from tide_platform.bench.bytes import BASE, Form
from tide_platform.capture.record import Sample
from tide_platform.config import Settings
from tide_platform.evaluation.acceptance import acceptance_length
from tide_platform.evaluation.replay import replay

FORMS = (BASE, Form("int4", 4))


@pytest.fixture
def samples(by_tenant: dict[str, list[Sample]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "collect", lambda *_: by_tenant)


def test_runs_are_kept_and_compared(settings: Settings, tmp_path: Path, samples: None) -> None:
    def run(most: int | None) -> bench.Report:
        return bench.run(
            settings, tmp_path, workloads=("maths",), forms=FORMS, seeds=(0,), most=most, say=said.append
        )

    said: list[str] = []
    first = run(1)
    assert list(first.ratios) == ["bytes_maths_bf16_k64"] and len(said) == 1
    report = run(None)
    assert len(said) == 2, "the first run was not done again"
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert report.ratios["bytes_maths_int4_k4"] < 0.45 * report.ratios["bytes_maths_bf16_k64"]
    ratio, (low, high) = (of["acceptance_maths_int4_k4"] for of in (report.ratios, report.intervals))
    assert low <= ratio <= high and 0.8 < ratio < 1.25
    before = acceptance_length(
        replay(bench_draft(settings), tiny_parts(), say(prompts(12, seed=4), 40), bench.K), bench.K
    )
    assert report.raw["runs"][1]["acceptance_length"] > before + 0.2
    assert run(None).ratios == report.ratios and len(said) == 2


def bench_draft(settings: Settings):
    from tide_platform.draft.checkpoint import load_draft
    from tide_platform.serving.drafts import resolve_draft

    return load_draft(resolve_draft(settings))


def test_what_is_stored_is_packed_and_narrow(samples: None) -> None:
    sample = say(prompts(1), 40)[0]
    rows, features = sample.tensors["aux"].shape
    small = bench.stored(sample, Form("int4", 4))
    assert small.meta.aux_format == "int4"
    assert small.tensors["teacher_ids"].shape[1] == small.tensors["teacher_logp"].shape[1] == 4
    whole, tokens = bench.sizes([sample], Form("bf16", 4))
    packed, _ = bench.sizes([sample], Form("int4", 4))
    assert tokens == rows
    # position 0 is kept whole; a block of 32 takes 18 bytes in place of 64
    assert packed < whole - (rows - 1) * features * 2 + (rows - 1) * -(-features // 32) * 18 + 2000
