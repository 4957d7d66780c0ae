"""The cluster's doctor on what pods share: the object store and the state folder, as seen from here."""

import os
import socket
from collections.abc import Iterator

from tide_platform.config import Settings
from tide_platform.config.locks import LockHeld, locked
from tide_platform.gate.doctor import Finding


def store(settings: Settings) -> Iterator[Finding]:
    """Conditional puts, from this pod. Raises what the store raises."""
    from tide_platform.store.location import Location
    from tide_platform.store.objects import ObjectStore

    if Location.of(settings.storage).bucket is None:
        text = f"{settings.storage.uri} is a folder: pods of several nodes do not share it"
        yield Finding("store", "error", text, "set storage.uri to s3://...")
        return
    ObjectStore(settings.storage).probe_conditional_put()
    yield Finding("store", "ok", f"{settings.storage.uri}: reachable, and honours conditional puts")


def state(settings: Settings) -> Iterator[Finding]:
    """Whether this account can write there, and whether its locks lock: a rollout counts on both."""
    folder = settings.state
    if not folder.is_dir():
        text = f"{folder} is not here: the shared volume is mounted in the cluster's pods only"
        yield Finding("state", "warn", text, "ask from inside: `helm test`")
        return
    probe = folder / f".doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        probe.write_bytes(b"tide")
        with locked(probe):
            try:
                with locked(probe):
                    mend = "mount it with locks (NFS: version 4, not `nolock`)"
                    yield Finding("state", "error", f"{folder}: a file can be locked twice", mend)
                    return
            except LockHeld:
                yield Finding("state", "ok", f"{folder}: writable, and its locks lock")
    finally:
        probe.unlink(missing_ok=True)
