"""``tide doctor``: a sound deployment is all ok; each thing that is wrong is one line with its mend."""

import collections
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.fixtures.tiny import AUX_LAYERS, TINY, prompts, say
from tests.free_ports import free_ports
from tests.unit.gate.gate_examples import draft_folder
from tide_platform.capture.record import Sample, StreamMeta
from tide_platform.cli import doctor as cli
from tide_platform.config import Settings, dump_settings, target_digest
from tide_platform.gate import doctor_places, doctor_serving
from tide_platform.gate.doctor import Finding, diagnose
from tide_platform.gate.doctor_serving import Serving
from tide_platform.gate.doctor_store import prompt_ending
from tide_platform.serving.interpreter import Interpreter, probe_interpreter
from tide_platform.store.hidden_states import open_store
from tide_platform.store.objects import ObjectStore

NEWLINE = ord("\n")  # with which the tiny target's template ends a message


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draft_folder(tmp_path_factory.mktemp("doctor") / "draft")


@pytest.fixture(autouse=True)
def probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking the real one takes a second, each time."""
    known = Interpreter(Path("python"), "0.5.14", ())
    monkeypatch.setattr(doctor_serving, "probe_interpreter", lambda python, supported: known)


@pytest.fixture
def settings(tmp_path: Path, draft: Path) -> Settings:
    ports = free_ports(4)
    raw: dict[str, Any] = {
        "deployment": "patient",
        "target": TINY,
        "draft": draft,
        "state": tmp_path / "state",
        "serving": {"port": ports[0], "context_length": 256},
        "capture": {"ring_bytes": 1 << 24, "segment_bytes": 1 << 20, "spool_bytes": 1 << 24},
        "storage": {"uri": str(tmp_path / "store")},
        "ledger": {"url": f"sqlite:///{tmp_path}/ledger.db"},
        "registry": {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"},
        "stack": {"s3_port": ports[1], "mlflow_port": ports[2], "dagster_port": ports[3]},
    }
    return Settings.model_validate(raw)


def seen(settings: Settings, about: str | None = None, grade: str | None = None) -> list[Finding]:
    return [f for f in diagnose(settings) if about in (None, f.about) and grade in (None, f.grade)]


def only(settings: Settings, about: str, grade: str = "error") -> Finding:
    (finding,) = seen(settings, about, grade)
    return finding


def traffic(count: int = 6, **meta: Any) -> list[Sample]:
    """Samples whose prompts end as the tiny target's template ends one."""
    ids = prompts(count, 20, seed=5)
    ids[:, -1] = NEWLINE
    found = []
    for sample in say(ids, 16):
        kept = replace(sample.meta, target_digest=target_digest(TINY), **meta)
        found.append(Sample(kept, sample.tensors))
    return found


def store(settings: Settings, samples: list[Sample], **stream: Any) -> None:
    meta = StreamMeta(target_digest(TINY), 96, 256, AUX_LAYERS, 16)
    dataset = open_store(settings)
    dataset.ensure(replace(meta, **stream))
    if samples:
        dataset.append(samples, ["segment"])


def test_a_sound_deployment_is_all_ok(settings: Settings) -> None:
    store(settings, traffic())
    assert [f for f in seen(settings) if f.grade != "ok"] == []
    about = {f.about for f in diagnose(settings)}
    subjects = (
        "interpreter ports target draft store dataset samples template disk ledger mlflow configuration"
    )
    assert about == set(subjects.split())


def test_nothing_stored_is_no_fault(settings: Settings) -> None:
    assert [f for f in seen(settings) if f.grade != "ok"] == []
    assert "none yet" in only(settings, "dataset", "ok").text


# what is served


def test_a_taken_port_is_named(settings: Settings) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", settings.serving.port))
        holder.listen()
        assert "set `serving.port`" in only(settings, "ports").text


def test_an_interpreter_without_sglang_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_serving, "probe_interpreter", probe_interpreter)
    settings.serving.python = Path("/nowhere/python")
    assert "serving.python /nowhere/python: cannot be run" in only(settings, "interpreter").text


def copy_target(folder: Path) -> Path:
    return Path(shutil.copytree(TINY, folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_target_without_a_file_is_named(settings: Settings, tmp_path: Path, name: str) -> None:
    settings.target = copy_target(tmp_path / "target")
    (settings.target / name).unlink()
    assert only(settings, "target").text.startswith(f"target {settings.target}")


def test_a_target_without_a_template_is_named(settings: Settings, tmp_path: Path) -> None:
    settings.target = copy_target(tmp_path / "target")
    (settings.target / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert "no chat template" in only(settings, "target").text


def test_an_untied_target_without_a_head_is_named(settings: Settings, tmp_path: Path) -> None:
    """Case 2, where the config does not say that it is tied."""
    settings.target = copy_target(tmp_path / "target")
    raw = json.loads((TINY / "config.json").read_text())
    (settings.target / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    assert "no lm_head.weight" in only(settings, "target").text


def damaged(draft: Path, folder: Path, change: Callable[[dict], object], config: dict | None = None) -> Path:
    shutil.copytree(draft, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | (config or {})))
    return folder


def stale(tensors: dict) -> None:
    """The map of another vocabulary."""
    tensors["d2t"].add_(20)
    tensors["t2d"].copy_(tensors["t2d"].roll(20))


@pytest.mark.parametrize(
    ("change", "config", "said"),
    [
        (lambda t: t.pop("lm_head.weight"), {}, "missing lm_head.weight"),  # case 20
        (lambda t: t.pop("d2t"), {}, "missing d2t"),  # case 20
        (lambda t: None, {"rope_theta": 5e5}, "500000.0"),  # case 15
        (stale, {}, "stale d2t"),  # case 16
        (lambda t: None, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "aux layer ids"),
    ],
)
def test_a_draft_that_cannot_work_is_named(
    settings: Settings, draft: Path, tmp_path: Path, change: Callable, config: dict, said: str
) -> None:
    settings.draft = damaged(draft, tmp_path / "draft", change, config)
    assert any(said in f.text for f in seen(settings, "draft", "error")), seen(settings, "draft")


def test_a_draft_of_another_target_is_named(settings: Settings, draft: Path, tmp_path: Path) -> None:
    """Case 21."""
    settings.draft = damaged(draft, tmp_path / "draft", lambda t: None)
    (settings.draft / "tide.json").write_text('{"target_digest": "0123456789abcdef"}')
    finding = only(settings, "draft")
    assert finding.text.startswith("target: ") and "0123456789abcdef" in finding.text


# what is stored


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        ({"target_digest": "f" * 16}, "target_digest ffffffffffffffff"),
        ({"aux_layer_ids": (1, 2, 4)}, "aux_layer_ids (1, 2, 4), a server started now would write (1, 2, 3)"),
        ({"teacher_k": 8}, "teacher_k 8, a server started now would write 16"),
    ],
)
def test_a_dataset_of_another_stream_is_named(settings: Settings, stream: dict, said: str) -> None:
    store(settings, [], **stream)
    finding = only(settings, "dataset")
    assert said in finding.text and finding.mend


def test_a_mask_that_covers_nothing_is_an_error_with_its_reason(settings: Settings) -> None:
    """Case 4."""
    store(settings, [Sample(replace(s.meta, prompt_tokens=s.meta.num_tokens), s.tensors) for s in traffic()])
    finding = only(settings, "samples")
    assert "mask coverage 0 %" in finding.text.replace("0%", "0 %") and "chat template" in finding.text


def test_samples_cut_before_their_response_are_named(settings: Settings) -> None:
    """Case 6."""
    settings.training.max_length = 16
    store(settings, traffic())
    assert "6 x cut before the response (training.max_length 16)" in only(settings, "samples").text


def test_a_vocabulary_that_misses_the_traffic_is_a_warning(settings: Settings) -> None:
    samples = traffic()
    for sample in samples:
        sample.tensors["input_ids"][-4:] = 200  # no printable ASCII, so not in the draft's vocabulary
    store(settings, samples)
    finding = only(settings, "samples", "warn")
    assert "of the response tokens" in finding.text and "`tide draft pretrain`" in finding.mend


def test_template_drift_is_an_error(settings: Settings, tmp_path: Path) -> None:
    store(settings, traffic())
    settings.target = copy_target(tmp_path / "target")
    raw = json.loads((TINY / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}Answer: "
    (settings.target / "tokenizer_config.json").write_text(json.dumps(raw | {"chat_template": template}))
    finding = only(settings, "template")
    assert "0 of 6 stored prompts end as" in finding.text and "template drift" in finding.mend


def test_some_prompts_without_the_template_are_a_warning(settings: Settings) -> None:
    samples = traffic()
    samples[0].tensors["input_ids"][19] = ord("x")
    store(settings, samples)
    assert "5 of 6 stored prompts" in only(settings, "template", "warn").text


def test_the_ending_of_a_prompt_is_the_templates(settings: Settings) -> None:
    assert prompt_ending(Serving(settings, None, None)).tolist() == [NEWLINE]


def test_a_store_that_cannot_be_written_is_named(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings.storage.uri = str(tmp_path / "file" / "store")
    finding = only(settings, "store")
    assert "file/store" in finding.text and finding.mend


def test_a_store_without_conditional_puts_is_named(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectStore, "_race", lambda self, key: 2)
    assert "ignores If-None-Match" in only(settings, "store").text


# places


@pytest.mark.parametrize(
    ("free", "grade", "said"),
    [(1 << 20, "error", "lower capture.ring_bytes"), (20 << 20, "warn", "lower capture.spool_bytes")],
)
def test_a_disk_without_room_is_named(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, free: int, grade: str, said: str
) -> None:
    """Case 19, before it happens."""
    usage = collections.namedtuple("usage", "total used free")
    settings.window.min_samples = 1 << 20
    monkeypatch.setattr(doctor_places.shutil, "disk_usage", lambda path: usage(1 << 40, 0, free))
    found = seen(settings, "disk")
    assert [f.grade for f in found] == [grade, "error"] and said in found[0].mend
    assert "a window of 1048576 samples" in found[1].text


def test_a_windows_bytes_are_those_that_are_stored(settings: Settings) -> None:
    settings.capture.aux_format, settings.window.min_samples = "bf16", 2
    settings.capture.teacher_k = 16
    sample = traffic(1)[0]
    names = ("aux", "teacher_ids", "teacher_logp")
    rows, teachers = len(sample.tensors["row_pos"]), len(sample.tensors["teacher_pos"])
    row = sample.tensors["aux"].nbytes / rows + sum(sample.tensors[n].nbytes for n in names[1:]) / teachers
    assert doctor_places.window_bytes(settings, 96, 10) == pytest.approx(2 * 10 * row, rel=0.03)


@pytest.mark.parametrize(
    ("about", "section", "name", "value", "said"),
    [
        ("mlflow", "registry", "tracking_uri", "http://127.0.0.1:1", "no MLflow server answers"),
        ("mlflow", "registry", "tracking_uri", "databricks", "neither a server nor"),
        (
            "ledger",
            "ledger",
            "url",
            "postgresql://me:secret@127.0.0.1:1/x",
            "127.0.0.1:1/x: cannot be reached",
        ),
    ],
)
def test_a_place_that_does_not_answer_is_named(
    settings: Settings, about: str, section: str, name: str, value: str, said: str
) -> None:
    setattr(getattr(settings, section), name, value)
    finding = only(settings, about)
    assert said in finding.text and finding.mend and "secret" not in finding.text


# the command


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(cli.command)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.fixture
def config(settings: Settings, tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tide.yaml"
    path.write_text(dump_settings(settings))
    yield path


def test_the_command_says_all_and_ends_with_0(config: Path) -> None:
    status, output = run("--config", str(config), "--json")
    report = json.loads(output)
    assert status == 0 and report["ok"] and {f["grade"] for f in report["findings"]} == {"ok"}
    status, output = run("--config", str(config))
    assert status == 0 and "mlflow" in output


def test_the_command_ends_with_1_where_something_is_wrong(config: Path, tmp_path: Path) -> None:
    status, output = run("--config", str(config), "--target", str(tmp_path / "nowhere"), "--json")
    assert status == 1 and not json.loads(output)["ok"]
    config.write_text("serving: {prot: 1}")
    status, output = run("--config", str(config))
    assert status == 1 and "prot" in output


def test_reading_the_store_leaves_no_dataset_behind(settings: Settings) -> None:
    list(diagnose(settings))
    assert list(Path(settings.storage.uri).rglob("*.lance")) == []
