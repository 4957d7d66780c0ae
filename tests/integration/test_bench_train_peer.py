"""``tide bench train`` with the peer that it is about, on the tiny target; all but the live server."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.fixtures.tiny import AUX_LAYERS, TINY, prompts, say, tiny_parts, with_last_hidden
from tide_platform.bench import train as bench
from tide_platform.bench.report import Report
from tide_platform.bench.train_samples import HELD_OUT, WORKLOAD
from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.capture.segment import SegmentWriter
from tide_platform.config import Settings
from tide_platform.draft.checkpoint import load_draft, new_draft, save_draft


@pytest.mark.slow
@pytest.mark.integration
def test_the_peer_proves_the_conversion_trains_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is done is not done again."""
    draft = new_draft(tiny_parts(), np.arange(20, 140), AUX_LAYERS, seed=1)
    samples = with_last_hidden(say(prompts(9, 17), 20))
    save_draft(tmp_path / "base", draft, {})
    settings = Settings(target=TINY, draft=tmp_path / "base", state=tmp_path / "state")
    settings.training.epochs, settings.training.threads, settings.training.batch_size = 1, 1, 4
    settings.training.learning_rate = 3e-3
    spool = tmp_path / "captured" / "state" / "spool"
    spool.mkdir(parents=True)
    stream = StreamMeta("t", 96, 256, AUX_LAYERS, 16, target_signal="last_hidden")
    segment = SegmentWriter(spool, stream)
    by_tenant: dict[str, list[Sample]] = {WORKLOAD: [], HELD_OUT: []}
    for number, sample in enumerate(samples):
        tenant = HELD_OUT if number % 3 == 0 else WORKLOAD
        by_tenant[tenant].append(Sample(replace(sample.meta, tenant=tenant), sample.tensors))
        segment.append(by_tenant[tenant][-1])
    segment.seal()
    monkeypatch.setattr(bench, "collect", lambda *_: (stream, by_tenant))  # no server is asked
    said: list[str] = []

    def run(most: int) -> Report:
        return bench.run(settings, tmp_path, bench.Sizes(6, 3, range(1), 1), most=most, say=said.append)

    report = run(6)
    differences = report.raw["conversion"]["differences"]
    assert differences["logits"] < 1e-4 and differences["loss"] < 1e-4
    assert set(report.ratios) == {
        "tokens_per_s",
        "tokens_per_cpu_s",
        "tokens_per_s_best_pack",
        "acceptance_replay",
        "store_over_memory",
        "recompute_once",
        "recompute_each_epoch",
    }
    assert len(report.raw["runs"]["theirs-0"]["seconds"]) == 2
    lengths = report.raw["acceptance_length"]
    assert lengths["ours-0"]["replay"] != lengths["base"]["replay"] != lengths["theirs-0"]["replay"]
    (imported,) = tmp_path.glob("recipe-*/runs/theirs-0/imported")
    assert torch.equal(load_draft(imported).d2t, draft.d2t)
    assert "verifier_lm_head.weight" not in load_file(imported / "model.safetensors")
    count = len(said)
    assert run(0).ratios == report.ratios and len(said) == count, "nothing was done again"
