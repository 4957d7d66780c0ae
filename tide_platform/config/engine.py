"""What ``tide serve`` tells the plugin inside SGLang: one JSON file, named by TIDE_ENGINE_CONFIG."""

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from tide_platform.config.errors import ConfigError

VARIABLE = "TIDE_ENGINE_CONFIG"


class EngineConfig(BaseModel):
    """Written by the launcher, read by the plugin; without it the plugin does nothing at all."""

    model_config = ConfigDict(extra="forbid")

    deployment: str
    device: str  # cpu | cuda | rocm
    target_digest: str
    hidden_size: int
    vocab_size: int
    aux_layer_ids: list[int]
    draft_digest: str | None  # None: serving without speculation, nothing is captured
    drafts_root: Path  # drafts are reloaded from below this folder only
    capture_enabled: bool
    capture_default: str  # allow | deny
    sampling_rate: float
    deny_tenants: list[str] = []  # never captured, whatever a request says
    allow_tenants: list[str] | None = None  # only these are captured; None: all
    trusted_proxies: list[str] = []  # networks whose word on tenant and consent is taken
    bytes_per_second: int | None = None  # what capture may write; None: no limit
    prompt_tail_tokens: int | None = None  # of a prompt, its last so many are kept; None: all
    max_request_tokens: int | None = None  # longer requests are not captured
    teacher_k: int
    target_signal: Literal["topk", "last_hidden"] = "topk"
    ring_path: Path | None  # the shared-memory file between the scheduler and the spool; None: no capture
    ring_bytes: int

    @property
    def last_width(self) -> int:
        """Columns of the last hidden states that are captured: 0 without them."""
        return self.hidden_size if self.target_signal == "last_hidden" else 0

    @classmethod
    def from_environment(cls) -> "EngineConfig | None":
        path = os.environ.get(VARIABLE)
        if not path:
            return None
        try:
            return cls.model_validate_json(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{VARIABLE}: {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{VARIABLE}: {path}: {error}") from error
