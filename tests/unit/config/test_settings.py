"""Every setting is read by something, and every way to set one says what it refuses."""

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from tide_platform.config import ConfigError, dump_settings, load_settings
from tide_platform.config.engine import EngineConfig
from tide_platform.config.schema import Settings

PACKAGE = Path(__file__).parents[3] / "tide_platform"
FOLDERS = (PACKAGE, PACKAGE.parent / "resources", PACKAGE.parent / "assets")
SOURCE = "\n".join(
    path.read_text() for folder in FOLDERS for path in folder.rglob("*.py") if path.parent.name != "config"
)


def leaves(model: type[BaseModel], path: str = "") -> list[str]:
    names = []
    for name, field in model.model_fields.items():
        inner = [x for x in (field.annotation, *get_args(field.annotation)) if isinstance(x, type)]
        models = [x for x in inner if issubclass(x, BaseModel)]
        if models:
            names += leaves(models[0], f"{path}{name}.")
        else:
            names.append(path + name)
    return names


@pytest.mark.parametrize("setting", [*leaves(Settings), *(f"engine.{n}" for n in leaves(EngineConfig))])
def test_something_reads_the_setting(setting: str) -> None:
    name = setting.rsplit(".", 1)[-1]
    if setting in ("config_version", "state"):  # read where the configuration is loaded
        return
    assert re.search(rf"\.{name}\b", SOURCE), f"nothing reads {setting}"


def test_a_dump_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "tide.yaml"
    path.write_text(dump_settings(Settings()))
    assert load_settings(path, {}) == Settings()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("serving: {prot: 1}", "serving.prot"),
        ("serving: {port: 99999}", "serving.port"),
        ("config_version: 7", "config_version 7"),
        ("- a list", "expected a mapping"),
        ("serving: [", "not YAML"),
    ],
)
def test_a_wrong_file_is_named_with_its_setting(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "tide.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(named)) as error:
        load_settings(path, {})
    assert str(path) in str(error.value)


def test_a_variable_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tide.yaml"
    path.write_text("serving: {port: 30001}")
    settings = load_settings(path, {"TIDE_SERVING__PORT": "30002", "TIDE_WINDOW__MIN_SAMPLES": "7"})
    assert (settings.serving.port, settings.window.min_samples) == (30002, 7)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_settings(Path("nowhere.yaml"), {})
