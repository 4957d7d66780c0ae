"""A server that starts in a cluster begins with the champion, whatever its volume holds."""

import shutil
from pathlib import Path

import pytest

from tests.unit.serving.fakes import write_draft
from tide_platform.config import Settings, draft_digest
from tide_platform.config.schema import Ledger as LedgerSettings
from tide_platform.config.schema import Storage
from tide_platform.control.champion import DraftNotStored, allowed_drafts, starting_draft, store_draft
from tide_platform.control.database import LedgerUnreachable
from tide_platform.control.ledger import opened
from tide_platform.control.rollouts import Order
from tide_platform.serving.drafts import mark_deployed, stage_draft

FIRST, SECOND = 0.0, 1.0


class World:
    """A deployment with a ledger and a store; ``pod()``: its settings on an empty volume of its own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.settings = self.pod("orchestrator")
        self.image = write_draft(folder / "image", FIRST)
        self.champion = write_draft(folder / "champion", SECOND)
        self.digest = draft_digest(self.champion)

    def pod(self, name: str) -> Settings:
        return Settings(
            state=self.folder / name,
            draft=self.folder / "image",
            ledger=LedgerSettings(url=f"sqlite:///{self.folder}/ledger.db"),
            storage=Storage(uri=str(self.folder / "store")),
        )

    def deploy(self) -> None:
        store_draft(self.settings, self.champion, self.digest)
        with opened(self.settings.ledger.url) as ledger:
            order = Order(self.digest, "run", "better")
            rollout = ledger.rollouts.begin("demo", order, draft_digest(self.image), ["http://a"])
            ledger.rollout_served(rollout, {})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_an_empty_volume_gets_the_champion_from_the_object_store(world: World) -> None:
    world.deploy()
    pod = world.pod("sglang-0")
    folder = starting_draft(pod)
    assert folder == pod.drafts_folder / world.digest and draft_digest(folder) == world.digest


def test_a_volume_with_an_older_champion_gets_the_new_one(world: World) -> None:
    pod = world.pod("sglang-0")
    _, old = stage_draft(pod, world.image)
    mark_deployed(pod, old)
    world.deploy()
    assert starting_draft(pod) == pod.drafts_folder / world.digest


def test_a_damaged_copy_on_the_volume_is_fetched_again(world: World) -> None:
    world.deploy()
    pod = world.pod("sglang-0")
    folder = starting_draft(pod)
    assert folder is not None
    (folder / "model.safetensors").write_bytes(b"torn")
    assert starting_draft(pod) == folder and draft_digest(folder) == world.digest


def test_another_draft_under_its_name_in_the_store_is_refused(world: World) -> None:
    world.deploy()
    shutil.rmtree(world.folder / "store")
    store_draft(world.settings, world.image, world.digest)
    with pytest.raises(DraftNotStored, match=world.digest):
        starting_draft(world.pod("sglang-0"))


def test_before_the_first_deployment_the_image_decides(world: World) -> None:
    assert starting_draft(world.pod("sglang-0")) is None and allowed_drafts(world.settings) == set()


def test_without_a_ledger_the_volume_decides_and_an_empty_one_does_not_start(world: World) -> None:
    pod = world.pod("sglang-0")
    pod.ledger.url = "postgresql+psycopg2://nobody@127.0.0.1:9/none"
    with pytest.raises(LedgerUnreachable):
        starting_draft(pod)
    _, old = stage_draft(pod, world.image)
    mark_deployed(pod, old)
    assert starting_draft(pod) == pod.drafts_folder / old and allowed_drafts(pod) == {old}


def test_both_drafts_of_a_rollout_are_right_while_it_runs(world: World) -> None:
    world.deploy()
    with opened(world.settings.ledger.url) as ledger:
        ledger.rollouts.begin("demo", Order("challenger", "run", "better"), world.digest, ["http://a"])
    assert allowed_drafts(world.settings) == {"challenger", world.digest}


def test_the_command_serves_it_in_a_cluster_only(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tide_platform.cli import serve as cli
    from tide_platform.config import dump_settings
    from tide_platform.config.cluster import Cluster
    from tide_platform.serving import serve as serving

    world.deploy()
    asked: list[Path | None] = []

    def serve(settings, say, draft, known, champion):
        asked.append(champion())
        return 0

    monkeypatch.setattr(serving, "serve", serve)
    for cluster in (None, Cluster()):
        pod = world.pod("sglang-0")
        pod.cluster = cluster
        (tmp_path / "tide.yaml").write_text(dump_settings(pod))
        with pytest.raises(cli.typer.Exit):
            cli.command(tmp_path / "tide.yaml", None, None, None, None, False)
    assert asked == [None, world.pod("sglang-0").drafts_folder / world.digest]


def test_what_is_served_is_what_was_asked_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from tide_platform.serving import serve as serving

    world.deploy()
    taken: list[Path | None] = []

    def stop(settings: Settings, draft: Path | None) -> None:
        taken.append(draft)
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "preflight", stop)
    pod = world.pod("sglang-0")
    with pytest.raises(KeyboardInterrupt):
        serving.serve(pod, print, champion=lambda: starting_draft(pod))
    assert taken == [pod.drafts_folder / world.digest]
