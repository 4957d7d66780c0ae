"""Values by metric, as a part of the exporter finds them."""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tide_platform.metrics.catalogue import CATALOGUE

if TYPE_CHECKING:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily


class Sheet:
    """What was read. A metric that is put under a name or labels which the catalogue lacks is a bug."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)

    def put(self, name: str, value: float | None, *labels: Any) -> None:
        """``value`` None, what is not known, is left out."""
        assert len(labels) == len(CATALOGUE[name].labels), f"{name}: {labels}"
        if value is not None:
            self.values[name][tuple(str(label) for label in labels)] = float(value)

    def add(self, other: "Sheet") -> None:
        for name, values in other.values.items():
            self.values[name].update(values)

    def families(self) -> "Iterator[CounterMetricFamily | GaugeMetricFamily]":
        """In the catalogue's order."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        for metric in CATALOGUE.values():
            if metric.name not in self.values:
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.what, labels=metric.labels)
            for labels, value in self.values[metric.name].items():
                family.add_metric(labels, value)
            yield family
