"""Which draft a server starts with, and the folder that it may load drafts from."""

import os
import shutil
import tempfile
from pathlib import Path

from tide_platform.config import Settings, TideError, draft_digest

POINTER = "champion"


class DraftMissing(TideError):
    """No draft to serve."""


def resolve_draft(settings: Settings) -> Path:
    """The draft to start with: the champion deployed last, else ``draft``, else the shipped one.

    Raises :class:`DraftMissing`.
    """
    pointed = deployed_draft(settings)
    if pointed is not None:
        return pointed
    folder = Path(settings.draft) if settings.draft else shipped_draft()
    if not folder.is_dir():
        raise DraftMissing(
            f"draft {folder}: no such folder; set `draft`, or `serving.k: 0` to serve without one"
        )
    return folder


def shipped_draft() -> Path:
    """The base draft for the default target, part of the project."""
    return Path(__file__).resolve().parents[2] / "drafts" / "smollm2-135m-general"


def deployed_draft(settings: Settings) -> Path | None:
    """The staged champion that :func:`mark_deployed` named last, if its files are still there."""
    try:
        digest = (settings.drafts_folder / POINTER).read_text().strip()
    except FileNotFoundError:
        return None
    folder = settings.drafts_folder / digest
    return folder if (folder / "model.safetensors").is_file() else None


def mark_deployed(settings: Settings, digest: str) -> None:
    """From now on a server of this state folder starts with the staged draft ``digest``."""
    settings.drafts_folder.mkdir(parents=True, exist_ok=True)
    work = settings.drafts_folder / f".{POINTER}-{os.getpid()}"
    with work.open("w") as file:
        file.write(digest + "\n")
        file.flush()
        os.fsync(file.fileno())
    work.replace(settings.drafts_folder / POINTER)


def stage_draft(settings: Settings, folder: Path) -> tuple[Path, str]:
    """Copy a draft to ``<drafts folder>/<digest>``, whole or not at all: (staged folder, digest).

    A staged folder whose content is no longer that of its name is replaced.
    """
    digest = draft_digest(folder)
    root = settings.drafts_folder
    staged = root / digest
    if staged.is_dir():
        if folder.resolve() == staged.resolve() or _is_intact(staged, digest):
            return staged, digest
        shutil.rmtree(staged)
    root.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".stage-", dir=root))
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix in {".json", ".safetensors"}:
                shutil.copyfile(path, work / path.name)
        work.chmod(0o755)
        try:
            work.rename(staged)
        except OSError:  # servers that share the folder start at once: another was first
            if not _is_intact(staged, digest):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return staged, digest


def _is_intact(folder: Path, digest: str) -> bool:
    try:
        return draft_digest(folder) == digest
    except (TideError, ValueError):
        return False
