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
from tiny import AUX_LAYERS, TINY, prompts, say, tiny_parts

from tide_platform.capture.record import StreamMeta
from tide_platform.config import Settings, TideError, draft_digest
from tide_platform.draft.checkpoint import load_draft, new_draft, save_draft
from tide_platform.evaluation.acceptance import acceptance_length
from tide_platform.evaluation.replay import replay
from tide_platform.store.hidden_states import open_store
from tide_platform.training.job import BadJob, TrainJob, run_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    root = tmp_path_factory.mktemp("job")
    settings = Settings.model_validate({
        "storage": {"uri": str(root / "store")},
        "training": {"epochs": 4, "learning_rate": 3e-3, "threads": 1, "reference_ratio": 0.5},
    })  # fmt: skip
    samples = say(prompts(32), 40)
    store = open_store(settings)
    store.ensure(StreamMeta("t", 96, 256, AUX_LAYERS, 16))
    version = store.append(samples, ["segment"]).version
    save_draft(root / "parent", new_draft(tiny_parts(), np.arange(20, 140), AUX_LAYERS), {})
    ids = [s.meta.sample_id for s in samples]
    return TrainJob(
        settings=settings,
        target=TINY,
        parent=root / "parent",
        lance_version=version,
        train_sample_ids=ids[:24],
        reference_sample_ids=ids[24:],
        out=root / "out",
        seed=3,
        provenance={"window": "w7"},
    )


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
    provenance = json.loads((result.folder / "tide.json").read_text())
    assert (provenance["window"], provenance["parent"]) == ("w7", result.parent_digest)
    written = json.loads((job.out / "result.json").read_text())
    assert written["digest"] == result.digest and len(written["history"]) == result.steps


def test_the_same_job_gives_the_same_draft(job: TrainJob) -> None:
    short = job.model_copy(update={"settings": job.settings.model_copy(deep=True)})
    short.settings.training.epochs = 1
    digests = {run_job(short.model_copy(update={"out": job.out.with_name(f"o{i}")})).digest for i in range(2)}
    assert len(digests) == 1


def test_reference_share_is_drawn_by_the_seed(job: TrainJob) -> None:
    many = job.model_copy(update={"reference_sample_ids": [f"r{i}" for i in range(40)]})
    assert len(many.sample_ids()) == 24 + 12
    assert many.sample_ids() == many.sample_ids() != many.model_copy(update={"seed": 4}).sample_ids()


def command(job_file: Path, **environment: str) -> subprocess.Popen[str]:
    code = "from tide_platform.cli.train import command; import typer; typer.run(command)"
    script = (
        "import sys\nfrom tide_platform.config import TideError\n"
        f"try:\n    {code}\nexcept TideError as error:\n    sys.exit(f'error: {{error}}')"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script, "--job", str(job_file)],
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


def test_sigterm_ends_it_clearly(job: TrainJob, tmp_path: Path) -> None:
    long = job.model_copy(update={"out": tmp_path / "out", "settings": job.settings.model_copy(deep=True)})
    long.settings.training.epochs = 10_000
    long.write(tmp_path / "job.json")
    process = command(tmp_path / "job.json")
    assert process.stdout and "step" in process.stdout.readline()
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and time.monotonic() - began < 30
    assert err.strip().splitlines()[-1].startswith("error: ") and "SIGTERM" in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


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
