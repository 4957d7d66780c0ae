"""What Helm renders, kept: a change of the chart shows its whole effect in the diff.

`make chart` writes the files again.
"""

from pathlib import Path

import pytest
import yaml

from tests.unit.cluster.chart import FILES, rendered

GOLDEN = Path(__file__).parent / "golden"
BULKY = {"ConfigMap": "-dashboard-", "PrometheusRule": "tide"}  # copies, compared in test_chart.py


def golden(name: str) -> str:
    kept = [
        each
        for each in rendered(name)
        if each["kind"] not in BULKY or BULKY[each["kind"]] not in each["metadata"]["name"]
    ]
    return yaml.safe_dump_all(kept, sort_keys=False, width=120)


@pytest.mark.parametrize("name", FILES)
def test_as_it_was(name: str) -> None:
    assert golden(name) == (GOLDEN / f"{name}.yaml").read_text(), "a wanted change? `make chart`"


def write() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name in FILES:
        (GOLDEN / f"{name}.yaml").write_text(golden(name))


if __name__ == "__main__":
    write()
