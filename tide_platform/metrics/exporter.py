"""``tide metrics``: the exporter's process."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tide_platform import __version__
from tide_platform.config import Settings, TideError
from tide_platform.metrics.part import Part
from tide_platform.metrics.sheet import Sheet

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from tide_platform.control.ledger import Ledger


class ExporterPort(TideError):
    """The exporter cannot listen."""

    def __init__(self, host: str, port: int, error: OSError):
        super().__init__(
            f"nothing can listen on {host}:{port} ({error.strerror or error}); end what does, or set "
            "metrics.host, metrics.port"
        )
        self.host, self.port = host, port


class Exporter:
    """A Collector of prometheus_client: asks all parts at once, and waits for no longer than
    ``metrics.scrape_seconds``.
    """

    def __init__(self, settings: Settings, parts: Sequence[Part] | None = None):
        self._settings = settings
        self.parts = parts if parts is not None else parts_of(settings)

    def collect(self) -> "Iterator[Metric]":
        end = time.monotonic() + self._settings.metrics.scrape_seconds
        whole = Sheet()
        whole.put("tide_deployment_info", 1, self._settings.deployment, __version__)
        for part, asked in [(part, part.ask()) for part in self.parts]:
            sheet = part.result(asked, end - time.monotonic())
            if sheet is not None:
                whole.add(sheet)
            whole.put("tide_up", sheet is not None, part.what)
            whole.put("tide_unread_total", part.unread, part.what)
            whole.put("tide_read_seconds", part.seconds, part.what)
        yield from whole.families()


def parts_of(settings: Settings) -> list[Part]:
    """The parts that ``metrics.parts`` names."""
    from tide_platform.metrics.dataset import DatasetReader
    from tide_platform.metrics.files import read_files
    from tide_platform.metrics.ledger import read_controls, read_ledger, read_live
    from tide_platform.metrics.servers import read_servers

    ledger = _once(lambda: _open_ledger(settings))
    reads: dict[str, Callable[[], Sheet]] = {
        "ledger": lambda: read_ledger(settings, ledger()),
        "live": lambda: read_live(settings, ledger()),
        "controls": lambda: read_controls(settings, ledger()),
        "servers": lambda: read_servers(settings),
        "dataset": DatasetReader(settings).read,
        "files": lambda: read_files(settings),
    }
    limits = settings.metrics
    every = {"dataset": limits.store_seconds}
    return [Part(name, reads[name], every.get(name, limits.interval_seconds)) for name in limits.parts]


def start(settings: Settings) -> Any:
    """Listens, and answers from threads of its own; the server, to be shut down. Raises
    :class:`ExporterPort`.
    """
    from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(Exporter(settings))
    host, port = settings.metrics.host, settings.metrics.port
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise ExporterPort(host, port, error) from error
    return server


def _open_ledger(settings: Settings) -> "Ledger":
    from tide_platform.control.ledger import Ledger

    return Ledger(settings.ledger.url)


def _once(make: "Callable[[], Ledger]") -> "Callable[[], Ledger]":
    """``make``'s value, made by the first thread that asks; asked again where it raised."""
    lock, made = threading.Lock(), []

    def get() -> "Ledger":
        with lock:
            if not made:
                made.append(make())
            return made[0]

    return get
