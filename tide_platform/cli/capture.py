"""``tide capture``: what the running server captures, shown and changed without a restart."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Names = list[str] | None


def command(
    switch: Annotated[
        Literal["on", "off"] | None, typer.Argument(metavar="[on|off]", help="Start or stop capturing.")
    ] = None,
    sampling_rate: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of conversations captured.")
    ] = None,
    default: Annotated[
        Literal["allow", "deny"] | None, typer.Option(help="For requests that do not say.")
    ] = None,
    bytes_per_second: Annotated[
        int | None, typer.Option(min=-1, help="What capture may write; -1 lifts the limit.")
    ] = None,
    deny_tenant: Annotated[Names, typer.Option(help="No more of this tenant; once for each.")] = None,
    undeny_tenant: Annotated[Names, typer.Option(help="Takes a --deny-tenant back.")] = None,
    only_tenant: Annotated[Names, typer.Option(help="These tenants and no others; once for each.")] = None,
    all_tenants: Annotated[bool, typer.Option("--all-tenants", help="Takes --only-tenant back.")] = False,
    url: Annotated[str | None, typer.Option(help="The server; default: that of the configuration.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what the running server captures, after the changes that are asked for.

    Changes last until the server is restarted; the configuration holds what it starts with.
    """
    from tide_platform.config import load_settings
    from tide_platform.serving.admin import read_admin_key
    from tide_platform.serving.client import SglangClient
    from tide_platform.serving.launch import base_url

    settings = load_settings(config)
    wanted: dict[str, Any] = {"sampling_rate": sampling_rate, "default": default}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if switch is not None:
        wanted["enabled"] = switch == "on"
    if bytes_per_second is not None:
        wanted["bytes_per_second"] = None if bytes_per_second < 0 else bytes_per_second
    if only_tenant or all_tenants:
        wanted["allow_tenants"] = None if all_tenants else only_tenant
    with SglangClient(url or base_url(settings), read_admin_key(settings)) as client:
        state = client.status()["capture"]
        if deny_tenant or undeny_tenant:
            denied = {*state.get("deny_tenants", ()), *(deny_tenant or ())} - {*(undeny_tenant or ())}
            wanted["deny_tenants"] = sorted(denied)
        if wanted:
            state = client.capture(**wanted)
    typer.echo(json.dumps(state) if json_output else _text(state))


def _text(state: dict[str, Any]) -> str:
    if "sampling_rate" not in state:
        return "this server captures nothing (no draft, or capture.enabled is false)"
    limit, only = state["bytes_per_second"], state["allow_tenants"]
    lines = {
        "capture": "on" if state["enabled"] else "off",
        "failed": state["error"],
        "default": state["default"],
        "sampling rate": f"{state['sampling_rate']:g}",
        "bytes a second": "no limit" if limit is None else str(limit),
        "denied tenants": " ".join(state["deny_tenants"]),
        "only tenants": None if only is None else " ".join(only) or "none",
        "samples": f"{state['samples']} ({state['open']} open, {state['bytes']} bytes written)",
        "dropped": _counts(state["dropped"]),
        "skipped": _counts(state["skipped"]),
        "not believed": _counts(state["ignored"]),
    }
    return "\n".join(f"{name:<15} {value}" for name, value in lines.items() if value)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
