"""Backups of a ledger on either database, brought back into either; what is refused."""

import shutil
import sqlite3
from pathlib import Path

import pytest
from control_fakes import make_draft

from tide_platform.config import Settings, draft_digest
from tide_platform.control.audit import Action, Entry
from tide_platform.control.backup import MANIFEST, BackupUnusable, NotEmpty, back_up, restore
from tide_platform.control.champion import store_draft
from tide_platform.control.hands import previous_of
from tide_platform.control.ledger import Ledger
from tide_platform.control.records import Cut, Scan
from tide_platform.control.rollouts import Order
from tide_platform.serving.drafts import deployed_draft, stage_draft


def settings_of(folder: Path, ledger: str) -> Settings:
    settings = Settings(state=folder / "state")
    settings.storage.uri = str(folder / "store")
    settings.registry.tracking_uri = f"sqlite:///{folder}/mlflow.db"
    settings.ledger.url = ledger
    return settings


@pytest.fixture
def deployed(tmp_path: Path, ledger_url: str) -> tuple[Settings, str, str]:
    """A deployment that served two drafts, one after the other."""
    settings = settings_of(tmp_path / "first", ledger_url)
    digests = []
    for name in ("old", "new"):
        digest = make_draft(tmp_path / "made", name)
        digests.append(digest)
        store_draft(settings, tmp_path / "made" / digest, digest)
        stage_draft(settings, tmp_path / "made" / digest)
    with sqlite3.connect(tmp_path / "first" / "mlflow.db") as mlflow:
        mlflow.execute("CREATE TABLE runs (name TEXT)")
        mlflow.execute("INSERT INTO runs VALUES ('kept')")
    ledger = Ledger(ledger_url)
    ledger.cut("demo", ledger.scan("demo"), Scan(1, 9, 9, 0), [Cut(0, 9, 1, 9, 90, {"by": "samples"})])
    rollout = ledger.rollouts.begin("demo", Order(digests[1], "run r", "better"), digests[0], ["http://s"])
    ledger.rollout_served(rollout, {"seconds": 1.0})
    ledger.guard.bar("demo", "f00", "ann", "slow")
    ledger.controls.put("demo", "memory", {"draft": digests[1]})
    ledger.close()
    return settings, digests[0], digests[1]


@pytest.mark.parametrize("into", ["sqlite", "postgresql"])
def test_a_lost_deployment_comes_back(
    deployed: tuple[Settings, str, str], into: str, tmp_path: Path, request: pytest.FixtureRequest
):
    settings, old, new = deployed
    made = back_up(settings, tmp_path / "backup")
    assert made.champion == new and sorted(made.drafts) == sorted([old, new]) and made.mlflow
    # another machine: neither its disk nor its databases are there
    url = f"sqlite:///{tmp_path}/second/ledger.db"
    if into == "postgresql":
        url = request.getfixturevalue("postgres").database(f"back_{tmp_path.name[-20:]}".lower())
    other = settings_of(tmp_path / "second", url)
    restore(other, tmp_path / "backup")
    before, after = Ledger(settings.ledger.url), Ledger(url)
    assert after.windows("demo") == before.windows("demo")
    assert after.audit("demo") == before.audit("demo")
    assert after.deployments("demo") == before.deployments("demo")
    assert after.champion("demo") == new and previous_of(after, "demo", new) == old
    assert after.guard.barred("demo", "f00") is not None
    assert after.controls.get("demo", "memory") == {"draft": new}
    pointed = deployed_draft(other)
    assert pointed is not None and pointed.name == draft_digest(pointed) == new
    with sqlite3.connect(tmp_path / "second" / "mlflow.db") as mlflow:
        assert mlflow.execute("SELECT name FROM runs").fetchall() == [("kept",)]
    # it goes on: new rows get new numbers
    after.note(Entry("demo", "ann", Action.FROZEN, "a test"))
    rollout = after.rollouts.begin("demo", Order(old, "ann", "back"), new, ["http://s"])
    after.rollout_served(rollout, {})
    assert after.champion("demo") == old
    before.close()
    after.close()


def test_nothing_is_written_over(deployed: tuple[Settings, str, str], tmp_path: Path):
    settings, _, _ = deployed
    back_up(settings, tmp_path / "backup")
    with pytest.raises(NotEmpty, match="backup"):
        back_up(settings, tmp_path / "backup")
    with pytest.raises(NotEmpty, match=r"mlflow\.db"):
        restore(settings, tmp_path / "backup")
    (tmp_path / "first" / "mlflow.db").unlink()
    with pytest.raises(NotEmpty, match="of the ledger"):
        restore(settings, tmp_path / "backup")
    assert not (tmp_path / "first" / "mlflow.db").exists()


def test_a_damaged_backup_is_refused_before_anything_is_written(
    deployed: tuple[Settings, str, str], tmp_path: Path
):
    settings, _, new = deployed
    back_up(settings, tmp_path / "backup")
    other = settings_of(tmp_path / "second", f"sqlite:///{tmp_path}/second/ledger.db")
    weights = tmp_path / "backup" / "drafts" / new / "model.safetensors"
    weights.write_text("bad")
    with pytest.raises(BackupUnusable, match=r"model\.safetensors is missing or damaged"):
        restore(other, tmp_path / "backup")
    (tmp_path / "backup" / MANIFEST).unlink()
    with pytest.raises(BackupUnusable, match="was not finished"):
        restore(other, tmp_path / "backup")
    assert not (tmp_path / "second").exists()


def test_a_backup_that_died_is_none(
    deployed: tuple[Settings, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings, _, _ = deployed

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("tide_platform.control.backup.write_json", die)
        with pytest.raises(KeyboardInterrupt):
            back_up(settings, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    assert back_up(settings, tmp_path / "backup").drafts, "what it left is in nobody's way"
    shutil.rmtree(tmp_path / "backup")


def test_a_deployment_that_served_nothing_yet_has_a_backup_too(tmp_path: Path):
    settings = settings_of(tmp_path, f"sqlite:///{tmp_path}/ledger.db")
    made = back_up(settings, tmp_path / "backup")
    assert made.champion is None and made.drafts == [] and not made.mlflow
    other = settings_of(tmp_path / "second", f"sqlite:///{tmp_path}/second/ledger.db")
    assert restore(other, tmp_path / "backup") == made
