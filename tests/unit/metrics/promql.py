"""Alerts, dashboards and metrics by name, as the files hold them; promtool."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tide_platform.metrics.catalogue import CATALOGUE

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deployments" / "prometheus"
GRAFANA = ROOT / "deployments" / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
_OF_PROMETHEUS = {"up"}
_OF_CAPTURE = re.compile(r'(counter|gauge)\(\s*"(\w+)"')
_SUFFIXES = ("_bucket", "_sum", "_count")


def promtool(*arguments: str, given: str | None = None) -> str:
    """What it prints. Raises where it is not content."""
    done = subprocess.run(["promtool", *arguments], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "rules" / "tide.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def dashboards() -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in DASHBOARDS}


def queries(dashboard: dict[str, Any]) -> list[str]:
    """Of panels and annotations, with the dashboard's variables filled in."""
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    found += [each["expr"] for each in dashboard["annotations"]["list"]]
    return [query.replace("$deployment", "demo").replace("$__rate_interval", "1m") for query in found]


def names(expression: str) -> set[str]:
    """Of the metrics in it."""
    return set(re.findall(r"\b(?:tide_\w+|sglang:\w+|up(?=\{))", expression))


def of_capture() -> set[str]:
    """What the server's plugin shows."""
    source = (ROOT / "tide_platform" / "engine" / "metrics.py").read_text()
    made = _OF_CAPTURE.findall(source)
    plain = {f"tide_capture_{name}{'_total' if kind == 'counter' else ''}" for kind, name in made}
    assert "tide_capture_rows_total" in plain and '"tide_capture_seconds"' in source
    return plain | {f"tide_capture_seconds{suffix}" for suffix in _SUFFIXES}


def of_sglang() -> set[str]:
    """What the installed server shows."""
    found = sorted((ROOT / ".venv-serving").glob("lib/python*/site-packages/sglang/srt/observability"))
    assert found, "`make setup` installs the server"
    return set(re.findall(r'name="(sglang:\w+)"', (found[0] / "metrics_collector.py").read_text()))


def known() -> set[str]:
    return set(CATALOGUE) | of_capture() | of_sglang() | _OF_PROMETHEUS
