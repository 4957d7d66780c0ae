"""The champion is the draft that is served; its files are kept in the object store, its name in the
registry.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from tide_platform.config import Settings, TideError, draft_digest
from tide_platform.serving.client import ServerUnreachable
from tide_platform.serving.drafts import resolve_draft, stage_draft
from tide_platform.serving.fleet import connect_all, served_by, the_one

if TYPE_CHECKING:
    from tide_platform.control.ledger import Ledger
    from tide_platform.control.rollout import Means
    from tide_platform.registry.mlflow_registry import DraftVersion

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
        yield Means(settings, ledger, servers, lambda digest: fetch_draft(settings, digest), promote)


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


def _objects(settings: Settings) -> Any:
    from tide_platform.store.objects import ObjectStore

    return ObjectStore(settings.storage)


def _find(settings: Settings, digest: str) -> Path:
    places = [settings.drafts_folder / digest, resolve_draft(settings)]
    for folder in places:
        if (folder / "model.safetensors").is_file() and draft_digest(folder) == digest:
            return folder
    raise ChampionUnknown(digest, [str(folder) for folder in places])


def _register_first(settings: Settings, registry: Any, digest: str, folder: Path) -> "DraftVersion":
    uri = store_draft(settings, folder, digest)
    run_id = registry.begin(
        f"served {digest}", {"digest": digest}, {"origin": "served before it was registered"}
    )
    version = registry.register(run_id, folder, digest, uri, {"origin": "served"}, {})
    registry.end(run_id)
    return version
