"""What is hooked into SGLang and what the hooks do, whatever the version.

An adapter names SGLang's functions (its ``targets``), and hands over a module that knows what that version's
objects mean (:class:`Sglang`). Neither this module nor ``rows.py`` imports SGLang.
"""

import logging
import os
from collections.abc import Callable
from typing import Any, Protocol

from tide_platform.capture.record import StreamMeta
from tide_platform.capture.ring import Ring, leave_ranks_from, rank_path
from tide_platform.capture.writer import RingWriter
from tide_platform.config.engine import EngineConfig
from tide_platform.engine import consent, routes
from tide_platform.engine.capture import Capture, Origin
from tide_platform.engine.control import Control
from tide_platform.engine.live import Live
from tide_platform.engine.metrics import Metrics
from tide_platform.engine.policy import Budget, Policy
from tide_platform.engine.reload import ServedDraft
from tide_platform.engine.rows import RowHooks, Sampled
from tide_platform.engine.staging import StreamStager, make_staging
from tide_platform.engine.staging_memory import Shape, Staging
from tide_platform.engine.support import check_server, verify_rule

logger = logging.getLogger("tide")

# in the internal-state message between SGLang's HTTP process and its scheduler
MESSAGE = "tide"
REFUSED = "refused: the served target is fixed under TIDE; POST /tide/reload_draft changes the draft"


class Sglang(Sampled, Protocol):
    """What a version's objects mean: the functions of a module ``sglang_<version>``."""

    VERSION: str

    def link(self, manager: Any) -> routes.Scheduler:
        """The HTTP process's end of the channel to the scheduler."""
        ...

    def application(self) -> Any:
        """SGLang's FastAPI application."""
        ...

    def protect(self, route: Any) -> None:
        """Marks a route for SGLang's own check of the admin key."""
        ...

    def arguments(self, args: Any) -> Any:
        """ServerArgs as SGLang resolved them: what is in force, under the names of the support table."""
        ...

    def asked(self, message: Any) -> dict[str, Any] | None:
        """What :data:`MESSAGE` carries, ``None`` in a message of SGLang's own."""
        ...

    def answer(self, payload: dict[str, Any]) -> Any:
        """The scheduler's reply to such a message."""
        ...

    def refused_update(self, message: Any, why: str) -> Any:
        """The reply to one of SGLang's own weight updates."""
        ...

    def served_draft(self, scheduler: Any, device: str) -> ServedDraft | None:
        """The models of this rank; ``None`` without speculation."""
        ...

    def writes(self, owner: Any) -> bool:
        """Whether the rank of a scheduler, or of a model runner, is the one that captures for its
        data-parallel rank.
        """
        ...

    def data_rank(self, scheduler: Any) -> tuple[int, int]:
        """Its data-parallel rank, and how many there are."""
        ...


class Hooks:
    """The hooks of one process. ``control`` and ``rows`` exist in scheduler processes only."""

    def __init__(self, config: EngineConfig, sglang: Sglang, missing: Callable[[], list[str]]):
        """``missing``: hooks that SGLang failed to apply (it logs and goes on)."""
        self.config, self.sglang, self.missing = config, sglang, missing
        self.control: Control | None = None
        self.rows = RowHooks(sglang, config.teacher_k, self._failed, config.last_width)
        self.staging: Staging | None = None  # on a GPU
        self._trusted = consent.networks(config.trusted_proxies)

    def watches(self) -> bool:
        """Whether finished requests are counted: where there is a draft."""
        return self.config.draft_digest is not None

    def captures(self) -> bool:
        """Whether rows are captured at all."""
        return self.watches() and self.config.ring_path is not None

    # ---- start ----

    def on_server_args(self, original: Callable, args: Any) -> None:
        original(args)
        check_server(self.sglang.arguments(args))

    def on_http_server(
        self, original: Callable, server_args: Any, manager: Any, *rest: Any, **named: Any
    ) -> Any:
        # uvicorn would put X-Forwarded-For in place of the peer's address, which decides who is believed
        os.environ["FORWARDED_ALLOW_IPS"] = ""
        sglang = self.sglang
        routes.add(
            sglang.application(),
            sglang.link(manager),
            self.config,
            sglang.VERSION,
            server_args,
            sglang.protect,
        )
        return original(server_args, manager, *rest, **named)

    def on_memory_pool(self, original: Callable, runner: Any, *rest: Any, **named: Any) -> Any:
        """SGLang gives its KV cache the memory that is left: staging takes its own before."""
        if self.config.device != "cpu" and self.staging is None and self.sglang.writes(runner):
            args = self.sglang.arguments(runner.server_args)
            self.staging = make_staging(staging_shape(self.config, args))
        return original(runner, *rest, **named)

    def on_scheduler(self, original: Callable, scheduler: Any, *rest: Any, **named: Any) -> None:
        original(scheduler, *rest, **named)
        config, version = self.config, self.sglang.VERSION
        args = self.sglang.arguments(scheduler.server_args)
        rule = verify_rule(config.device, version, bool(args.speculative_use_rejection_sampling))
        served = self.sglang.served_draft(scheduler, config.device)
        rank, ranks = self.sglang.data_rank(scheduler)
        if self.captures() and served and self.sglang.writes(scheduler):
            writer = open_ring(config, rank, ranks)
            origin = Origin(config.target_digest, rule, f"sglang-{version}")
            capture = open_capture(config, writer, origin, args.speculative_num_steps, ranks)
            staged = StreamStager(capture, self.staging, self._failed) if self.staging else None
            self.rows.start(capture, staged)
            Metrics(capture, writer, self.rows.cost).start()
        if self.watches() and self.sglang.writes(scheduler):
            self.rows.watch(Live(str(config.draft_digest)))
        self.control = Control(config, version, rule, served, self.rows, self.missing, rank)

    # ---- messages and requests ----

    def on_message(self, original: Callable, scheduler: Any, message: Any) -> Any:
        asked = self.sglang.asked(message)
        if asked is None:
            return original(scheduler, message)
        assert self.control is not None
        return self.sglang.answer(self.control.handle(asked))

    def on_generate(
        self, original: Callable, manager: Any, obj: Any, request: Any = None, **named: Any
    ) -> Any:
        """Each request on its way to the scheduler: what it says of itself is checked here, once.

        Parameters as SGLang names them: some of its callers do. ``request`` is the HTTP request.
        """
        self._resolve(obj, request)
        return original(manager, obj, request, **named)

    def _resolve(self, request: Any, http: Any) -> None:
        params = request.sampling_params
        many = params if isinstance(params, list) else [params]
        peer = getattr(getattr(http, "client", None), "host", None)
        headers = getattr(http, "headers", None)
        trusted = consent.is_trusted(peer, self._trusted)
        resolved = [self._with_options(one, headers, trusted, request) for one in many]
        if resolved != many:
            request.sampling_params = resolved if isinstance(params, list) else resolved[0]

    def _with_options(
        self, params: dict[str, Any], headers: Any, trusted: bool, request: Any
    ) -> dict[str, Any]:
        custom = params.get("custom_params") if params else None
        said = custom.get("tide") if isinstance(custom, dict) else None
        options = consent.resolve(headers, said, trusted)
        if getattr(request, TOOL_CALLS, False):
            options["tool_calls"] = True
        if not options and said is None:
            return params
        others = custom if isinstance(custom, dict) else {}
        return {**(params or {}), "custom_params": {**others, "tide": options}}

    def on_chat(self, original: Callable, chat: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """A chat request turned into a plain one: only here its tools are known."""
        plain, request = original(chat, request, *rest, **named)
        if has_tools(request):
            setattr(plain, TOOL_CALLS, True)
        return plain, request

    # ---- SGLang's own updates ----

    def on_set_state(self, original: Callable, manager: Any, message: Any) -> Any:
        """SGLang's own route must not reach the plugin past the plugin's checks."""
        if self.sglang.asked(message) is not None:
            raise ValueError(f"{MESSAGE!r} is not set through SGLang's own routes; see the /tide routes")
        return original(manager, message)

    async def on_disk_update(self, original: Callable, manager: Any, *rest: Any, **named: Any) -> Any:
        """Refused before SGLang drains all requests for it."""
        return False, REFUSED, 0

    def on_update(self, original: Callable, updater: Any, message: Any) -> Any:
        """The target is fixed: samples and digests speak of it. SGLang would load a draft into it."""
        return self.sglang.refused_update(message, REFUSED)

    # ---- keys ----

    def on_key_middleware(
        self, original: Callable, app: Any, *, api_key: str | None, admin_api_key: str | None
    ) -> Any:
        """SGLang's admin routes ask for the key of the environment as well.

        The key is kept out of ServerArgs: SGLang prints those, and ``/server_info`` shows them to anyone.
        """
        return original(app, api_key=api_key, admin_api_key=admin_api_key or routes.environment_key())

    def on_key_decision(self, original: Callable, *, authorization_header: str | None, **named: Any) -> Any:
        """SGLang's comparison raises on a header that is not ASCII; such a header holds no key."""
        header = authorization_header if authorization_header and authorization_header.isascii() else None
        return original(authorization_header=header, **named)

    def _failed(self, error: Exception) -> None:
        assert self.control is not None
        self.control.fail_capture(error)


# attribute of a plain request that came from a chat with tools
TOOL_CALLS = "tide_tool_calls"


def has_tools(chat: Any) -> bool:
    """Whether a chat request offers tools, or its conversation has called some."""
    if getattr(chat, "tools", None) and getattr(chat, "tool_choice", None) != "none":
        return True
    messages = getattr(chat, "messages", None) or []
    return any(getattr(m, "role", "") == "tool" or getattr(m, "tool_calls", None) for m in messages)


def staging_shape(config: EngineConfig, args: Any) -> Shape:
    """For the steps that SGLang's ServerArgs allow."""
    chunk = args.chunked_prefill_size or 0
    prefill = chunk if chunk > 0 else args.max_prefill_tokens
    k = args.speculative_num_draft_tokens - 1
    running, width = args.max_running_requests, 3 * config.hidden_size
    return Shape.of(width, config.teacher_k, prefill, running, k, config.last_width)


def open_ring(config: EngineConfig, rank: int = 0, ranks: int = 1) -> RingWriter:
    """Makes the ring of this data-parallel rank; the first one sets those of ranks aside that are no more."""
    assert config.ring_path is not None
    if rank == 0:
        leave_ranks_from(config.ring_path, ranks)
    stream = StreamMeta(
        target_digest=config.target_digest,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        aux_layer_ids=tuple(config.aux_layer_ids),
        teacher_k=config.teacher_k,
        target_signal=config.target_signal,
    )
    return RingWriter(Ring.create(rank_path(config.ring_path, rank), config.ring_bytes, stream))


def open_capture(config: EngineConfig, writer: RingWriter, origin: Origin, k: int, ranks: int = 1) -> Capture:
    """Capture with the rules that the configuration starts it with; each of the ranks may write its share."""
    assert config.draft_digest is not None
    tenants = config.allow_tenants
    policy = Policy(
        enabled=config.capture_enabled,
        default=config.capture_default,
        sampling_rate=config.sampling_rate,
        deny_tenants=frozenset(config.deny_tenants),
        allow_tenants=None if tenants is None else frozenset(tenants),
        max_request_tokens=config.max_request_tokens,
        budget=Budget(config.bytes_per_second, ranks=ranks),
    )
    return Capture(writer, policy, origin, config.draft_digest, k, config.prompt_tail_tokens)
