"""Makes the files that Grafana imports, of dashboards.yml: ``python deployments/grafana/build.py``.

All queries go to the data source and the deployment that are chosen at the top of the page.
"""

import json
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
FOLDER = HERE / "dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CHOSEN = 'deployment="$deployment"'
WIDTH = 24  # of Grafana's grid
DEPLOYMENTS = "label_values(tide_deployment_info, deployment)"
DEPLOYED_AT = "max by (deployment) (tide_champion_timestamp_seconds{@}) * 1000"
TAKEN_BACK = 'max by (deployment) (increase(tide_audit_total{@,action="rolled back"}[2m])) > 0'


def build() -> dict[str, str]:
    """The text of each file of :data:`FOLDER`, by its name."""
    described = yaml.safe_load((HERE / "dashboards.yml").read_text())
    return {f"{name}.json": json.dumps(dashboard(each), indent=2) + "\n" for name, each in described.items()}


def dashboard(said: dict[str, Any]) -> dict[str, Any]:
    """As Grafana 10.4 and later read it (schema 39)."""
    link = {"type": "dashboards", "tags": ["tide"], "title": "TIDE", "keepTime": True, "includeVars": True}
    return {
        "uid": said["uid"],
        "title": said["title"],
        "description": said["what"],
        "tags": ["tide"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "timezone": "browser",
        "templating": {"list": variables()},
        "annotations": {"list": annotations()},
        "links": [link],
        "panels": panels(said["rows"]),
    }


def variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"}
    deployment = {
        "name": "deployment",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": DEPLOYMENTS, "refId": "deployments"},
        "definition": DEPLOYMENTS,
        "refresh": 2,
        "sort": 1,
    }
    return [source | {"refresh": 1}, deployment]


def annotations() -> list[dict[str, Any]]:
    """Deployments stand at their own time, not at that of the scrape which saw them."""

    def made(name: str, color: str, query: str, *, at_value: bool) -> dict[str, Any]:
        return {
            "name": name,
            "datasource": SOURCE,
            "enable": True,
            "iconColor": color,
            "expr": chosen(query),
            "useValueForTime": at_value,
            "titleFormat": name,
            "step": "60s",
        }

    return [
        made("draft deployed", "green", DEPLOYED_AT, at_value=True),
        made("draft taken back", "red", TAKEN_BACK, at_value=False),
    ]


def panels(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []

    def place(body: dict[str, Any], x: int, y: int, w: int, h: int) -> None:
        made.append({"id": len(made) + 1, "gridPos": {"x": x, "y": y, "w": w, "h": h}} | body)

    y = 0
    for row in rows:
        if "row" in row:
            place({"type": "row", "title": row["row"], "collapsed": False, "panels": []}, 0, y, WIDTH, 1)
            y += 1
        count = len(row["panels"])
        for number, said in enumerate(row["panels"]):
            left, right = WIDTH * number // count, WIDTH * (number + 1) // count
            place(panel(**said), left, y, right - left, row["height"])
        y += row["height"]
    return made


def panel(
    title: str,
    queries: dict[str, str],
    unit: str = "short",
    what: str = "",
    kind: str = "timeseries",
    stacked: bool = False,
    least: float | None = 0,
    red: float | None = None,
) -> dict[str, Any]:
    """See the head of dashboards.yml."""
    stat = kind == "stat"
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [] if red is None else [{"color": "red", "value": red}]
    defaults: dict[str, Any] = {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}}
    if not stat:
        defaults |= {} if least is None else {"min": least}
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 20 if stacked else 5,
            "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "off" if red is None else "line"},
        }
    return {
        "type": kind,
        "title": title,
        "description": what,
        "datasource": SOURCE,
        "targets": [target(n, *query, stat) for n, query in enumerate(queries.items())],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": stat_options(queries) if stat else series_options(),
    }


def target(number: int, legend: str, query: str, stat: bool) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + number),
        "datasource": SOURCE,
        "expr": chosen(query),
        "legendFormat": legend or "__auto",
        "instant": stat,
        "range": not stat,
    }


def stat_options(queries: dict[str, str]) -> dict[str, Any]:
    """Of an info metric the label is shown, of any other the value."""
    info = any("_info{" in query for query in queries.values())
    return {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "none",
        "textMode": "name" if info else "auto",
    }


def series_options() -> dict[str, Any]:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def chosen(query: str) -> str:
    return query.replace("{@", "{" + CHOSEN)


if __name__ == "__main__":
    for name, text in build().items():
        (FOLDER / name).write_text(text)
