"""A whole job on the tiny target: from the store to a checkpoint; and as the command that Dagster starts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import AUX_LAYERS, TINY, prompts, say, tiny_parts, with_last_hidden
from tiny_job import tiny_job

from tide_platform.capture.record import StreamMeta
from tide_platform.cluster.failures import GPU_MEMORY
from tide_platform.config import Settings, TideError, draft_digest, target_digest
from tide_platform.config.locks import LockHeld, locked
from tide_platform.config.schema import Storage
from tide_platform.draft.checkpoint import load_draft, new_draft, save_draft
from tide_platform.draft.vocab import map_digest
from tide_platform.evaluation.acceptance import acceptance_length
from tide_platform.evaluation.replay import replay
from tide_platform.store.hidden_states import open_store
from tide_platform.training.data import NothingToTrain
from tide_platform.training.job import BadJob, TrainJob, without_secrets
from tide_platform.training.planned import plan_job
from tide_platform.training.progress import Stopped
from tide_platform.training.recovery import ResumeRefused
from tide_platform.training.run import run_job
from tide_platform.training.teacher import MissingTeacher
from tide_platform.training.trainer import OutOfMemory


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    return tiny_job(tmp_path_factory.mktemp("job"))


def test_run(job: TrainJob) -> None:
    steps = []
    result = run_job(job, steps.append)
    assert result.digest == draft_digest(result.folder) and result.folder == job.out / "draft"
    assert result.parent_digest == draft_digest(job.parent) != result.digest
    assert result.samples == 24 + 8 and result.steps == len(steps) == 4 * 4
    assert steps[-1].loss < steps[0].loss and steps[-1].tokens == result.tokens
    before, after = (load_draft(f) for f in (job.parent, result.folder))
    assert (before.d2t == after.d2t).all() and (before.t2d == after.t2d).all()  # the map is frozen
    samples = say(prompts(16, seed=4), 40)
    lengths = [acceptance_length(replay(d, tiny_parts(), samples, 2), 2) for d in (before, after)]
    assert lengths[1] > lengths[0] + 0.2
    told = json.loads((result.folder / "tide.json").read_text())
    assert (told["window"], told["parent"]) == ("w7", result.parent_digest)
    assert told["data"]["window"]["row_ids"] == [[0, 23]] and told["data"]["window"]["count"] == 24
    assert told["data"]["reference"]["row_ids"] == [[24, 31]] and told["data"]["past"]["count"] == 0
    assert told["map_digest"] == map_digest(before.d2t.numpy())
    assert told["target_digest"] == target_digest(TINY)
    assert told["code"]["version"] and told["machine"]["torch"] and told["seed"] == 3
    assert told["training"] == job.settings.training.model_dump() and told["skipped"] == {}
    written = json.loads((job.out / "result.json").read_text())
    assert written["digest"] == result.digest and len(written["history"]) == result.steps


def test_the_same_job_gives_the_same_draft(job: TrainJob) -> None:
    short = job.model_copy(update={"settings": job.settings.model_copy(deep=True)})
    short.settings.training.epochs = 1
    digests = {run_job(short.model_copy(update={"out": job.out.with_name(f"o{i}")})).digest for i in range(2)}
    assert len(digests) == 1


def changed(
    job: TrainJob, out: Path, training: dict[str, object] | None = None, **fields: object
) -> TrainJob:
    settings = job.settings.model_copy(deep=True)
    for name, value in (training or {}).items():
        setattr(settings.training, name, value)
    return job.model_copy(update={"out": out, "settings": settings, **fields})


def test_reference_and_past_are_drawn_anew_each_epoch(job: TrainJob, tmp_path: Path) -> None:
    ids = [*job.train_sample_ids, *job.reference_sample_ids]
    ratios = {"reference_ratio": 0.3, "past_window_ratio": 0.2, "epochs": 3}
    both = changed(
        job, tmp_path, ratios, train_sample_ids=ids[:10], reference_sample_ids=ids[10:20],
        past_sample_ids=[*ids[20:], "expired"],
    )  # fmt: skip
    store = open_store(job.settings)
    planned = plan_job(both, store)
    names = [planned.refs[i].sample_id for i in planned.pool]
    of_epochs = [
        [names[i] for step in planned.plan.steps if step.epoch == epoch for i in step.samples]
        for epoch in range(3)
    ]
    assert [len(epoch) for epoch in of_epochs] == [10 + 3 + 2] * 3
    assert all(set(ids[:10]) < set(epoch) for epoch in of_epochs)
    replayed = [name for epoch in of_epochs for name in epoch if name not in ids[:10]]
    assert len(set(replayed)) == len(replayed) == 15  # others each time, while there are any
    assert planned.expired == {"reference": 0, "past": 1}
    assert {part: len(refs) for part, refs in planned.parts.items()} == {
        "window": 10, "reference": 9, "past": 6,
    }  # fmt: skip
    assert plan_job(both, store).plan == planned.plan
    assert plan_job(both.model_copy(update={"seed": 4}), store).plan.digest != planned.plan.digest


def test_the_teacher_is_the_one_that_is_asked_for(job: TrainJob, tmp_path: Path) -> None:
    uri = str(tmp_path / "store")
    settings = job.settings.model_copy(update={"storage": Storage(uri=uri)})
    store = open_store(settings)
    store.ensure(StreamMeta("t", 96, 256, AUX_LAYERS, 16, target_signal="last_hidden"))
    version = store.append(with_last_hidden(say(prompts(24), 40)), ["segment"]).version
    update = {"settings": settings, "lance_version": version, "reference_sample_ids": []}
    known = job.model_copy(update=update)
    results = {
        teacher: run_job(changed(known, tmp_path / teacher, {"teacher": teacher, "epochs": 2}))
        for teacher in ("topk", "last_hidden")
    }
    of_topk, of_last = (results[teacher].history for teacher in ("topk", "last_hidden"))
    assert results["topk"].digest != results["last_hidden"].digest
    # 16 of 120 tokens hold nearly all that the teacher says
    assert of_last[-1]["loss"] == pytest.approx(of_topk[-1]["loss"], rel=0.05)
    assert of_last[-1]["loss"] < of_last[0]["loss"]


def test_a_teacher_that_the_dataset_does_not_hold_is_named_before_any_tensor_is_read(
    job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("tide_platform.store.reading.load_batch")
    with pytest.raises(MissingTeacher, match=r"capture\.target_signal"):
        run_job(changed(job, tmp_path / "out", {"teacher": "last_hidden"}))


def test_a_window_that_teaches_nothing_is_named_before_any_tensor_is_read(
    job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("tide_platform.store.reading.load_batch")
    with pytest.raises(NothingToTrain, match=r"24 x its response begins behind training\.max_length"):
        run_job(changed(job, tmp_path / "out", {"max_length": 20}))


def command(job_file: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    code = "from tide_platform.cli.train import command; import typer; typer.run(command)"
    script = (
        "import sys\nfrom tide_platform.config import TideError\n"
        f"try:\n    {code}\nexcept TideError as error:\n    sys.exit(f'error: {{error}}')"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script, "--job", str(job_file), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


def test_command_prints_one_json_line_at_a_time(job: TrainJob, tmp_path: Path) -> None:
    short = job.model_copy(update={"out": tmp_path / "out", "settings": job.settings.model_copy(deep=True)})
    short.settings.training.epochs = 1
    short.write(tmp_path / "job.json")
    assert TrainJob.read(tmp_path / "job.json") == short
    out, err = command(tmp_path / "job.json").communicate(timeout=120)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [x["event"] for x in lines] == ["step"] * 4 + ["done"], err
    assert lines[-1]["digest"] == draft_digest(tmp_path / "out" / "draft")


def events(out: str) -> list[tuple[str, int]]:
    lines = [json.loads(line) for line in out.splitlines()]
    return [(line["event"], line.get("step", 0)) for line in lines]


def test_sigterm_saves_and_the_same_command_goes_on(job: TrainJob, tmp_path: Path) -> None:
    """Ended in its middle, then run again: the same draft as undisturbed; run a third time: nothing to do."""
    long = changed(job, tmp_path / "out", {"epochs": 25})
    long.write(tmp_path / "job.json")
    process = command(tmp_path / "job.json")
    assert process.stdout
    first = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    # not communicate(): it would miss what readline() has buffered
    assert process.stderr
    rest, err = process.stdout.read(), process.stderr.read()
    process.wait(60)
    assert process.returncode == 143 and time.monotonic() - began < 30, err
    told = events(first + rest)
    last = told[-1][1]
    assert told == [("step", i) for i in range(1, last + 1)] and last < 100
    said = err.strip().splitlines()[-1]
    assert said.startswith("error: SIGTERM: ") and f"after step {last} of 100" in said and "goes on" in said
    assert "Traceback" not in err and not (tmp_path / "out" / "draft").exists()
    assert list((tmp_path / "out" / "run").glob("step-*/COMPLETE"))

    out, err = command(tmp_path / "job.json").communicate(timeout=120)
    past, new = [("past_step", i) for i in range(1, last + 1)], [("step", i) for i in range(last + 1, 101)]
    assert events(out) == [*past, *new, ("done", 0)], err
    undisturbed = run_job(changed(long, tmp_path / "undisturbed"))
    digest = json.loads(out.splitlines()[-1])["digest"]
    assert digest == undisturbed.digest == draft_digest(tmp_path / "out" / "draft")
    assert not list((tmp_path / "out" / "run").glob("step-*"))

    written = (tmp_path / "out" / "result.json").stat().st_mtime_ns
    again = run_job(long)
    assert again.digest == digest and (tmp_path / "out" / "result.json").stat().st_mtime_ns == written


def test_another_parent_or_order_is_refused_by_name_or_begun_anew(job: TrainJob, tmp_path: Path) -> None:
    def stopped(which: TrainJob) -> None:
        polls = iter([False] * 5)
        with pytest.raises(Stopped):
            run_job(which, stop=lambda: next(polls, True))

    mine = changed(job, tmp_path / "out")
    stopped(mine)
    save_draft(tmp_path / "other", new_draft(tiny_parts(), np.arange(30, 150), AUX_LAYERS), {})
    parent = changed(job, tmp_path / "out", parent=tmp_path / "other")
    with pytest.raises(ResumeRefused, match=r"map was \w+, now is \w+; parent was \w+") as refused:
        run_job(parent)
    assert {"map", "parent"} == set(refused.value.differing)
    order = changed(job, tmp_path / "out", train_sample_ids=job.train_sample_ids[::-1])
    with pytest.raises(ResumeRefused, match="order of samples"):
        run_job(order)
    with pytest.raises(ResumeRefused, match=r"training\.lr_schedule was cosine, now is constant"):
        run_job(changed(job, tmp_path / "out", {"lr_schedule": "constant"}))

    steps: list[int] = []
    past: list[int] = []
    begun = changed(parent, tmp_path / "out", {"epochs": 1}, restart=True)
    run_job(begun, lambda r: steps.append(r.step), on_past=lambda records: past.append(len(records)))
    assert steps == [1, 2, 3, 4] and past == []
    stopped(changed(mine, tmp_path / "fresh"))
    run_job(changed(parent, tmp_path / "fresh", {"epochs": 1}), fresh=True)


def test_one_process_at_a_time_trains_in_a_folder(
    job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tide_platform.training.run._LOCK_WAIT_S", 0.1)
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out" / ".lock"), pytest.raises(LockHeld):
        run_job(changed(job, tmp_path / "out"))


def test_dagster_pipes_hears_of_it(job: TrainJob, tmp_path: Path) -> None:
    from dagster import AssetExecutionContext, PipesSubprocessClient, asset, materialize

    short = job.model_copy(update={"out": tmp_path / "out", "settings": job.settings.model_copy(deep=True)})
    short.settings.training.epochs = 1
    short.write(tmp_path / "job.json")
    code = "from tide_platform.cli.train import command; import typer; typer.run(command)"

    @asset
    def draft(context: AssetExecutionContext) -> object:
        argv = [sys.executable, "-c", code, "--job", str(tmp_path / "job.json")]
        return PipesSubprocessClient().run(command=argv, context=context).get_materialize_result()

    result = materialize([draft])
    metadata = result.asset_materializations_for_node("draft")[0].metadata
    assert metadata["digest"].value == draft_digest(tmp_path / "out" / "draft")
    assert metadata["steps"].value == 4


def test_a_failure_is_noted_on_the_volume_and_forgotten_by_the_next_try(
    job: TrainJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = changed(job, tmp_path / "out", {"epochs": 1})

    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    with monkeypatch.context() as patched:
        patched.setattr("tide_platform.training.trainer.accumulate", out_of_memory)
        with pytest.raises(OutOfMemory, match="micro-batches of 8192 positions"):
            run_job(mine)
    noted = tmp_path / "out" / "run" / "failed-0.json"
    told = json.loads(noted.read_text())
    assert (told["rank"], told["kind"]) == (0, "OutOfMemory") and "3 GiB" in told["text"]
    assert told["kind"] == GPU_MEMORY, "what whoever watches pods looks for"
    run_job(mine)
    assert not noted.exists()


def test_a_job_for_others_to_read_holds_no_password(tmp_path: Path) -> None:
    settings = Settings.model_validate({
        "ledger": {"url": "postgresql+psycopg2://tide:hunter2@db/tide"},
        "registry": {"tracking_uri": "http://tide:hunter2@mlflow:5000"},
    })  # fmt: skip
    assert "hunter2" not in without_secrets(settings).model_dump_json()
    assert without_secrets(settings).training == settings.training


def test_bad_jobs_are_named(job: TrainJob, tmp_path: Path) -> None:
    with pytest.raises(BadJob, match="No such file"):
        TrainJob.read(tmp_path / "none.json")
    raw = json.loads(job.model_dump_json())
    (tmp_path / "a.json").write_text(json.dumps(raw | {"train_sample_ids": []}))
    with pytest.raises(BadJob, match="train_sample_ids"):
        TrainJob.read(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(json.dumps(raw | {"epochs": 3}))
    with pytest.raises(BadJob, match="epochs"):
        TrainJob.read(tmp_path / "b.json")
    with pytest.raises(TideError, match="nobody"):
        run_job(job.model_copy(update={"train_sample_ids": ["nobody"]}))


def test_writing_jobs_needs_no_torch() -> None:
    code = "import sys, tide_platform.training.job; assert not {'torch', 'lance'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
