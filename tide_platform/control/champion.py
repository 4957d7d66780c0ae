"""The champion is the draft that is served; its files are kept in the object store, its name in the
registry.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tide_platform.config import Settings, TideError, draft_digest
from tide_platform.serving.drafts import resolve_draft, stage_draft

if TYPE_CHECKING:
    from tide_platform.registry.mlflow_registry import DraftVersion
    from tide_platform.serving.client import SglangClient

SERVER_POLL_S = 2.0


class NothingServed(TideError):
    """The server runs without a draft."""

    def __init__(self, url: str):
        super().__init__(
            f"{url} serves no draft, so there is no champion; start `tide serve` with serving.k above 0"
        )
        self.url = url


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


def connect(settings: Settings) -> "SglangClient":
    """A client of the deployment's server, with its admin key."""
    from tide_platform.serving.admin import read_admin_key
    from tide_platform.serving.client import SglangClient
    from tide_platform.serving.launch import base_url

    return SglangClient(base_url(settings), read_admin_key(settings))


def served_digest(settings: Settings) -> str:
    """Digest of the served draft. Raises :class:`NothingServed` or
    :class:`ServerUnreachable`.

    A server that is just starting again is waited for, as long as it may take to start.
    """
    from tide_platform.serving.client import ServerUnreachable

    end = time.monotonic() + settings.serving.ready_timeout_s
    with connect(settings) as client:
        while True:
            try:
                digest = client.status()["draft_digest"]
            except ServerUnreachable:
                if time.monotonic() > end:
                    raise
                time.sleep(SERVER_POLL_S)
                continue
            if not digest:
                raise NothingServed(client.base_url)
            return digest


def ensure_champion(settings: Settings) -> Champion:
    """The served draft as champion: stored and registered if it is new, and the alias points to it.

    The first call registers the draft that the deployment began with. Later ones mend what a dead deployment
    left: an alias that lags behind the server. Raises :class:`NothingServed`, :class:`ChampionUnknown`.
    """
    from tide_platform.registry.mlflow_registry import CHAMPION, DraftRegistry

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
