"""The ledger's tables on SQLite and PostgreSQL: made, migrated, locked, refused."""

import multiprocessing
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Connection, create_engine, delete, insert, text, update
from sqlalchemy.exc import DatabaseError

from tide_platform.control import tables
from tide_platform.control.audit import Action, Entry
from tide_platform.control.database import Database, LedgerTooNew, LedgerUnreachable, revision
from tide_platform.control.ledger import Ledger
from tide_platform.control.migrations import config, upgrade
from tide_platform.control.records import Cut, Scan, WindowHeld
from tide_platform.control.states import State, WindowKey


def test_the_migrations_make_just_these_tables(ledger_url: str):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    database = Database(ledger_url)
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []
        assert revision(connection) == tables.HEAD == ScriptDirectory.from_config(config()).get_current_head()
    database.close()


def test_a_ledger_from_before_there_were_migrations_keeps_its_windows(ledger_url: str):
    engine = create_engine(ledger_url)
    with engine.begin() as connection:
        upgrade(connection, None, "0001")
        connection.execute(text("DROP TABLE alembic_version"))
        connection.execute(
            text(
                'INSERT INTO windows (deployment, "window", state, attempt, after_row, last_row, '
                "lance_version, samples, tokens, created_at, updated_at)"
                " VALUES ('demo', 'w00001', 'owed', 2, -1, 9, 7, 10, 100, 1.0, 2.0)"
            )
        )
    engine.dispose()
    ledger = Ledger(ledger_url)
    record = ledger.get(WindowKey("demo", "w00001"))
    assert (record.attempt, record.samples, record.rule) == (2, 10, None)
    assert ledger.claim(record.key, "run", 2).state is State.RUNNING
    ledger.close()


def test_a_ledger_of_a_later_version_is_refused(ledger_url: str):
    Database(ledger_url).close()
    engine = create_engine(ledger_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(LedgerTooNew, match="revision 9999"):
        Database(ledger_url)


def test_a_ledger_that_does_not_answer_is_named_without_its_password(tmp_path: Path):
    url = f"postgresql+psycopg2://tide:secret@/ledger?host={tmp_path}"
    with pytest.raises(LedgerUnreachable, match=r"check ledger\.url") as raised:
        Database(url)
    assert "secret" not in str(raised.value)


def test_the_audit_is_only_ever_added_to(ledger_url: str):
    ledger = Ledger(ledger_url)
    ledger.note(Entry("demo", "ann@host", Action.PROMOTED, "by hand", digest="abc", detail={"k": 2}))
    database = Database(ledger_url)
    for statement in (update(tables.audit).values(reason="other"), delete(tables.audit)):
        with pytest.raises(DatabaseError, match="only ever added to"), database.write() as connection:
            connection.execute(statement)
    (entry,) = ledger.audit("demo")
    assert (entry.actor, entry.action, entry.digest, entry.detail) == (
        "ann@host",
        Action.PROMOTED,
        "abc",
        {"k": 2},
    )
    assert entry.at > 0 and ledger.audit("other") == []
    database.close()
    ledger.close()


def test_a_failed_transaction_leaves_nothing(ledger_url: str):
    database = Database(ledger_url)

    def insert_scan(connection: Connection) -> None:
        row = {"deployment": "demo", "version": 1, "rows": 1, "last_row": 2**40, "pending": 0}
        connection.execute(insert(tables.scans).values(row))

    with pytest.raises(RuntimeError), database.write() as connection:
        insert_scan(connection)
        raise RuntimeError
    with database.write() as connection:
        insert_scan(connection)
    database.close()


def _claim(url: str, number: int, start) -> None:
    ledger = Ledger(url)
    start.wait()
    try:
        ledger.claim(WindowKey("demo", f"w{1 + number % 2:05d}"), f"run-{number}", 1)
    except WindowHeld:
        ledger.close()
        raise SystemExit(3) from None
    ledger.close()


def _cut(url: str, start) -> None:
    ledger = Ledger(url)
    start.wait()
    cuts = [Cut(-1, 9, 7, 10, 100), Cut(9, 19, 7, 10, 100)]
    found = ledger.cut("demo", Scan(), Scan(7, 20, 19, 0), cuts)
    ledger.close()
    raise SystemExit(len(found))


def _together(target, arguments: list[tuple]) -> list[int | None]:
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(len(arguments))
    children = [context.Process(target=target, args=(*each, start)) for each in arguments]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    return sorted(child.exitcode or 0 for child in children)


def test_of_processes_that_cut_and_claim_at_once_one_gets_it(ledger_url: str):
    """The database is empty: the three race for its migration as well."""
    assert _together(_cut, [(ledger_url,)] * 3) == [0, 0, 2]
    assert _together(_claim, [(ledger_url, number) for number in range(4)]) == [0, 3, 3, 3]
    ledger = Ledger(ledger_url)
    held = [record for record in ledger.open("demo") if record.holder]
    assert len(held) == 1 and held[0].state is State.RUNNING
    ledger.close()


def test_a_reader_does_not_wait_for_a_writer(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path}/ledger.db")
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with database.read() as connection:
        assert revision(connection) == tables.HEAD
    other.close()
    database.close()
