"""One training run as a file: everything that decides its result, and what came of it.

Importing this loads no torch and no Lance: whoever only writes jobs and reads results stays light.
"""

import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tide_platform.config import Settings, TideError, draft_digest, target_digest

if TYPE_CHECKING:
    from tide_platform.training.trainer import StepRecord

RESULT = "result.json"


class BadJob(TideError):
    """A job file that cannot be used."""

    def __init__(self, path: Path, detail: str):
        super().__init__(f"{path}: not a training job: {detail}")
        self.path, self.detail = path, detail


class TrainJob(BaseModel):
    """What ``tide train`` is told. Sample ids pin the data, together with the dataset's version."""

    model_config = ConfigDict(extra="forbid")

    settings: Settings  # of the deployment: training, storage
    target: Path
    parent: Path  # folder of the draft to start from, the champion
    lance_version: int
    train_sample_ids: list[str] = Field(min_length=1)
    reference_sample_ids: list[
        str
    ] = []  # replayed against forgetting; settings.training.reference_ratio takes its share
    out: Path  # the checkpoint is written to out/draft, the result to out/result.json
    seed: int = 0
    provenance: dict[str, Any] = {}  # kept in the checkpoint's tide.json

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2))

    @classmethod
    def read(cls, path: Path) -> "TrainJob":
        """Raises :class:`BadJob`, which names the first field that is wrong."""
        try:
            return cls.model_validate_json(path.read_text())
        except OSError as error:
            raise BadJob(path, error.strerror or str(error)) from error
        except ValidationError as error:
            first = error.errors()[0]
            raise BadJob(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error

    def sample_ids(self) -> list[str]:
        """The window's samples and, drawn by the seed, ``reference_ratio`` times as many of the reference
        set.
        """
        share = round(self.settings.training.reference_ratio * len(self.train_sample_ids))
        reference = sorted(self.reference_sample_ids)
        random.Random(self.seed).shuffle(reference)
        return [*self.train_sample_ids, *reference[:share]]


@dataclass(frozen=True)
class TrainResult:
    digest: str
    folder: Path
    parent_digest: str
    steps: int
    tokens: int  # response tokens trained on, all epochs
    seconds: float  # of the optimizer loop
    load_seconds: float
    samples: int
    skipped: dict[str, int]  # reason -> samples left out
    history: list[dict[str, Any]]  # one record a step

    def summary(self) -> dict[str, Any]:
        """Without the history; with the last epoch's means."""
        rest = {k: v for k, v in asdict(self).items() if k != "history"} | {"folder": str(self.folder)}
        last = [r for r in self.history if r["epoch"] == self.history[-1]["epoch"]]
        steps = range(len(last[0]["accuracy"]))
        rest["loss"] = sum(r["loss"] for r in last) / len(last)
        rest["accuracy"] = [sum(r["accuracy"][j] for r in last) / len(last) for j in steps]
        return rest


def run_job(job: TrainJob, on_step: "Callable[[StepRecord], None] | None" = None) -> TrainResult:
    """Fine-tunes the parent on the job's samples; writes ``out/draft`` (atomically), then
    ``out/result.json``.

    Raises the named errors of :mod:`tide_platform.draft.errors`, of the store, and
    :class:`~tide_platform.training.data.NothingToTrain`,
    :class:`~tide_platform.training.trainer.LossNotFinite`.
    """
    from tide_platform.draft.check import check_draft
    from tide_platform.draft.checkpoint import load_draft, load_target_parts, save_draft
    from tide_platform.draft.prefix import fill_prefixes
    from tide_platform.draft.vocab import inverse_map
    from tide_platform.store.hidden_states import open_store
    from tide_platform.training.data import prepare_all
    from tide_platform.training.trainer import train

    settings = job.settings.training
    check_draft(job.parent, job.target)
    began = time.monotonic()
    target = load_target_parts(job.target)
    draft = load_draft(job.parent)
    inverse = inverse_map(draft.d2t.numpy(), draft.config.vocab_size)
    store, ids = open_store(job.settings), job.sample_ids()
    rest = sorted(set(job.reference_sample_ids) - set(ids))
    samples = fill_prefixes(
        list(store.load(ids, version=job.lance_version)),
        donors=store.load(rest, version=job.lance_version),
    )
    examples, skipped = prepare_all(samples, inverse, settings.unroll_steps, settings.max_length)
    load_seconds = time.monotonic() - began
    records = train(draft, target.embed_VH, examples, settings, job.seed, on_step)
    parent = draft_digest(job.parent)
    folder = job.out / "draft"
    digest = save_draft(
        folder,
        draft,
        {
            "parent": parent,
            "target_digest": target_digest(job.target),
            "lance_version": job.lance_version,
            "samples": len(examples),
            "tokens": records[-1].tokens,
            "seed": job.seed,
            "training": settings.model_dump(),
            **job.provenance,
        },
    )
    result = TrainResult(
        digest=digest,
        folder=folder,
        parent_digest=parent,
        steps=len(records),
        tokens=records[-1].tokens,
        seconds=records[-1].seconds,
        load_seconds=load_seconds,
        samples=len(examples),
        skipped=skipped,
        history=[r.to_json() for r in records],
    )
    (job.out / RESULT).write_text(json.dumps(result.summary() | {"history": result.history}, indent=2))
    return result
