"""``tide_capture_*`` on the server's own /metrics.

SGLang runs prometheus_client in its multiprocess mode: what the schedulers' processes count, the HTTP process
shows; counters are sums over data-parallel ranks. A thread of its own copies the counts once a second, so
that the scheduler's thread pays nothing.
"""

import logging
import threading
from collections.abc import Mapping
from typing import Any, Literal

from tide_platform.capture.writer import RingWriter
from tide_platform.engine.capture import Capture
from tide_platform.engine.rows import Cost

logger = logging.getLogger("tide")

SECONDS = 1.0  # between two copies
BUCKETS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.5)


class Metrics:
    """Publishes one capture's counts. Make it after SGLang has set up prometheus_client."""

    def __init__(self, capture: Capture, writer: RingWriter, cost: Cost):
        from prometheus_client import Counter, Gauge, Histogram

        self._capture, self._writer, self._cost = capture, writer, cost
        self._published: dict[tuple[str, str], float] = {}

        def counter(name: str, what: str, *labels: str) -> Any:
            return Counter(f"tide_capture_{name}", what, labels)

        def gauge(name: str, what: str, of_ranks: Literal["sum", "min", "max"]) -> Any:
            return Gauge(f"tide_capture_{name}", what, multiprocess_mode=of_ranks)

        self._counters = {
            "samples": counter("samples", "Samples handed to the spool whole."),
            "rows": counter("rows", "Rows written to the ring."),
            "bytes": counter("bytes", "Bytes written to the ring."),
        }
        self._by_reason = {
            "dropped": counter("dropped", "Samples lost that were meant to be kept.", "reason"),
            "skipped": counter("skipped", "Requests not captured by rule.", "reason"),
            "ignored": counter("ignored", "What requests said of themselves and was not believed.", "reason"),
        }
        self._gauges = {
            "open": gauge("open", "Requests being captured.", "sum"),
            "enabled": gauge("enabled", "1 where capture is on.", "min"),
            "sampling_rate": gauge("sampling_rate", "Share of conversations captured.", "min"),
            "ring_bytes": gauge("ring_bytes", "Capacity of the ring (of one rank's).", "max"),
            "ring_used_bytes": gauge(
                "ring_used_bytes", "Bytes that the spool has yet to take, of the fullest ring.", "max"
            ),
            "spool_age_seconds": gauge(
                "spool_age_seconds", "Since the spool last said that it lives.", "max"
            ),
        }
        self._seconds = Histogram(
            "tide_capture_seconds",
            "Capture's time on the scheduler's thread a forward step.",
            buckets=BUCKETS,
        )

    def start(self) -> None:
        threading.Thread(target=self._run, name="tide-metrics", daemon=True).start()

    def publish(self) -> None:
        """Copies the counts once."""
        capture = self._capture
        dropped, skipped = capture.drops()
        for name, counter in self._counters.items():
            self._add(counter, name, "", getattr(capture, name))
        of = {"dropped": dropped, "skipped": skipped, "ignored": dict(capture.ignored)}
        for name, reasons in of.items():
            self._add_all(name, reasons)
        values = {
            "open": len(capture.open),
            "enabled": capture.policy.enabled,
            "sampling_rate": capture.policy.sampling_rate,
            "ring_bytes": self._writer.capacity,
            "ring_used_bytes": self._writer.ring_used_bytes(),
            "spool_age_seconds": self._writer.ring.spool_age(),
        }
        for name, value in values.items():
            self._gauges[name].set(value)
        while self._cost.recent:
            self._seconds.observe(self._cost.recent.popleft())

    def _add_all(self, name: str, reasons: Mapping[str, int]) -> None:
        for reason, count in reasons.items():
            self._add(self._by_reason[name].labels(reason), name, reason, count)

    def _add(self, counter: Any, name: str, reason: str, value: float) -> None:
        known = self._published.get((name, reason), 0)
        counter.inc(value - known)
        self._published[name, reason] = value

    def _run(self) -> None:
        waiting = threading.Event()
        try:
            while not waiting.wait(SECONDS):
                self.publish()
        except Exception:  # metrics must not end the server; /tide/status has the counts
            logger.exception("tide_capture_* on /metrics stand still until the server is restarted")
