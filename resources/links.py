"""Figures and links as Dagster's pages show them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import dagster as dg

from tide_platform.config import Settings, TideError
from tide_platform.control.records import WindowRecord

if TYPE_CHECKING:
    from tide_platform.control.rollout import Deployed


def mlflow_links(settings: Settings, log: Any, run_id: str | None, **artifacts: str) -> dict[str, Any]:
    """``mlflow``: the run's page; ``artifacts``: name -> path of one of its artifacts. Empty where
    ``registry.tracking_uri`` is no server, or it does not answer now: a link is worth no failed run.
    """
    if not run_id or not settings.registry.tracking_uri.startswith("http"):
        return {}
    from tide_platform.registry.mlflow_registry import DraftRegistry

    registry = DraftRegistry(settings)
    try:
        pages = {"mlflow": registry.run_page(run_id)}
        pages |= {name: registry.run_page(run_id, path) for name, path in artifacts.items()}
    except TideError as error:
        log.warning(f"no link to MLflow: {error}")
        return {}
    return {name: dg.MetadataValue.url(page) for name, page in pages.items() if page}


def version_link(settings: Settings, version: str) -> dict[str, Any]:
    """``model_version``: the page of a registered version."""
    if not version or not settings.registry.tracking_uri.startswith("http"):
        return {}
    from tide_platform.registry.mlflow_registry import DraftRegistry

    page = DraftRegistry(settings).version_page(version)
    return {"model_version": dg.MetadataValue.url(page)} if page else {}


def window_figures(record: WindowRecord) -> dict[str, Any]:
    """What a window is: samples, tokens, where in the dataset, why it was cut."""
    return {
        "window": record.key.window,
        "samples": record.samples,
        "tokens": record.tokens,
        "tokens_a_sample": record.tokens / max(record.samples, 1),
        "lance_version": record.lance_version,
        "rows": f"{record.after_row} < row id <= {record.last_row}",
        "rule": dg.MetadataValue.json(record.rule or {}),
    }


def live_figures(deployed: "Deployed") -> dict[str, Any]:
    """What the canary's live requests showed, flat, so that Dagster draws it."""
    figures: dict[str, Any] = {}
    for draft in ("champion", "challenger"):
        of: Mapping[str, Any] = (deployed.watched or {}).get(draft) or {}
        for name in ("requests", "acceptance_length", "token_ms_p50", "token_ms_p99"):
            if of.get(name) is not None:
                figures[f"live.{draft}.{name}"] = of[name]
    return figures


def flat(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of numbers, one a draft step, as numbers of their own: Dagster draws no list."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if isinstance(value, list) and value and all(isinstance(each, float) for each in value):
            found |= {f"{name}.step_{step}": each for step, each in enumerate(value, start=1)}
        else:
            found[name] = value
    return found
