"""The soak's parts: what it does to the loop, and what it makes of what it saw."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tide_platform.bench.samples import random_sample
from tide_platform.capture.record import StreamMeta
from tide_platform.config import Settings
from tide_platform.config.locks import locked
from tide_platform.local.layout import Layout
from tide_platform.local.soak import traffic
from tide_platform.local.soak.faults import POISONER, poison
from tide_platform.local.soak.figures import Check, Result, acceptance, nothing_lost
from tide_platform.local.soak.plan import soak_settings
from tide_platform.local.soak.traffic import Users, UsersFailed
from tide_platform.store.hidden_states import HiddenStates, open_store

STREAM = StreamMeta("t", hidden_size=8, vocab_size=64, aux_layer_ids=(1, 2, 3), teacher_k=4)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    settings = Settings(state=tmp_path)
    settings.storage.uri = str(tmp_path / "store")
    return settings


@pytest.fixture
def store(settings: Settings) -> HiddenStates:
    store = open_store(settings)
    store.ensure(STREAM)
    rng = np.random.default_rng(0)
    store.append([random_sample(STREAM, rng, f"s{n}", 12) for n in range(5)], ["first"])
    return store


def test_poisoned_samples_have_their_teacher_rows_elsewhere(settings: Settings, store: HiddenStates):
    assert poison(settings, 3) == 3
    refs = open_store(settings).refs()
    assert [ref.tenant for ref in refs[5:]] == [POISONER] * 3
    real = {sample.meta.sample_id: sample for sample in store.load(refs[:5])}
    for ruined in open_store(settings).load(refs[5:]):
        source = real[ruined.meta.sample_id.removeprefix(f"{POISONER}-")]
        for name, tensor in source.tensors.items():
            same = np.array_equal(ruined.tensors[name], tensor)
            assert same == (name not in ("teacher_ids", "teacher_logp")), name
        moved, rows = ruined.tensors["teacher_ids"].tolist(), source.tensors["teacher_ids"].tolist()
        assert sorted(moved) == sorted(rows)
    assert [ref.sample_id for ref in refs[:5]] == ["s0", "s1", "s2", "s3", "s4"], "the real ones stay"


def test_a_lost_sample_a_dropped_one_and_one_that_came_twice_are_told(
    settings: Settings, store: HiddenStates
):
    assert nothing_lost(settings, captured=5, dropped=0, foreign=0).holds
    assert nothing_lost(settings, captured=3, dropped=0, foreign=2).holds
    lost = nothing_lost(settings, captured=6, dropped=0, foreign=0)
    assert not lost.holds and lost.figures["in_dataset"] == 5
    assert not nothing_lost(settings, captured=5, dropped=1, foreign=0).holds


def test_a_soak_holds_where_every_check_does_and_nothing_ended_it(tmp_path: Path):
    result = Result()
    assert not result.holds, "nothing was shown"
    result.checks.append(Check("one", True, {"gain": 1.2}))
    assert result.holds
    result.write(tmp_path / "soak.json", drafts={"static": "d"})
    written = json.loads((tmp_path / "soak.json").read_text())
    assert written["holds"] is True and written["checks"][0]["figures"] == {"gain": 1.2}
    assert written["drafts"] == {"static": "d"}
    result.checks.append(Check("two", False))
    assert not result.holds
    late = Result([Check("one", True)], problem="no drift")
    assert not late.holds


def test_without_requests_there_is_no_acceptance():
    assert acceptance([], "d", "maths") == {"requests": 0, "acceptance_length": None, "token_ms": None}


class Server:
    """Takes what users send; ``errors``: what it refuses with."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[Any], int]] = []
        self.errors: list[str] = []
        self.seen = threading.Event()

    def run_traffic(self, url: str, prompts: list[Any], target: Path, **options: Any) -> Any:
        assert options["capture"] and options["max_new_tokens"] > 0
        self.batches.append((options["tenant"], prompts, options["concurrency"]))
        self.seen.set()
        return SimpleNamespace(requests=len(prompts) - len(self.errors), errors=self.errors)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(traffic, "run_traffic", server.run_traffic)
    monkeypatch.setattr(traffic, "load_workload", lambda name, split: [f"{name}-{n}" for n in range(10)])
    return server


@pytest.fixture
def users(server: Server) -> Iterator[Users]:
    users = Users("http://server", Path("target"), concurrency=2)
    yield users
    users.close()


def test_users_send_each_prompt_in_turn_and_begin_again(server: Server, users: Users):
    users.send("maths", 11)
    assert [tenant for tenant, _, _ in server.batches] == ["maths", "maths"]
    sent = [prompt for _, prompts, _ in server.batches for prompt in prompts]
    assert sent == [f"maths-{n % 10}" for n in range(11)] and users.sent == 11
    users.send("maths", 1)
    assert server.batches[-1][1] == ["maths-1"] and server.batches[-1][2] == 2


def test_users_go_on_until_something_else_is_wanted(server: Server, users: Users):
    users.want("code")
    assert server.seen.wait(10)
    users.want(None)
    count = len(server.batches)
    assert {tenant for tenant, _, _ in server.batches} == {"code"}
    users.want(None)
    assert len(server.batches) == count


def test_a_user_who_gets_no_answer_ends_the_soak(server: Server, users: Users):
    server.errors = ["refused"]
    users.want("maths")
    assert server.seen.wait(10)
    with pytest.raises(UsersFailed, match="1 requests of maths failed, the first: refused"):
        while True:
            users.check()


def test_it_begins_anew_in_a_state_of_its_own(tmp_path: Path) -> None:
    own = soak_settings(Settings(state=tmp_path))
    assert own.state == tmp_path / "soak" / "state"
    layout = Layout(own.state)
    layout.make()
    (layout.state / "ledger.db").write_text("windows of the soak before")
    (layout.objects / "sample").write_text("a sample")
    layout.config.write_text("settings")
    (tmp_path / "ledger.db").write_text("the deployment's own")
    with locked(layout.lock):
        layout.forget()
    assert [path for path in own.state.rglob("*") if path.is_file()] == [layout.lock]
    assert (tmp_path / "ledger.db").read_text() == "the deployment's own"
