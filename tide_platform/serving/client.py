"""Client of the SGLang server: what the platform asks it, plain and asynchronous."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tenacity import AsyncRetrying, Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from tide_platform.config import TideError

CONTROL_TIMEOUT_S = 60.0
GENERATE_TIMEOUT_S = 600.0
ATTEMPTS = 4
# only where no byte reached the server: a request that was sent may have run
_RETRY = {
    "retry": retry_if_exception_type((httpx.ConnectError, httpx.ConnectTimeout)),
    "stop": stop_after_attempt(ATTEMPTS),
    "wait": wait_exponential(multiplier=0.2, max=2),
    "reraise": True,
}


class ServerUnreachable(TideError):
    """No answer from the server's address."""

    def __init__(self, base_url: str, error: Exception):
        detail = str(error) or type(error).__name__
        super().__init__(f"no SGLang server answers at {base_url} ({detail}); start one with `tide serve`")
        self.base_url = base_url


class ServerRefused(TideError):
    """The server answered with an error."""

    def __init__(self, path: str, status: int, detail: str):
        super().__init__(f"{path}: the server answered {status}: {detail}")
        self.path, self.status, self.detail = path, status, detail


@dataclass(frozen=True)
class Generation:
    """One finished request, with what the server counted of it."""

    rid: str
    text: str
    output_ids: list[int]
    prompt_tokens: int
    completion_tokens: int
    verify_rounds: int  # 0 where it ended at the prefill, or without speculation
    accepted_drafts: int
    rounds_by_accepted: list[int]  # [i]: verify rounds in which exactly i draft tokens were accepted
    latency_s: float  # from sending to the last byte, seen from the client
    finish_reason: str
    cached_tokens: int = 0

    @classmethod
    def from_reply(cls, reply: dict[str, Any], latency_s: float) -> "Generation":
        """From a reply of ``/generate`` (sglang 0.5.14, _calculate_spec_decoding_metrics)."""
        meta = reply["meta_info"]
        reason = meta.get("finish_reason") or {}
        return cls(
            rid=meta["id"],
            text=reply.get("text", ""),
            output_ids=list(reply.get("output_ids") or []),
            prompt_tokens=meta["prompt_tokens"],
            completion_tokens=meta["completion_tokens"],
            verify_rounds=meta.get("spec_verify_ct", 0),
            accepted_drafts=meta.get("spec_num_correct_drafts", 0),
            rounds_by_accepted=list(meta.get("spec_correct_drafts_histogram") or []),
            latency_s=latency_s,
            finish_reason=reason.get("type", "") if isinstance(reason, dict) else str(reason),
            cached_tokens=meta.get("cached_tokens", 0),
        )


@dataclass(frozen=True)
class GenerateRequest:
    """What is asked of ``/generate``: token ids, so that captured and uncaptured requests are the same."""

    input_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    capture: bool = True
    tenant: str = "default"
    rid: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)  # more of SGLang's sampling parameters

    def body(self) -> dict[str, Any]:
        tide = {"train": "allow" if self.capture else "deny", "tenant": self.tenant}
        body: dict[str, Any] = {
            "input_ids": list(self.input_ids),
            "sampling_params": {
                "temperature": self.temperature,
                "max_new_tokens": self.max_new_tokens,
                "custom_params": {"tide": tide},
                **self.sampling,
            },
        }
        return body | ({"rid": self.rid} if self.rid else {})


class SglangClient:
    """Asks one server. ``status``, ``capture``, ``reload_draft`` and ``flush_cache`` need ``admin_key``;
    ``timeout_s``: of connecting, and of each read, where a method has none of its own.

    Every method raises :class:`ServerUnreachable` or :class:`ServerRefused`. Only failed connections are
    retried.
    """

    def __init__(
        self,
        base_url: str,
        admin_key: str | None = None,
        timeout_s: float = CONTROL_TIMEOUT_S,
        attempts: int = ATTEMPTS,
    ):
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._http = httpx.Client(base_url=self.base_url, timeout=timeout_s, trust_env=False)
        self._retry: dict[str, Any] = {**_RETRY, "stop": stop_after_attempt(attempts)}

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "SglangClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def healthy(self) -> bool:
        """Whether the server generates; one try, about a second (``/health`` makes a token)."""
        try:
            return self._http.get("/health", timeout=30).status_code == 200
        except httpx.HTTPError:
            return False

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 0.0,
        capture: bool = True,
        tenant: str = "default",
        rid: str | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> Generation:
        """Continue ``input_ids``; ``capture`` False keeps the request out of the dataset."""
        request = GenerateRequest(
            input_ids, max_new_tokens, temperature, capture, tenant, rid, sampling or {}
        )
        start = time.perf_counter()
        reply = self._post("/generate", request.body(), timeout=GENERATE_TIMEOUT_S)
        return Generation.from_reply(reply, time.perf_counter() - start)

    def prompt_logprobs(
        self, input_ids: Sequence[int], top: int
    ) -> list[list[tuple[float, int, str]] | None]:
        """For each token of a prompt, the ``top`` likeliest in its place: (log-probability, id, text).

        Nothing is said of the first. Not captured.
        """
        body = GenerateRequest(input_ids, 1, capture=False).body()
        body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": top}
        reply = self._post("/generate", body, timeout=GENERATE_TIMEOUT_S)
        return reply["meta_info"]["input_top_logprobs"]

    def status(self) -> dict[str, Any]:
        """The plugin's own account: adapter, verify rule, digests, capture counters."""
        return self._request("GET", "/tide/status")

    def requests(self, after: int = 0) -> dict[str, Any]:
        """Requests that ended behind number ``after``: what :meth:`tide_platform.engine.live.Live.since`
        tells of them.
        """
        return self._request("GET", "/tide/requests", params={"after": after})

    def reload_draft(self, path: Path, digest: str) -> dict[str, Any]:
        """Load the draft at ``path``, whose content must be ``digest``, into the running server."""
        return self._post(
            "/tide/reload_draft", {"path": str(path), "digest": digest}, timeout=CONTROL_TIMEOUT_S
        )

    def capture(self, **changes: Any) -> dict[str, Any]:
        """Change capture while the server runs, and get its state; what is not named stays as it is.

        ``enabled``, ``sampling_rate``, ``default`` (allow | deny), ``deny_tenants``, ``allow_tenants`` and
        ``bytes_per_second``; ``None`` lifts the last two.
        """
        return self._post("/tide/capture", changes)

    def flush_cache(self) -> None:
        """Empty the prefix cache; refused while requests run."""
        self._request("POST", "/flush_cache")

    def server_info(self) -> dict[str, Any]:
        return self._request("GET", "/server_info")

    def model_info(self) -> dict[str, Any]:
        return self._request("GET", "/model_info")

    def _post(self, path: str, body: dict[str, Any], timeout: float = CONTROL_TIMEOUT_S) -> Any:
        return self._request("POST", path, json=body, timeout=timeout)

    def _request(self, method: str, path: str, **options: Any) -> Any:
        try:
            for attempt in Retrying(**self._retry):
                with attempt:
                    response = self._http.request(method, path, headers=self._headers, **options)
        except httpx.HTTPError as error:
            raise ServerUnreachable(self.base_url, error) from error
        return _checked(path, response)


class AsyncSglangClient:
    """The same for many requests at a time; use as an async context manager."""

    def __init__(self, base_url: str, connections: int):
        self.base_url = base_url.rstrip("/")
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(
            base_url=self.base_url, timeout=GENERATE_TIMEOUT_S, limits=limits, trust_env=False
        )

    async def __aenter__(self) -> "AsyncSglangClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises :class:`ServerUnreachable` or :class:`ServerRefused`."""
        start = time.perf_counter()
        try:
            async for attempt in AsyncRetrying(**_RETRY):
                with attempt:
                    response = await self._http.post("/generate", json=request.body())
        except httpx.HTTPError as error:
            raise ServerUnreachable(self.base_url, error) from error
        return Generation.from_reply(_checked("/generate", response), time.perf_counter() - start)


def _checked(path: str, response: httpx.Response) -> Any:
    """The reply's JSON, else its text. Raises :class:`ServerRefused`."""
    if response.status_code != 200:
        raise ServerRefused(path, response.status_code, _detail(response))
    try:
        return response.json()
    except json.JSONDecodeError:
        return response.text


def _detail(response: httpx.Response) -> str:
    """The error's message, out of the shapes that SGLang and the plugin use."""
    try:
        body = response.json()
    except json.JSONDecodeError:
        return response.text.strip()[:300]
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            value = body[key]
            return str(value.get("message", value) if isinstance(value, dict) else value)[:300]
    return str(body)[:300]
