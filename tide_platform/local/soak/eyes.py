"""What the soak looks at while the loop is left to itself; changes nothing."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from tide_platform.config import Settings
from tide_platform.control.audit import Action, Entry
from tide_platform.control.ledger import Ledger
from tide_platform.local.demo.clock import Clock
from tide_platform.local.demo.screen import Screen
from tide_platform.local.errors import StackError
from tide_platform.local.soak import plan
from tide_platform.local.soak.figures import acceptance
from tide_platform.local.soak.traffic import Users
from tide_platform.serving.client import SglangClient

T = TypeVar("T")
_POLL_S = 1.0


class SoakLate(StackError):
    """What the loop should have done by itself did not happen."""

    def __init__(self, what: str, seconds: float):
        super().__init__(f"{what}: not within {seconds:.0f} s; see the Dagster page and .tide/logs")
        self.what = what


class Eyes:
    """On one stack; ends what waits when users fail or time is up."""

    def __init__(
        self,
        settings: Settings,
        ledger: Ledger,
        client: SglangClient,
        users: Users,
        clock: Clock,
        screen: Screen,
    ):
        self._settings, self._ledger, self._client = settings, ledger, client
        self._users, self._clock, self._screen = users, clock, screen

    def until(self, what: str, look: Callable[[], T | None], seconds: float) -> T:
        """What ``look`` finds as soon as it finds something. Raises :class:`SoakLate`."""
        end = time.monotonic() + min(seconds, plan.LIMIT_S - self._clock.elapsed)
        with self._screen.status() as show:
            while (found := look()) is None:
                self._users.check()
                if time.monotonic() > end:
                    raise SoakLate(what, seconds)
                show(f"waiting for {what}")
                time.sleep(_POLL_S)
        return found

    def since(self, began: float, action: Action) -> Entry | None:
        """The first entry of the audit since ``began`` (Unix time)."""
        entries = self._ledger.audit(self._settings.deployment, 50)
        return next((entry for entry in entries if entry.action is action and entry.at >= began), None)

    def deployed_of_new_window(self, began: float) -> Entry | None:
        """The first deployment of a window that was cut since ``began``: one on its way before that knows
        nothing of the new traffic.
        """
        cut = {
            record.key.window: record.created_at for record in self._ledger.windows(self._settings.deployment)
        }
        entries = self._ledger.audit(self._settings.deployment, 50)
        new = (e for e in entries if e.action is Action.DEPLOYED and cut.get(e.window or "", 0.0) >= began)
        return next(new, None)

    def live(self, draft: str, tenant: str, since: float) -> dict[str, Any]:
        """Live figures of a draft on a workload's requests since ``since`` (Unix time)."""
        return acceptance(self._ledger.history.blocks(self._settings.deployment, since), draft, tenant)

    def settled_live(self, draft: str, tenant: str, since: float, requests: int) -> dict[str, Any]:
        """The same, as soon as the sensor has read so many requests."""
        return self.until(
            "the sensor to have seen them",
            lambda: live if (live := self.live(draft, tenant, since))["requests"] >= requests else None,
            plan.POISON_S,
        )

    def quiet(self) -> None:
        """Until no window is open."""
        self.until(
            "open windows to end",
            lambda: None if self._ledger.open(self._settings.deployment) else True,
            plan.SHIFT_S,
        )

    def served(self) -> str:
        """Digest of the draft that the server serves."""
        digest = self._client.status()["draft_digest"]
        assert digest, "the server was started with a draft"
        return digest
