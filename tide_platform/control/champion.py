"""The champion is the draft that is served; its files are kept in the object store, its name in the
registry.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from tide_platform.config import Settings, TideError, draft_digest
from tide_platform.config.redact import shown_settings
from tide_platform.serving.client import ServerUnreachable
from tide_platform.serving.drafts import deployed_draft, resolve_draft, stage_draft
from tide_platform.serving.fleet import connect_all, require_all, served_by, the_one

if TYPE_CHECKING:
    from tide_platform.control.ledger import Ledger
    from tide_platform.control.rollout import Means
    from tide_platform.control.rollouts import Rollout
    from tide_platform.registry.mlflow_registry import DraftRegistry, DraftVersion

logger = logging.getLogger("tide")
SERVER_POLL_S = 2.0


class ChampionUnknown(TideError):
    """The served draft is neither registered nor found on this machine."""

    def __init__(self, digest: str, looked: list[str]):
        super().__init__(
            f"the server serves draft {digest}, which is not registered and not in {', '.join(looked)}; "
            "set `draft` to its folder"
        )
        self.digest, self.looked = digest, looked


class DraftNotStored(TideError):
    """The object store does not give a registered draft back whole."""

    def __init__(self, digest: str, uri: str, found: str):
        super().__init__(f"draft {digest}: {uri} holds {found}; put its files back, or deploy another draft")
        self.digest, self.uri, self.found = digest, uri, found


@dataclass(frozen=True)
class Champion:
    """The served draft, registered and staged."""

    digest: str
    folder: Path
    version: "DraftVersion"


@contextmanager
def means(settings: Settings, ledger: "Ledger") -> Iterator["Means"]:
    """The deployment's servers, registry and object store, for a rollout."""
    from tide_platform.control.rollout import Means
    from tide_platform.registry.mlflow_registry import CHAMPION, DraftRegistry

    registry = DraftRegistry(settings)

    def promote(digest: str) -> None:
        version = registry.version_of(digest)
        assert version is not None, f"{digest} was registered before it could be deployed"
        registry.point(CHAMPION, version)

    with connect_all(settings) as servers:
        yield Means(
            settings,
            ledger,
            servers,
            lambda digest: fetch_draft(settings, digest),
            promote,
            lambda rollout, served, evidence: _tell(registry, rollout, served, evidence),
            lambda: require_all(settings, len(servers)),
        )


def served_digest(settings: Settings) -> str:
    """Digest of the draft that all servers serve. Raises :class:`NothingServed`, :class:`ServersDisagree`
    or :class:`ServerUnreachable`.

    A server that is just starting again is waited for, as long as it may take to start.
    """
    patient = retry(
        retry=retry_if_exception_type(ServerUnreachable),
        stop=stop_after_delay(settings.serving.ready_timeout_s),
        wait=wait_fixed(SERVER_POLL_S),
        reraise=True,
    )
    with connect_all(settings) as servers:
        return the_one(served_by(servers, patient(lambda server: server.status())))


def starting_draft(settings: Settings) -> Path | None:
    """The folder of the draft that a server of a cluster starts with: the champion, staged and checked,
    fetched from the object store where its volume lacks it. None: nothing was deployed yet.

    A ledger that does not answer stops no server that has a pointer on its volume: an older draft is slower,
    and the watch brings the champion. Raises :class:`LedgerUnreachable` where there is none,
    :class:`DraftNotStored`.
    """
    champion, _ = _known(settings)
    return fetch_draft(settings, champion) if champion else None


def allowed_drafts(settings: Settings) -> set[str]:
    """Drafts that a server may serve now: the champion, and both of a rollout that is under way. Empty where
    nothing was deployed yet. Raises :class:`LedgerUnreachable` as :func:`starting_draft` does.
    """
    champion, rollout = _known(settings)
    under_way = {rollout.challenger, rollout.previous} if rollout else set()
    return under_way | ({champion} if champion else set())


def ensure_champion(settings: Settings, ledger: "Ledger") -> Champion:
    """The served draft as champion: stored and registered if it is new, and the alias points to it.

    What a dead rollout left is settled first. The first call registers the draft that the deployment began
    with. Raises :class:`NothingServed`, :class:`ServersDisagree`, :class:`ChampionUnknown`, and what
    :func:`tide_platform.control.rollout.settle` does.
    """
    from tide_platform.control.rollout import settle
    from tide_platform.registry.mlflow_registry import CHAMPION, DraftRegistry

    if ledger.rollouts.unfinished(settings.deployment) is not None:
        with means(settings, ledger) as given:
            settle(given)
    registry = DraftRegistry(settings)
    digest = served_digest(settings)
    version = registry.version_of(digest)
    if version is None:
        folder = _find(settings, digest)
        version = _register_first(settings, registry, digest, folder)
    else:
        folder = fetch_draft(settings, digest)
    alias = registry.alias(CHAMPION)
    if alias is None or alias.version != version.version:
        registry.point(CHAMPION, version)
    return Champion(digest, folder, version)


def fetch_draft(settings: Settings, digest: str) -> Path:
    """The draft's folder below ``drafts_folder``, fetched from the object store where it is not staged whole.

    Raises :class:`DraftNotStored`.
    """
    from tempfile import TemporaryDirectory

    staged = settings.drafts_folder / digest
    if staged.is_dir() and draft_digest(staged) == digest:
        return staged
    objects, key = _objects(settings), draft_key(settings, digest)
    with TemporaryDirectory(prefix="tide-draft-") as work:
        folder = Path(work) / digest
        objects.get_folder(key, folder)
        found = draft_digest(folder)
        if found != digest:
            raise DraftNotStored(digest, objects.uri(key), found)
        return stage_draft(settings, folder)[0]


def store_draft(settings: Settings, folder: Path, digest: str) -> str:
    """Put a draft's files into the object store; their URI."""
    objects, key = _objects(settings), draft_key(settings, digest)
    objects.put_folder(folder, key)
    return objects.uri(key)


def draft_key(settings: Settings, digest: str) -> str:
    return f"{settings.deployment}/drafts/{digest}"


def _known(settings: Settings) -> "tuple[str | None, Rollout | None]":
    """Champion and unfinished rollout by the ledger; the pointer on this volume where it does not answer."""
    from tide_platform.control.database import LedgerUnreachable
    from tide_platform.control.ledger import opened

    try:
        with opened(settings.ledger.url) as ledger:
            deployment = settings.deployment
            return ledger.champion(deployment), ledger.rollouts.unfinished(deployment)
    except LedgerUnreachable as error:
        pointed = deployed_draft(settings)
        if pointed is None:
            raise
        logger.warning("%s; taking %s for the champion, which this volume points to", error, pointed.name)
        return pointed.name, None


def _objects(settings: Settings) -> Any:
    from tide_platform.store.objects import ObjectStore

    return ObjectStore(settings.storage)


def _tell(registry: "DraftRegistry", rollout: "Rollout", served: bool, evidence: Mapping[str, Any]) -> None:
    """How a rollout ended, on the versions of its drafts. For people: servers, pointer and alias are right by
    now, and a registry that does not take it stops no rollout.
    """
    from tide_platform.control.told import of_rollout
    from tide_platform.registry.mlflow_registry import RegistryUnavailable

    try:
        for digest, told in of_rollout(rollout, served, evidence, time.time()).items():
            version = registry.version_of(digest)
            if version is not None:
                registry.tell(version, **vars(told))
    except RegistryUnavailable as error:
        logger.warning("how the rollout of %s ended is not in MLflow: %s", rollout.challenger, error)


def _find(settings: Settings, digest: str) -> Path:
    places = [settings.drafts_folder / digest, resolve_draft(settings)]
    for folder in places:
        if (folder / "model.safetensors").is_file() and draft_digest(folder) == digest:
            return folder
    raise ChampionUnknown(digest, [str(folder) for folder in places])


def _register_first(settings: Settings, registry: Any, digest: str, folder: Path) -> "DraftVersion":
    uri = store_draft(settings, folder, digest)
    tags = {"digest": digest, "origin": "served"}
    files = {"settings.yaml": shown_settings(settings)}
    run_id = registry.begin(f"served {digest}", tags, {"serving.k": settings.serving.k}, files)
    version = registry.register(run_id, folder, digest, uri, tags, {})
    registry.end(run_id)
    return version
