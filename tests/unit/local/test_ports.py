"""Ports are checked before anything is started, and named with the setting that moves them."""

import socket

import pytest

from tests.free_ports import free_port
from tide_platform.config import Settings
from tide_platform.local.errors import PortTaken
from tide_platform.local.ports import SETTINGS, check_ports, free_ports, inner_ports, is_free, with_free_ports


@pytest.fixture
def settings() -> Settings:
    return with_free_ports(Settings.model_validate({}))


@pytest.fixture
def listener():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", free_port()))
        sock.listen()
        yield sock.getsockname()[1]


def test_free_ports_differ_and_are_free() -> None:
    ports = free_ports(12, taken=set())
    assert len(set(ports)) == 12
    assert all(is_free(port) for port in ports)


def test_taken_ports_are_not_chosen() -> None:
    first = free_ports(1, set())[0]
    assert first not in free_ports(50, {first})


@pytest.mark.parametrize("setting", SETTINGS.values())
def test_a_taken_port_is_named_with_its_setting(settings: Settings, listener: int, setting: str) -> None:
    section, name = setting.split(".")
    setattr(getattr(settings, section), name, listener)
    with pytest.raises(PortTaken) as caught:
        check_ports(settings)
    assert setting in str(caught.value) and str(listener) in str(caught.value)
    assert f"TIDE_{section.upper()}__{name.upper()}" in str(caught.value)


def test_one_port_for_two_services_is_refused(settings: Settings) -> None:
    settings.stack.mlflow_port = settings.stack.s3_port
    with pytest.raises(PortTaken):
        check_ports(settings)


def test_free_ones_pass_and_the_given_settings_stay(listener: int) -> None:
    given = Settings.model_validate({})
    given.stack.mlflow_port = listener
    check_ports(with_free_ports(given))
    assert given.stack.mlflow_port == listener


def test_inner_ports_avoid_the_outer_ones(settings: Settings) -> None:
    inner = inner_ports(settings)
    assert len(set(vars(inner).values())) == 8
    assert not set(vars(inner).values()) & {settings.stack.s3_port, settings.serving.port}
