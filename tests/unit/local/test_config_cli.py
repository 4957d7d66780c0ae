"""``tide config``."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tide_platform.cli.config import app
from tide_platform.config import ConfigError, load_settings
from tide_platform.config import migrate as steps


def _run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_init_writes_what_check_reads_and_show_prints(tmp_path: Path) -> None:
    path = tmp_path / "tide.yaml"
    _run("init", str(path))
    assert "ok: deployment demo" in _run("check", "--config", str(path))
    assert _run("show", "--config", str(path)) == path.read_text()
    with pytest.raises(ConfigError, match="is there already"):
        _run("init", str(path))
    _run("init", str(path), "--force")


def test_a_current_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tide.yaml"
    path.write_text("config_version: 1\nserving: {k: 3}  # mine\n")
    assert "nothing to do" in _run("migrate", str(path))
    assert "# mine" in path.read_text()


def test_an_older_file_is_brought_on_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(steps.STEPS, 0, lambda raw: {"config_version": 1, "serving": {"k": raw["k"]}})
    path = tmp_path / "tide.yaml"
    path.write_text("config_version: 0\nk: 3\n")
    with pytest.raises(ConfigError, match="tide config migrate"):
        load_settings(path, environ={})
    assert "0 -> 1" in _run("migrate", str(path))
    assert load_settings(path, environ={}).serving.k == 3
    assert (tmp_path / "tide.yaml.bak").read_text() == "config_version: 0\nk: 3\n"


def test_a_version_that_nothing_leads_from_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tide.yaml"
    path.write_text("config_version: 99\n")
    with pytest.raises(ConfigError, match="no way from config_version 99"):
        _run("migrate", str(path))
