"""Requests of a fixed length for a benchmark's server, so that one block of them is like another."""

import asyncio
import time
from collections.abc import Sequence

import httpx
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from tide_platform.serving.chat import encode_prompts
from tide_platform.serving.client import GENERATE_TIMEOUT_S, GenerateRequest, Generation, ServerRefused
from tide_platform.serving.own_server import Served
from tide_platform.serving.report import TrafficReport
from tide_platform.serving.traffic import send
from tide_platform.serving.workloads import load_workload

EXACT = {"ignore_eos": True}  # every request answers with just as many tokens


def prompts(server: Served, count: int, workload: str = "general") -> list[list[int]]:
    """Token ids of the first ``count`` prompts of a workload's traffic; where it has fewer, some twice."""
    found = encode_prompts(server.target, load_workload(workload, "traffic", count))
    return [found[i % len(found)] for i in range(count)]


def at_once(server: Served, inputs: Sequence[Sequence[int]], new_tokens: int) -> list[Generation]:
    """One call with all ``inputs``, so that the scheduler takes them as one batch; uncaptured."""
    bodies = [request.body() for request in _requests(inputs, new_tokens, capture=False)]
    body = {key: [one[key] for one in bodies] for key in ("input_ids", "sampling_params")}
    began = time.perf_counter()
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=GENERATE_TIMEOUT_S, trust_env=False)
    seconds = time.perf_counter() - began
    reply.raise_for_status()
    return [Generation.from_reply(one, seconds) for one in reply.json()]


def flow(
    server: Served, inputs: Sequence[Sequence[int]], new_tokens: int, concurrency: int, capture: bool
) -> TrafficReport:
    """``inputs`` one after the other, ``concurrency`` at a time, from an empty prefix cache."""
    flush(server)
    return asyncio.run(send(server.url, _requests(inputs, new_tokens, capture), concurrency))


# refused while a request runs, a health check's included
@retry(
    retry=retry_if_exception_type(ServerRefused),
    stop=stop_after_delay(60),
    wait=wait_fixed(0.2),
    reraise=True,
)
def flush(server: Served) -> None:
    """Empties the prefix cache."""
    server.client.flush_cache()


def _requests(inputs: Sequence[Sequence[int]], new_tokens: int, capture: bool) -> list[GenerateRequest]:
    return [
        GenerateRequest(ids, new_tokens, capture=capture, tenant="bench", sampling=EXACT) for ids in inputs
    ]
