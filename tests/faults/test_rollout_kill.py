"""A deployer killed with SIGKILL at each step, on two real servers: whoever comes next makes all agree."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.integration.test_serve import TIDE, TINY, Serve
from tide_platform.config import Settings, draft_digest, load_settings
from tide_platform.control.champion import ensure_champion, store_draft
from tide_platform.control.ledger import Ledger
from tide_platform.control.mend import mend
from tide_platform.control.rollouts import Step
from tide_platform.draft.checkpoint import load_target_parts, new_draft, save_draft
from tide_platform.registry.mlflow_registry import CHAMPION, DraftRegistry
from tide_platform.serving.client import SglangClient
from tide_platform.serving.drafts import deployed_draft
from tide_platform.serving.launch import base_url

pytestmark = pytest.mark.integration
KEY = "a-key-of-this-test"


class Fleet:
    """Two servers that load drafts from one folder, one ledger, one registry."""

    def __init__(self, folder: Path, servers: list[Serve]):
        config = folder / "a" / "tide.yaml"
        raw = yaml.safe_load(config.read_text())
        raw["rollout"] = {"servers": [base_url(server.settings) for server in servers], "idle_seconds": 3}
        self.config = folder / "control.yaml"
        self.config.write_text(yaml.safe_dump(raw))
        self.settings: Settings = load_settings(self.config, {"TIDE_ADMIN_KEY": KEY})
        self.servers, self.ledger = servers, Ledger(self.settings.ledger.url)
        self.registry = DraftRegistry(self.settings)

    def register(self, folder: Path) -> str:
        digest = draft_digest(folder)
        run_id = self.registry.begin(digest, {"digest": digest}, {})
        self.registry.register(run_id, folder, digest, store_draft(self.settings, folder, digest), {}, {})
        self.registry.end(run_id)
        return digest

    def promote(self, digest: str) -> "subprocess.Popen[bytes]":
        argv = [*TIDE, "promote", digest, "--reason", "to be killed", "--config", self.config]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def step(self, known: int) -> Step | None:
        """Of the newest rollout, where there is one behind the first ``known``."""
        history = self.ledger.rollouts.history("demo")
        return history[-1].step if len(history) > known else None

    def agreed(self) -> str:
        """The digest that all of them name."""
        alias, pointer = self.registry.alias(CHAMPION), deployed_draft(self.settings)
        assert alias is not None
        if pointer is None:  # the server's own first draft
            assert not self.ledger.rollouts.history("demo")
        served = set()
        for server in self.servers:
            with SglangClient(base_url(server.settings), KEY) as client:
                served.add(client.status()["draft_digest"])
        assert served == {alias.digest} == {pointer.name if pointer else alias.digest}
        assert self.ledger.rollouts.unfinished("demo") is None
        assert self.ledger.champion("demo") in (alias.digest, None)
        return alias.digest


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("TIDE_ADMIN_KEY", KEY)
    monkeypatch.chdir(tmp_path)  # MLflow's artifacts
    parts = load_target_parts(TINY)
    for seed in (0, 1):
        save_draft(
            tmp_path / f"draft-{seed}", new_draft(parts, np.arange(64, 192), seed=seed), {"made_by": "test"}
        )
    shared = {
        "storage": {"uri": str(tmp_path / "store")},
        "registry": {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"},
        "ledger": {"url": f"sqlite:///{tmp_path}/ledger.db"},
    }
    (tmp_path / "a" / "state" / "drafts").mkdir(parents=True)
    (tmp_path / "b" / "state").mkdir(parents=True)
    (tmp_path / "b" / "state" / "drafts").symlink_to(tmp_path / "a" / "state" / "drafts")
    servers: list[Serve] = []
    with ExitStack() as stack:
        for name in ("a", "b"):
            serve = Serve(tmp_path / name, tmp_path / "draft-0", more=shared)
            stack.callback(_end, serve)
            servers.append(serve)
        for serve in servers:
            serve.wait_ready()
        fleet = Fleet(tmp_path, servers)
        stack.callback(fleet.ledger.close)
        yield fleet


def _end(serve: Serve) -> None:
    if serve.process.poll() is None:
        serve.process.terminate()
        serve.process.wait(60)
    serve.assert_nothing_left()


def test_a_deployer_killed_at_any_step_ends_in_agreement(fleet: Fleet, tmp_path: Path):
    first = ensure_champion(fleet.settings, fleet.ledger).digest
    second = fleet.register(tmp_path / "draft-1")
    assert fleet.agreed() == first
    for step in (Step.CANARY, Step.WATCHED, Step.WAVES, Step.PROMOTING):
        served = fleet.agreed()
        wanted, known = second if served == first else first, len(fleet.ledger.rollouts.history("demo"))
        process, reached = fleet.promote(wanted), None
        while process.poll() is None:
            reached = fleet.step(known)
            if reached is step:
                process.kill()
        process.wait()
        last = fleet.step(known)  # it may have come further before the signal was there
        assert last is not None, process.stdout.read() if process.stdout else ""
        mend(fleet.settings, fleet.ledger)
        assert fleet.agreed() in (served, wanted), f"killed at {step}, it had come to {last}"
        if last in (Step.CANARY, Step.WATCHED):
            assert fleet.agreed() == served, "a draft that one server alone had is taken back"
    served = fleet.agreed()
    process = fleet.promote(second if served == first else first)
    assert process.wait(60) == 0
    assert fleet.agreed() != served == fleet.ledger.rollouts.history("demo")[-1].previous

    _strayed(fleet, first if fleet.agreed() == second else second)


def _strayed(fleet: Fleet, other: str) -> None:
    """Somebody gives one server another draft past the platform: it gets the champion back."""
    champion = fleet.agreed()
    strayed = base_url(fleet.servers[1].settings)
    with SglangClient(strayed, KEY) as client:
        client.reload_draft((fleet.settings.drafts_folder / other).resolve(), other)
    assert mend(fleet.settings, fleet.ledger).done == [f"{strayed} served {other}, serves {champion} again"]
    assert fleet.agreed() == champion
