import pytest

from tests.unit.serving.fakes import write_draft
from tide_platform.config import Settings, draft_digest
from tide_platform.serving.admin import AdminKeyMissing, admin_key_file, ensure_admin_key, read_admin_key
from tide_platform.serving.drafts import DraftMissing, mark_deployed, resolve_draft, stage_draft


@pytest.fixture
def settings(tmp_path):
    return Settings(state=tmp_path / "state", draft=write_draft(tmp_path / "first"))


def test_staged_under_its_digest(settings):
    staged, digest = stage_draft(settings, settings.draft)
    assert staged == settings.drafts_folder / digest and draft_digest(staged) == digest
    assert sorted(path.name for path in staged.iterdir()) == ["config.json", "model.safetensors", "tide.json"]
    assert stage_draft(settings, settings.draft) == (staged, digest)
    assert stage_draft(settings, staged) == (staged, digest)


def test_a_damaged_staged_draft_is_replaced(settings):
    staged, digest = stage_draft(settings, settings.draft)
    (staged / "model.safetensors").write_bytes(b"damaged")
    stage_draft(settings, settings.draft)
    assert draft_digest(staged) == digest


def test_the_deployed_draft_comes_before_the_first(settings, tmp_path):
    assert resolve_draft(settings) == settings.draft
    staged, digest = stage_draft(settings, write_draft(tmp_path / "second", 1.0))
    mark_deployed(settings, digest)
    assert resolve_draft(settings) == staged
    (staged / "model.safetensors").unlink()
    assert resolve_draft(settings) == settings.draft


def test_no_draft(tmp_path):
    with pytest.raises(DraftMissing, match=r"serving\.k: 0"):
        resolve_draft(Settings(state=tmp_path, draft=tmp_path / "none"))


def test_admin_key_is_made_once_and_private(settings, monkeypatch):
    monkeypatch.delenv("TIDE_ADMIN_KEY", raising=False)
    with pytest.raises(AdminKeyMissing, match="TIDE_ADMIN_KEY"):
        read_admin_key(settings)
    key = ensure_admin_key(settings)
    assert admin_key_file(settings).stat().st_mode & 0o777 == 0o600
    assert ensure_admin_key(settings) == read_admin_key(settings) == key
    monkeypatch.setenv("TIDE_ADMIN_KEY", "given")
    assert ensure_admin_key(settings) == "given"


def test_servers_that_share_the_folder_may_stage_at_once(settings, monkeypatch):
    from pathlib import Path

    rename = Path.rename

    def other_was_first(self, target):
        write_draft(target)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", other_was_first)
    staged, digest = stage_draft(settings, settings.draft)
    assert draft_digest(staged) == digest
    assert [path.name for path in settings.drafts_folder.iterdir()] == [digest]
