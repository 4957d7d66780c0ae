"""The dashboards are what Grafana's importer takes, and ask for metrics that there are.

Grafana's own schema is not to be had here, so its importer's conditions are written out.
"""

import itertools
import json
import runpy
from typing import Any

import pytest
import yaml

from tests.unit.metrics.promql import DASHBOARDS, GRAFANA, dashboards, known, names, promtool, queries

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
NAMED = list(dashboards().items())
UNITS = {"short", "s", "bytes", "percentunit"}


def test_the_files_are_those_of_their_description():
    built = runpy.run_path(str(GRAFANA / "build.py"))["build"]()
    assert {path.name: path.read_text() for path in DASHBOARDS} == built, "run `make docs`"


@pytest.mark.parametrize(("name", "dashboard"), NAMED)
def test_the_page(name: str, dashboard: dict[str, Any]):
    assert "id" not in dashboard, "an id is a database's; the uid is what links and updates go by"
    assert 0 < len(dashboard["uid"]) <= 40 and dashboard["title"]
    assert dashboard["schemaVersion"] >= 36 and isinstance(dashboard["version"], int)
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["deployment"]["type"] == "query" and variables["deployment"]["datasource"] == SOURCE
    assert names(variables["deployment"]["definition"]) <= known()
    marks = dashboard["annotations"]["list"]
    assert any("tide_champion_timestamp_seconds" in mark["expr"] for mark in marks)
    assert all(mark["datasource"] == SOURCE and mark["enable"] for mark in marks)


@pytest.mark.parametrize(("name", "dashboard"), NAMED)
def test_its_panels(name: str, dashboard: dict[str, Any]):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    for panel in panels:
        assert panel["title"] and panel["type"] in ("row", "timeseries", "stat")
        if panel["type"] == "row":
            assert panel["panels"] == [] and not panel["collapsed"]
            continue
        assert panel["datasource"] == SOURCE and panel["targets"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS and panel["fieldConfig"]["overrides"] == []
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert target["datasource"] == SOURCE and target["expr"].strip()
            assert 'deployment="$deployment"' in target["expr"], "or it shows another deployment's"
            assert target["instant"] is (panel["type"] == "stat") is not target["range"]


@pytest.mark.parametrize(("name", "dashboard"), NAMED)
def test_nothing_lies_on_anything_else(name: str, dashboard: dict[str, Any]):
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    for place in places:
        assert place["x"] >= 0 and place["w"] > 0 and place["h"] > 0 and place["x"] + place["w"] <= 24
    for one, other in itertools.combinations(places, 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart or above, (one, other)


def test_uids_differ():
    assert len({dashboard["uid"] for _, dashboard in NAMED}) == len(NAMED) == 2


@pytest.mark.parametrize(("name", "dashboard"), NAMED)
def test_its_queries_are_promql_on_metrics_that_there_are(name: str, dashboard: dict[str, Any], tmp_path):
    every = queries(dashboard)
    used = set().union(*map(names, every))
    assert used <= known(), used - known()
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(every)]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(every)} rules found" in promtool("check", "rules", str(path))


def test_provisioning_names_the_data_source_and_the_folder():
    sources = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert sources["apiVersion"] == 1
    (source,) = sources["datasources"]
    assert (source["type"], source["access"]) == ("prometheus", "proxy") and source["uid"]
    assert source["url"] == "http://127.0.0.1:9090"
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "tide.yml").read_text())[
        "providers"
    ]
    assert provider["type"] == "file" and provider["options"]["path"].startswith(
        "/var/lib/grafana/dashboards"
    )
    assert "secret" not in json.dumps([source, provider]).lower()
