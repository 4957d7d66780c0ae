"""NetworkPolicies: nothing by default, then what a part needs; and each selects pods that there are."""

from typing import Any

import pytest

from tests.unit.cluster.chart import ALL, FILES, named, of_kind, pods, values_of
from tide_platform.cluster.labels import TRAINER


def _labels(name: str) -> list[dict[str, str]]:
    return [TRAINER, *(pod.labels for pod in pods(name))]


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items()


@pytest.mark.parametrize("name", ALL)
def test_nothing_comes_in_or_goes_out_by_default(name: str) -> None:
    spec = named(name, "NetworkPolicy", "default")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"] and "ingress" not in spec
    assert {port["port"] for rule in spec["egress"] for port in rule["ports"]} == {53}
    assert all(_selects(spec["podSelector"], labels) for labels in _labels(name))


@pytest.mark.parametrize("name", ALL)
def test_every_selector_matches_a_pod(name: str) -> None:
    for policy in of_kind(name, "NetworkPolicy"):
        spec = policy["spec"]
        selectors = [spec["podSelector"]]
        for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
            peers = [*rule.get("from", []), *rule.get("to", [])]
            selectors += [peer["podSelector"] for peer in peers if "podSelector" in peer]
        for selector in selectors:
            if selector.get("matchLabels") == {"app.kubernetes.io/name": "dagster"}:  # of the official chart
                continue
            assert any(_selects(selector, labels) for labels in _labels(name)), policy["metadata"]["name"]


@pytest.mark.parametrize("name", ALL)
def test_every_pod_has_a_policy_of_its_own(name: str) -> None:
    policies = [each["spec"]["podSelector"] for each in of_kind(name, "NetworkPolicy")]
    own = [
        selector for selector in policies if "app.kubernetes.io/component" in selector.get("matchLabels", {})
    ]
    for labels in _labels(name):
        assert len([s for s in own if _selects(s, labels)]) == 1, labels


@pytest.mark.parametrize("name", ALL)
def test_what_one_part_may_send_another_may_receive(name: str) -> None:
    """Between two parts of the chart a port is open on both sides or on none."""
    sides: dict[str, set[tuple[str, str, int]]] = {"to": set(), "from": set()}
    for policy in of_kind(name, "NetworkPolicy"):
        own = policy["spec"]["podSelector"].get("matchLabels", {}).get("app.kubernetes.io/component")
        for direction, rules in (("from", "ingress"), ("to", "egress")):
            for rule in policy["spec"].get(rules, []):
                for peer in rule.get(direction, []):
                    labels = peer.get("podSelector", {}).get("matchLabels", {})
                    other = labels.get("app.kubernetes.io/component")
                    for port in [each["port"] for each in rule.get("ports", [])] if own and other else []:
                        pair = (own, other, port) if direction == "to" else (other, own, port)
                        sides[direction].add(pair)
    assert sides["to"] == sides["from"] and len(sides["to"]) >= 4


@pytest.mark.parametrize("name", FILES)
def test_the_servers_admin_routes_are_open_to_those_that_are_named(name: str) -> None:
    given = values_of(name).get("networkPolicy", {}).get("clients", [])
    rules = named(name, "NetworkPolicy", "sglang")["spec"]["ingress"]
    assert all(rule.get("from") for rule in rules), "a rule without peers lets anyone in"
    peers = [peer for rule in rules for peer in rule["from"]]
    elsewhere = [peer for peer in peers if "podSelector" not in peer]
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert elsewhere == [*given, monitoring]


@pytest.mark.parametrize("name", FILES)
def test_trainers_reach_each_other_and_the_store_alone(name: str) -> None:
    spec = named(name, "NetworkPolicy", "trainer")["spec"]
    among, store = spec["egress"]
    assert [peer["podSelector"]["matchLabels"] for peer in among["to"]] == [TRAINER]
    port = values_of(name).get("networkPolicy", {}).get("objectStorage", {}).get("port", 443)
    assert [each["port"] for each in store["ports"]] == [port]
    assert [peer["podSelector"]["matchLabels"] for peer in spec["ingress"][0]["from"]] == [TRAINER]
