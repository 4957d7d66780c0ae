"""The doctor on what is served: interpreter, ports, target, draft."""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
from safetensors import safe_open

from tide_platform.config import Settings
from tide_platform.draft.checkpoint import load_target_parts
from tide_platform.draft.config import DraftConfig, read_config, text_config
from tide_platform.engine.support import ADAPTERS, check_device
from tide_platform.gate.doctor import Finding
from tide_platform.gate.draft_files import check_files
from tide_platform.gate.report import Check
from tide_platform.gate.run import folder_checks
from tide_platform.gate.server_rules import LoadedDraft
from tide_platform.serving.drafts import resolve_draft
from tide_platform.serving.interpreter import find_python, probe_interpreter
from tide_platform.serving.launch import base_url
from tide_platform.serving.preflight import PortBusy, check_port, check_settings, check_verify_rule
from tide_platform.serving.target import resolve_target
from tide_platform.serving.target_folder import Target, check_target


class Serving:
    """What the serving checks find, for the checks behind them."""

    def __init__(self, settings: Settings, draft: Path | None, target: Path | None):
        self.settings, self.target_folder = settings, target or resolve_target(settings)
        self._draft = draft
        self.target: Target | None = None
        self.loaded: LoadedDraft | None = None  # the draft, where it can be served
        self.draft_config: DraftConfig | None = None

    @property
    def hidden_size(self) -> int | None:
        return self.target.hidden_size if self.target else None

    def interpreter(self) -> Iterator[Finding]:
        serving = self.settings.serving
        check_settings(self.settings)
        found = probe_interpreter(find_python(self.settings), sorted(ADAPTERS))
        check_device(serving.device, found.sglang, bool(serving.k))
        check_verify_rule(self.settings, found.sglang)
        yield Finding("interpreter", "ok", f"{found.python}: sglang {found.sglang} with the plugin")

    def ports(self) -> Iterator[Finding]:
        settings, served = self.settings, _served_now(self.settings)
        if served:
            yield Finding("ports", "ok", f"`tide serve` runs with these settings ({served})")
        else:
            check_port(settings.serving.host, settings.serving.port)
            check_port(settings.serving.host, settings.serving.port + 10000)  # SGLang's, for gRPC
            yield Finding("ports", "ok", f"{base_url(settings)} is free")
        for name in ("s3_port", "mlflow_port", "dagster_port"):
            port = getattr(settings.stack, name)
            try:
                check_port("127.0.0.1", port)
            except PortBusy:
                mend = "as it is where `tide stack up` runs; else `tide stack up --ports auto`, or set it"
                yield Finding("ports", "warn", f"stack.{name} {port} is taken", mend)

    def check_target(self) -> Iterator[Finding]:
        self.target = check_target(self.target_folder)
        folder = self.target.folder
        shards = sorted(folder.glob("*.safetensors"))
        names = set()
        for shard in shards:
            with safe_open(shard, framework="np") as file:
                names |= {name.rpartition("model.")[2] for name in file.keys()}  # noqa: SIM118
        text = text_config(read_config(folder))
        if missing := {"embed_tokens.weight", "norm.weight"} - names:
            yield Finding(
                "target", "error", f"{folder}: weights hold no {', '.join(sorted(missing))}", "save it whole"
            )
        tied = bool(text.get("tie_word_embeddings")) and "lm_head.weight" not in names
        if "lm_head.weight" not in names and not tied:
            said = (
                f"{folder}: weights hold no lm_head.weight, and config.json does not tie it to embed_tokens"
            )
            yield Finding("target", "error", said, "set tie_word_embeddings if the model ties it, or save it")
        files = "one file" if len(shards) == 1 else f"{len(shards)} files"
        head = "head tied to the embeddings" if tied else "a head of its own"
        yield Finding(
            "target",
            "ok",
            f"{folder.name} ({self.target.digest}): {self.target.architecture}, {files}, {head}",
        )

    def check_draft(self) -> Iterator[Finding]:
        if not self.settings.serving.k:
            yield Finding("draft", "warn", "serving.k is 0: served without a draft", "nothing is captured so")
            return
        folder = self._draft or resolve_draft(self.settings)
        files, loaded = check_files(folder, self.target_folder)
        yield _finding(files)
        if loaded is None:
            return
        layers = text_config(read_config(self.target_folder))["num_hidden_layers"]
        self.loaded, self.draft_config = loaded, DraftConfig.from_json(read_config(folder), layers)
        parts = load_target_parts(self.target_folder)
        yield from map(_finding, folder_checks(loaded, parts, self.target_folder, None))


def _finding(check: Check) -> Finding:
    return Finding("draft", "ok" if check.status == "pass" else "error", f"{check.name}: {check.message}")


def _served_now(settings: Settings) -> str | None:
    """Address of the `tide serve` that runs with this state folder."""
    try:
        state = json.loads((settings.state / "serve.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return state["url"] if psutil.pid_exists(state["pid"]) else None
