"""Files and folders, on a local folder; the same cases run on S3 in tests/integration."""

import pytest

from tide_platform.config import ConfigError
from tide_platform.config.schema import Storage
from tide_platform.store.errors import ConditionalPutIgnored, ObjectCorrupt, ObjectMissing, StoreUnavailable
from tide_platform.store.location import Location
from tide_platform.store.objects import INVENTORY, ObjectStore


@pytest.fixture
def objects(tmp_path):
    return ObjectStore(Storage(uri=str(tmp_path / "store")))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "draft"
    (folder / "nested").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "nested" / "weights").write_bytes(b"w" * 100_000)
    return folder


def test_bytes(objects):
    objects.ensure_bucket()
    assert objects.put_bytes("a/b", b"1") and objects.get_bytes("a/b") == b"1"
    assert not objects.put_bytes("a/b", b"2", only_if_absent=True) and objects.get_bytes("a/b") == b"1"
    assert objects.exists("a/b") and not objects.exists("a")
    assert objects.list("a/") == ["a/b"] and objects.list("nothing/") == []
    with pytest.raises(ObjectMissing, match="a/c"):
        objects.get_bytes("a/c")


def test_folder(objects, folder, tmp_path):
    sums = objects.put_folder(folder, "demo/drafts/abc/")
    assert set(sums) == {"config.json", "nested/weights"} and objects.exists("demo/drafts/abc")
    fetched = tmp_path / "out" / "abc"
    assert objects.get_folder("demo/drafts/abc", fetched) == sums
    assert (fetched / "nested" / "weights").read_bytes() == b"w" * 100_000
    assert objects.get_folder("demo/drafts/abc", fetched) == sums, "one that is there is verified"
    (fetched / "config.json").write_text("[]")
    with pytest.raises(ObjectCorrupt, match=r"config\.json"):
        objects.get_folder("demo/drafts/abc", fetched)


def test_a_folder_that_was_not_stored_whole_is_not_there(objects, folder, tmp_path):
    objects.put_folder(folder, "x")
    (tmp_path / "store" / "x" / INVENTORY).unlink()
    assert not objects.exists("x")
    with pytest.raises(ObjectMissing):
        objects.get_folder("x", tmp_path / "out")


def test_a_damaged_file_is_never_placed(objects, folder, tmp_path):
    objects.put_folder(folder, "x")
    (tmp_path / "store" / "x" / "nested" / "weights").write_bytes(b"v" * 100_000)
    with pytest.raises(ObjectCorrupt, match="weights"):
        objects.get_folder("x", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_probe(objects, monkeypatch):
    objects.probe_conditional_put()
    assert objects.list() == []
    real = objects._files.put
    monkeypatch.setattr(objects._files, "put", lambda name, data, only_if_absent=False: real(name, data))
    with pytest.raises(ConditionalPutIgnored, match="If-None-Match"):
        objects.probe_conditional_put()


def test_location(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    s3 = Location.of(Storage(uri="s3://bucket/a/b/", endpoint="http://127.0.0.1:1"))
    assert (s3.bucket, s3.prefix, s3.uri("x")) == ("bucket", "a/b", "s3://bucket/a/b/x")
    options = s3.lance_options()
    assert options["allow_http"] == "true" and options["aws_access_key_id"] == "id"
    assert "allow_http" not in Location.of(Storage(uri="s3://bucket", endpoint="https://x")).lance_options()
    local = Location.of(Storage(uri=str(tmp_path)))
    assert local.lance_options() is None and local.uri("x") == f"{tmp_path}/x"
    for uri in ("gs://bucket", "s3://"):
        with pytest.raises(ConfigError, match=r"storage\.uri"):
            Location.of(Storage(uri=uri))


def test_an_s3_that_is_down(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    objects = ObjectStore(Storage(uri="s3://bucket", endpoint="http://127.0.0.1:9"))
    with pytest.raises(StoreUnavailable, match="s3://bucket"):
        objects.get_bytes("x")
