"""Messages to people: always into the log, and to the addresses of ``TIDE_NOTIFY__URLS`` or of the file
``notify.urls_file`` (mail, Slack, a webhook ... whatever the apprise library knows).

An address holds secrets: it stands in no setting, log or error; it is told by its number and its scheme. A
message that cannot be delivered raises nothing.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tenacity import RetryCallState, Retrying, retry_if_result, stop_after_attempt, wait_exponential_jitter

from tide_platform.config import Settings, TideError

VARIABLE = "TIDE_NOTIFY__URLS"
COUNTS = "notify"  # name of the counters among the ledger's controls
Grade = Literal["info", "success", "warning", "failure"]  # apprise's own
log = logging.getLogger("tide.notify")
_LEVELS = {"info": logging.INFO, "success": logging.INFO}


class AddressesUnreadable(TideError):
    """``notify.urls_file`` cannot be read."""

    def __init__(self, path: str, error: OSError):
        super().__init__(
            f"notify.urls_file {path}: {error.strerror or error}; give a file with one address a line, "
            f"or the addresses in {VARIABLE}"
        )
        self.path = path


@dataclass(frozen=True)
class Message:
    """What is said. ``title``: one line, which names the deployment."""

    title: str
    body: str
    grade: Grade = "warning"


@dataclass(frozen=True)
class Outcome:
    """How many addresses took a message; ``failed`` names those that did not, by number and scheme."""

    taken: int = 0
    failed: list[str] = field(default_factory=list)

    @property
    def told(self) -> bool:
        """Whether it need not be tried again: somebody has it, or nobody is to be told."""
        return self.taken > 0 or not self.failed


def addresses(settings: Settings, environ: Mapping[str, str] | None = None) -> list[str]:
    """The addresses of ``TIDE_NOTIFY__URLS``, between blanks or line breaks, and of ``notify.urls_file``.

    Raises :class:`AddressesUnreadable`.
    """
    found = (os.environ if environ is None else environ).get(VARIABLE, "").split()
    path = settings.notify.urls_file
    if path is not None:
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise AddressesUnreadable(str(path), error) from error
        found += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return found


class Notifier:
    """Tells all addresses. ``tries`` at each, ``timeout_s`` for a try, ``pause_s`` before the second."""

    def __init__(self, urls: Sequence[str], tries: int, timeout_s: float, pause_s: float = 0.5):
        self._urls, self._tries, self._timeout_s, self._pause_s = list(urls), tries, timeout_s, pause_s

    @classmethod
    def of(cls, settings: Settings) -> "Notifier":
        """Raises :class:`AddressesUnreadable`."""
        return cls(addresses(settings), settings.notify.tries, settings.notify.timeout_s)

    def tell(self, message: Message) -> Outcome:
        log.log(_LEVELS.get(message.grade, logging.WARNING), "%s: %s", message.title, message.body)
        taken, failed = 0, []
        for number, url in enumerate(self._urls, start=1):
            if self._deliver(url, message):
                taken += 1
            else:
                failed.append(f"address {number} ({url.partition('://')[0][:20]})")
        if failed:
            log.error("%r could not be delivered to %s", message.title, ", ".join(failed))
        return Outcome(taken, failed)

    def _deliver(self, url: str, message: Message) -> bool:
        import apprise

        # its log holds what it was given, which is a secret
        logging.getLogger("apprise").disabled = True
        sender = apprise.Apprise(asset=apprise.AppriseAsset(app_id="tide", secure_logging=True))
        if not sender.add(url):
            return False

        def send() -> bool:
            done = sender.notify(
                title=message.title,
                body=message.body,
                notify_type=apprise.NotifyType(message.grade),
                timeout=self._timeout_s,
            )
            return bool(done)

        pause = self._pause_s
        again = Retrying(
            retry=retry_if_result(lambda sent: not sent),
            stop=stop_after_attempt(self._tries),
            wait=wait_exponential_jitter(multiplier=pause, max=8 * pause, jitter=pause),
            retry_error_callback=_given_up,
        )
        return again(send)


def _given_up(_: RetryCallState) -> bool:
    return False
