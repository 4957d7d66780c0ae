"""A lease in the store: who commits, and who does the upkeep.

It needs a store that honours ``If-None-Match`` and nothing else, and no clock but the reader's own monotonic
one: a holder writes a beat, and whoever sees the same beat for ``seconds`` by its own clock takes the next
epoch. It saves work; what makes commits safe is :mod:`tide_platform.store.commits`, so a holder that was
paused past its time does no harm.

Objects below its key: ``<epoch>.json`` (made once, by the holder of that epoch) and ``<epoch>.beat``.
"""

import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tide_platform.store.errors import ObjectMissing, StoreUnavailable
from tide_platform.store.objects import ObjectStore

_RELEASED = b"released"
_RENEWALS, _LOOKS = 3, 5  # a lease's time holds so many


@dataclass(frozen=True)
class Holder:
    """A process, such that another one on the same machine can tell whether it lives."""

    machine: str  # boot and process namespace
    pid: int
    started: int  # in clock ticks since boot: a process id is used again

    @classmethod
    def here(cls) -> "Holder":
        return cls(_machine(), os.getpid(), _started(os.getpid()) or 0)

    def dead(self) -> bool:
        """Whether it is known to be: False for a process of another machine."""
        return self.machine == _machine() and _started(self.pid) != self.started


class StoreLease:
    """One candidate. ``clock`` gives seconds that never go back."""

    def __init__(
        self,
        objects: ObjectStore,
        key: str,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        holder: Holder | None = None,
    ):
        self.key, self.epoch = key, 0  # 0: not held
        self.taken = 0  # times that it was taken from another holder
        self._objects, self._seconds, self._clock = objects, seconds, clock
        self._holder, self._token = holder or Holder.here(), secrets.token_hex(8)
        self._beats, self._renewed, self._looked = 0, 0.0, float("-inf")
        self._seen: tuple[int, bytes] | None = None
        self._seen_at = 0.0

    def try_hold(self) -> bool:
        """Whether this candidate holds the lease now; renews it, or takes it where it is free.

        Costs no read between renewals, three a time otherwise. Raises :class:`StoreUnavailable`.
        """
        now = self._clock()
        if self.epoch:
            if now - self._renewed >= self._seconds / _RENEWALS:
                self._renew(now)
        elif now - self._looked >= self._seconds / _LOOKS:
            self._looked = now
            self._look(now)
        return bool(self.epoch)

    def release(self) -> None:
        """Lets the next candidate have it at once."""
        if not self.epoch:
            return
        epoch, self.epoch = self.epoch, 0
        if self._newest() == epoch:
            self._objects.put_bytes(self._beat(epoch), _RELEASED)

    def _renew(self, now: float) -> None:
        try:
            newest = self._newest()
            if newest == self.epoch:
                self._beats += 1
                self._objects.put_bytes(self._beat(self.epoch), f"{self._token} {self._beats}".encode())
                self._renewed = now
        except StoreUnavailable:
            if now - self._renewed >= self._seconds:
                self.epoch = 0
            raise
        if newest != self.epoch:
            self.epoch = 0

    def _look(self, now: float) -> None:
        newest = self._newest()
        if newest and not self._is_free(newest, now):
            return
        epoch = newest + 1
        claim = json.dumps({"token": self._token, **self._holder.__dict__}).encode()
        if not self._claim(f"{self.key}/{epoch:012d}.json", claim):
            return
        if self._newest() != epoch:  # a claim made so late that the epoch was used and cleaned away
            self._forget(epoch)
            return
        self.epoch, self._renewed, self._seen = epoch, now, None
        self.taken += bool(newest)
        for old in self._epochs():
            if old < epoch:
                self._forget(old)

    def _claim(self, key: str, claim: bytes) -> bool:
        """A put whose answer was lost is repeated by the client, and then refused: it may be ours."""
        if self._objects.put_bytes(key, claim, only_if_absent=True):
            return True
        try:
            return self._objects.get_bytes(key) == claim
        except ObjectMissing:
            return False

    def _is_free(self, epoch: int, now: float) -> bool:
        try:
            beat = self._objects.get_bytes(self._beat(epoch))
        except ObjectMissing:
            beat = b""
        if beat == _RELEASED or self._holder_is_dead(epoch):
            return True
        if (epoch, beat) != self._seen:
            self._seen, self._seen_at = (epoch, beat), now
        return now - self._seen_at >= self._seconds

    def _holder_is_dead(self, epoch: int) -> bool:
        """Known at once on the same machine; a damaged claim says nothing and its time decides."""
        try:
            raw = json.loads(self._objects.get_bytes(f"{self.key}/{epoch:012d}.json"))
            return Holder(str(raw["machine"]), int(raw["pid"]), int(raw["started"])).dead()
        except (ObjectMissing, ValueError, KeyError, TypeError):
            return False

    def _epochs(self) -> list[int]:
        names = [key.rpartition("/")[2] for key in self._objects.list(f"{self.key}/")]
        return [int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()]

    def _newest(self) -> int:
        return max(self._epochs(), default=0)

    def _forget(self, epoch: int) -> None:
        self._objects.delete(self._beat(epoch))
        self._objects.delete(f"{self.key}/{epoch:012d}.json")

    def _beat(self, epoch: int) -> str:
        return f"{self.key}/{epoch:012d}.beat"


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    if not boot.exists() or not namespace.is_symlink():
        return f"unknown-{secrets.token_hex(8)}"  # equal to none: its time decides
    return f"{boot.read_text().strip()} {namespace.readlink()}"


def _started(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; None where there is no such process, or a dead one not yet waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])
