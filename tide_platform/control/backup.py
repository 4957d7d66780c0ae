"""A deployment's memory in a folder, and back: the ledger's tables as JSON lines, which any database takes;
the champion's files and those of the draft before it; MLflow's database where it is a file.

The dataset is not in it: it is captured anew, and object storage has its own ways of being kept.
"""

import contextlib
import json
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, func, insert, make_url, select, text

from tide_platform.config import Settings, TideError, draft_digest
from tide_platform.config.files import sync, write_json
from tide_platform.control.champion import draft_key, fetch_draft, store_draft
from tide_platform.control.database import Database
from tide_platform.control.hands import previous_of
from tide_platform.control.ledger import Ledger
from tide_platform.control.tables import HEAD, metadata
from tide_platform.serving.drafts import mark_deployed, stage_draft
from tide_platform.store.objects import ObjectStore, sha256_of

MANIFEST, TABLES, DRAFTS, MLFLOW = "backup.json", "ledger", "drafts", "mlflow.db"


class BackupUnusable(TideError):
    """The folder is no whole backup, or one of another version."""

    def __init__(self, folder: Path, why: str):
        super().__init__(f"{folder}: {why}")
        self.folder, self.why = folder, why


class NotEmpty(TideError):
    """What a restore would write over."""

    def __init__(self, what: str):
        super().__init__(f"{what} holds something already; a restore writes over nothing: move it away first")
        self.what = what


@dataclass(frozen=True)
class Backup:
    """What a folder holds. ``files``: SHA-256 by relative path."""

    deployment: str
    revision: str  # of the ledger's tables
    at: float  # Unix time, seconds
    champion: str | None
    rows: dict[str, int]  # by table
    drafts: list[str]
    mlflow: bool
    files: dict[str, str] = field(default_factory=dict)


def back_up(settings: Settings, folder: Path) -> Backup:
    """Writes ``folder``, which must not be there; whole or not at all.

    Every deployment of the ledger is in it, drafts of this one alone. Raises :class:`NotEmpty`, and what
    ledger and object store raise.
    """
    if folder.exists():
        raise NotEmpty(str(folder))
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    with _ledger(settings) as (ledger, database):
        rows = _dump(database, work / TABLES)
        champion = ledger.champion(settings.deployment)
        before = previous_of(ledger, settings.deployment, champion) if champion else None
    drafts = [digest for digest in (champion, before) if digest is not None]
    for digest in drafts:
        shutil.copytree(fetch_draft(settings, digest), work / DRAFTS / digest)
    source = mlflow_file(settings)
    if source is not None and source.exists():
        _copy_sqlite(source, work / MLFLOW)
    files = {
        path.relative_to(work).as_posix(): sha256_of(path)
        for path in sorted(work.rglob("*"))
        if path.is_file()
    }
    made = Backup(
        settings.deployment, HEAD, time.time(), champion, rows, drafts, (work / MLFLOW).exists(), files
    )
    write_json(work / MANIFEST, asdict(made), indent=1)
    for path in work.rglob("*"):
        sync(path)
    work.rename(folder)
    sync(folder.absolute().parent)
    return made


def restore(settings: Settings, folder: Path) -> Backup:
    """Brings ledger, drafts, pointer and MLflow's database back. Nothing is written over, and nothing is
    written before all of the backup was found to be whole.

    Raises :class:`BackupUnusable`, :class:`NotEmpty`, and what ledger and object store raise.
    """
    made = read(folder)
    target = mlflow_file(settings)
    if made.mlflow and target is not None and target.exists():
        raise NotEmpty(str(target))
    with _ledger(settings) as (_, database), database.write() as db:
        for table in metadata.sorted_tables:
            if db.execute(select(func.count()).select_from(table)).scalar():
                raise NotEmpty(f"table {table.name} of the ledger")
        for table in metadata.sorted_tables:
            _load(db, table, folder / TABLES / f"{table.name}.jsonl")
    objects = ObjectStore(settings.storage)
    objects.ensure_bucket()
    for digest in made.drafts:
        if not objects.exists(draft_key(settings, digest)):
            store_draft(settings, folder / DRAFTS / digest, digest)
        stage_draft(settings, folder / DRAFTS / digest)
    if made.champion is not None:
        mark_deployed(settings, made.champion)
    if made.mlflow and target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy_sqlite(folder / MLFLOW, target)
    return made


def read(folder: Path) -> Backup:
    """The backup in ``folder``, every file of it verified. Raises :class:`BackupUnusable`."""
    try:
        made = Backup(**json.loads((folder / MANIFEST).read_text()))
    except FileNotFoundError as error:
        raise BackupUnusable(
            folder, f"no {MANIFEST} in it: no backup, or one that was not finished"
        ) from error
    except (ValueError, TypeError) as error:
        raise BackupUnusable(folder, f"{MANIFEST} cannot be read ({error})") from error
    if made.revision != HEAD:
        raise BackupUnusable(
            folder, f"of ledger revision {made.revision}; restore it with the version of tide that made it"
        )
    for name, sum_ in made.files.items():
        path = folder / name
        if not path.is_file() or sha256_of(path) != sum_:
            raise BackupUnusable(folder, f"{name} is missing or damaged")
    for digest in made.drafts:
        if draft_digest(folder / DRAFTS / digest) != digest:
            raise BackupUnusable(folder, f"draft {digest} is another one")
    return made


def mlflow_file(settings: Settings) -> Path | None:
    """MLflow's database where it is a file of this machine: of a SQLite store, or of the local stack's
    server. None: it is backed up with its own database's tools.
    """
    uri = settings.registry.tracking_uri
    if uri.startswith("sqlite:"):
        database = make_url(uri).database
        return Path(database) if database else None
    own = settings.state / "mlflow.db"
    return own if own.exists() or (settings.state / "stack").exists() else None


@contextlib.contextmanager
def _ledger(settings: Settings) -> Iterator[tuple[Ledger, Database]]:
    ledger, database = Ledger(settings.ledger.url), Database(settings.ledger.url)
    try:
        yield ledger, database
    finally:
        database.close()
        ledger.close()


def _dump(database: Database, folder: Path) -> dict[str, int]:
    """All tables as they are at one moment; rows by table."""
    folder.mkdir()
    counts = {}
    with database.write() as db:  # nobody changes one table between another's reading
        for table in metadata.sorted_tables:
            rows = [dict(row) for row in db.execute(select(table).order_by(*table.primary_key)).mappings()]
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{table.name}.jsonl").write_text(lines, encoding="utf-8")
            counts[table.name] = len(rows)
    return counts


def _load(db: Connection, table: Table, path: Path) -> None:
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not rows:
        return
    db.execute(insert(table), rows)
    if db.dialect.name == "postgresql" and "id" in table.c:
        # rows came with their numbers: the next one that is made must get a new one
        sequence = f"pg_get_serial_sequence('{table.name}', 'id')"
        db.execute(text(f"SELECT setval({sequence}, (SELECT max(id) FROM {table.name}))"))


def _copy_sqlite(source: Path, target: Path) -> None:
    """Whole, also while somebody writes to it."""
    with (
        contextlib.closing(sqlite3.connect(source)) as reading,
        contextlib.closing(sqlite3.connect(target)) as writing,
    ):
        reading.backup(writing)
