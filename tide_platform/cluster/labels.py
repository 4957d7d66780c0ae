"""Labels that pods of the platform carry: the chart's NetworkPolicies and selectors go by them."""

NAME = "app.kubernetes.io/name"
COMPONENT = "app.kubernetes.io/component"

# of a trainer's pods, which no chart makes
TRAINER = {NAME: "tide", COMPONENT: "trainer"}
