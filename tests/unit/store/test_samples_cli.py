"""``tide samples`` prints what is stored."""

import pytest
from typer.testing import CliRunner

from tests.synthetic import LAST_STREAM, STREAM, make_sample
from tide_platform.cli.samples import app
from tide_platform.config import Settings, dump_settings
from tide_platform.store.errors import SamplesMissing
from tide_platform.store.hidden_states import open_store


@pytest.fixture
def config(tmp_path):
    settings = Settings(storage={"uri": str(tmp_path / "store")}, state=tmp_path)
    store = open_store(settings)
    store.ensure(STREAM)
    store.append([make_sample("first"), make_sample("second", tenant="reference", flags=("stretch",))], ["x"])
    path = tmp_path / "tide.yaml"
    path.write_text(dump_settings(settings))
    return str(path)


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments, catch_exceptions=False)


def test_list(config):
    both = run("list", "--config", config)
    assert "first" in both.output and "2.40" in both.output and "2 of 2 samples" in both.output
    one = run("list", "--tenant", "reference", "--config", config)
    assert "second" in one.output and "first" not in one.output and "1 of 1" in one.output
    assert "1 of 2 samples" in run("list", "--limit", "1", "--config", config).output


def test_show(config):
    output = run("show", "second", "--config", config).output
    assert "uint16[12, 24]" in output and "not at hand" in output and "response tokens" in output
    with pytest.raises(SamplesMissing, match="third"):
        run("show", "third", "--config", config)


def test_show_names_the_last_hidden_states_of_a_stream_that_has_them(tmp_path):
    settings = Settings(storage={"uri": str(tmp_path / "store")}, state=tmp_path)
    store = open_store(settings)
    store.ensure(LAST_STREAM)
    store.append([make_sample("one", 12, 1, LAST_STREAM)], ["x"])
    path = tmp_path / "tide.yaml"
    path.write_text(dump_settings(settings))
    assert "last_hidden          uint16[12, 8]" in run("show", "one", "--config", str(path)).output


def test_stats(config):
    output = run("stats", "--config", config).output
    assert "default 1, reference 1" in output and "2.400" in output and "stretch 1" in output
