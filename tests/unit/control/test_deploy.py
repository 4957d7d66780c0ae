"""Fenced deployment: whatever dies or lies, the alias follows the served draft."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tide_platform.config import Settings, draft_digest
from tide_platform.serving import deploy as module
from tide_platform.serving.client import ServerUnreachable
from tide_platform.serving.deploy import (
    Deployed,
    DeploymentBusy,
    NotJudged,
    NotServed,
    StagedDraftBroken,
    TargetChanged,
    deploy,
    deployment_lock,
)
from tide_platform.serving.drafts import deployed_draft


def make_draft(root: Path, text: str) -> Path:
    work = root / text
    work.mkdir(parents=True)
    (work / "config.json").write_text(json.dumps({"name": text}))
    (work / "model.safetensors").write_bytes(text.encode())
    return work.rename(root / draft_digest(work))


class FakeServer:
    """Serves a digest; ``refuses`` and ``lies`` say how a reload goes wrong."""

    def __init__(self, digest: str):
        self.digest, self.reloads = digest, 0
        self.refuses: set[str] = set()
        self.reply: dict[str, Any] = {"pause_s": 0.1, "weights_checksum": "w"}
        self.lose_reply = False

    def status(self) -> dict[str, Any]:
        return {"draft_digest": self.digest}

    def reload_draft(self, path: Path, digest: str) -> dict[str, Any]:
        self.reloads += 1
        assert draft_digest(path) == digest
        if digest not in self.refuses:
            self.digest = digest
        if self.lose_reply:
            raise ServerUnreachable("http://server", TimeoutError("read"))
        return {"ok": True, "target_checksum_before": "t", "target_checksum_after": "t", **self.reply}


class World:
    def __init__(self, folder: Path):
        self.settings = Settings(state=folder)
        root = self.settings.drafts_folder
        self.old, self.new = make_draft(root, "old").name, make_draft(root, "new").name
        self.server = FakeServer(self.old)
        self.passed = {(self.new, self.old)}
        self.alias = self.old

    def deploy(self) -> Deployed:
        return deploy(
            self.settings,
            self.new,
            server=self.server,
            passed_against=lambda champion: (self.new, champion) in self.passed,
            fetch=lambda digest: self.settings.drafts_folder / digest,
            promote=self.promote,
            still_wanted=lambda: None,
        )

    def promote(self, digest: str) -> None:
        assert self.server.digest == digest
        self.alias = digest


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_judged_challenger_is_served_and_promoted(world: World):
    deployed = world.deploy()
    assert (world.server.digest, world.alias) == (world.new, world.new)
    assert (deployed.previous, deployed.pause_s) == (world.old, 0.1)
    assert deployed_draft(world.settings) == world.settings.drafts_folder / world.new


def test_a_second_deployment_only_finds_it_done(world: World):
    world.deploy()
    again = world.deploy()
    assert (again.previous, world.server.reloads) == (None, 1)


def test_death_between_reload_and_alias_is_finished_by_the_next_run(world: World):
    world.server.digest = world.new  # reloaded, then the run died
    assert world.deploy().previous is None
    assert (world.alias, world.server.reloads) == (world.new, 0)


def test_a_verdict_against_another_champion_does_not_count(world: World):
    world.server.digest = make_draft(world.settings.drafts_folder, "other").name
    with pytest.raises(NotJudged, match="judged again"):
        world.deploy()
    assert (world.alias, world.server.reloads) == (world.old, 0)


def test_a_lost_reply_is_read_back(world: World):
    world.server.lose_reply = True
    world.deploy()
    assert world.alias == world.new


def test_a_refused_reload_moves_nothing(world: World):
    world.server.refuses = {world.new}
    with pytest.raises(NotServed, match="the previous draft serves again"):
        world.deploy()
    assert (world.server.digest, world.alias) == (world.old, world.old)
    assert deployed_draft(world.settings) is None


def test_a_server_that_serves_something_else_gets_the_previous_draft_back(world: World):
    real = world.server.reload_draft

    def garble(path: Path, digest: str) -> dict[str, Any]:
        reply = real(path, digest)
        if digest == world.new:
            world.server.digest = "garbled"
        return reply

    world.server.reload_draft = garble  # type: ignore[method-assign]
    with pytest.raises(NotServed, match="reads back garbled"):
        world.deploy()
    assert (world.server.digest, world.alias) == (world.old, world.old)


def test_a_changed_target_is_an_alarm(world: World):
    world.server.reply = {"target_checksum_after": "x"}
    with pytest.raises(TargetChanged, match="restart the server"):
        world.deploy()
    assert world.alias == world.old


def test_broken_files_never_reach_the_server(world: World):
    (world.settings.drafts_folder / world.new / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(StagedDraftBroken):
        world.deploy()
    assert world.server.reloads == 0


def _hold_lock(settings: Settings, ready: Any, done: Any) -> None:
    with deployment_lock(settings):
        ready.set()
        done.wait(20)


def test_one_process_deploys_at_a_time(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0.2)
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=_hold_lock, args=(world.settings, ready, done))
    process.start()
    try:
        assert ready.wait(20)
        with pytest.raises(DeploymentBusy):
            world.deploy()
    finally:
        done.set()
        process.join()
    world.deploy()
