"""Waiting for services: all at once, and a dead one is noticed while others are still starting."""

from pathlib import Path

import pytest

from tide_platform.config import Settings
from tide_platform.local import ready
from tide_platform.local.errors import ServiceFailed, StackError
from tide_platform.local.layout import Layout
from tide_platform.local.supervisor import State


class FakeSupervisor:
    def __init__(self, **states: str):
        self._states = states

    def states(self) -> dict[str, State]:
        return {name: State(state, 1, 3, "") for name, state in self._states.items()}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "_PAUSE_S", 0.01)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path)
    layout.make()
    layout.log("mlflow").write_text("".join(f"line {n}\n" for n in range(100)) + "\n")
    return layout


def _wait(supervisor: FakeSupervisor, layout: Layout, probes: dict, seconds: float = 5.0) -> dict[str, float]:
    limits = dict.fromkeys(probes, seconds)
    return ready.wait_ready(supervisor, layout, probes, limits, lambda line: None)  # pyright: ignore[reportArgumentType]


def test_all_are_waited_for_together(layout: Layout) -> None:
    answers = iter([False, True])
    probes = {"mlflow": lambda: next(answers), "ingest": lambda: True}
    assert set(_wait(FakeSupervisor(mlflow="RUNNING", ingest="RUNNING"), layout, probes)) == set(probes)


def test_one_that_ended_is_said_with_the_end_of_its_log(layout: Layout) -> None:
    supervisor = FakeSupervisor(mlflow="EXITED", ingest="STARTING")
    with pytest.raises(ServiceFailed, match=r"mlflow ended \(exit status 3\)") as caught:
        _wait(supervisor, layout, {"ingest": lambda: False, "mlflow": lambda: False})
    assert caught.value.last_lines[-1] == "line 99" and len(caught.value.last_lines) == 12


def test_the_deadline_tells_the_last_problem(layout: Layout) -> None:
    def refuse() -> bool:
        raise ConnectionRefusedError("connection refused")

    with pytest.raises(ServiceFailed, match=r"not ready after 0 s \(connection refused\)"):
        _wait(FakeSupervisor(mlflow="RUNNING"), layout, {"mlflow": refuse}, seconds=0.05)
    with pytest.raises(ServiceFailed, match="is started again"):
        _wait(FakeSupervisor(mlflow="BACKOFF"), layout, {"mlflow": refuse}, seconds=0.05)


class Webserver:
    """Answers with one message after the other, then with definitions that are loaded."""

    def __init__(self, *messages: str):
        self.messages, self.reloads = list(messages), 0

    def locations(self) -> list[dict[str, object]]:
        error = {"__typename": "PythonError", "message": self.messages.pop(0)} if self.messages else {"x": 1}
        return [{"name": "tide", "loadStatus": "LOADED", "locationOrLoadError": error}]

    def reload_locations(self) -> None:
        self.reloads += 1


def test_a_code_server_that_does_not_answer_yet_is_waited_for(monkeypatch):
    webserver = Webserver("dagster._core.errors.DagsterUserCodeUnreachableError: Could not reach user code")
    monkeypatch.setattr(ready, "Dagster", lambda url: webserver)
    with pytest.raises(OSError, match="Could not reach"):
        ready._definitions_loaded(Settings())
    assert webserver.reloads == 1
    assert ready._definitions_loaded(Settings())


def test_definitions_that_are_wrong_are_not_waited_for(monkeypatch):
    webserver = Webserver("ModuleNotFoundError: No module named 'assets'")
    monkeypatch.setattr(ready, "Dagster", lambda url: webserver)
    with pytest.raises(StackError, match="No module named"):
        ready._definitions_loaded(Settings())
    assert webserver.reloads == 0
