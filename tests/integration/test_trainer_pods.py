"""Training pods against the fake Kubernetes API, with a stand-in for the trainer: each fault of the docs'
table, by the very texts that it shows.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))

from fakekube import Flaky, Logs, Trouble, after
from pod_world import WINDOW, PodWorld, pod_world

from tide_platform.cluster import faults
from tide_platform.cluster.api import KubeApi
from tide_platform.cluster.faults import (
    FAULTS,
    QUIET,
    LostTooOften,
    MemoryNotEnough,
    PodFault,
    TrainingStopped,
)
from tide_platform.cluster.leftovers import leftovers, remove_leftovers
from tide_platform.cluster.manifests import RunLabels, manifests
from tide_platform.cluster.rights import TRAINER
from tide_platform.config import TideError
from tide_platform.training.job import TrainJob

pytestmark = pytest.mark.integration

STEPS = 8
RUNNING = after('"step": 3,')
NO_GPU = "0/3 nodes are available: 3 Insufficient amd.com/gpu."
PREEMPTED = "Preempted by pod serving-0 on node node-1"
FAILED_MOUNT = "MountVolume.SetUp failed for volume: connection timed out"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[PodWorld]:
    with pod_world(tmp_path, STEPS) as made:
        yield made


@pytest.fixture
def two(tmp_path: Path) -> Iterator[PodWorld]:
    """Two pods."""
    with pod_world(tmp_path, STEPS, nodes=2) as made:
        yield made


@dataclass(frozen=True)
class Final:
    """A fault that ends the run."""

    fault: type[PodFault]
    shows: str  # part of what the user reads
    trouble: Trouble | None = None
    misbehaves: dict | None = None
    window: str = WINDOW

    def __str__(self) -> str:
        return f"{self.fault.name}: {self.shows[:30]}"


FINAL = [
    Final(faults.Unschedulable, f"for 2 s: {NO_GPU}; make room", Trouble("unschedulable", NO_GPU)),
    Final(
        faults.ImagePullFailed,
        "image tide-trainer:1 cannot be pulled (ErrImagePull: tide-trainer:1: not found)",
        Trouble("image", "tide-trainer:1: not found"),
    ),
    Final(
        faults.ImagePullFailed, "ImagePullBackOff: Back-off pulling", Trouble("image", "connection refused")
    ),
    Final(
        faults.InitFailed,
        "Init:Error, init container injected ended with exit status 1: error: no vault",
        Trouble("init", "connecting\nerror: no vault"),
    ),
    Final(faults.NotStarted, f"FailedMount: {FAILED_MOUNT}; mend", Trouble("stuck", FAILED_MOUNT)),
    Final(
        faults.NotStarted, 'Failed: Error: secret "s3" not found', Trouble("config", 'secret "s3" not found')
    ),
    Final(
        faults.TrainerFailed,
        "exit status 2: error: dataset: no such version;",
        misbehaves={"fails_after": 2, "fails_with": "Traceback\nerror: dataset: no such version"},
    ),
    Final(faults.ManifestRefused, "pod tide-W_1-0123abcd-1 (422): metadata.name", window="W_1"),
]

LOST = [
    (faults.Preempted, Trouble("preempted", PREEMPTED, RUNNING), f": {PREEMPTED})"),
    (
        faults.Preempted,
        Trouble("evicted", "The node was low on resource: memory.", RUNNING),
        "(TerminationByKubelet: The node was low on resource: memory.)",
    ),
    (
        faults.NodeLost,
        Trouble("node_lost", "Node is unresponsive", RUNNING),
        "(NodeLost: Node is unresponsive)",
    ),
    (faults.NodeLost, Trouble("node_unknown", when=RUNNING), "(NodeStatusUnknown: Kubelet stopped"),
    (faults.PodDeleted, Trouble("deleted", when=RUNNING), "and not by this run"),
]


def shown(error: TideError, fault: type[PodFault]) -> str:
    """The error's text, which is the table's."""
    assert isinstance(error, fault)
    assert str(error) == fault.text.format(**error.values)
    return str(error)


def in_order(world: PodWorld, steps: int = STEPS) -> None:
    """Each step told once, whatever happened."""
    assert world.steps == list(range(1, steps + 1))


def test_one_pod_trains_and_nothing_is_left(world: PodWorld) -> None:
    world.train()
    in_order(world)
    assert world.fake.left() == []
    name = "tide-w00001-0123abcd-1"
    assert world.said[-2:] == [
        f"pod {name} runs on node node-1",
        f"pod {name} ended with exit status 0 (Completed)",
    ]


@pytest.mark.parametrize("case", FINAL, ids=str)
def test_a_fault_that_ends_the_run(world: PodWorld, case: Final) -> None:
    if case.trouble is not None:
        world.fake.plan(1, case.trouble)
    world.misbehave(**case.misbehaves or {})
    with pytest.raises(case.fault) as error:
        world.train(window=case.window)
    assert case.shows in shown(error.value, case.fault)
    assert case.fault.answer is faults.Answer.FINAL
    assert world.fake.left() == [] and world.fake.launches <= 1


@pytest.mark.parametrize(("fault", "trouble", "shows"), LOST, ids=lambda it: getattr(it, "kind", None))
def test_a_lost_pod_is_started_again_and_training_goes_on(
    world: PodWorld, fault: type[PodFault], trouble: Trouble, shows: str
) -> None:
    world.fake.plan(1, trouble)
    world.train()
    in_order(world)
    assert world.fake.launches == 2 and world.fake.left() == []
    (told,) = [line for line in world.said if "started again" in line]
    assert told.startswith(fault.text.split("{", 1)[0]) and shows in told and "(1 of 3)" in told
    assert fault.answer is faults.Answer.AGAIN


def test_pods_that_are_always_lost_end_the_run(world: PodWorld) -> None:
    for launch in (1, 2):
        world.fake.plan(launch, Trouble("deleted", when=after('"step"')))
    with pytest.raises(LostTooOften, match="given up after 2 lost attempts") as error:
        world.train(max_lost=1)
    shown(error.value.fault, faults.PodDeleted)
    assert world.fake.launches == 2 and world.fake.left() == []


def test_out_of_memory_is_tried_with_smaller_micro_batches(world: PodWorld) -> None:
    before = world.positions
    for launch in (1, 2):
        world.fake.plan(launch, Trouble("oom", when=after(f'"step": {2 * launch},')))
    world.train()
    in_order(world)
    assert world.positions == before // 4
    told = [line for line in world.said if "started again" in line]
    assert told[0].startswith("pod tide-w00001-0123abcd-1 ran out of memory (OOMKilled, exit status 137)")
    assert f"micro_batch_positions {before // 2} in place of {before}" in told[0]


def test_a_gpus_memory_counts_as_memory_and_too_little_of_it_is_the_end(world: PodWorld) -> None:
    words = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB."
    world.misbehave(fails_after=1, fails_with=words)
    before = world.positions
    # only the first step fails: a run that goes on has it behind it
    world.train()
    assert "ran out of memory (the GPU's: OutOfMemoryError)" in world.log and world.positions == before // 2
    world.job.parent.joinpath("run", "steps.jsonl").unlink()
    world.misbehave(fails_after=2)
    with pytest.raises(MemoryNotEnough, match=f"micro_batch_positions {before // 2}; raise") as error:
        world.train(max_shrinks=0)
    shown(error.value.fault, faults.OutOfMemory)


def test_host_memory_beside_gpus_is_no_matter_of_the_micro_batch(world: PodWorld) -> None:
    world.fake.plan(1, Trouble("oom", when=RUNNING))
    before = world.positions
    with pytest.raises(faults.HostMemoryShort) as error:
        world.train(gpus=1)
    assert "OOMKilled, exit status 137" in shown(error.value, faults.HostMemoryShort)
    assert world.positions == before and world.fake.launches == 1 and world.fake.left() == []
    # and where a pod has GPUs, one that is not visible is an error of the trainer's
    assert TrainJob.read(world.job).settings.training.device == "cuda"


def test_a_gpus_memory_is_seen_behind_the_tracebacks_of_those_who_lost_a_peer(two: PodWorld) -> None:
    two.misbehave(fails_after=1, fails_with="it is too large", fails_kind="OutOfMemory")
    before = two.positions
    two.train()
    in_order(two)
    assert "-1-0-" in two.log and "ran out of memory (the GPU's, rank 0: it is too large)" in two.log
    assert two.positions == before // 2


def test_a_gpus_memory_is_found_in_the_log_of_any_pod(two: PodWorld) -> None:
    """Without the trainer's file, and too far up for the words that the kubelet keeps."""
    words = "\n".join(["torch.OutOfMemoryError: HIP out of memory.", *["  File somewhere"] * 150])
    two.misbehave(fails_after=1, fails_with=words)
    before = two.positions
    two.train()
    in_order(two)
    assert two.positions == before // 2


def test_a_folder_that_an_unreachable_trainer_holds_is_tried_again(world: PodWorld) -> None:
    words = "train.lock: process 7 holds this lock"
    world.misbehave(fails_after=1, fails_with=words, fails_kind="LockHeld")
    world.train()
    in_order(world)
    (told,) = [line for line in world.said if "started again" in line]
    assert f"still holds the folder of the run: pod tide-w00001-0123abcd-1: {words}; started" in told


def test_a_good_end_without_a_result_is_none(world: PodWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide_platform.cluster.run.RESULT_WAIT_S", 0.2)
    world.misbehave(result=False)
    with pytest.raises(faults.ResultMissing) as error:
        world.train()
    assert "result.json is not there: the pods" in shown(error.value, faults.ResultMissing)


def test_an_api_server_that_fails_now_and_then_is_lived_with(world: PodWorld) -> None:
    world.fake.flaky = Flaky(errors=0.2, hang_ups=0.1, seed=3)
    world.train()
    in_order(world)
    world.fake.flaky = Flaky()
    assert world.fake.left() == []


def test_an_api_server_that_stays_away_is_named(world: PodWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide_platform.cluster.access.RETRIES", 1)
    world.fake.flaky.down = True
    with pytest.raises(faults.ApiUnavailable) as error:
        world.train()
    assert "does not answer: 500 etcdserver: request timed out" in shown(error.value, faults.ApiUnavailable)


@pytest.mark.parametrize("returns", [False, True])
def test_no_second_trainer_is_started_beside_one_that_cannot_be_removed(
    world: PodWorld, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    monkeypatch.setattr("tide_platform.cluster.access.RETRIES", 1)
    world.misbehave(steps=100)

    def outage() -> None:
        world.wait_for_steps(2)
        world.fake.flaky.down = True

        if returns:
            world.wait_for_words("earlier pods are removed when it does")
            assert world.fake.launches == 1 and world.fake.pods()
            world.misbehave(steps=STEPS)
            world.fake.flaky.down = False

    with beside(outage):
        if returns:
            world.train()
            assert world.fake.launches == 2 and world.fake.left() == []
        else:
            with pytest.raises(faults.PodsRemain) as error:
                world.train()
            assert "etcdserver: request timed out" in shown(error.value, faults.PodsRemain)
            assert world.fake.launches == 1 and len(world.fake.pods()) == 1


def test_lost_and_merged_log_lines_cost_nothing(world: PodWorld) -> None:
    world.fake.logs = Logs(one_stamp=True, lose=lambda line: "step" in line)
    world.train()
    in_order(world)


@contextmanager
def beside(act: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    yield
    thread.join(30)


def test_a_run_that_loses_its_window_ends_its_pods(world: PodWorld) -> None:
    world.misbehave(steps=400)

    def stop() -> None:
        world.wait_for_steps(2)
        world.stopped = True

    with beside(stop), pytest.raises(TrainingStopped):
        world.train()
    assert world.fake.left() == []


def test_a_cancelled_run_leaves_no_pod_and_the_step_in_hand_is_kept(world: PodWorld) -> None:
    world.misbehave(steps=400)
    told: list[int] = []

    def cancelled(record: dict) -> None:
        told.append(record["step"])
        if len(told) == 2:
            raise KeyboardInterrupt

    world._on_step = cancelled  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        world.train()
    assert world.fake.left() == []
    journal = (world.job.parent / "run" / "steps.jsonl").read_text()
    assert journal.endswith("\n") and len(journal.splitlines()) >= 2


def test_what_a_killed_run_left_is_removed_by_the_next(world: PodWorld) -> None:
    world.misbehave(steps=3)
    dead, other = RunLabels("demo", WINDOW, "dead0000-run"), RunLabels("demo", "w00002", "alive000-run")
    assert world.cluster.trainer is not None
    with KubeApi(world.cluster) as api:
        for labels in (dead, other):
            stuck = world.cluster.trainer.model_copy(update={"volumes": [], "env": {"K": "v"}})
            made = manifests(world.cluster, stuck, labels, 1, Path("/nowhere/job.json"), [])
            assert made.pod is not None
            made.pod["spec"]["containers"][0]["command"] = ["sleep", "100"]
            api.create(made.pod)
        world.train()
        in_order(world, 3)
        assert "removed tide-w00001-dead0000-1 of run dead0000-run, which left it behind" in world.said
        assert world.fake.left() == ["tide-w00002-alive000-1"]
        # the sensor's way: whatever run is over
        assert leftovers(api, "demo", lambda run: True) == {}
        said: list[str] = []
        remove_leftovers(api, "demo", lambda run: False, said.append)
        assert said == ["removed tide-w00002-alive000-1 of run alive000-run, which left it behind"]
        assert world.fake.left() == []


def test_kubernetes_removes_the_pods_with_the_runs_own(
    world: PodWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is a pod itself, killed with its node: its training pod goes with it."""
    world.misbehave(steps=400)
    spec = {"containers": [{"name": "run", "image": "i", "command": ["sleep", "100"]}]}
    with KubeApi(world.cluster) as api:
        api.create(
            {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "run", "labels": {}}, "spec": spec}
        )
    own = world.fake.store.get("pods", "run")
    assert own is not None
    for name, value in {"NAME": "run", "UID": own["metadata"]["uid"], "NAMESPACE": "default"}.items():
        monkeypatch.setenv(f"POD_{name}", value)

    def kill() -> None:
        world.wait_for_steps(2)
        world.fake.delete_pod("run", 0)

    with beside(kill), pytest.raises(LostTooOften):
        world.train(max_lost=0)
    assert world.fake.left() == []


def test_two_pods_find_each_other_and_both_end(two: PodWorld) -> None:
    two.train()
    in_order(two)
    assert two.fake.left() == [] and len(two.fake.made) == 2


@pytest.mark.parametrize("pod", [0, 1])
def test_a_preempted_pod_of_two_is_the_reason_whatever_its_peer_says(two: PodWorld, pod: int) -> None:
    two.fake.plan(
        1, Trouble("preempted", PREEMPTED, RUNNING if pod == 0 else lambda log: bool(two.steps)), pod
    )
    two.train()
    in_order(two)
    assert "(1 of 3)" in two.log and PREEMPTED in two.log
    assert two.fake.launches == 2 and two.fake.left() == []


@pytest.mark.parametrize("pod", [0, 1])
def test_a_deleted_pod_of_two_is_the_reason_whatever_its_peer_says(two: PodWorld, pod: int) -> None:
    two.fake.plan(1, Trouble("deleted", when=RUNNING if pod == 0 else lambda log: bool(two.steps)), pod)
    two.train()
    in_order(two)
    assert "was deleted while it trained, and not by this run; started again (1 of 3)" in two.log


@pytest.mark.parametrize("pod", [0, 1])
def test_a_pod_of_two_that_ends_as_torchrun_does_when_deleted_is_the_reason(two: PodWorld, pod: int) -> None:
    """torchrun ends with 1 on SIGTERM, and its peer with 1 as well."""
    when = RUNNING if pod == 0 else lambda log: bool(two.steps)
    two.fake.plan(1, Trouble("deleting", when=when), pod)
    two.train()
    in_order(two)
    assert f"-1-{pod}-" in next(line for line in two.said if "was deleted while it trained" in line)
    assert "ended with exit status 1" in two.log and two.fake.launches == 2


def test_a_deleted_pod_of_several_processes_is_started_again(world: PodWorld) -> None:
    world.fake.plan(1, Trouble("deleting", when=RUNNING))
    world.train(processes=2)
    in_order(world)
    assert "ended with exit status 1" in world.log and "was deleted while it trained" in world.log


# where pod 0 lingers, pod 1 fails first, and the Job's controller deletes pod 0 for it
@pytest.mark.parametrize("lingers_s", [0, 0.5])
def test_of_two_pods_that_fail_the_first_is_told(two: PodWorld, lingers_s: float) -> None:
    two.misbehave(fails_after=2, fails_with="error: dataset: no such version", lingers_s=lingers_s)
    with pytest.raises(faults.TrainerFailed) as error:
        two.train()
    # whichever pod was seen to fail first: pod 1 only lost its peer
    told = shown(error.value, faults.TrainerFailed)
    assert ": error: dataset: no such version; all" in told and "-1-0-" in error.value.pod
    assert two.fake.left() == []


def test_no_more_rights_are_used_than_the_role_gives(two: PodWorld) -> None:
    two.fake.plan(1, Trouble("deleted", when=RUNNING), pod=0)
    two.train()
    asked = {(group, resource, verb) for group, resource, verb in two.fake.asked}
    given = {
        (right.group, "/".join(filter(None, (right.resource, right.subresource))), right.verb)
        for right in TRAINER
    }
    assert asked <= given


def test_every_row_of_the_table_is_tested() -> None:
    tested = {case.fault for case in FINAL} | {fault for fault, *_ in LOST}
    tested |= {faults.OutOfMemory, faults.HostMemoryShort, faults.FolderHeld}
    tested |= {faults.ResultMissing, faults.ApiUnavailable, faults.PodsRemain}
    assert tested == set(FAULTS) and len({name for name, *_ in QUIET}) == 3
