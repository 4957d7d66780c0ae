"""Sends prompts to a server, a bounded number at a time, and reports what came of it."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tide_platform.config import TideError
from tide_platform.serving.chat import encode_prompts
from tide_platform.serving.client import (
    AsyncSglangClient,
    GenerateRequest,
    Generation,
    ServerRefused,
    ServerUnreachable,
)
from tide_platform.serving.report import TrafficReport, summarize
from tide_platform.serving.workloads.prompts import Prompt

Progress = Callable[[Generation], None]


class TrafficFailed(TideError):
    """The server failed so many requests in a row that sending more is pointless."""


def run_traffic(
    base_url: str,
    prompts: Sequence[Prompt],
    target: Path,
    *,
    concurrency: int,
    max_new_tokens: int,
    capture: bool,
    tenant: str = "default",
    temperature: float = 0.0,
    on_progress: Progress | None = None,
) -> TrafficReport:
    """Send every prompt once, in order. ``target`` is the served model's folder, for its tokenizer.

    Tokenizing is done before the clock starts. A request that the server refuses becomes one of the report's
    ``errors``. Raises :class:`TrafficFailed` when nothing but errors comes back.
    """
    requests = [
        GenerateRequest(ids, max_new_tokens, temperature, capture, tenant)
        for ids in encode_prompts(target, prompts)
    ]
    return asyncio.run(send(base_url, requests, concurrency, on_progress))


async def send(
    base_url: str, requests: Sequence[GenerateRequest], concurrency: int, on_progress: Progress | None = None
) -> TrafficReport:
    """The same, of requests that are ready to go."""
    pending = iter(requests)
    done: list[Generation] = []
    errors: list[str] = []
    in_a_row = itertools.count(1)

    async def worker(client: AsyncSglangClient) -> None:
        nonlocal in_a_row
        for request in pending:
            try:
                generation = await client.generate(request)
            except (ServerRefused, ServerUnreachable) as error:
                errors.append(str(error))
                if next(in_a_row) >= 2 * concurrency:
                    raise TrafficFailed(f"{len(errors)} requests failed, the last: {error}") from error
                continue
            in_a_row = itertools.count(1)
            done.append(generation)
            if on_progress is not None:
                on_progress(generation)

    start = time.perf_counter()
    async with AsyncSglangClient(base_url, concurrency) as client:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(requests))):
                    group.create_task(worker(client))
        except* TrafficFailed as failures:
            raise failures.exceptions[0] from None
    return summarize(done, errors, time.perf_counter() - start, concurrency)
