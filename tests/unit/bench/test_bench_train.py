"""The pure parts of ``tide bench train`` on the tiny target, and the peer itself where it is installed."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny import AUX_LAYERS, TINY, prompts, say, tiny_parts, with_last_hidden

from tide_platform.bench import train as bench
from tide_platform.bench import train_peer as peer
from tide_platform.bench.train import OURS, THEIRS, Run
from tide_platform.bench.train_samples import features, plain, store_settings, stored
from tide_platform.bench.train_worker import recomputed
from tide_platform.capture.packing import unpack
from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.config import Settings
from tide_platform.draft.checkpoint import load_draft, new_draft
from tide_platform.draft.eagle3 import Eagle3Draft
from tide_platform.draft.importer import import_draft
from tide_platform.draft.target_model import TargetModel
from tide_platform.draft.vocab import inverse_map
from tide_platform.store.hidden_states import open_store
from tide_platform.training.data import collate, prepare_all
from tide_platform.training.objective import unroll_steps
from tide_platform.training.trainer import train

STEPS = 3


@pytest.fixture(scope="module")
def settings() -> Settings:
    settings = Settings(target=TINY)
    settings.training.epochs, settings.training.threads, settings.training.batch_size = 2, 1, 4
    settings.training.autocast = False
    return settings


@pytest.fixture(scope="module")
def draft() -> Eagle3Draft:
    made = new_draft(tiny_parts(), np.arange(20, 140), AUX_LAYERS, seed=1)
    with torch.no_grad():
        for parameter in made.parameters():  # as files hold them
            parameter.copy_(parameter.bfloat16().float())
    return made


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """With last hidden states, of several lengths."""
    lengths = enumerate((12, 17, 25))
    said = [say(prompts(3, length, seed=seed), 20, prefix=f"{seed}-") for seed, length in lengths]
    return with_last_hidden([sample for of in said for sample in of])


def test_the_recipe_is_what_the_trainer_does(
    settings: Settings, draft: Eagle3Draft, samples: list[Sample]
) -> None:
    inverse = inverse_map(draft.d2t.numpy(), draft.config.vocab_size)
    examples, _ = prepare_all(samples, inverse, STEPS, 1024)
    told = peer.recipe(examples, settings, seed=3)
    own = new_draft(tiny_parts(), np.arange(20, 140), AUX_LAYERS, seed=1)
    records = train(own, tiny_parts().embed_VH, examples, settings.training, seed=3)
    assert told.learning_rates == [record.learning_rate for record in records]
    tokens = np.diff([0, *(record.tokens for record in records)])
    assert [sum(examples[i].response_tokens for i in step) for step in told.steps] == tokens.tolist()
    assert sorted(i for step in told.steps for i in step) == sorted([*range(len(examples))] * 2)


def test_features_are_rows_at_their_positions(samples: list[Sample]) -> None:
    tensors, length = features(samples, 30), 30
    first, sample = {name: tensors[f"4.{name}"] for name in names_of(tensors)}, samples[4]
    assert len(first["input_ids"]) == length and first["input_ids"].dtype == torch.int64
    assert first["loss_mask"].tolist() == [p >= 17 for p in range(length)]
    bits = first["hidden_states"].view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(bits, sample.tensors["aux"][:length])
    last = first["verifier_last_hidden_states"].view(torch.int16).numpy().view(np.uint16)
    assert (last[:16] == 0).all()  # no teacher rows there
    np.testing.assert_array_equal(last[16:], sample.tensors["last_hidden"][: length - 16])


def names_of(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name.removeprefix("0.") for name in tensors if name.startswith("0.")]


def test_a_hole_and_the_last_row_are_no_supervision(samples: list[Sample]) -> None:
    of = samples[0].tensors
    keep = of["teacher_pos"] != 15
    cut = {name: of[name][keep] for name in ("teacher_ids", "teacher_logp", "token_logp", "last_hidden")}
    holed = Sample(samples[0].meta, of | cut | {"teacher_pos": of["teacher_pos"][keep]})
    mask = features([holed], 1024)["0.loss_mask"]
    assert len(mask) == 32 and mask.nonzero()[:, 0].tolist() == [p for p in range(12, 31) if p != 15]


def test_weights_come_back_as_they_were(draft: Eagle3Draft, tmp_path: Path) -> None:
    """Under the peer's names, in the layout that it saves, by the importer that users have."""
    theirs = peer.weights(draft, tiny_parts())
    ids = draft.d2t + torch.arange(len(draft.d2t))
    assert torch.equal(theirs["verifier_lm_head.weight"], tiny_parts().lm_head_VH[ids].float())
    given = peer.shape(draft)
    config = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": given["layer"],
        "draft_vocab_size": given["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": given["aux_layer_ids"],
    }
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    kept = {name: tensor for name, tensor in theirs.items() if name != "verifier_lm_head.weight"}
    save_file(kept, folder / "model.safetensors")
    import_draft(folder, TINY, tmp_path / "back")
    back = load_draft(tmp_path / "back")
    assert back.config == draft.config
    for name, tensor in draft.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_full_logits_are_the_trainers_own(draft: Eagle3Draft, samples: list[Sample]) -> None:
    inverse = inverse_map(draft.d2t.numpy(), draft.config.vocab_size)
    tensors = features(samples, 1024)
    for i in (0, 5):
        (example,), _ = prepare_all([samples[i]], inverse, STEPS, 1024)
        batch = collate([example])
        with torch.inference_mode():
            hidden = unroll_steps(draft, tiny_parts().embed_VH.float(), batch, STEPS)
            expected = [draft.lm_head(draft.norm(h))[0] for h in hidden]
        found = peer.full_logits(
            draft, tiny_parts().embed_VH, tensors[f"{i}.input_ids"], tensors[f"{i}.hidden_states"], STEPS
        )
        first = example.context - example.roots
        for j in range(STEPS):
            rows = batch.root_index[j]
            torch.testing.assert_close(found[j, rows + first], expected[j][rows], rtol=1e-4, atol=1e-4)


def test_another_draft_is_noticed(draft: Eagle3Draft, samples: list[Sample], tmp_path: Path) -> None:
    target, tensors, chosen = tiny_parts(), features(samples, 1024), [5, 0]

    def ours(i: int) -> torch.Tensor:
        ids, aux = tensors[f"{i}.input_ids"], tensors[f"{i}.hidden_states"]
        return peer.full_logits(draft, target.embed_VH, ids, aux, STEPS)

    logits = torch.cat([ours(i) for i in chosen], 1)

    def write(logits: torch.Tensor, losses: list[float]) -> None:
        save_file({"logits": logits.contiguous()}, tmp_path / "logits.safetensors")
        (tmp_path / "result.json").write_text(json.dumps({"losses": losses}))

    write(logits + 0.1, [1.0] * STEPS)
    with pytest.raises(peer.NotTheSameDraft, match="logits"):
        peer.check_conversion(draft, target, tensors, chosen, tmp_path)
    write(logits, [1.0] * STEPS)
    with pytest.raises(peer.NotTheSameDraft, match="loss"):
        peer.check_conversion(draft, target, tensors, chosen, tmp_path)


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer, "PYTHON", tmp_path / "python")
    with pytest.raises(peer.PeerMissing, match="make setup-peers"):
        peer.call("probe", {"threads": 1}, tmp_path / "out")


def test_states_that_are_computed_again_are_the_captured_ones(samples: list[Sample]) -> None:
    again = recomputed(TargetModel(TINY, AUX_LAYERS), samples, 16)
    for sample, other in zip(samples, again, strict=True):
        assert other.meta == sample.meta
        found, wanted = (
            torch.from_numpy(s.tensors["aux"].view(np.int16).copy()).view(torch.bfloat16).float()
            for s in (other, sample)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
        assert (other.tensors["teacher_ids"][:, 0] == sample.tensors["teacher_ids"][:, 0]).all()
        np.testing.assert_allclose(
            other.tensors["teacher_logp"], sample.tensors["teacher_logp"], atol=2e-2, rtol=1e-2
        )


def test_the_dataset_holds_them_as_the_deployment_would(
    settings: Settings, samples: list[Sample], tmp_path: Path
) -> None:
    stream = StreamMeta("t", 96, 256, AUX_LAYERS, 16, target_signal="last_hidden")
    version = stored(settings, tmp_path, stream, samples)
    assert stored(settings, tmp_path, stream, samples) == version, "written once"
    store = open_store(store_settings(settings, tmp_path))
    assert store.tip().rows == len(samples) and store.stream_meta().target_signal == "topk"
    (found,) = store.load([samples[0].meta.sample_id])
    assert settings.capture.aux_format == "int4"
    wanted = unpack(plain(samples[0], settings), 3 * 96)
    np.testing.assert_array_equal(found.tensors["aux"], wanted.tensors["aux"])


def result(seconds: list[float], supervised: list, **more: float) -> dict:
    cpu = [2 * one for one in seconds]
    return {"seconds": seconds, "cpu_seconds": cpu, "supervised": supervised, **more}


PROBES = {"probes": [{"attention": "eager", "samples": 2, "seconds": 0.5, "supervised": [40, 39, 38]}]}


def test_what_is_judged_of_the_runs() -> None:
    done = {
        Run(OURS, 0): result([9.0, 1.0, 1.0], [100, 100, 100]),
        Run(THEIRS, 0): result([9.0, 2.0, 2.0], [[110, 108, 106]] * 3),
        Run("store", 0): {"whole_s": 21.0},
        Run("memory", 0): {"whole_s": 20.0},
        Run("recompute_once", 0): {"whole_s": 31.5},
    }
    judged = {
        "ours-0": {"replay": {"a": [10, 12], "b": [10, 8]}, "live": {"0": [10, 10]}},
        "theirs-0": {"replay": {"a": [10, 10], "b": [10, 10]}},
    }
    report = bench.summarize(done, judged, PROBES)
    assert report.ratios["tokens_per_s"] == pytest.approx(100 / 55)
    assert report.ratios["tokens_per_cpu_s"] == pytest.approx(100 / 55)
    assert report.ratios["tokens_per_s_best_pack"] == pytest.approx(100 / 80)
    assert report.ratios["acceptance_replay"] == pytest.approx(1.0)
    assert report.raw["acceptance_length"]["ours-0"] == {"replay": 2.0, "live": 2.0}
    assert "acceptance_live" not in report.ratios, "one side was not measured yet"
    assert report.ratios["store_over_memory"] == pytest.approx(1.05)
    assert report.ratios["recompute_once"] == pytest.approx(1.5)
    low, high = report.intervals["acceptance_replay"]
    assert low < 1 < high
    assert bench.summarize({}, {}, PROBES).ratios == {}


def test_the_order_of_runs_alternates() -> None:
    runs = bench.plan((0, 1), 2)
    assert [one.kind for one in runs[:4]] == [OURS, THEIRS, THEIRS, OURS]
    assert [one.number for one in runs[:4]] == [0, 0, 1, 1]
    assert [one.kind for one in runs[4:]] == [
        "store",
        "memory",
        "memory",
        "store",
        "recompute_once",
        "recompute_each_epoch",
    ]
    assert len(set(runs)) == len(runs)
