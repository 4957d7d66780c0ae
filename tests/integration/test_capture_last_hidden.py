"""Last hidden states from a real SGLang, fp32: the target's own, and what its captured logits are made of."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from engine_server import EngineServer, start_server
from test_engine_capture import assert_covers

from tests.fixtures.tiny import AUX_LAYERS, TINY, prompts
from tide_platform.capture.record import Sample
from tide_platform.capture.segment import read_segment
from tide_platform.capture.spool import sealed_segments
from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft
from tide_platform.draft.target_model import TargetModel

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """The tiny target; a few requests fill its KV cache, so that some are thrown out and prefilled again."""
    folder = tmp_path_factory.mktemp("last_hidden")
    draft = folder / "draft"
    save_draft(draft, new_draft(load_target_parts(TINY), np.arange(64, 192), seed=0), {})
    started = start_server(
        folder,
        TINY,
        draft,
        ["--schedule-conservativeness", "0.05"],
        AUX_LAYERS,
        {"target_signal": "last_hidden", "teacher_k": 16},
        context_length=256,
        max_total_tokens=512,
        radix_cache=True,  # without, SGLang admits only what surely fits
    )
    yield started
    started.end()


@pytest.fixture(scope="module")
def samples(server: EngineServer) -> list[Sample]:
    texts = [row.tolist() for row in prompts(6, 24, seed=3)]
    rids = [f"r{i}" for i in range(len(texts))]
    plain = {"max_new_tokens": 120, "ignore_eos": True}
    server.generate(texts, [plain] * 5 + [plain | {"temperature": 0.8, "frequency_penalty": 0.7}], rids)
    status = server.status()
    assert not status["missing_hooks"] and status["capture"]["error"] is None
    return list(server.samples(rids).values())


def values(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float()


def test_they_are_the_targets_states_after_its_norm(samples: list[Sample]) -> None:
    target = TargetModel(TINY, AUX_LAYERS)
    for sample in samples:
        assert_covers(sample)
        tensors = sample.tensors
        ids = torch.from_numpy(tensors["input_ids"].astype(np.int64))[None]
        expected = target.states(ids).last_hidden_BTH[0][torch.from_numpy(tensors["teacher_pos"].astype(int))]
        found = values(tensors["last_hidden"])
        error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 4e-3, f"{sample.meta.request_id}: row {int(error.argmax())}"


def test_the_head_makes_the_captured_log_probabilities_of_them(samples: list[Sample]) -> None:
    target = TargetModel(TINY, AUX_LAYERS)
    for sample in samples:
        tensors = sample.tensors
        logp = target.logits(values(tensors["last_hidden"])).log_softmax(-1).numpy()
        found = np.take_along_axis(logp, tensors["teacher_ids"], 1)
        np.testing.assert_allclose(found, tensors["teacher_logp"], atol=0.1, rtol=1e-2)
        likely = tensors["teacher_logp"] > -3
        np.testing.assert_allclose(found[likely], tensors["teacher_logp"][likely], atol=0.03)


def test_a_retracted_request_and_one_with_penalties_are_among_them(samples: list[Sample]) -> None:
    flags = {flag for sample in samples for flag in sample.meta.flags}
    assert {"retracted", "penalties"} <= flags, flags


def test_the_segment_says_that_it_has_them(server: EngineServer, samples: list[Sample]) -> None:
    stream, _ = read_segment(sealed_segments(server.settings.spool_folder)[0])
    assert stream.target_signal == "last_hidden" and set(samples[0].tensors) == set(stream.tensors)
