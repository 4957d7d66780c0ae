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
from types import MappingProxyType
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, Metric, Param, RunTag
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from tide_platform.config import Settings, TideError
from tide_platform.registry.words import describe

CHAMPION, CHALLENGER = "champion", "challenger"
SMALL_FILES = ("config.json", "tide.json")
_BATCH = 900  # metrics a request; MLflow takes at most 1000
_NOTE, _NOTE_CHARS = "mlflow.note.content", 8000  # what the UI shows as a description
NOTHING: Mapping[str, Any] = MappingProxyType({})
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
        self._served = self.uri.startswith(("http://", "https://"))
        self._artifacts = None if self._served else (settings.state / "mlflow-artifacts").resolve().as_uri()
        self._client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    # --- runs

    def begin(
        self,
        name: str,
        tags: Mapping[str, str],
        params: Mapping[str, Any],
        files: Mapping[str, str] = NOTHING,
    ) -> str:
        """A new run for a window; runs that dead attempts of the same window left open are ended as
        KILLED. ``files``: texts among its artifacts, by name.
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
        for file, text in files.items():
            self._client.log_text(run_id, text, file)
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
        self._client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
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
        made = _draft_version(version)
        self._describe(made)
        return made

    def tell(
        self,
        version: DraftVersion,
        *,
        metrics: Mapping[str, float] = NOTHING,
        tags: Mapping[str, str] = NOTHING,
        cleared: Iterable[str] = (),
        files: Mapping[str, str] = NOTHING,
    ) -> None:
        """What became known of a draft: on its run, its logged model and its version, whose description is
        written anew. ``cleared``: tags that hold no more; ``files``: texts, by name. May be told twice.

        Raises :class:`RegistryUnavailable`, having told some or none of it.
        """
        try:
            self._measure(version, metrics)
            self._keep_files(version, files)
            self._tag(version, tags, cleared)
            self._describe(version)
        except MlflowException as error:
            raise RegistryUnavailable(
                self.uri, f"what became of draft {version.digest}", error.message
            ) from error

    def _measure(self, version: DraftVersion, metrics: Mapping[str, float]) -> None:
        """On run and logged model, where they do not say so already: a model keeps every point."""
        if not metrics:
            return
        points = self._client.get_logged_model(version.model_id).metrics or []
        known = {point.key: point.value for point in sorted(points, key=lambda point: point.timestamp)}
        new = {key: value for key, value in metrics.items() if known.get(key) != value}
        now = int(time.time() * 1000)
        for model_id in (None, version.model_id):
            values = [Metric(key, value, now, 0, model_id=model_id) for key, value in new.items()]
            for first in range(0, len(values), _BATCH):
                self._client.log_batch(version.run_id, metrics=values[first : first + _BATCH])

    def _keep_files(self, version: DraftVersion, files: Mapping[str, str]) -> None:
        if not files:
            return
        with TemporaryDirectory() as folder:
            for name, text in files.items():
                (Path(folder) / name).write_text(text)
            self._client.log_artifacts(version.run_id, folder)
            self._client.log_model_artifacts(version.model_id, folder)

    def _tag(self, version: DraftVersion, tags: Mapping[str, str], cleared: Iterable[str]) -> None:
        at = (self.model, version.version)
        gone = set(cleared) - tags.keys()
        on_version = set(self._client.get_model_version(*at).tags)
        on_run = set(self._client.get_run(version.run_id).data.tags)
        on_model = set(self._client.get_logged_model(version.model_id).tags)
        for key in sorted(gone & on_version):
            self._client.delete_model_version_tag(*at, key=key)
        for key in sorted(gone & on_run):
            self._client.delete_tag(version.run_id, key)
        for key in sorted(gone & on_model):
            self._client.delete_logged_model_tag(version.model_id, key)
        if not tags:
            return
        self._client.log_batch(version.run_id, tags=[RunTag(key, value) for key, value in tags.items()])
        self._client.set_logged_model_tags(version.model_id, dict(tags))
        for key, value in tags.items():
            self._client.set_model_version_tag(*at, key=key, value=value)

    def _describe(self, version: DraftVersion) -> None:
        """The version's description, and the same as the note of its run and its logged model."""
        text = describe(self._client.get_model_version(self.model, version.version).tags)
        self._client.update_model_version(self.model, version.version, description=text)
        self._client.set_tag(version.run_id, _NOTE, text[:_NOTE_CHARS])
        self._client.set_logged_model_tags(version.model_id, {_NOTE: text[:_NOTE_CHARS]})

    # --- versions and aliases

    def version_of(self, digest: str) -> DraftVersion | None:
        """The registered version with this digest. Raises :class:`RegistryUnavailable`."""
        query = f"name = '{self.model}' and tags.digest = '{digest}'"
        try:
            found = self._client.search_model_versions(query)
        except MlflowException as error:
            raise RegistryUnavailable(self.uri, f"looking for draft {digest}", error.message) from error
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

    # --- pages

    def run_page(self, run_id: str, artifact: str = "") -> str | None:
        """Address of a run's page, or of one of its artifacts; None without an MLflow server. Raises
        :class:`RegistryUnavailable`.
        """
        if not self._served:
            return None
        try:
            found = self._client.get_run(run_id).info.experiment_id
        except MlflowException as error:
            raise RegistryUnavailable(self.uri, f"run {run_id}", error.message) from error
        page = f"{self.uri.rstrip('/')}/#/experiments/{found}/runs/{run_id}"
        return f"{page}/artifacts/{artifact}" if artifact else page

    def version_page(self, version: str) -> str | None:
        """Address of a registered version's page; None without an MLflow server."""
        return f"{self.uri.rstrip('/')}/#/models/{self.model}/versions/{version}" if self._served else None

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
        words = f"Drafts of {self._deployment}: `champion` is served, `challenger` was trained last"
        try:
            self._client.create_registered_model(self.model, description=words)
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
