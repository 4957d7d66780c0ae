"""Several processes give what one gives: torchrun, gloo, on CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_probe import RECIPE

from tide_platform.config.schema import Training
from tide_platform.training.progress import JOURNAL
from tide_platform.training.ranks import NoGpu, joined

PROBE = Path(__file__).parents[2] / "fixtures" / "ranks_probe.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(scenario: str, out: Path, size: int, **env: str) -> list[dict[str, Any]]:
    """Each process's findings."""
    start = [*TORCHRUN, str(size)] if size > 1 else [sys.executable]
    subprocess.run(
        [*start, str(PROBE), scenario, str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        check=True,
        timeout=300,
        capture_output=True,
    )
    return [json.loads(out.with_name(f"{out.name}.{rank}.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run("curves", tmp_path_factory.mktemp("alone") / "out", 1)[0]["alone"]


def close(a: dict[str, Any], b: dict[str, Any]) -> None:
    """The same curve and the same weights, within rounding."""
    assert len(a["records"]) == len(b["records"])
    for one, other in zip(a["records"], b["records"], strict=True):
        assert (one["step"], one["samples"], one["tokens"]) == (
            other["step"],
            other["samples"],
            other["tokens"],
        )
        for name in ("loss", "losses", "accuracy", "grad_norm", "learning_rate"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (name, one["step"])
    for name, weight in a["weights"].items():
        torch.testing.assert_close(
            torch.tensor(weight), torch.tensor(b["weights"][name]), rtol=2e-3, atol=2e-4, msg=name
        )


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_give_the_curve_of_one(size: int, alone: dict[str, Any], tmp_path: Path) -> None:
    """Also where a step has fewer samples than there are ranks, and ranks have different micro-batches."""
    found = run("curves", tmp_path / "out", size)
    assert set(found[0]) == {
        f"{kind}{how}" for kind in ("replicate", "shard") for how in ("", ", small micro-batches")
    }
    for name, first in found[0].items():
        close(first, alone)
        assert first["told"] == [record["step"] for record in alone["records"]]
        for other in found[1:]:  # they end with the very same weights, and tell nobody
            assert other[name]["weights"] == first["weights"] and other[name]["told"] == []


def test_a_run_goes_on_with_another_number_of_processes(alone: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run("resumes", out, 2, PROBE_PARALLEL="shard", PROBE_STOP_AFTER="4")
    assert all(each["ended"].startswith("Stopped: stopped after step") for each in first)
    done = len(first[0]["told"])
    assert 0 < done < len(alone["records"]) and first[1]["told"] == []
    second = run("resumes", out, 4, PROBE_PARALLEL="replicate", PROBE_STOP_AFTER="2")
    last = run("resumes", out, 1, PROBE_PARALLEL="replicate")[0]
    told = [*first[0]["told"], *second[0]["told"], *last["told"]]
    assert told == [record["step"] for record in alone["records"]] and last["ended"] == "done"
    close(last, alone)
    journal = [json.loads(x) for x in (tmp_path / "out.run" / JOURNAL).read_text().splitlines()]
    assert [record["step"] for record in journal] == told


@pytest.mark.parametrize(
    ("scenario", "own", "text"),
    [
        ("a_store_fails_one", "Trouble: ", "the store does not answer"),
        ("a_library_fails_one", "PeerFailed: process 1 of this run: ", "an offset out of range"),
    ],
)
def test_what_stops_one_stops_all_with_the_steps_kept(
    scenario: str, own: str, text: str, tmp_path: Path
) -> None:
    first, second = run(scenario, tmp_path / "out", 2)
    assert second["ended"] == f"{own}{text}"
    assert first["ended"] == f"PeerFailed: process 1 of this run: {text}"
    journal = (tmp_path / "out.run" / JOURNAL).read_text().splitlines()
    assert len(journal) == 3 == len(first["told"])
    assert (tmp_path / "out.run" / "step-00000003" / "COMPLETE").is_file()


def test_damage_is_counted_over_all_processes(tmp_path: Path) -> None:
    found = run("too_much_is_damaged", tmp_path / "out", 3)
    assert all(each["ended"].startswith("TooManyDamaged: ") for each in found)
    assert all(each["own"] <= 0.4 * 12 for each in found), "none could have judged by itself"


def test_what_they_tell_one_another(tmp_path: Path) -> None:
    found = run("words", tmp_path / "out", 3)
    shares = [each["share"] for each in found]
    assert sorted(i for share in shares for i in share) == list(range(7))
    for rank, each in enumerate(found):
        assert each["total"] == [3.0, 3.0] and each["most"] == 14
        assert each["union"] == {"s0": "", "s1": "ü", "s2": "üü"}
        assert each["led"] == {"rank": 0, "text": "ä"}
        assert each["handed"] == {
            "a": ["torch.int64", [3], [0.0, 1.0, 2.0]],
            "b": ["torch.float32", [], 2.5],
            "c": ["torch.bfloat16", [0, 4], []],
        }
        peer = {0: "Trouble: disk full"}.get(rank, "PeerFailed: process 0 of this run: disk full")
        assert each["led fails"] == peer
        trouble = {1: "Trouble: here"}.get(rank, "PeerFailed: process 1 of this run: here")
        assert each["one in trouble"] == trouble and each["nobody in trouble"] == "fine"


def test_gpus_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with (
        pytest.raises(NoGpu, match="runs 2 processes, PyTorch sees 1 GPUs"),
        joined(Training(**RECIPE | {"device": "cuda"}), {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}),
    ):
        pass
    with joined(Training(device="auto"), {"LOCAL_WORLD_SIZE": "1"}) as world:
        assert world.device.type == "cuda"
    with joined(Training(device="cpu"), {}) as world:
        assert world.device.type == "cpu" and world.size == 1
