"""One training run as a file: everything that decides its result, and what came of it.

Importing this loads no torch and no Lance: whoever only writes jobs and reads results stays light.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tide_platform.config import Settings, TideError
from tide_platform.config.files import write_json
from tide_platform.config.schema import Ledger, Registry

RESULT, DRAFT, RUN_FOLDER = "result.json", "draft", "run"  # below a job's `out`
FAILED = "failed-{}.json"  # in RUN_FOLDER, of a rank: an error of its own
MOST_NAMED = 100  # samples that were left out, by name in result.json and tide.json


class BadJob(TideError):
    """A job file that cannot be used."""

    def __init__(self, path: Path, detail: str):
        super().__init__(f"{path}: not a training job: {detail}")
        self.path, self.detail = path, detail


def without_secrets(settings: Settings) -> Settings:
    """For a job's file, which others may read: addresses that can hold a password (ledger, registry) are the
    defaults. Training needs neither.
    """
    return settings.model_copy(update={"ledger": Ledger(), "registry": Registry()})


class TrainJob(BaseModel):
    """What ``tide train`` is told. Sample ids pin the data, together with the dataset's version."""

    model_config = ConfigDict(extra="forbid")

    settings: Settings  # of the deployment: training, storage
    target: Path
    parent: Path  # folder of the draft to start from, the champion
    lance_version: int
    train_sample_ids: list[str] = Field(min_length=1)
    # replayed against forgetting: each epoch draws from them, settings.training.reference_ratio and
    # past_window_ratio times as many as train_sample_ids
    reference_sample_ids: list[str] = []
    past_sample_ids: list[str] = []  # of earlier windows
    out: Path  # the checkpoint is written to out/draft, the result to out/result.json
    # a run in `out` that cannot go on (another parent, other samples) is begun anew, with a warning, and not
    # refused: for callers that nobody watches
    restart: bool = False
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


@dataclass(frozen=True)
class TrainResult:
    digest: str
    folder: Path
    parent_digest: str
    contract: str  # digest of everything that decided the result
    steps: int
    processes: int  # that shared each step
    tokens: int  # response tokens trained on, all epochs
    seconds: float  # of the optimizer steps: waiting for samples and computing
    wait_seconds: float  # of these, waiting
    load_seconds: float  # before the first step
    samples: int  # that taught something
    skipped: dict[str, int]  # reason -> samples left out
    skipped_samples: dict[str, str]  # sample id -> reason, of the first of them
    expired: dict[str, int]  # "reference", "past": samples named that are not in the dataset any more
    replayed: int  # steps computed again in this process after an earlier one had died
    diverged: int  # of these, steps that came out otherwise in their last bits
    history: list[dict[str, Any]]  # one record a step

    def summary(self) -> dict[str, Any]:
        """Without the history; with the last epoch's means."""
        rest = {k: v for k, v in asdict(self).items() if k != "history"} | {"folder": str(self.folder)}
        last = [r for r in self.history if r["epoch"] == self.history[-1]["epoch"] and r["samples"]]
        steps = range(len(self.history[0]["accuracy"]))
        rest["loss"] = sum(r["loss"] for r in last) / max(1, len(last))
        rest["accuracy"] = [sum(r["accuracy"][j] for r in last) / max(1, len(last)) for j in steps]
        return rest

    def to_json(self) -> dict[str, Any]:
        return self.summary() | {"history": self.history}

    def write(self, path: Path) -> None:
        """All or nothing."""
        write_json(path, self.to_json(), indent=2)

    @classmethod
    def read(cls, path: Path) -> "TrainResult | None":
        """None where there is none, or one of a release that wrote others."""
        raw = json.loads(path.read_text()) if path.is_file() else {}
        return cls.from_json(raw) if all(field.name in raw for field in fields(cls)) else None

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "TrainResult":
        """What :meth:`to_json` gave."""
        own: dict[str, Any] = {field.name: raw[field.name] for field in fields(cls)}
        own["folder"] = Path(own["folder"])
        return cls(**own)
