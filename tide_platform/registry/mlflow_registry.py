"""Drafts in MLflow: a run and a logged model for each checkpoint, registered versions, aliases.

The weights themselves lie in the object store; MLflow holds where and by which digest, and the small files
that a
person wants to read. Aliases have no compare-and-set in MLflow, so they are moved under the deployment's lock
only.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, Metric, Param, RunTag
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from tide_platform.config import Settings, TideError

CHAMPION, CHALLENGER = "champion", "challenger"
SMALL_FILES = ("config.json", "tide.json")
_BATCH = 900  # metrics a request; MLflow takes at most 1000
_MODEL_VERSIONS = "mlflow.modelVersions"  # the tag that links a logged model to its version in the UI


class RegistryUnavailable(TideError):
    """MLflow did not answer, or refused."""

    def __init__(self, uri: str, doing: str, detail: str):
        super().__init__(f"MLflow at {uri}: {doing}: {detail}; is it running (registry.tracking_uri)?")
        self.uri, self.doing = uri, doing


class AliasMoved(TideError):
    """The alias does not point where it was just set."""

    def __init__(self, model: str, alias: str, wanted: str, found: str):
        super().__init__(
            f"{model}: alias {alias} points to version {found}, not {wanted} as set just now; somebody else "
            "moves aliases of this model: let only the deployment do so"
        )
        self.model, self.alias, self.wanted, self.found = model, alias, wanted, found


@dataclass(frozen=True)
class DraftVersion:
    """A registered draft."""

    version: str
    digest: str
    uri: str  # of its files in the object store
    run_id: str
    model_id: str


@dataclass(frozen=True)
class Point:
    """Metrics of one training step."""

    step: int
    values: Mapping[str, float]
    at: float  # Unix time, seconds


class DraftRegistry:
    """The registered model ``draft-<deployment>`` and the runs of its experiment."""

    def __init__(self, settings: Settings):
        self.uri = settings.registry.tracking_uri
        self.model = f"draft-{settings.deployment}"
        self._deployment = settings.deployment
        self._experiment_name = settings.registry.experiment
        if self.uri.startswith("sqlite:///"):
            Path(self.uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        # a server decides itself; MLflow alone would put artifacts into a folder of wherever we happen to run
        served = self.uri.startswith(("http://", "https://"))
        self._artifacts = None if served else (settings.state / "mlflow-artifacts").resolve().as_uri()
        self._client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    # --- runs

    def begin(self, name: str, tags: Mapping[str, str], params: Mapping[str, Any]) -> str:
        """A new run for a window; runs that dead attempts of the same window left open are ended as
        KILLED.
        """
        experiment = self._experiment()
        tags = {"deployment": self._deployment, **tags}
        if "window" in tags:
            query = (
                f"tags.deployment = '{self._deployment}' and tags.window = '{tags['window']}' "
                "and attributes.status = 'RUNNING'"
            )
            for run in self._client.search_runs([experiment], query):
                self._client.set_terminated(run.info.run_id, "KILLED")
        run_id = self._client.create_run(experiment, tags=dict(tags), run_name=name).info.run_id
        self._client.log_batch(run_id, params=[Param(key, str(value)) for key, value in params.items()])
        return run_id

    def log_points(self, run_id: str, points: Iterable[Point]) -> None:
        """Metrics of training steps. Raises :class:`RegistryUnavailable`, having logged some or none of
        them.
        """
        metrics = [
            Metric(key, float(value), int(point.at * 1000), point.step)
            for point in points
            for key, value in point.values.items()
        ]
        try:
            for first in range(0, len(metrics), _BATCH):
                self._client.log_batch(run_id, metrics=metrics[first : first + _BATCH])
        except MlflowException as error:
            raise RegistryUnavailable(self.uri, f"metrics of run {run_id}", error.message) from error

    def log_json(self, run_id: str, name: str, content: Mapping[str, Any]) -> None:
        """A small JSON file among the run's artifacts."""
        self._client.log_text(run_id, json.dumps(content, indent=2), name)

    def end(self, run_id: str, *, succeeded: bool = True, tags: Mapping[str, str] | None = None) -> None:
        """Close a run."""
        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in (tags or {}).items()])
        self._client.set_terminated(run_id, "FINISHED" if succeeded else "FAILED")

    # --- checkpoints

    def register(
        self,
        run_id: str,
        folder: Path,
        digest: str,
        uri: str,
        tags: Mapping[str, str],
        params: Mapping[str, Any],
    ) -> DraftVersion:
        """A logged model and a registered version for the checkpoint in ``folder``, found at ``uri``.

        A digest that is registered already keeps its version: content is what a draft is.
        """
        known = self.version_of(digest)
        if known is not None:
            return known
        tags = {"digest": digest, "uri": uri, "deployment": self._deployment, **tags}
        model = self._client.create_logged_model(
            self._experiment(),
            name=f"{self.model}-{digest}",
            source_run_id=run_id,
            tags=dict(tags),
            params={key: str(value) for key, value in params.items()},
            model_type="eagle3",
        )
        with TemporaryDirectory() as small:
            for name in SMALL_FILES:
                if (folder / name).is_file():
                    (Path(small) / name).write_bytes((folder / name).read_bytes())
            (Path(small) / "files.json").write_text(json.dumps({"uri": uri, "digest": digest}, indent=2))
            self._client.log_model_artifacts(model.model_id, small)
            self._client.log_artifacts(run_id, small, "checkpoint")
        self._client.finalize_logged_model(model.model_id, "READY")
        self._client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        self._ensure_model()
        # not "models:/<id>": a registry store on a database looks that up at the process's global tracking
        # URI
        version = self._client.create_model_version(
            self.model,
            str(model.artifact_location),
            run_id,
            tags={**tags, "model_id": model.model_id},
            model_id=model.model_id,
        )
        link = json.dumps([{"name": self.model, "version": version.version}])
        self._client.set_logged_model_tags(model.model_id, {_MODEL_VERSIONS: link})
        return _draft_version(version)

    def judge(
        self, version: DraftVersion, metrics: Mapping[str, float], verdict: Mapping[str, Any], word: str
    ) -> None:
        """Acceptance figures on the version's run and logged model, and the verdict as a file and a tag."""
        now = int(time.time() * 1000)
        for model_id in (None, version.model_id):
            values = [Metric(key, value, now, 0, model_id=model_id) for key, value in metrics.items()]
            self._client.log_batch(version.run_id, metrics=values)
        self.log_json(version.run_id, "verdict.json", verdict)
        self._client.set_tag(version.run_id, "verdict", word)
        self._client.set_model_version_tag(self.model, version.version, "verdict", word)

    # --- versions and aliases

    def version_of(self, digest: str) -> DraftVersion | None:
        """The registered version with this digest."""
        found = self._client.search_model_versions(f"name = '{self.model}' and tags.digest = '{digest}'")
        return _draft_version(found[0]) if found else None

    def digests(self) -> list[str]:
        """Of all registered versions, oldest first."""
        found = self._client.search_model_versions(f"name = '{self.model}'")
        return [one.tags["digest"] for one in sorted(found, key=lambda one: int(one.version))]

    def alias(self, alias: str) -> DraftVersion | None:
        """The version that an alias points to."""
        try:
            return _draft_version(self._client.get_model_version_by_alias(self.model, alias))
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise RegistryUnavailable(self.uri, f"alias {alias} of {self.model}", error.message) from error

    def point(self, alias: str, version: DraftVersion) -> None:
        """Move an alias and read it back. Raises :class:`AliasMoved`."""
        self._client.set_registered_model_alias(self.model, alias, version.version)
        found = self.alias(alias)
        if found is None or found.version != version.version:
            raise AliasMoved(self.model, alias, version.version, found.version if found else "none")

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment_name)
        if found is not None:
            return found.experiment_id
        try:
            return self._client.create_experiment(self._experiment_name, self._artifacts)
        except MlflowException as error:
            found = self._client.get_experiment_by_name(
                self._experiment_name
            )  # made by another process meanwhile?
            if found is None:
                raise RegistryUnavailable(self.uri, "creating the experiment", error.message) from error
            return found.experiment_id

    def _ensure_model(self) -> None:
        try:
            self._client.create_registered_model(self.model, description="EAGLE3 drafts, by tide-platform")
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise RegistryUnavailable(self.uri, f"creating {self.model}", error.message) from error


def _draft_version(version: ModelVersion) -> DraftVersion:
    tags = version.tags
    return DraftVersion(
        version=str(version.version),
        digest=tags["digest"],
        uri=tags["uri"],
        run_id=version.run_id or "",
        model_id=tags["model_id"],  # some stores leave version.model_id empty
    )
