"""The rules are what Prometheus takes, do what they say, and tell a person what to do."""

import re

import pytest
import yaml

from tests.unit.metrics.promql import PROMETHEUS, ROOT, alerts, known, names, promtool

RULES, TESTS = PROMETHEUS / "rules" / "tide.yml", PROMETHEUS / "tests" / "tide.yml"


def test_prometheus_takes_configuration_and_rules():
    assert "SUCCESS" in promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(RULES))


def test_they_fire_when_they_should_and_not_otherwise():
    promtool("test", "rules", str(TESTS))


def test_each_is_seen_firing_in_those_tests():
    groups = yaml.safe_load(TESTS.read_text())["tests"]
    fired = {
        name
        for group in groups
        for test in group.get("promql_expr_test", [])
        for sample in test["exp_samples"]
        for name in re.findall(r'alertname="(\w+)"', sample["labels"])
    }
    fired |= {
        test["alertname"]
        for group in groups
        for test in group.get("alert_rule_test", [])
        if test.get("exp_alerts")
    }
    assert fired == set(alerts())


def test_a_wrong_expectation_is_found(tmp_path):
    text = TESTS.read_text().replace("TideServerDown", "TideServerUp").replace("../rules", str(RULES.parent))
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(text)
    with pytest.raises(AssertionError, match="TideServerUp"):
        promtool("test", "rules", str(wrong))


@pytest.mark.parametrize("name", alerts())
def test_it_goes_by_metrics_that_there_are_and_has_its_page(name: str):
    rule = alerts()[name]
    used = names(rule["expr"])
    assert used and used <= known(), used - known()
    assert rule["labels"]["severity"] in ("critical", "warning")
    said = rule["annotations"]
    assert set(said) == {"summary", "description", "runbook"}
    page, anchor = said["runbook"].split("#")
    headings = re.findall(r"^## (\w+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in [heading.lower() for heading in headings] and anchor == name.lower()


def test_the_page_has_no_alert_that_is_gone():
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alerts())
