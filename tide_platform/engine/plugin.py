"""The entry point ``sglang.srt.plugins``: SGLang calls :func:`register` first in each of its processes."""

from importlib.metadata import version

from tide_platform.config import TideError
from tide_platform.config.engine import EngineConfig
from tide_platform.engine.support import CPU_SPECULATION, check_device, load_adapter


def register() -> None:
    """Installs the hooks where ``TIDE_ENGINE_CONFIG`` names a configuration; does nothing elsewhere.

    SGLang logs a plugin's exception and serves on without it, so what cannot work ends the process instead: a
    server that was started for capture and captures nothing would go unnoticed.
    """
    try:
        config = EngineConfig.from_environment()
        if config is None:
            return
        installed = version("sglang")
        adapter = load_adapter(installed)
        check_device(config.device, installed, config.draft_digest is not None)
        if config.device == "cpu" and installed in CPU_SPECULATION:
            from tide_platform.engine import cpu

            cpu.install()
        adapter.install(config)
    except TideError as error:
        raise SystemExit(f"tide: {error}") from error
