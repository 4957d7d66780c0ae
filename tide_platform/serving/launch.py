"""How the server is started: pure functions from settings and checked facts to command lines."""

from dataclasses import dataclass
from pathlib import Path

from tide_platform.capture.folder import RING_FILE
from tide_platform.config import Settings
from tide_platform.config.engine import VARIABLE as ENGINE_CONFIG_VARIABLE
from tide_platform.config.engine import EngineConfig
from tide_platform.serving.adaptive import Adaptive
from tide_platform.serving.interpreter import Interpreter
from tide_platform.serving.target_folder import Target


@dataclass(frozen=True)
class StagedDraft:
    """A checked draft, already in the folder that the server loads drafts from."""

    folder: Path
    digest: str
    aux_layer_ids: tuple[int, ...]  # SGLang's numbering: entry of the layer


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that ``tide serve`` starts, and what it starts it with."""

    argv: tuple[str, ...]  # the server
    env: dict[str, str]  # its variables, over the inherited ones; holds no secret
    engine: EngineConfig
    engine_config_path: Path
    ring_path: Path | None  # None: nothing is captured
    spool_argv: tuple[str, ...] | None  # run by the platform's own Python
    base_url: str


def base_url(settings: Settings) -> str:
    """Where clients on this machine reach the server."""
    host = settings.serving.host
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{settings.serving.port}"


def plan_launch(
    settings: Settings,
    target: Target,
    draft: StagedDraft | None,
    interpreter: Interpreter,
    adaptive: Adaptive | None = None,
) -> LaunchPlan:
    """The plan for ``serving.device`` cpu, cuda or rocm. ``draft`` is None where ``serving.k`` is 0.
    ``adaptive``: in place of the settings' own file, and of ``serving.k`` at the start.
    """
    state = settings.state.resolve()
    spool = settings.spool_folder.resolve()
    captured = settings.capture.enabled and draft is not None
    ring = spool / RING_FILE if captured else None
    engine = EngineConfig(
        deployment=settings.deployment,
        device=settings.serving.device,
        target_digest=target.digest,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        aux_layer_ids=list(draft.aux_layer_ids) if draft else [],
        draft_digest=draft.digest if draft else None,
        drafts_root=settings.drafts_folder.resolve(),
        capture_enabled=captured,
        capture_default=settings.capture.default,
        deny_tenants=settings.capture.deny_tenants,
        allow_tenants=settings.capture.allow_tenants,
        trusted_proxies=[str(network) for network in settings.capture.trusted_proxies],
        bytes_per_second=settings.capture.bytes_per_second,
        prompt_tail_tokens=settings.capture.prompt_tail_tokens,
        max_request_tokens=settings.capture.max_request_tokens,
        sampling_rate=settings.capture.sampling_rate,
        teacher_k=settings.capture.teacher_k,
        target_signal=settings.capture.target_signal,
        ring_path=ring,
        ring_bytes=settings.capture.ring_bytes,
    )
    config_path = state / "engine.json"
    return LaunchPlan(
        argv=server_argv(settings, target, draft, interpreter, adaptive),
        env=server_env(settings) | {ENGINE_CONFIG_VARIABLE: str(config_path)},
        engine=engine,
        engine_config_path=config_path,
        ring_path=ring,
        spool_argv=spool_argv(settings, ring) if ring else None,
        base_url=base_url(settings),
    )


def server_argv(
    settings: Settings,
    target: Target,
    draft: StagedDraft | None,
    interpreter: Interpreter,
    adaptive: Adaptive | None = None,
) -> tuple[str, ...]:
    """SGLang's command line. Everything that decides what is served is said, nothing is left to a default."""
    serving = settings.serving
    argv = [str(interpreter.python), "-m", "sglang.launch_server"]
    argv += ["--model-path", str(target.folder.resolve()), "--served-model-name", target.folder.name]
    argv += ["--host", serving.host, "--port", str(serving.port)]
    argv += ["--dtype", serving.dtype, "--context-length", str(serving.context_length)]
    argv += ["--max-running-requests", str(serving.max_running_requests), "--tp-size", str(serving.tp_size)]
    if serving.dp_size > 1:
        argv += ["--dp-size", str(serving.dp_size)]
        argv += ["--enable-dp-attention"] if serving.dp_attention else []
    argv += ["--chunked-prefill-size", str(serving.chunked_prefill_size)]
    if serving.max_total_tokens is not None:
        argv += ["--max-total-tokens", str(serving.max_total_tokens)]
    if not serving.radix_cache:
        argv.append("--disable-radix-cache")
    for flag, name in (
        ("--reasoning-parser", serving.reasoning_parser),
        ("--tool-call-parser", serving.tool_call_parser),
    ):
        if name is not None:
            argv += [flag, name]
    argv += _device_argv(settings)
    argv += ["--grammar-backend", _grammar_backend(settings, interpreter)]
    # the warm-up request would be captured like a user's: `tide serve` sends its own, uncaptured
    argv += ["--enable-metrics", "--skip-server-warmup", "--log-level", serving.log_level]
    if draft is not None:
        argv += _speculative_argv(settings, draft, adaptive)
    return tuple(argv)


def server_env(settings: Settings) -> dict[str, str]:
    """Variables of the server's process."""
    serving = settings.serving
    env = {
        "HF_HUB_OFFLINE": "1",  # everything is served from local folders
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(serving.threads),
    }
    if serving.device == "cpu":
        env |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",  # stock CPU layers would compile for minutes
            # a thread waits a few milliseconds at a barrier, then sleeps: a round is hundreds of short
            # parallel regions, and waking a sleeper for each costs a third of the speed; spinning on when
            # there is no work would take the core from the spool, the clients and the trainer
            "OMP_WAIT_POLICY": "passive",
            "GOMP_SPINCOUNT": "200000",
            # keep freed activations in the heap: mapping and clearing their pages again costs each round
            "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
            "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
            "MALLOC_TOP_PAD_": str(64 << 20),
        }
    if serving.device == "rocm":
        env["SGLANG_USE_AITER"] = "1" if _attention_backend(settings) == "aiter" else "0"
    return env


def spool_argv(settings: Settings, ring: Path) -> tuple[str, ...]:
    """Arguments of the spool process, after the interpreter."""
    capture = settings.capture
    argv = ["-m", "tide_platform.capture.spool", "--ring", str(ring)]
    argv += ["--folder", str(settings.spool_folder.resolve())]
    argv += ["--segment-bytes", str(capture.segment_bytes), "--segment-seconds", str(capture.segment_seconds)]
    argv += ["--max-sample-tokens", str(capture.max_sample_tokens)]
    argv += ["--aux-format", capture.aux_format]
    argv += ["--validation-share", str(settings.window.validation_share)]
    argv += ["--spool-bytes", str(capture.spool_bytes)]
    return tuple(argv)


def _attention_backend(settings: Settings) -> str | None:
    default = {"cpu": "torch_native", "rocm": "aiter"}.get(settings.serving.device)
    return settings.serving.attention_backend or default


def _grammar_backend(settings: Settings, interpreter: Interpreter) -> str:
    # SGLang masks logits by xgrammar on a GPU only; on a CPU the first such request ends the server
    wanted = "llguidance" if settings.serving.device == "cpu" else "xgrammar"
    return wanted if wanted in interpreter.grammar else "none"


def _device_argv(settings: Settings) -> list[str]:
    device = settings.serving.device
    # ROCm builds of torch call their device cuda
    argv = ["--device", "cpu" if device == "cpu" else "cuda"]
    backend = _attention_backend(settings)
    if backend is not None:
        argv += ["--attention-backend", backend]
    if device == "cpu":
        argv += ["--sampling-backend", "pytorch", "--disable-overlap-schedule", "--disable-cuda-graph"]
        argv.append("--sleep-on-idle")  # an idle scheduler would spin, and take a core from the trainer
    elif settings.serving.k and not settings.serving.overlap_schedule:
        argv.append("--disable-overlap-schedule")
    return argv


def _speculative_argv(settings: Settings, draft: StagedDraft, adaptive: Adaptive | None) -> list[str]:
    serving = settings.serving
    k, file = serving.k, serving.adaptive_config
    if adaptive is not None:
        k, file = adaptive.start, adaptive.file
    argv = [
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-draft-model-path",
        str(draft.folder.resolve()),
    ]
    argv += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
    argv += ["--speculative-num-draft-tokens", str(k + 1)]
    if serving.adaptive:
        argv.append("--speculative-adaptive")
        if file is not None:
            argv += ["--speculative-adaptive-config", str(file.resolve())]
    argv += ["--speculative-accept-threshold-single", str(serving.accept_threshold_single)]
    argv += ["--speculative-accept-threshold-acc", str(serving.accept_threshold_acc)]
    return argv
