"""Command lines and environment of the services, and supervisord's configuration of them."""

import configparser
import json
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tide_platform.config import Settings, dump_settings, load_settings
from tide_platform.local import services
from tide_platform.local.errors import ToolMissing
from tide_platform.local.layout import Layout
from tide_platform.local.ports import inner_ports
from tide_platform.local.secrets import load_secrets, write_identities
from tide_platform.local.services import environment, stack_settings, tool
from tide_platform.local.supervisor import _quote, configuration


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path / "state")
    layout.make()
    return layout


@pytest.fixture
def settings(layout: Layout) -> Settings:
    given = Settings.model_validate({})
    given.state = layout.state
    return stack_settings(given)


def test_everything_is_of_the_stack_and_absolute(settings: Settings, layout: Layout) -> None:
    assert settings.storage.uri == "s3://tide"
    assert settings.storage.endpoint == "http://127.0.0.1:8333"
    assert settings.registry.tracking_uri == "http://127.0.0.1:5050"
    assert settings.ledger.url == f"sqlite:///{layout.state}/ledger.db"
    assert settings.state.is_absolute()


def test_keys_are_made_once_and_private(layout: Layout) -> None:
    keys = load_secrets(layout)
    assert load_secrets(layout) == keys
    assert len(set(keys.values())) == len(keys)
    assert stat.S_IMODE(layout.secrets.stat().st_mode) == 0o600
    write_identities(layout, keys)
    assert stat.S_IMODE(layout.identities.stat().st_mode) == 0o600
    credential = json.loads(layout.identities.read_text())["identities"][0]["credentials"][0]
    assert credential == {"accessKey": keys["AWS_ACCESS_KEY_ID"], "secretKey": keys["AWS_SECRET_ACCESS_KEY"]}


def test_no_key_stands_in_a_command_or_a_configuration(settings: Settings, layout: Layout) -> None:
    keys = load_secrets(layout)
    every = services.services(settings, layout, inner_ports(settings))
    text = configuration(layout, every) + dump_settings(settings)
    assert not [name for name, value in keys.items() if value in text]


def test_all_listen_on_loopback_only(settings: Settings, layout: Layout) -> None:
    every = services.services(settings, layout, inner_ports(settings))
    assert {service.name for service in every} == {*services.ALL, services.PLAIN}
    text = configuration(layout, every)
    assert "0.0.0.0" not in text
    assert "-ip.bind=127.0.0.1" in text and text.count("--host=127.0.0.1") == 3
    assert "-s3.port.iceberg=0" in text and "-s3.port.lance=0" in text


def test_overrides_of_the_user_do_not_reach_the_services(layout: Layout) -> None:
    given = {"TIDE_SERVING__PORT": "1", "TIDE_HOME": "/cache", "TIDE_CONFIG": "mine.yaml", "PATH": "/bin"}
    env = environment(layout, {"AWS_ACCESS_KEY_ID": "x"}, given)
    assert "TIDE_SERVING__PORT" not in env
    assert env["TIDE_HOME"] == "/cache" and env["PATH"] == "/bin" and env["AWS_ACCESS_KEY_ID"] == "x"
    assert env["TIDE_CONFIG"] == str(layout.config)


def test_services_read_back_the_settings(settings: Settings, layout: Layout) -> None:
    layout.config.write_text(dump_settings(settings))
    assert load_settings(layout.config, environ={}) == settings


def test_supervisord_reads_its_configuration(settings: Settings, layout: Layout) -> None:
    every = services.services(settings, layout, inner_ports(settings))
    parsed = configparser.RawConfigParser(inline_comment_prefixes=(";", "#"))
    parsed.read_string(configuration(layout, every))
    for service in every:
        section = parsed[f"program:{service.name}"]
        assert section["killasgroup"] == "true" and section["stopsignal"] == "TERM"
        assert section["stdout_logfile"] == str(layout.log(service.name))


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20))
def test_words_survive_supervisords_splitting(word: str) -> None:
    import shlex

    assert shlex.split(f"program {_quote(word)} end") == ["program", word, "end"]


def test_a_missing_tool_is_named() -> None:
    with pytest.raises(ToolMissing, match="no-such-tool is not installed here: install some-package"):
        tool("no-such-tool", "some-package")


def test_sockets_of_a_deep_state_are_elsewhere(tmp_path: Path) -> None:
    deep = Layout(tmp_path / ("x" * 100))
    assert len(str(deep.supervisor_socket)) < 100
    assert deep.supervisor_socket != Layout(tmp_path / ("y" * 100)).supervisor_socket
    assert str(Layout(Path("/a/.tide")).supervisor_socket) == "/a/.tide/stack/supervisor.sock"
