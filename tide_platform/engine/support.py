"""What is supported inside SGLang, what is refused, what is skipped: the table that the docs are made from.

Pure data and predicates: neither torch nor SGLang is imported, so launcher, preflight and docs read it too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

from tide_platform.config import TideError

# SGLang version -> module that knows its names
ADAPTERS = {
    "0.5.14": "tide_platform.engine.adapter_0_5_14",
    "0.5.23": "tide_platform.engine.adapter_0_5_23",
}

# versions that engine/cpu was written for: it lends SGLang what speculation lacks on a CPU
CPU_SPECULATION = ("0.5.14",)

# untested: written and tested in its parts, never run whole
Status = Literal["supported", "untested", "refused", "skipped"]
VerifyRule = Literal["greedy", "target_only", "rejection"]


class UnsupportedSGLang(TideError):
    """An SGLang version that no adapter was written for."""

    def __init__(self, version: str):
        known = ", ".join(sorted(ADAPTERS))
        super().__init__(f"sglang {version}: no adapter for it; install one of: {known}")
        self.version = version


class UnsupportedFeature(TideError):
    """The server was asked for something that capture or reload would get wrong."""

    def __init__(self, feature: str, reason: str):
        super().__init__(f"{feature}: not supported with TIDE: {reason}")
        self.feature, self.reason = feature, reason


@dataclass(frozen=True)
class Feature:
    """A line of the support table.

    ``server`` tells from SGLang's ServerArgs whether a refused feature is asked for; ``request`` is the name
    under which a skipped request is counted; ``seen``: versions on which a supported feature was seen.
    """

    name: str
    status: Status
    reason: str
    server: Callable[[Any], bool] | None = None
    request: str | None = None
    seen: tuple[str, ...] = ("0.5.14",)

    def status_on(self, version: str) -> Status:
        return "untested" if self.status == "supported" and version not in self.seen else self.status


def _speculation(args: Any) -> str | None:
    return args.speculative_algorithm


FEATURES: tuple[Feature, ...] = (
    Feature("EAGLE3 with a chain of drafts", "supported", "rows of accepted tokens are captured"),
    Feature(
        "no speculation",
        "supported",
        "serves; nothing is captured, there is no draft to reload",
        seen=("0.5.14", "0.5.23"),
    ),
    Feature("radix cache", "supported", "a prefix hit leaves a hole in the rows, flagged truncated_context"),
    Feature("chunked prefill", "supported", "chunks are joined by position"),
    Feature("retraction", "supported", "the rows of the second prefill replace the first, flagged retracted"),
    Feature("abort", "supported", "the sample ends early, flagged aborted"),
    Feature("stop tokens, stop strings, EOS", "supported", "rows past the stop are cut"),
    Feature("sampling", "supported", "the verify rule is stored with the sample"),
    Feature("streaming, multi-turn", "supported", "a client that leaves ends its sample, flagged aborted"),
    Feature("parallel sampling (n > 1)", "supported", "a sample an answer, flagged truncated_context"),
    Feature("thinking, tool calls", "supported", "chat requests are flagged thinking, tool_calls"),
    Feature("adaptive speculation", "supported", "the sample has the largest k, flagged adaptive_k"),
    Feature("penalties, logit bias", "supported", "teacher rows are raw, flagged penalties"),
    Feature("grammar", "supported", "teacher rows are raw, flagged grammar"),
    Feature(
        "last hidden states (capture.target_signal)",
        "supported",
        "final states of the teacher rows beside the top K; under CUDA graphs tested in parts only",
    ),
    Feature("tensor parallelism", "untested", "rank 0 writes, every rank reloads or none"),
    Feature(
        "other speculative algorithms",
        "refused",
        "the draft must be an EAGLE3 one (EAGLE with an EAGLE3 draft accepts nothing, silently)",
        lambda args: _speculation(args) not in (None, "EAGLE3"),
    ),
    Feature(
        "a tree of drafts (speculative_eagle_topk > 1)",
        "refused",
        "captured rows follow a chain; set --speculative-eagle-topk 1",
        lambda args: bool(_speculation(args)) and (args.speculative_eagle_topk or 1) > 1,
    ),
    Feature(
        "overlap schedule on a CPU",
        "refused",
        "rows are copied on the scheduler's thread; start with --disable-overlap-schedule",
        lambda args: bool(_speculation(args)) and args.device == "cpu" and not args.disable_overlap_schedule,
    ),
    Feature(
        "overlap schedule on a GPU", "untested", "rows leave by a side stream (serving.overlap_schedule)"
    ),
    Feature(
        "mixed chunks (enable_mixed_chunk)",
        "refused",
        "prefill and decode rows in one batch",
        lambda args: bool(args.enable_mixed_chunk),
    ),
    Feature(
        "data parallelism (dp_size > 1)",
        "supported",
        "a ring and a writer for each rank; a draft on every rank or on none; tested on a CPU",
    ),
    Feature("DP attention", "untested", "as data parallelism; idle steps and padded rows are left out"),
    Feature(
        "DP attention with local control messages (enable_dp_attention_local_control_broadcast)",
        "refused",
        "ranks would pause at different steps, and wait for one another",
        lambda args: bool(args.enable_dp_attention_local_control_broadcast),
    ),
    Feature(
        "context parallelism (attn_cp_size > 1)",
        "refused",
        "a prompt's rows lie on several ranks",
        lambda args: (args.attn_cp_size or 1) > 1,
    ),
    Feature(
        "pipeline parallelism (pp_size > 1)",
        "refused",
        "the aux layers lie on several ranks",
        lambda args: args.pp_size > 1,
    ),
    Feature(
        "prefill/decode disaggregation",
        "refused",
        "prompt rows and response rows arise in different servers",
        lambda args: args.disaggregation_mode != "null",
    ),
    Feature(
        "several tokenizer workers (tokenizer_worker_num > 1)",
        "refused",
        "SGLang checks no key there, the admin routes would be open",
        lambda args: args.tokenizer_worker_num > 1,
    ),
    Feature(
        "a quantised draft",
        "refused",
        "a reload could not copy its weights in place",
        lambda args: bool(_speculation(args)) and bool(args.speculative_draft_model_quantization),
    ),
    Feature("LoRA traffic", "skipped", "its hidden states are of another model", request="lora"),
    Feature("images, audio, video", "skipped", "token ids do not tell the input", request="multimodal"),
    Feature("input embeddings", "skipped", "token ids do not tell the input", request="input_embeds"),
    Feature("health checks", "skipped", "SGLang's own requests", request="health_check"),
    Feature(
        "weight updates by SGLang's own routes",
        "refused",
        "the served target is fixed; POST /tide/reload_draft changes the draft",
    ),
)


def adapter_module(version: str) -> str:
    """Name of the adapter's module for an SGLang version. Raises :class:`UnsupportedSGLang`."""
    if version not in ADAPTERS:
        raise UnsupportedSGLang(version)
    return ADAPTERS[version]


def load_adapter(version: str) -> ModuleType:
    """Imports the adapter (and with it SGLang). Raises :class:`UnsupportedSGLang`."""
    return import_module(adapter_module(version))


def check_server(args: Any) -> None:
    """Raises :class:`UnsupportedFeature` for the first refused feature that ServerArgs ask for."""
    for feature in FEATURES:
        if feature.server and feature.server(args):
            raise UnsupportedFeature(feature.name, feature.reason)


def check_device(device: str, version: str, speculative: bool) -> None:
    """Raises :class:`UnsupportedFeature` where a version cannot speculate on a device."""
    if speculative and device == "cpu" and version not in CPU_SPECULATION:
        known = ", ".join(CPU_SPECULATION)
        reason = f"its operations are written for {known} alone; serve with that, or with serving.k 0"
        raise UnsupportedFeature(f"EAGLE3 on a CPU with sglang {version}", reason)


def verify_rule(device: str, version: str, rejection_sampling: bool = False) -> VerifyRule:
    """How a server accepts drafts of requests with temperature > 0 (with temperature 0 it is always greedy).

    Both versions take the greedy path for all requests on ROCm (eagle_utils.py), 0.5.23 unless it samples by
    rejection; 0.5.23 also on a CPU. Raises :class:`UnsupportedSGLang`.
    """
    adapter_module(version)
    if device == "rocm" and not (rejection_sampling and version != "0.5.14"):
        return "greedy"
    if device == "cpu" and version != "0.5.14":
        return "greedy"
    return "rejection" if rejection_sampling else "target_only"


def lossy_reason(rule: VerifyRule, threshold_single: float = 1.0, threshold_acc: float = 1.0) -> str | None:
    """Why a verify rule changes what is said; ``None`` where it is lossless."""
    if rule == "greedy":
        return "requests with temperature > 0 are answered greedily (verify rule greedy)"
    if min(threshold_single, threshold_acc) < 1:
        return "accept thresholds below 1 accept tokens that the target would not have drawn"
    return None


def markdown_table() -> str:
    """The support table as Markdown."""
    lines = [f"| feature | {' | '.join(ADAPTERS)} | why |", f"| --- |{' --- |' * len(ADAPTERS)} --- |"]
    for feature in FEATURES:
        statuses = " | ".join(feature.status_on(version) for version in ADAPTERS)
        lines.append(f"| {feature.name} | {statuses} | {feature.reason} |")
    on_cpu = " | ".join("supported" if version in CPU_SPECULATION else "refused" for version in ADAPTERS)
    lines.append(f"| EAGLE3 on a CPU | {on_cpu} | what SGLang lacks there is in `engine/cpu` |")
    return "\n".join(lines) + "\n"
