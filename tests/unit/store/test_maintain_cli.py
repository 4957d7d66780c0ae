"""``tide maintain``: one pass, and a loop until it is told to stop."""

import json
import signal
import subprocess
import sys
import time

from typer.testing import CliRunner

from tests.synthetic import STREAM, make_sample
from tide_platform.cli.maintain import command
from tide_platform.config import Settings, dump_settings
from tide_platform.store.hidden_states import open_store

_RUN = "import typer; from tide_platform.cli.maintain import command; typer.run(command)"


def prepare(tmp_path):
    settings = Settings(storage={"uri": str(tmp_path / "store")}, state=tmp_path)
    settings.ledger.url = f"sqlite:///{tmp_path / 'ledger.db'}"
    config = tmp_path / "tide.yaml"
    config.write_text(dump_settings(settings))
    return settings, config


def test_once(tmp_path):
    import typer

    settings, config = prepare(tmp_path)
    app = typer.Typer()
    app.command()(command)
    empty = CliRunner().invoke(app, ["--config", str(config), "--once"], catch_exceptions=False)
    assert empty.exit_code == 0 and "compactions 0" in empty.output
    store = open_store(settings)
    store.ensure(STREAM)
    for number in range(12):
        store.append([make_sample(f"s{number}")], [str(number)])
    done = CliRunner().invoke(app, ["--config", str(config), "--once"], catch_exceptions=False)
    assert "compactions 1, fragments merged 11" in done.output
    assert len(store.refs()) == 12


def test_a_loop_ends_when_told(tmp_path):
    settings, config = prepare(tmp_path)
    store = open_store(settings)
    store.ensure(STREAM)
    for number in range(12):
        store.append([make_sample(f"s{number}")], [str(number)])
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, "--config", str(config)], stdout=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while len(store.handle.require().get_fragments()) > 3 and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "compactions 1" in output
    status = json.loads((settings.state / "maintain.json").read_text())
    assert status["upkeep_compactions"] == 1 and status["at"] > 0
