"""Tables of the user's: made, checked, fenced, and never lost sight of."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.core.errors import BadInput, Misconfigured, SinkDown
from sublet.queues.sinks import rows, sqlite
from sublet.queues.sinks.other_databases import SqlalchemySink, open_sqlalchemy, results_table
from sublet.queues.sinks.postgres import open_postgres
from sublet.queues.sinks.rows import TableName, pieces, rows_of
from sublet.queues.sinks.sqlite import open_sqlite
from tests.conftest import need
from tests.homes import wait_until
from tests.queues.sinks.results import made
from tests.queues.sinks.rig import PostgresPlace, SqlitePlace

ALL = "key TEXT PRIMARY KEY, queue TEXT, item INTEGER, item_key TEXT, delivery INTEGER, body TEXT, result TEXT, stored_at TEXT"
WRONG = {
    "id INTEGER PRIMARY KEY, image TEXT": "key, queue",
    ALL.replace("result TEXT, ", ""): "no column result",
    ALL.replace("delivery INTEGER", "delivery TEXT"): "delivery",
    ALL.replace(" PRIMARY KEY", ""): "neither its primary key nor UNIQUE",
    ALL.replace("TEXT PRIMARY KEY", "TEXT")
    + ", PRIMARY KEY (key, delivery)": "neither its primary key nor UNIQUE",
}
CUT = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename IS NOT NULL"
UNIQUE = ALL.replace("TEXT PRIMARY KEY", "TEXT UNIQUE") + ", id INTEGER, note TEXT DEFAULT 'mine'"


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", ["sqlite", "sqlalchemy"])
def test_a_table_of_another_shape_in_sqlite(wrong: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.db"
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute(f"CREATE TABLE results ({wrong})")
        before = db.execute("SELECT sql FROM sqlite_schema").fetchall()
    with pytest.raises(BadInput, match=WRONG[wrong]) as caught:
        open_sqlite(f"sqlite:{file}") if kind == "sqlite" else open_sqlalchemy(f"sqlite+pysqlite:///{file}")
    assert "CREATE TABLE" in caught.value.remedy
    with contextlib.closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT sql FROM sqlite_schema").fetchall() == before


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
def test_a_table_of_another_shape_in_postgres(wrong: str, scheme: str, postgres: PostgresPlace) -> None:
    postgres.sql(f"CREATE TABLE results ({wrong})")
    opener = open_postgres if scheme == "postgresql" else open_sqlalchemy
    with pytest.raises(BadInput, match=WRONG[wrong]):
        opener(postgres.plain.replace("postgresql:", f"{scheme}:"))


def test_a_table_of_the_users_that_fits(tmp_path: Path, postgres: PostgresPlace) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "mine.db")) as db:
        db.execute(f"CREATE TABLE Mine ({UNIQUE})")
    postgres.sql(f"CREATE TABLE mine ({UNIQUE})")
    address = f"{postgres.plain}&table={postgres.schema}.mine"
    for sink in (
        open_sqlite(f"sqlite:{tmp_path}/mine.db?table=mine"),
        open_postgres(address),
        open_sqlalchemy(address.replace("postgresql:", "postgresql+psycopg:")),
    ):
        sink.store([made(1, delivery=2)])
        sink.store([made(1, delivery=1, result="old"), made(2)])
        assert sink.known(["images/1", "images/2", "images/3"]) == {"images/1", "images/2"}
        sink.close()
    assert postgres.sql("SELECT note, result FROM mine ORDER BY key") == [
        ("mine", "[1,2]"),
        ("mine", "[2,1]"),
    ]


def test_views_are_no_tables(tmp_path: Path, postgres: PostgresPlace) -> None:
    postgres.sql(f"CREATE TABLE under ({ALL})")
    postgres.sql("CREATE VIEW results AS SELECT * FROM under")
    with pytest.raises(BadInput, match="no table"):
        open_postgres(postgres.plain)
    with contextlib.closing(sqlite3.connect(tmp_path / "v.db")) as db:
        db.execute("CREATE VIEW results AS SELECT 1 AS key")
    with pytest.raises(BadInput, match="view"):
        open_sqlite(f"sqlite:{tmp_path}/v.db")


def test_columns_of_json(postgres: PostgresPlace) -> None:
    """JSONB holds no NUL: that is said, and nothing of the batch is stored."""
    postgres.sql(
        f"CREATE TABLE results ({ALL.replace('body TEXT', 'body JSON').replace('result TEXT', 'result JSONB')})"
    )
    sink = open_postgres(postgres.plain)
    sink.store([made(1, result={"label": "cat"})])
    assert postgres.sql("SELECT result->>'label', body->>'n' FROM results") == [("cat", "1")]
    with pytest.raises(BadInput, match="nothing of the batch"):
        sink.store([made(2), made(3, result="a\x00b")])
    assert sink.known(["images/2", "images/3"]) == set()
    sink.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "sqlalchemy"])
def test_a_constraint_of_the_users(kind: str, tmp_path: Path, postgres: PostgresPlace) -> None:
    """`BadInput`, once, and not a race that is run again for ever."""
    columns = ALL.replace("item INTEGER", "item INTEGER CHECK (item < 100)")
    with contextlib.closing(sqlite3.connect(tmp_path / "c.db")) as db:
        db.execute(f"CREATE TABLE results ({columns})")
    postgres.sql(f"CREATE TABLE results ({columns})")
    sink = {
        "sqlite": lambda: open_sqlite(f"sqlite:{tmp_path}/c.db"),
        "postgres": lambda: open_postgres(postgres.plain),
        "sqlalchemy": lambda: open_sqlalchemy(postgres.plain.replace("postgresql:", "postgresql+psycopg:")),
    }[kind]()
    with pytest.raises(BadInput, match="nothing of the batch"):
        sink.store([made(1), made(100)])
    assert sink.known(["images/1", "images/100"]) == set()
    sink.store([made(1)])
    assert sink.known(["images/1"]) == {"images/1"}
    sink.close()


def test_half_a_surrogate_in_a_name(tmp_path: Path) -> None:
    sink = open_sqlite(f"sqlite:{tmp_path}/a.db")
    with pytest.raises(BadInput, match="surrogate"):
        sink.store([made(1, item_key="\udcff.png")])


def test_a_large_batch_is_one_transaction(postgres: PostgresPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    postgres.sql(f"CREATE TABLE results ({ALL.replace('item INTEGER', 'item INTEGER CHECK (item <> 58)')})")
    monkeypatch.setattr(rows, "BYTES_AT_ONCE", 5000)
    batch = [made(n, result="x" * 900) for n in range(60)]
    assert len(list(pieces(rows_of(batch)))) > 5
    sink = open_postgres(postgres.plain)
    with pytest.raises(BadInput):
        sink.store(batch)
    assert postgres.sql("SELECT count(*) FROM results") == [(0,)]
    sink.store(batch[:58])
    assert postgres.sql("SELECT count(*) FROM results") == [(58,)]
    sink.close()


# --- SQLite --------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "results.db"


def mode(of: Path) -> str:
    with contextlib.closing(sqlite3.connect(of)) as db:
        return str(db.execute("PRAGMA journal_mode").fetchone()[0])


@pytest.mark.parametrize(("good", "given"), [((3, 0, 0), "wal"), ((99, 0, 0), "delete")])
def test_a_new_file_gets_a_log_where_it_is_safe(
    file: Path, good: tuple[int, int, int], given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "GOOD_LOG", good)
    sink = open_sqlite(f"sqlite:{file}")
    sink.store([made(1)])
    assert mode(file) == given
    sink.close()


@pytest.mark.parametrize("given", ["wal", "delete"])
def test_a_file_of_the_users_keeps_its_mode_and_is_durable(file: Path, given: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute(f"PRAGMA journal_mode = {given}")
        db.execute("CREATE TABLE mine (x)")
    sink = open_sqlite(f"sqlite:{file}")
    sink.store([made(1)])
    assert mode(file) == given
    assert sink._run(lambda db: db.execute("PRAGMA synchronous").fetchone()) == (3,)
    sink.close()


@pytest.mark.parametrize("given", ["wal", "delete"])
def test_the_user_reads_in_the_same_process(file: Path, given: str) -> None:
    """With Python's sqlite3, between batches: two copies of SQLite would take each other's log away, and what comes after be seen by nobody."""
    with contextlib.closing(sqlite3.connect(file)) as db:
        db.execute(f"PRAGMA journal_mode = {given}")
        db.execute("CREATE TABLE mine (x)")
    sink = open_sqlite(f"sqlite:{file}")
    for n in range(1, 4):
        sink.store([made(n)])
        with contextlib.closing(sqlite3.connect(file)) as db:
            assert db.execute("SELECT count(*) FROM results").fetchone() == (n,)
    sink.close()


@pytest.mark.parametrize("good", [(3, 0, 0), (99, 0, 0)], ids=["log", "journal"])
def test_a_file_that_was_deleted_takes_no_more_results(
    file: Path, good: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no name any more is no place for them."""
    monkeypatch.setattr(sqlite, "GOOD_LOG", good)
    sink = open_sqlite(f"sqlite:{file}")
    sink.store([made(1)])
    for replaced in (False, True):
        for path in file.parent.glob("results.db*"):
            path.unlink()
        if replaced:
            with contextlib.closing(sqlite3.connect(file)) as db:
                db.execute("CREATE TABLE another (x)")
        sink.store([made(2)])
        with contextlib.closing(sqlite3.connect(file)) as db:
            assert db.execute("SELECT key FROM results").fetchall() == [("images/2",)]
    sink.close()


def test_a_table_that_was_dropped_is_made_again(file: Path, postgres: PostgresPlace) -> None:
    other = file.with_name("other.db")
    sinks = [
        open_sqlite(f"sqlite:{file}"),
        open_postgres(postgres.plain),
        open_sqlalchemy(f"sqlite+pysqlite:///{other}"),
    ]
    for sink in sinks:
        sink.store([made(1)])
    postgres.sql("DROP TABLE results")
    for path in (file, other):
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("DROP TABLE results")
    for sink in sinks:
        sink.store([made(2)])
        assert sink.known(["images/1", "images/2"]) == {"images/2"}
        sink.close()


def test_what_is_known_is_durable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have been killed between its write and its sync."""
    monkeypatch.setattr(sqlite, "GOOD_LOG", (3, 0, 0))
    sink = open_sqlite(f"sqlite:{file}")
    sink.store([made(1)])
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1]
    )
    assert sink.known(["images/2"]) == set()
    assert synced == []
    assert sink.known(["images/1"]) == {"images/1"}
    assert synced == [f"{file}-wal", str(file.parent)]
    sink.close()


def test_a_locked_file_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.1)
    sink = open_sqlite(f"sqlite:{file}")
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        with pytest.raises(SinkDown, match="locked"):
            sink.store([made(1)])
        db.execute("ROLLBACK")
    sink.store([made(1)])
    sink.close()


def test_a_full_disk_and_what_is_no_database(tmp_path: Path) -> None:
    place = tmp_path / "full"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(place)], capture_output=True, check=False
    )
    need(mounted.returncode == 0, "the right to mount")
    try:
        sink = open_sqlite(f"sqlite:{place}/r.db")
        sink.store([made(1)])
        with pytest.raises(SinkDown, match="full"):
            sink.store([made(2, result="x" * 2_000_000)])
        sink.store([made(3)])
        assert sink.known(["images/1", "images/2", "images/3"]) == {"images/1", "images/3"}
        sink.close()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)
    (tmp_path / "text").write_text("not a database, however long it is " * 100)
    for wrong in (tmp_path / "text", tmp_path, tmp_path / "nowhere" / "r.db"):
        with pytest.raises(Misconfigured):
            open_sqlite(f"sqlite:{wrong}")


@pytest.mark.parametrize("round_", range(3))
def test_many_open_a_new_file_at_once(file: Path, round_: int) -> None:
    failed: list[BaseException] = []

    def start(n: int) -> None:
        try:
            sink = open_sqlite(f"sqlite:{file}")
            sink.store([made(n)])
            sink.close()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=start, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with contextlib.closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT count(*) FROM results").fetchone() == (8,)


# --- PostgreSQL ----------------------------------------------------------------------------------------------


def test_a_connection_that_was_cut_is_not_noticed(postgres: PostgresPlace) -> None:
    sinks = [
        open_postgres(postgres.plain),
        open_sqlalchemy(postgres.plain.replace("postgresql:", "postgresql+psycopg:")),
    ]
    for n, sink in enumerate(sinks):
        sink.store([made(n)])
        postgres.sql(CUT)
        sink.store([made(n + 10)])
        postgres.sql(CUT)
        assert sink.known([f"images/{n}", f"images/{n + 10}"]) == {f"images/{n}", f"images/{n + 10}"}
        sink.close()


def test_all_that_are_idle_were_cut_with_it(postgres: PostgresPlace) -> None:
    sink = open_postgres(postgres.plain)
    sink._run(lambda one: sink._run(lambda two: sink.store([made(1)])))
    assert len(sink._sessions._here.connections) == 3
    postgres.sql(CUT)
    sink.store([made(2)])
    assert sink.known(["images/1", "images/2"]) == {"images/1", "images/2"}
    sink.close()


@pytest.mark.parametrize("kind", ["postgres", "sqlalchemy"])
def test_a_forked_child_has_a_session_of_its_own(kind: str, postgres: PostgresPlace) -> None:
    """And takes none away from its parent, also when it closes the sink."""

    def session(sink: Any) -> int:
        ask = "SELECT pg_backend_pid()"
        if kind == "postgres":
            return int(sink._run(lambda s: s.connection.execute(ask).fetchone())[0])

        def asked(engine: Any) -> int:
            with engine.connect() as connection:
                return int(connection.exec_driver_sql(ask).scalar())

        return int(sink._run(asked))

    url = postgres.plain
    sink: Any = (
        open_postgres(url)
        if kind == "postgres"
        else open_sqlalchemy(url.replace("postgresql:", "postgresql+psycopg:"))
    )
    before = session(sink)
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sink.store([made(1)])
            os.write(theirs, str(session(sink)).encode())
            sink.close()
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said.isdigit()
    assert int(said) != before
    assert session(sink) == before
    sink.close()


def test_a_session_of_ours_waits_for_the_log(postgres: PostgresPlace) -> None:
    """Durable when it returns, also where the user's default is otherwise; what is stricter stays."""
    for given, found in (("off", "on"), ("on", "on"), ("remote_apply", "remote_apply"), ("local", "local")):
        sink = open_postgres(f"{postgres.plain}%20-csynchronous_commit%3D{given}")
        assert sink._run(lambda s: s.connection.execute("SHOW synchronous_commit").fetchone()) == (found,)
        sink.close()


@pytest.fixture
def stranger(postgres: PostgresPlace) -> Iterator[str]:
    """Another user's address."""
    name = f"u{postgres.schema}"
    postgres.sql(f"CREATE ROLE {name} LOGIN")
    postgres.sql(f"GRANT USAGE ON SCHEMA {postgres.schema} TO {name}")
    yield postgres.plain.replace("user=sublet", f"user={name}")
    postgres.sql(f"DROP OWNED BY {name}")
    postgres.sql(f"DROP ROLE {name}")


def test_rights(postgres: PostgresPlace, stranger: str) -> None:
    name = f"u{postgres.schema}"
    with pytest.raises(Misconfigured, match="may not make the table") as caught:
        open_postgres(stranger)
    statement = caught.value.remedy.removeprefix("make it: ").partition(";")[0]
    postgres.sql(statement)
    postgres.sql(f"GRANT SELECT, INSERT ON results TO {name}")
    with pytest.raises(Misconfigured, match="UPDATE"):
        open_postgres(stranger)
    postgres.sql(f"GRANT UPDATE ON results TO {name}")
    sink = open_postgres(stranger)
    sink.store([made(1)])
    postgres.sql(f"REVOKE INSERT ON results FROM {name}")
    with pytest.raises(SinkDown):
        sink.store([made(2)])
    postgres.sql(f"GRANT INSERT ON results TO {name}")
    sink.store([made(2)])
    sink.close()


@pytest.mark.parametrize("change", ["/nowhere?", "user=nobody_at_all", "table=nowhere.results"])
def test_what_is_not_there(postgres: PostgresPlace, change: str) -> None:
    address = {
        "/nowhere?": postgres.plain.replace("/postgres?", change),
        "user=nobody_at_all": postgres.plain.replace("user=sublet", change),
        "table=nowhere.results": f"{postgres.plain}&{change}",
    }[change]
    with pytest.raises(BadInput if "table" in change else Misconfigured):
        open_postgres(address)


def test_batches_that_cross_do_not_wait_in_a_circle(postgres: PostgresPlace) -> None:
    """Rows are locked in the order of their keys, whatever the batch's own: who waits for the first has not the second."""
    import psycopg

    sink = open_postgres(postgres.plain)
    sink.store([made(1), made(2)])
    thread = threading.Thread(target=sink.store, args=([made(2, delivery=2), made(1, delivery=2)],))
    waiting = (
        "SELECT 1 FROM pg_stat_activity WHERE application_name = 'sublet sink' AND wait_event_type = 'Lock'"
    )
    lock = "SELECT 1 FROM results WHERE key = %s FOR UPDATE NOWAIT"
    with psycopg.connect(postgres.plain) as other:
        other.execute(lock, ("images/1",))
        thread.start()
        wait_until(lambda: postgres.sql(waiting))
        other.execute(lock, ("images/2",))
    thread.join()
    assert {row["delivery"] for row in postgres.stored().values()} == {2}
    sink.close()


def test_a_row_that_stays_locked(postgres: PostgresPlace) -> None:
    """Told after a while, not waited for for ever; and it is stored when the lock is gone."""
    import psycopg

    sink = open_postgres(postgres.plain)
    sink.store([made(1)])
    sink._run(lambda s: s.connection.execute("SET lock_timeout = '50ms'"))
    with psycopg.connect(postgres.plain) as other:
        other.execute("SELECT 1 FROM results FOR UPDATE")
        with pytest.raises(SinkDown, match="locked"):
            sink.store([made(1, delivery=2)])
    sink.store([made(1, delivery=2)])
    assert postgres.stored()["images/1"]["delivery"] == 2
    sink.close()


# --- others --------------------------------------------------------------------------------------------------


def test_the_table_in_databases_that_are_not_here() -> None:
    """Keys that differ only in case are two keys, and a result may be larger than 64 KiB."""
    from sqlalchemy.dialects import mssql, mysql
    from sqlalchemy.schema import CreateTable

    table = results_table(TableName("", "results"))
    in_mysql = str(CreateTable(table).compile(dialect=mysql.dialect()))
    assert "`key` VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL" in in_mysql
    assert "result LONGTEXT" in in_mysql
    assert "[key] NVARCHAR(255) COLLATE Latin1_General_BIN2" in str(
        CreateTable(table).compile(dialect=mssql.dialect())
    )


def test_somebody_stores_between_the_look_and_the_insert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look is old by then: the insert is refused, the update says itself what it may replace, and no newer result is lost."""
    place = SqlitePlace("sqlalchemy-sqlite", tmp_path)
    late, other = place.open(), place.open()
    other.store([made(2, delivery=1)])
    look, looks = SqlalchemySink._deliveries, []
    meanwhile = [made(1, delivery=9, result="newer"), made(2, delivery=9, result="newer")]

    def look_and_lose(self: SqlalchemySink, connection: Any, keys: Any) -> dict[str, int]:
        found = look(self, connection, keys)
        if self is late:
            looks.append(found)
            if len(looks) == 1:
                other.store(meanwhile)
        return found

    monkeypatch.setattr(SqlalchemySink, "_deliveries", look_and_lose)
    late.store([made(1, delivery=5), made(2, delivery=5), made(3, delivery=5)])
    assert len(looks) == 2
    stored = place.stored()
    assert [stored[f"images/{n}"]["delivery"] for n in (1, 2, 3)] == [9, 9, 5]
    # And where nothing is new, so that no insert is refused.
    looks.clear()
    meanwhile[:] = [made(2, delivery=20)]
    late.store([made(2, delivery=15)])
    assert place.stored()["images/2"]["delivery"] == 20
    for sink in (late, other):
        sink.close()
