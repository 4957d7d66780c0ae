"""What the HTTP process makes of the answers of several data-parallel ranks."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from test_reload import _World as Models

from tide_platform.config.engine import EngineConfig
from tide_platform.engine import data_ranks, live
from tide_platform.engine.control import Control
from tide_platform.engine.live import Live
from tide_platform.engine.reload import ReloadFailed


class Rows:
    """What Control needs of the row hooks."""

    def __init__(self, number: int):
        self.capture = None
        self.now = 100.0 + number
        self.live: Live | None = Live("old", clock=lambda: self.now, monotonic=lambda: self.now)
        self.changes: list[str] = []

    def draft_changed(self, digest: str) -> None:
        self.changes.append(digest)
        assert self.live is not None
        self.live.draft_changed(digest)

    def finish(self, count: int = 1) -> None:
        """Requests that end on this rank, one a second."""
        assert self.live is not None
        for _ in range(count):
            req = SimpleNamespace(
                origin_input_ids=[0], output_ids=[1], spec_verify_ct=1, spec_num_correct_drafts=1
            )
            self.live.prefill([req])
            self.live.decoded(1)
            self.now += 1
            self.live.ended(req, "ann", 4, "stop")


class Server:
    """Ranks with toy models, each behind its real Control."""

    def __init__(self, folder: Any, ranks: int):
        config = EngineConfig.model_construct(deployment="d", target_digest="t", draft_digest="old")
        self.models, self.rows, self.controls = [], [], []
        for rank in range(ranks):
            (folder / str(rank)).mkdir()
            self.models.append(Models(folder / str(rank)))
            self.rows.append(Rows(rank))
            served: Any = self.models[-1].served
            rows: Any = self.rows[-1]
            self.controls.append(Control(config, "unit", "target_only", served, rows, list, rank))
        self.asked: list[dict[str, Any]] = []

    async def call(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Replies come in any order."""
        self.asked.append(message)
        return data_ranks.in_order([control.handle(message) for control in reversed(self.controls)])

    def status(self) -> dict[str, Any]:
        return data_ranks.merged_status(asyncio.run(self.call({"op": "status"})))

    def reload(self, digest: str = "new") -> dict[str, Any]:
        stamp = self.models[0].file()
        message = {"op": "reload", "folder": str(self.models[0].folder), "stamp": stamp}
        return asyncio.run(data_ranks.reload(self, message | {"digest": digest, "ignored": []}))

    def checksums(self) -> list[str]:
        return [models.served.draft_checksum() for models in self.models]


@pytest.fixture(params=[1, 2, 3])
def server(request: pytest.FixtureRequest, tmp_path: Any) -> Server:
    return Server(tmp_path, request.param)


def test_all_ranks_take_a_draft(server: Server) -> None:
    done = server.reload()
    assert done["ok"] and done["ranks"] == server.checksums()
    assert len(set(server.checksums())) == 1
    status = server.status()
    assert status["draft_digest"] == "new" and status["reloads"] == 1
    assert all(control._former is None for control in server.controls)  # no copy of the old weights stays
    assert all(rows.changes == ["new"] for rows in server.rows)


@pytest.mark.parametrize("fault", ["raise", "rebind", "target"])
def test_one_rank_that_cannot_keeps_all_from_it(server: Server, fault: str) -> None:
    before, broken = server.checksums(), len(server.models) - 1
    server.models[broken].draft.fault = fault
    refused = server.reload()
    assert refused["type"] == ReloadFailed.__name__ and "still served" in refused["error"]
    assert (f"rank {broken}: " in refused["error"]) == (broken > 0)
    if fault != "target":
        assert server.checksums() == before
    status = server.status()
    assert status["draft_digest"] == "old" and status["reloads"] == 0
    assert all(control._former is None for control in server.controls)
    assert all(rows.changes in ([], ["new", "old"]) for rows in server.rows)
    server.models[broken].draft.fault = None
    assert server.reload()["ok"] and server.status()["draft_digest"] == "new"


def test_an_undone_draft_unpacks_its_weights_anew(tmp_path: Any) -> None:
    server = Server(tmp_path, 2)
    server.models[1].draft.fault = "raise"
    server.reload()
    assert server.models[0].unpacked == 2  # loaded, put back


def test_drafts_that_differ_are_no_drafts_digest(tmp_path: Any) -> None:
    server = Server(tmp_path, 2)
    server.controls[1].draft_digest = "other"
    assert server.status()["draft_digest"] == "old|other"


def test_a_fault_of_one_rank_is_told_for_the_server() -> None:
    good = {"dp_rank": 0, "draft_digest": "d"}
    assert data_ranks.merged_status([good]) == good
    bad = {"dp_rank": 1, "error": "gone", "type": "InternalError"}
    assert data_ranks.merged_status([good, bad]) == {"error": "rank 1: gone", "type": "InternalError"}


def test_counts_of_capture_are_added_up() -> None:
    def rank(samples: int, **of: Any) -> dict[str, Any]:
        counts = {"samples": samples, "rows": 2, "bytes": 3, "open": 1, "dropped": {"ring_full": 1}}
        more = {"skipped": {"opt_out": samples}, "ignored": {}, "cost": {"rounds": samples, "round_s": 0.5}}
        return {"live": True, "enabled": True, "error": None, "sampling_rate": 0.5} | counts | more | of

    merged = data_ranks.merged_capture([rank(1), rank(4, error="no disk", live=False)])
    assert merged == rank(5) | {
        "live": False,
        "error": "no disk",
        "rows": 4,
        "bytes": 6,
        "open": 2,
        "dropped": {"ring_full": 2},
        "cost": {"rounds": 5, "round_s": 1.0},
    }


class TestRequests:
    @staticmethod
    def told(requests: data_ranks.Requests, after: int) -> dict[str, Any]:
        return asyncio.run(requests.since(after))

    def test_every_request_once_under_one_numbering(self, server: Server) -> None:
        requests, seen = data_ranks.Requests(server), []
        for turn in range(4):
            for rank, rows in enumerate(server.rows):
                rows.finish((turn + rank) % 3)
            told = self.told(requests, len(seen))
            assert told["missed"] == 0 and not told["restarted"]
            seen += told["requests"]
        assert [one["number"] for one in seen] == list(range(1, len(seen) + 1))
        assert len(seen) == sum((turn + rank) % 3 for turn in range(4) for rank in range(len(server.rows)))
        assert self.told(requests, len(seen)) | {"draft": "old"} == self.told(requests, len(seen))
        assert self.told(requests, 2)["requests"] == seen[2:]

    def test_steps_of_all_ranks_are_added_up(self, server: Server) -> None:
        for rows in server.rows:
            rows.finish(2)
        assert self.told(data_ranks.Requests(server), 0)["rounds_by_batch"] == {"1": 2 * len(server.rows)}

    def test_more_than_one_answer_holds_is_all_read(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(data_ranks, "MOST", 8)
        monkeypatch.setattr(Live.since, "__defaults__", (8,))
        monkeypatch.setattr(live.Newest.since, "__defaults__", (8,))
        for rows in server.rows:
            rows.finish(20)
        requests, seen = data_ranks.Requests(server), []
        while told := self.told(requests, len(seen))["requests"]:
            seen += told
        assert [one["number"] for one in seen] == list(range(1, 20 * len(server.rows) + 1))

    def test_what_a_rank_forgot_is_missed(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(live, "BUFFER", 4)
        server = Server(server.models[0].folder, 2)
        requests = data_ranks.Requests(server)
        server.rows[0].finish(6)
        server.rows[1].finish(1)
        told = self.told(requests, 0)
        assert told["missed"] + len(told["requests"]) == told["last"] == 7 and len(told["requests"]) == 4

    def test_a_refusal_is_handed_on(self, server: Server) -> None:
        server.rows[0].live = None
        assert self.told(data_ranks.Requests(server), 0)["type"] == "NotCounted"
