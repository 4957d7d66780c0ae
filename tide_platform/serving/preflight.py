"""Everything that is wrong with a deployment and can be known before anything is started."""

import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from tide_platform.config import Settings, TideError
from tide_platform.draft.check import check_draft
from tide_platform.engine.support import ADAPTERS, check_device, lossy_reason, verify_rule
from tide_platform.serving.drafts import resolve_draft, stage_draft
from tide_platform.serving.interpreter import Interpreter, find_python, probe_interpreter
from tide_platform.serving.launch import StagedDraft
from tide_platform.serving.target import resolve_target
from tide_platform.serving.target_folder import Target, check_target


class LossyVerifyRule(TideError):
    """The server would say other things than the target alone; only ``serving.accept_lossy`` allows it."""

    def __init__(self, reason: str):
        super().__init__(f"lossy verify rule: {reason}; `serving.accept_lossy: true` serves all the same")
        self.reason = reason


class PortBusy(TideError):
    """Somebody listens there already."""

    def __init__(self, host: str, port: int, holder: str):
        super().__init__(f"port {port} on {host} is taken{holder}; set `serving.port` to a free one")
        self.host, self.port = host, port


class ServingImpossible(TideError):
    """A combination of settings that no server runs with."""


@dataclass(frozen=True)
class Checked:
    """What the checks found out on their way; all that a launch plan needs."""

    target: Target
    draft: StagedDraft | None
    interpreter: Interpreter


def preflight(settings: Settings, draft_folder: Path | None = None) -> Checked:
    """Check everything, cheapest first, and stage the draft. Raises a :class:`TideError` of one line.

    ``draft_folder``: serve this draft, in place of the one that the settings lead to.
    """
    check_settings(settings)
    check_port(settings.serving.host, settings.serving.port)
    interpreter = probe_interpreter(find_python(settings), sorted(ADAPTERS))
    check_device(settings.serving.device, interpreter.sglang, bool(settings.serving.k))
    check_verify_rule(settings, interpreter.sglang)
    target = check_target(resolve_target(settings))
    draft = _checked_draft(settings, target, draft_folder) if settings.serving.k else None
    return Checked(target=target, draft=draft, interpreter=interpreter)


def check_verify_rule(settings: Settings, sglang: str) -> None:
    """Design 1: under a lossless rule a draft changes the speed only. Raises :class:`LossyVerifyRule`."""
    serving = settings.serving
    rule = verify_rule(serving.device, sglang)
    reason = lossy_reason(rule, serving.accept_threshold_single, serving.accept_threshold_acc)
    if reason and serving.k and not serving.accept_lossy:
        raise LossyVerifyRule(f"sglang {sglang} on {serving.device}: {reason}")


def check_port(host: str, port: int) -> None:
    """Raises :class:`PortBusy`, or :class:`ServingImpossible` for an address that is not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ServingImpossible(f"serving.host {host}: {error.strerror}") from error
    except PermissionError as error:
        raise ServingImpossible(f"serving.port {port}: not allowed to listen there") from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ServingImpossible(f"serving.host {host}: {os.strerror(error.errno or 0)}") from error
        raise PortBusy(host, port, _holder(port)) from error


def check_settings(settings: Settings) -> None:
    """Settings that contradict each other. Raises :class:`ServingImpossible`."""
    serving = settings.serving
    if serving.device == "cpu" and serving.attention_backend not in (None, "torch_native"):
        raise ServingImpossible(
            f"serving.attention_backend {serving.attention_backend}: on cpu there is only torch_native"
        )
    if serving.device == "cpu" and serving.tp_size != 1:
        raise ServingImpossible(f"serving.tp_size {serving.tp_size}: on cpu it must be 1")
    if serving.dp_attention and (serving.dp_size < 2 or serving.tp_size % serving.dp_size):
        raise ServingImpossible(
            f"serving.dp_attention divides serving.tp_size {serving.tp_size} GPUs among serving.dp_size "
            f"{serving.dp_size} ranks: dp_size must be at least 2 and divide tp_size"
        )
    if serving.dp_attention and settings.capture.target_signal == "last_hidden":
        raise ServingImpossible(
            "capture.target_signal last_hidden: under serving.dp_attention its rows are padded; use topk"
        )
    if serving.max_total_tokens is not None and serving.max_total_tokens < serving.context_length:
        raise ServingImpossible(
            f"serving.max_total_tokens {serving.max_total_tokens} cannot hold one request of "
            f"serving.context_length {serving.context_length}"
        )


def _checked_draft(settings: Settings, target: Target, given: Path | None) -> StagedDraft:
    folder = given or resolve_draft(settings)
    config = check_draft(folder, target.folder)
    staged, digest = stage_draft(settings, folder)
    return StagedDraft(folder=staged, digest=digest, aux_layer_ids=tuple(config.aux_layer_ids))


def _holder(port: int) -> str:
    """`` by python (pid 7)``, where this user may know that."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        pass
    return ""
