"""The plugin's routes on SGLang's HTTP server: ``/tide/status``, ``/tide/requests``,
``/tide/reload_draft``, ``/tide/capture``.

Each asks for the admin key, ``Authorization: Bearer …``, which the server has from ``TIDE_ADMIN_KEY``;
``/tide/ready`` does not: it says yes or no to whoever decides on traffic, and nothing else.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from tide_platform.config import TideError
from tide_platform.config.engine import EngineConfig
from tide_platform.engine import data_ranks
from tide_platform.engine.draft_file import DraftLayout, check_draft

KEY_VARIABLE = "TIDE_ADMIN_KEY"


class Scheduler(data_ranks.Ranks, Protocol):
    """The way to SGLang's schedulers (the adapter's ``Link``)."""

    def paused(self) -> bool: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...


class ReloadBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    path: str
    digest: str


class CaptureBody(BaseModel):
    """What is not given stays as it is; ``null`` lifts ``allow_tenants`` and ``bytes_per_second``."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = True
    default: Literal["allow", "deny"] = "allow"
    sampling_rate: float = Field(1.0, ge=0, le=1)
    deny_tenants: list[str] = []
    allow_tenants: list[str] | None = None
    bytes_per_second: int | None = Field(None, ge=0)


def environment_key() -> str | None:
    return os.environ.get(KEY_VARIABLE) or None


def check_key(header: str | None, key: str | None) -> None:
    """Raises HTTPException 403 where the server has no key, 401 where the header does not carry it."""
    if not key:
        detail = f"no admin key: start the server with {KEY_VARIABLE} in its environment"
        raise HTTPException(403, detail)
    scheme, _, given = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not secrets.compare_digest(given.encode(), key.encode()):
        detail = f"give the server's admin key: Authorization: Bearer ${KEY_VARIABLE}"
        raise HTTPException(401, detail, headers={"WWW-Authenticate": "Bearer"})


def add(
    app: FastAPI,
    scheduler: Scheduler,
    config: EngineConfig,
    sglang: str,
    server_args: Any,
    protect: Callable[[Any], None],
) -> None:
    """Adds the routes to SGLang's application, before it starts to listen.

    ``protect`` marks a route for SGLang's own key check, which then guards its other admin routes, too.
    """
    key = server_args.admin_api_key or environment_key()
    served_folder = server_args.speculative_draft_model_path
    served = DraftLayout.read(Path(served_folder)) if config.draft_digest and served_folder else None
    one_reload = asyncio.Lock()
    finished = data_ranks.Requests(scheduler)

    def admin(request: Request) -> None:
        check_key(request.headers.get("Authorization"), key)

    async def status(checksums: bool = Query(False)) -> JSONResponse:
        reply = data_ranks.merged_status(await scheduler.call({"op": "status", "checksums": checksums}))
        return _answer({"sglang": sglang, "pid": os.getpid()} | reply)

    async def capture(body: CaptureBody) -> JSONResponse:
        wanted = body.model_dump(exclude_unset=True)
        replies = await scheduler.call({"op": "capture"} | wanted)
        return _answer(data_ranks.refusal(replies) or data_ranks.merged_capture(replies))

    async def reload_draft(body: ReloadBody) -> JSONResponse:
        if served is None:
            return _answer({"error": "this server has no draft", "type": "NoDraft"})
        try:
            checked = await asyncio.to_thread(check_draft, body.path, body.digest, config.drafts_root, served)
        except TideError as error:
            return _answer({"error": str(error), "type": type(error).__name__})
        message = {"op": "reload", **checked.to_json()}
        async with one_reload:
            return _answer(await _paused(scheduler, message) | {"ignored_tensors": checked.ignored})

    async def ready() -> JSONResponse:
        # a fault that ended capture does not count: users are served without it, and the status tells of it
        reply = data_ranks.merged_status(await scheduler.call({"op": "status", "checksums": False}))
        good = bool(reply.get("adapter")) and not reply.get("missing_hooks")
        return JSONResponse({"ready": good}, status_code=200 if good else 503)

    async def requests(after: int = Query(0, ge=0)) -> JSONResponse:
        return _answer(await finished.since(after))

    if key:  # without one SGLang would answer a bare 403, check_key says how to set it
        for route in (status, capture, reload_draft, requests):
            protect(route)
    guard = [Depends(admin)]
    app.add_api_route("/tide/ready", ready, methods=["GET"])
    app.add_api_route("/tide/status", status, methods=["GET"], dependencies=guard)
    app.add_api_route("/tide/requests", requests, methods=["GET"], dependencies=guard)
    app.add_api_route("/tide/capture", capture, methods=["POST"], dependencies=guard)
    app.add_api_route("/tide/reload_draft", reload_draft, methods=["POST"], dependencies=guard)


async def _paused(scheduler: Scheduler, message: dict[str, Any]) -> dict[str, Any]:
    """Reloads while no batch runs. Without the pause SGLang would first drain all requests."""
    already = scheduler.paused()
    started = time.perf_counter()
    if not already:
        await scheduler.pause()
    try:
        reply = await data_ranks.reload(scheduler, message)
    finally:
        if not already:
            await scheduler.resume()
    return reply | {"pause_s": time.perf_counter() - started}


def _answer(reply: dict[str, Any]) -> JSONResponse:
    return JSONResponse(reply, status_code=400 if "error" in reply and "type" in reply else 200)
