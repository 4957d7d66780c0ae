"""The entry point: silent without a configuration, loud where it cannot work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tide_platform.config.engine import VARIABLE, EngineConfig
from tide_platform.engine import plugin


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = EngineConfig(
        deployment="unit",
        device="cuda",
        target_digest="t",
        hidden_size=8,
        vocab_size=32,
        aux_layer_ids=[1, 2, 3],
        draft_digest="d",
        drafts_root=tmp_path,
        capture_enabled=True,
        capture_default="allow",
        sampling_rate=1.0,
        teacher_k=4,
        ring_path=tmp_path / "ring",
        ring_bytes=1 << 20,
    )
    path = tmp_path / "engine.json"
    path.write_text(config.model_dump_json())
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_does_nothing_without_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(plugin, "load_adapter", lambda version: pytest.fail("loaded"))
    plugin.register()


def test_refuses_an_unknown_version_by_name(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "version", lambda name: "0.9.9")
    with pytest.raises(SystemExit, match=r"sglang 0\.9\.9: no adapter for it; install one of: 0\.5\.14"):
        plugin.register()


def test_installs_the_adapter_of_the_version(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[EngineConfig] = []

    class Adapter:
        install = staticmethod(installed.append)

    monkeypatch.setattr(plugin, "version", lambda name: "0.5.14")
    monkeypatch.setattr(plugin, "load_adapter", lambda version: Adapter)
    plugin.register()
    assert [config.deployment for config in installed] == ["unit"]


@pytest.mark.parametrize("content", [None, "{", json.dumps({"deployment": "x"})])
def test_a_broken_configuration_ends_the_process(config_file: Path, content: str | None) -> None:
    config_file.unlink()
    if content is not None:
        config_file.write_text(content)
    with pytest.raises(SystemExit, match=r"engine\.json"):
        plugin.register()


def test_the_entry_point_imports_neither_torch_nor_the_platform() -> None:
    """SGLang imports it in each process, with or without TIDE."""
    code = (
        "import sys, tide_platform.engine.plugin; "
        "print(sorted({'torch', 'lance', 'dagster', 'sglang'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
