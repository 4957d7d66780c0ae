"""Messages to a real webhook on loopback: delivered, tried again, given up; addresses stay secret."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.webhook import Webhook, webhook
from tests.free_ports import free_port
from tide_platform.config import Settings, dump_settings, load_settings
from tide_platform.control.notify import VARIABLE, AddressesUnreadable, Message, Notifier, addresses

HELLO = Message("demo: draft abc rolled back", "it was slow", "failure")


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as kept:
        yield kept


def test_a_message_arrives(hook: Webhook) -> None:
    outcome = Notifier([hook.url], 3, 5.0).tell(HELLO)
    assert (outcome.taken, outcome.failed, outcome.told) == (1, [], True)
    (body,) = hook.bodies
    assert (body["title"], body["message"], body["type"]) == (HELLO.title, HELLO.body, "failure")


def test_a_refusal_is_tried_again_so_often_and_no_more(hook: Webhook) -> None:
    hook.refuse = 2
    assert Notifier([hook.url], 3, 5.0, pause_s=0.01).tell(HELLO).taken == 1 and hook.asked == 3
    hook.refuse = 100
    outcome = Notifier([hook.url], 3, 5.0, pause_s=0.01).tell(HELLO)
    assert hook.asked == 6 and not outcome.told
    assert outcome.failed == ["address 1 (json)"]


def test_one_dead_address_keeps_the_message_from_no_other(
    hook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    dead = f"json://user:s3cret@127.0.0.1:{free_port()}/"
    with caplog.at_level(logging.DEBUG):
        outcome = Notifier([dead, "nonsense://s3cret", hook.url], 2, 5.0, pause_s=0.01).tell(HELLO)
    assert outcome.taken == 1 and outcome.told
    assert outcome.failed == ["address 1 (json)", "address 2 (nonsense)"]
    assert "could not be delivered to address 1 (json), address 2 (nonsense)" in caplog.text
    assert HELLO.title in caplog.text and "s3cret" not in caplog.text


def test_without_an_address_the_log_has_it(caplog: pytest.LogCaptureFixture) -> None:
    outcome = Notifier([], 3, 5.0).tell(HELLO)
    assert outcome.told and not outcome.taken
    assert [record.levelname for record in caplog.records] == ["WARNING"] and HELLO.body in caplog.text


def test_addresses_come_from_the_variable_and_the_file_and_never_stand_in_the_configuration(
    tmp_path: Path,
) -> None:
    (tmp_path / "urls").write_text("# mail\nmailto://a:s3cret@example.org\n\njson://127.0.0.1:1/\n")
    environ = {VARIABLE: "json://one/ json://two/\njson://three/", "TIDE_NOTIFY__TRIES": "2"}
    environ["TIDE_NOTIFY__URLS_FILE"] = str(tmp_path / "urls")
    settings = load_settings(environ=environ)
    assert settings.notify.tries == 2 and "json://one" not in dump_settings(settings)
    assert addresses(settings, environ) == [
        *("json://one/", "json://two/", "json://three/"),
        *("mailto://a:s3cret@example.org", "json://127.0.0.1:1/"),
    ]
    assert addresses(Settings(), {}) == []


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    settings = Settings()
    settings.notify.urls_file = tmp_path / "gone"
    with pytest.raises(AddressesUnreadable, match=r"gone: No such file.*TIDE_NOTIFY__URLS"):
        addresses(settings, {})


def test_the_command_says_whether_it_arrived(
    hook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import typer

    from tide_platform.cli.notify import command

    (tmp_path / "tide.yaml").write_text(json.dumps({"deployment": "prod", "notify": {"tries": 1}}))
    monkeypatch.setenv(VARIABLE, hook.url)
    with pytest.raises(typer.Exit) as done:
        command("hello", tmp_path / "tide.yaml")
    assert done.value.exit_code == 0 and hook.titles == ["prod: tide notify"]
    hook.refuse = 1
    with pytest.raises(typer.Exit) as failed:
        command("hello", tmp_path / "tide.yaml")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(typer.Exit) as nobody:
        command("hello", tmp_path / "tide.yaml")
    assert failed.value.exit_code == nobody.value.exit_code == 1
    shown = capsys.readouterr()
    assert "delivered to 0 addresses, not to address 1 (json)" in shown.out and VARIABLE in shown.err
