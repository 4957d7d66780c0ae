"""Upkeep on a local folder: what expires, what is merged, what is removed, what a reader keeps."""

import os
import time
from dataclasses import replace

import pytest

from tests.synthetic import STREAM, assert_same, make_sample
from tide_platform.config import Settings
from tide_platform.store.compaction import FANOUT, Part, choose
from tide_platform.store.durable import manifest_name
from tide_platform.store.errors import CommitRaced, ManifestDamaged, VersionGone
from tide_platform.store.hidden_states import open_store
from tide_platform.store.objects import ObjectStore
from tide_platform.store.pending import Entry, Pending
from tide_platform.store.upkeep import Upkeep

DAY, NOW = 86400.0, 1.8e9 + 40 * 86400


@pytest.fixture
def settings(tmp_path):
    return Settings(storage={"uri": str(tmp_path / "store")}, state=tmp_path)


@pytest.fixture
def store(settings):
    store = open_store(settings)
    store.ensure(STREAM)
    return store


def upkeep(settings, store, pinned=(), now=NOW):
    return Upkeep(settings, store, ObjectStore(settings.storage), lambda: set(pinned), lambda: now)


def fragments(store):
    return store.handle.require(fresh=True).get_fragments()


def ids(store, **of):
    return {ref.sample_id for ref in store.refs(**of)}


def test_small_fragments_of_one_tenant_and_day_merge_and_row_ids_stay(settings, store):
    samples = [
        make_sample(f"s{n}", 3000 if n % 5 == 0 else 20, seed=n, tenant="ab"[n % 2], captured_at=NOW - n % 3)
        for n in range(40)
    ]
    for number, sample in enumerate(samples):
        store.append([sample], [str(number)])
    before = {ref.sample_id: ref.row_id for ref in store.refs()}
    keeper = upkeep(settings, store, now=NOW)
    assert keeper.run()
    assert keeper.counts.compactions >= 2 and len(fragments(store)) < 2 * FANOUT + 2
    assert {ref.sample_id: ref.row_id for ref in store.refs()} == before
    for fragment in fragments(store):
        assert len(set(fragment.to_table(columns=["tenant"])["tenant"].to_pylist())) == 1
    for found, sample in zip(store.load([s.meta.sample_id for s in samples]), samples, strict=True):
        assert_same(found, sample)
    keeper.lease.release()
    assert upkeep(settings, store, now=NOW + DAY).run(), "the day is over: each tenant's rest is merged"
    assert len(fragments(store)) == 3, "two tenants, and the fragment that appends touch"
    assert store.sample_ids(NOW - 1) == ids(store, where=f"captured_at >= {NOW - 1}")


def test_merges_that_never_end_do_not_starve_the_clean_up(settings, store):
    """Each call has time for one step, and finds fragments to merge each time."""
    keeper = upkeep(settings, store, now=time.time() + DAY)
    number = 0
    while keeper.counts.versions_removed < 300:
        for _ in range(2 * FANOUT):
            store.append([make_sample(f"s{number}", 4, captured_at=NOW)], [str(number)])
            number += 1
        keeper.run(0.0)
        assert number < 2000, keeper.counts
    assert keeper.counts.compactions > 2


def test_choice():
    parts = [Part(n, "a", "2026-01-02", 100, False) for n in range(FANOUT + 1)]
    assert len(choose(parts, 500, "2026-01-02")) == FANOUT, "all but the lowest id"
    assert choose(parts[:-1], 500, "2026-01-02") == []
    assert len(choose(parts[:4], 500, "2026-01-03")) == 3, "a day that is over"
    assert len(choose(parts[:4], 5, "2026-01-02")) == 3, "too many fragments"
    assert choose([replace(parts[0], deleted=True), *parts[1:3]], 500, "2026-01-02")[0].fragment_id == 0
    large = [replace(part, size=1 << 30) for part in parts]
    assert choose(large, 500, "2026-01-03") == []


def test_expiry_drops_rows_by_tenant_and_beats_pins(settings, store):
    old, young = NOW - 3 * DAY, NOW - 100
    store.append(
        [make_sample("old-a", captured_at=old), make_sample("old-b", tenant="b", captured_at=old)], "1"
    )
    store.append(
        [make_sample("mixed", captured_at=NOW - DAY - 7300), make_sample("kept", captured_at=young)], "2"
    )
    store.append([make_sample("ref", tenant="reference", captured_at=old)], "3")
    pinned = store.tip().version
    settings.retention.tenants = {"b": 24 * 30}
    settings.retention.days = 1
    settings.maintain.keep_hours = 1e-9
    time.sleep(0.01)
    keeper = upkeep(settings, store, {pinned})
    keeper._now = lambda: NOW
    keeper.run(everything=True)
    assert ids(store) == {"old-b", "kept", "ref"} and keeper.counts.expired_samples == 2
    assert not any(f.metadata.deletion_file for f in fragments(store)), "their bytes are gone as well"
    with pytest.raises(VersionGone, match=str(pinned)):
        store.refs(pinned)
    content = b"".join(p.read_bytes() for p in (settings.state / "store" / "demo").rglob("*") if p.is_file())
    assert b"old-a" not in content and b"r-mixed" not in content and b"r-kept" in content


def test_a_pinned_version_stays_readable_and_the_others_go(settings, store):
    for number in range(20):
        store.append([make_sample(f"s{number}", 2000, captured_at=NOW)], [str(number)])
    pinned = store.tip().version - 4
    wanted = ids(store, version=pinned)
    settings.maintain.keep_hours = 1e-9
    time.sleep(0.01)
    keeper = upkeep(settings, store, {pinned}, now=time.time() + 60)
    keeper.run(everything=True)
    assert keeper.counts.versions_removed > 15 and keeper.counts.bytes_removed > 0
    refs = store.refs(pinned)
    assert {ref.sample_id for ref in refs} == wanted and len(list(store.load(refs, pinned))) == len(wanted)
    with pytest.raises(VersionGone):
        store.refs(pinned - 1)


def test_versions_younger_than_the_setting_stay(settings, store):
    for number in range(4):
        store.append([make_sample(f"s{number}")], [str(number)])
    keeper = upkeep(settings, store, now=time.time())
    keeper.run(everything=True)
    assert keeper.counts.versions_removed == 0


def test_orphans_go_at_their_age_unless_an_entry_names_them(settings, store):
    store.append([make_sample("a", 3000)], ["1"])
    dead = store.write([make_sample("dead", 3000)])
    waiting = store.write([make_sample("waiting", 3000)])
    entry = Entry.of("w", STREAM, ["2"], {"waiting": 1.8e9}, waiting)
    Pending(ObjectStore(settings.storage), "demo").put(entry)
    files = {path for path in (settings.state / "store").rglob("data/**/*") if path.is_file()}
    young = upkeep(settings, store, now=time.time())
    young.run(everything=True)
    assert all(path.exists() for path in files)
    young.lease.release()
    keeper = upkeep(settings, store, now=time.time() + 25 * 3600)
    keeper.run(everything=True)
    assert keeper.counts.orphans_removed == 2 and sum(path.exists() for path in files) == len(files) - 2
    store.commit(waiting, ["2"], store.snapshot())
    assert len(list(store.load(["a", "waiting"]))) == 2
    assert dead


def test_one_process_keeps_up_at_a_time(settings, store):
    first, second = upkeep(settings, store), upkeep(settings, store)
    assert first.lease.try_hold()
    assert second.run() and second.counts.to_json() == upkeep(settings, store).counts.to_json()
    first.lease.release()
    assert second.run()


def test_an_append_is_never_harmed_by_a_merge(settings, store):
    for number in range(12):
        store.append([make_sample(f"s{number}")], [str(number)])
    snapshot = store.snapshot()
    written = store.write([make_sample("late")])
    now = time.time()
    assert upkeep(settings, store, now=now).run() and len(fragments(store)) < 6
    store.commit(written, ["late"], snapshot)
    assert len(ids(store)) == 13
    snapshot, written = store.snapshot(), store.write([make_sample("later")])
    store.remove(["s0"])  # the fragment of the lowest id goes: a snapshot before it is refused
    with pytest.raises(CommitRaced):
        store.commit(written, ["later"], snapshot)


@pytest.mark.parametrize("damage", ["empty", "half", "panic"])
def test_a_newest_manifest_that_cannot_be_read_is_set_aside_with_a_report(settings, store, damage, caplog):
    store.append([make_sample("a"), make_sample("b")], ["1"])
    store.append([make_sample("c"), make_sample("d"), make_sample("e")], ["2"])
    path = settings.state / "store" / "demo" / "hidden_states.lance" / "_versions"
    path /= manifest_name(store.tip().version)
    content = bytearray(path.read_bytes())
    content[3] ^= 0x10
    path.write_bytes({"empty": b"", "half": content[: len(content) // 2], "panic": bytes(content)}[damage])
    os.utime(path)
    with pytest.raises(ManifestDamaged, match="tide maintain"):
        open_store(settings).tip()
    fresh = open_store(settings)
    keeper = upkeep(settings, fresh)
    keeper.run()
    assert keeper.counts.recovered == 1 and "at most 3 samples are lost" in caplog.text
    assert ids(fresh) == {"a", "b"}
    aside = list((settings.state / "store" / "demo" / "set-aside").rglob("*.manifest"))
    assert len(aside) == 1 and len(list(aside[0].parent.glob("report.json"))) == 1
    fresh.append([make_sample("c")], ["2"])
    assert ids(open_store(settings)) == {"a", "b", "c"}


def test_ensure_recovers_too(settings, store):
    store.append([make_sample("a")], ["1"])
    folder = settings.state / "store" / "demo" / "hidden_states.lance" / "_versions"
    (folder / manifest_name(store.tip().version)).write_bytes(b"")
    fresh = open_store(settings)
    fresh.ensure(STREAM)
    assert fresh.tip().rows == 0
