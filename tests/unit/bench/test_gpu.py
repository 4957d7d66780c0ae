"""``make gpu`` where there is no GPU: its plan, and what its steps compute."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.synthetic import make_sample
from tide_platform.bench import gpu, gpu_ring, gpu_steps
from tide_platform.bench.gpu import Box, Step
from tide_platform.config import Settings, TideError

CPU_BOX = Box("0.5.14", "2.13.0+cpu", None, [])
CAPABLE = Box("0.5.14", "2.11.0", "rocm", ["MI300X", "MI300X"])


class Now:
    def synchronize(self) -> None: ...


class Host:
    """A device that is the host, and copies at once."""

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    pinned = memory

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Now:
        for host, staged in pairs:
            host.copy_(staged)
        return Now()


class Forgetful(Host):
    """Copies when the next step has been there."""

    def __init__(self) -> None:
        self.late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def download(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Now:
        super().download(self.late)
        self.late = list(pairs)
        return Now()


def settings(folder: Path) -> Settings:
    return Settings.model_validate({"state": str(folder), "serving": {"python": sys.executable}})


def test_a_box_without_a_gpu_says_what_it_could_not_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDE_STATE", str(tmp_path))
    monkeypatch.setattr(gpu, "probe", lambda python: CPU_BOX)
    assert gpu.main([]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == len(gpu.PLAN) and all(line.startswith("untested") for line in lines)
    report = json.loads(last)
    assert report["bench"] == "gpu" and report["ratios"] == {"passed": 0.0}
    assert report["raw"]["box"]["devices"] == []
    for step in report["raw"]["steps"].values():
        assert step["status"] == "untested" and "GPU" in step["reason"]


def test_a_box_is_asked_in_the_python_that_has_sglang() -> None:
    box = gpu.probe(Path(sys.executable))
    assert box.torch == torch.__version__ and box.sglang is None
    assert "has no SGLang" in str(box.problem)


def test_two_devices_and_sglang_leave_no_obstacle() -> None:
    assert [step.obstacle(CAPABLE) for step in gpu.PLAN] == [None] * len(gpu.PLAN)
    one = Box("0.5.14", "2.11.0", "cuda", ["H200"])
    assert [step.name for step in gpu.PLAN if step.obstacle(one)] == [
        "capture truth on two devices (TP 2)",
        "capture truth and reload under DP attention",
        "capture truth and reload of two replicas",
    ]
    bare = Box(None, "2.11.0", "cuda", ["H200"], "has no SGLang")
    assert [step.name for step in gpu.PLAN if not step.obstacle(bare)] == ["ring under a graph's replays"]


def test_a_step_that_fails_stops_no_other_and_is_told(tmp_path: Path) -> None:
    seen: list[Any] = []

    def fails(context: gpu_steps.Context) -> dict[str, Any]:
        raise gpu_steps.StepFailed("rows are not the model's")

    def works(context: gpu_steps.Context) -> dict[str, Any]:
        seen.append(context)
        return {"rows": 3}

    said: list[str] = []
    plan = [Step("one", fails), Step("two", works)]
    report = gpu.run(settings(tmp_path), tmp_path, box=CAPABLE, plan=plan, say=said.append)
    assert report.ratios == {"passed": 0.5}
    steps = report.raw["steps"]
    assert steps["one"]["status"] == "failed" and "rows are not" in steps["one"]["reason"]
    assert steps["two"]["found"] == {"rows": 3} and said[1] == "passed    two"
    assert seen[0].settings.serving.device == "rocm"
    whole = seen[0].whole(tp_size=2)
    assert whole.serving.overlap_schedule and whole.serving.radix_cache and whole.serving.tp_size == 2


def test_ranks_are_asked_for_rows_and_for_a_reload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, dict[str, Any]]] = []
    for name in ("capture_truth", "reload"):

        def step(context: gpu_steps.Context, name: str = name, **serving: Any) -> dict[str, Any]:
            assert context.folder.is_dir()
            asked.append((name, context.folder.name, serving))
            return {"of": name}

        monkeypatch.setattr(gpu_steps, name, step)
    context = gpu_steps.Context(settings(tmp_path), Path(sys.executable), tmp_path)
    under = {"tp_size": 2, "dp_size": 2, "dp_attention": True}
    assert gpu_steps.attention_ranks(context) == {
        "truth": {"of": "capture_truth"},
        "reload": {"of": "reload"},
    }
    assert asked == [("capture_truth", "truth", under), ("reload", "reload", under)]
    gpu_steps.replicas(context)
    assert asked[2:] == [("capture_truth", "truth", {"dp_size": 2}), ("reload", "reload", {"dp_size": 2})]


def test_rows_of_every_step_come_through_staging_and_ring(tmp_path: Path) -> None:
    engine = gpu_ring.Engine(torch.device("cpu"))
    found = gpu_ring.check(tmp_path, Host(), engine, engine.compute)
    assert found["steps"] == gpu_ring.STEPS and found["dropped"] == {} and found["rows"] > 3000


def test_rows_of_another_step_are_found(tmp_path: Path) -> None:
    engine = gpu_ring.Engine(torch.device("cpu"))
    with pytest.raises(TideError):
        gpu_ring.check(tmp_path, Forgetful(), engine, engine.compute)


def test_captured_rows_are_compared_with_the_reference_by_layer() -> None:
    sample = make_sample("a", 20)
    name, shape = sample.meta.sample_id, sample.tensors["aux"].shape
    width = shape[1]
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    sample.tensors["aux"][:] = rows.view(torch.int16).numpy().view(np.uint16)
    aux = np.zeros((sample.meta.num_tokens, width), np.float32)
    aux[sample.tensors["row_pos"] - sample.meta.start_pos] = rows.float().numpy()
    best = np.full(sample.meta.num_tokens, -1)
    best[sample.tensors["teacher_pos"] - sample.meta.start_pos] = sample.tensors["teacher_ids"][:, 0]
    found = gpu_steps.compare([sample], {f"{name}.aux": aux, f"{name}.best": best})
    assert found["error_low"] == found["error_high"] == 0 and found["agreement"] == 1
    assert gpu_steps.judged(found) == found

    aux[:, width // 3 : 2 * width // 3] *= 1.5
    wrong = gpu_steps.compare([sample], {f"{name}.aux": aux, f"{name}.best": best + 1})
    assert wrong["error_middle"] > 0.3 and wrong["error_low"] == 0 and wrong["agreement"] == 0
    with pytest.raises(gpu_steps.StepFailed, match="not the model's"):
        gpu_steps.judged(wrong)
    with pytest.raises(gpu_steps.StepFailed):
        gpu_steps.judged(gpu_steps.compare([], {}))
