"""The embedded engine: one SQLite file, many processes, no server.

Rules of this file:
- One writer at a time, chosen by a writer lock (`flock` on a sidecar file), never by SQLite's busy handler,
  which starves waiters. Order: lock, BEGIN IMMEDIATE, work, COMMIT (synchronous=NORMAL), lock released, then
  fdatasync of the write-ahead log before a durable verb returns. Others may therefore see a commit one fsync
  before it is durable; whoever acts outside on something merely read calls `barrier` first.
- A connection and its flock are used by one thread at a time. A forked child opens its own and never touches
  what it inherited.
- The clock is the host's boot clock, anchored once to the calendar and clamped by a stored high-water mark:
  stepping the wall clock moves no lease. The file is on one host: all processes read the same boot clock.
- When more than a few threads wait, one thread commits for all of them, with a savepoint each and one fsync.
- Every transaction that writes compares the ledger with the stamp beside it first, and every sync raises the
  stamp: a ledger that went back in time is read and not written (I5).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import apsw

from sublet.core.errors import Disconnected, LedgerFromThePast, Misconfigured, SchemaMismatch
from sublet.core.journal.chain import GENESIS
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.stamp import NEVER, LedgerState, past_reason
from sublet.ledger.engines.connection_pool import ConnectionPool
from sublet.ledger.engines.sqlite import doorbell
from sublet.ledger.engines.sqlite.combiner import Combiner, PendingWrite
from sublet.ledger.engines.sqlite.connection import SAFETY_BUSY_MS, SqliteConnection, translated, translation
from sublet.ledger.engines.sqlite.ledger_file import check_place, file_system_of, make_ledger_private
from sublet.ledger.engines.sqlite.writer_lock import free_writer_lock, writer_lock
from sublet.ledger.engines.stamp_file import LedgerStamp
from sublet.ledger.ledger import SqlLedger
from sublet.ledger.schema import versions
from sublet.ledger.tx import PoolRow, Row, Tx
from sublet.machine.failpoints import failpoint
from sublet.machine.private_files import make_private_folder
from sublet.ports.bell import Bell
from sublet.ports.clock import Clock

T = TypeVar("T")

#: 3.7.0 to 3.51.2 can corrupt a write-ahead log that is reset while another connection reads it.
OLDEST_LIBRARY = (3, 51, 3)
#: How long another process may take to make a ledger of a new file.
MIGRATE_SECONDS = 5.0
#: Waiting threads of one process above which one commits for all.
COMBINE_ABOVE = 4
#: Connections inherited through fork: never closed, because closing one would touch the parent's files.
_inherited: list[object] = []


def library_version() -> tuple[int, ...]:
    return tuple(int(part) for part in apsw.sqlite_lib_version().split("."))


def check_library(version: tuple[int, ...]) -> None:
    if version < OLDEST_LIBRARY:
        raise Misconfigured(
            f"SQLite {'.'.join(map(str, version))} can corrupt a shared ledger; "
            f"{'.'.join(map(str, OLDEST_LIBRARY))} or newer is needed",
            remedy="pip install --upgrade apsw",
        )


class SqliteTx:
    """Implements `ledger.tx.Tx`. BEGIN IMMEDIATE has locked everything, so a row needs no lock of its own."""

    def __init__(self, db: apsw.Connection, clock: Clock) -> None:
        self.rings: set[str] = set()
        self.again = False
        self._db = db
        self._execute = db.execute
        row = self._execute(
            "SELECT epoch, waiting, journal_seq, journal_hash, policy, clock_us, boot_id, boot_offset_us "
            "FROM pool"
        ).fetchone()
        assert row is not None
        self.pool = PoolRow(*row[:5])
        self.found = LedgerState(row[0], row[2], row[5])
        self._boot_id: str = row[6]
        self._offset: int = row[7]
        self._rebased = False
        if self._boot_id != clock.boot_id():
            self._boot_id = clock.boot_id()
            self._offset = max(clock.wall_us(), row[5]) - clock.boot_us()
            self._rebased = True
        self.now: int = max(row[5], self._offset + clock.boot_us())

    @property
    def state(self) -> LedgerState:
        return LedgerState(self.pool.epoch, self.pool.journal_seq, self.now)

    def rows(self, sql: str, *params: Any) -> list[Row]:
        return self._execute(sql, params).fetchall()

    def row(self, sql: str, *params: Any) -> Row | None:
        return self._execute(sql, params).fetchone()

    def locked(self, sql: str, *params: Any, of: str = "") -> Row | None:
        return self._execute(sql, params).fetchone()

    free_rows = rows

    def others(self) -> tuple[int, int]:
        return 0, 0  # one writer at a time: nobody else's rows are on their way

    def stream(self, sql: str, *params: Any) -> Iterator[Row]:
        return iter(self._execute(sql, params))

    def run(self, sql: str, *params: Any) -> int:
        self._execute(sql, params)
        return self._db.changes()

    def run_all(self, sql: str, rows: Sequence[Sequence[Any]]) -> bool:
        if len(rows) == 1:
            return self.run(sql, *rows[0]) == 1
        # Asking each statement what it changed, by RETURNING, costs five times as much as the change.
        self._execute("SAVEPOINT run_all")
        try:
            every = self.run_many(sql, rows) == len(rows)
        except BaseException:
            every = False
            raise
        finally:
            if not every:
                self._execute("ROLLBACK TO run_all")
            self._execute("RELEASE run_all")
        return every

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        before = self._db.total_changes()
        for _ in self._db.executemany(sql, rows):
            pass
        return self._db.total_changes() - before

    def flush(self) -> None:
        pool = self.pool
        if pool.dirty:
            self._execute(
                "UPDATE pool SET clock_us = ?, epoch = ?, waiting = ?, journal_seq = ?, journal_hash = ?, "
                "policy = ?",
                (self.now, pool.epoch, pool.waiting, pool.journal_seq, pool.journal_hash, pool.policy_text),
            )
        else:
            self._execute("UPDATE pool SET clock_us = ?", (self.now,))
        if self._rebased:
            self._execute("UPDATE pool SET boot_id = ?, boot_offset_us = ?", (self._boot_id, self._offset))


class SqliteEngine:
    """Implements `ledger.engine.Engine`."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self.clock = clock
        self._bells = f"{path}-bells"
        self._lending = self._make_lending()
        self._local = threading.local()  # the snapshot a thread reads in, see `at_once`
        self._combiner_lock = threading.Lock()
        self._pid = os.getpid()
        self._writers = 0
        self._combiner: Combiner | None = None
        self._closed = False
        self._stamp = LedgerStamp(path)
        self._committed = "", NEVER  # the ledger and its state after this process's last commit

    # connections

    def _make_lending(self) -> ConnectionPool[SqliteConnection]:
        return ConnectionPool(lambda: SqliteConnection(self.path), SqliteConnection.close)

    def _lent(self) -> ConnectionPool[SqliteConnection]:
        """This process's pool of connections. Every connection taken is given back."""
        if self._closed:
            raise Disconnected("the ledger was closed")
        if self._pid != os.getpid():
            _inherited.extend((self._lending, self._combiner))
            self._pid, self._lending = os.getpid(), self._make_lending()
            self._combiner_lock, self._combiner, self._writers = threading.Lock(), None, 0
        return self._lending

    def _sync(self) -> None:
        lending = self._lent()
        with translated:
            connection = lending.take()
            try:
                self._confirm(connection)
            finally:
                lending.give_back(connection)

    def _confirm(self, connection: SqliteConnection) -> None:
        """What was committed before is on the disk afterwards; then, and not before, the stamp says so."""
        committed = self._committed
        connection.sync()
        if committed[0]:
            self._stamp.raise_to(*committed)

    def _begun(self, connection: SqliteConnection) -> SqliteTx:
        """The transaction that writes, on a ledger that is not behind its stamp."""
        tx = SqliteTx(connection.db, self.clock)
        why = past_reason(self._stamp.read(), connection.ledger_id(), tx.found)
        if why:
            raise LedgerFromThePast(f"{why} ({self.path}); nothing was changed")
        return tx

    # transactions

    def write(self, work: Callable[[Tx], T], *, durable: bool, patience_us: int | None = None) -> T:
        self._writers += 1
        try:
            if self._writers > COMBINE_ABOVE:
                return self._combine(work, durable)
            return self._write_alone(work, durable)
        finally:
            self._writers -= 1

    def _write_alone(self, work: Callable[[Tx], T], durable: bool) -> T:
        lending = self._lent()
        failpoint("before_begin")
        with translated:
            connection = lending.take()
            try:
                with writer_lock(connection.writer_lock):
                    tx, result = self._transact(connection, work)
                if durable:
                    self._confirm(connection)
            finally:
                lending.give_back(connection)
        failpoint("after_commit_before_reply")
        if tx.rings:
            self.ring(tx.rings)
        return result

    def write_restored(self, work: Callable[[Tx, int], T]) -> T:
        def restored(connection: SqliteConnection, tx: Tx) -> T:
            return work(tx, self._stamp.begin_again(connection.ledger_id(), tx.pool.epoch))

        lending = self._lent()
        with translated:
            connection = lending.take()
            try:
                with writer_lock(connection.writer_lock):
                    tx, result = self._transact(connection, partial(restored, connection), past=True)
                self._confirm(connection)
            finally:
                lending.give_back(connection)
        failpoint("after_commit_before_reply")
        self.ring(tx.rings)
        return result

    def _transact(
        self, connection: SqliteConnection, work: Callable[[Tx], T], *, past: bool = False
    ) -> tuple[SqliteTx, T]:
        execute = connection.db.execute
        execute("BEGIN IMMEDIATE")
        try:
            tx = SqliteTx(connection.db, self.clock) if past else self._begun(connection)
            result = work(tx)
            tx.flush()
            failpoint("before_commit")
            execute("COMMIT")
        except BaseException:
            with contextlib.suppress(apsw.Error):
                execute("ROLLBACK")
            raise
        self._committed = connection.ledger_id(), tx.state
        return tx, result

    def _combine(self, work: Callable[[Tx], T], durable: bool) -> T:
        self._lent()  # a forked child must not use its parent's combiner
        with self._combiner_lock:
            if self._combiner is None:
                self._combiner = Combiner(self._commit_batch, self._sync, self.ring)
            combiner = self._combiner
        return combiner.submit(work, durable)

    def _commit_batch(self, batch: list[PendingWrite]) -> None:
        lending = self._lent()
        with translated:
            connection = lending.take()
            try:
                with writer_lock(connection.writer_lock):
                    self._run_batch(connection, batch)
            finally:
                lending.give_back(connection)

    def _run_batch(self, connection: SqliteConnection, batch: list[PendingWrite]) -> None:
        execute = connection.db.execute
        execute("BEGIN IMMEDIATE")
        committed = self._committed
        try:
            for job in batch:
                committed = self._run_one(connection, job) or committed
            execute("COMMIT")
        except BaseException:
            with contextlib.suppress(apsw.Error):
                execute("ROLLBACK")
            raise
        self._committed = committed

    def _run_one(self, connection: SqliteConnection, job: PendingWrite) -> tuple[str, LedgerState] | None:
        execute = connection.db.execute
        execute("SAVEPOINT job")
        committed = None
        try:
            tx = self._begun(connection)
            job.result = job.work(tx)
            tx.flush()
            job.rings = tx.rings
            committed = connection.ledger_id(), tx.state
        except BaseException as e:
            execute("ROLLBACK TO job")
            job.error = translation(e) or e
        execute("RELEASE job")
        return committed

    def read(self, work: Callable[[Tx], T], *, patience_us: int | None = None) -> T:
        lending = self._lent()
        around: Tx | None = getattr(self._local, "around", None)
        if around is not None:
            return work(around)
        with translated:
            connection = lending.take()
            execute = connection.db.execute
            try:
                execute("BEGIN")
                try:
                    return work(SqliteTx(connection.db, self.clock))
                finally:
                    execute("ROLLBACK")
            finally:
                lending.give_back(connection)

    def at_once(self, work: Callable[[], T]) -> T:
        def read(tx: Tx) -> T:
            self._local.around = tx
            try:
                return work()
            finally:
                self._local.around = None

        return self.read(read)

    def glance(self, sql: str, *params: object) -> Row | None:
        lending = self._lent()
        with translated:
            connection = lending.take()
            try:
                return connection.db.execute(sql, params).fetchone()
            finally:
                lending.give_back(connection)

    def confirm(self, sql: str, *params: object) -> Row | None:
        found = self.glance(sql, *params)
        self._sync()
        return found

    def now(self) -> int:
        return self.read(lambda tx: tx.now)

    def keep_stamp(self, folder: Path) -> None:
        """Nothing to do: the stamp is beside the ledger."""

    # the rest

    def ring(self, topics: set[str]) -> None:
        doorbell.ring(self._bells, topics)

    def bell(self) -> Bell:
        return doorbell.FileBell(self._bells)

    def barrier(self) -> None:
        self._sync()

    def unstick(self) -> str:
        return free_writer_lock(f"{self.path}-gate")

    def describe(self) -> dict[str, str]:
        row = self.read(lambda tx: tx.row("SELECT value FROM meta WHERE key = 'schema_version'"))
        return {
            "engine": "SQLite " + apsw.sqlite_lib_version(),
            "path": str(self.path),
            "schema": str(row[0]) if row else "none",
            "file system": file_system_of(self.path),
        }

    def close(self) -> None:
        self._closed = True
        if self._pid != os.getpid():
            _inherited.append(self._lending)
            return
        if self._combiner is not None:
            self._combiner.stop()
        self._lending.close()
        self._stamp.close()


# --- opening ------------------------------------------------------------------------------------------------


def schema_version(db: apsw.Connection) -> int:
    # One read: between two, another process may make the ledger.
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_schema")]
    if "meta" not in names:
        if names:
            raise SchemaMismatch(
                "the file is a SQLite database, but not a ledger",
                remedy="point SUBLET_LEDGER at another path",
            )
        return 0
    try:
        row = db.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone()
        return int(str(row[0]))  # type: ignore[index]
    except (apsw.SQLError, ValueError, TypeError):
        raise SchemaMismatch(
            "the file has a table called meta, but is not a ledger",
            remedy="point SUBLET_LEDGER at another path",
        ) from None


def apply_migrations(path: Path, clock: Clock) -> list[str]:
    """Bring the file to the newest schema, each step in its own transaction. Returns what was applied."""
    until = time.monotonic() + MIGRATE_SECONDS
    while True:
        try:
            return _migrated(path, clock)
        except Disconnected:
            # A new file cannot be opened while another process makes a ledger of it: its journal mode is
            # being set.
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)


def _migrated(path: Path, clock: Clock) -> list[str]:
    with translated:
        connection = SqliteConnection(path)
        try:
            with writer_lock(connection.writer_lock):
                return _apply(connection, clock, LedgerStamp(path))
        finally:
            connection.close()


def _apply(connection: SqliteConnection, clock: Clock, stamp: LedgerStamp) -> list[str]:
    db = connection.db
    found = schema_version(db)
    if found == 0:
        stamp.prepare()
    if found > versions.newest("sqlite"):
        versions.check_version("sqlite", found)
    done: list[str] = []
    steps = [step for step in versions.migrations("sqlite") if step.number > found]
    # A new ledger appears whole: a process that opens it meanwhile must not find half and be told to
    # migrate it.
    for batch in [steps] if found == 0 else [[step] for step in steps]:
        db.execute("BEGIN IMMEDIATE")
        try:
            for step in batch:
                db.execute(step.sql)
                if step.number == 1:
                    _first_rows(db, clock)
                db.execute(
                    "INSERT INTO meta VALUES ('schema_version', ?) ON CONFLICT (key) DO UPDATE SET value = "
                    "excluded.value",
                    (str(step.number),),
                )
            db.execute("COMMIT")
        except BaseException:
            db.execute("ROLLBACK")
            raise
        done += [f"{step.number:04d} {step.name}" for step in batch]
    if done:
        connection.sync()
    if found == 0:
        stamp.raise_to(connection.ledger_id(), NEVER)
    stamp.close()
    return done


def _first_rows(db: apsw.Connection, clock: Clock) -> None:
    db.execute("INSERT INTO meta VALUES ('incarnation', ?)", (secrets.token_hex(8),))
    db.execute(
        "INSERT INTO pool VALUES (1, 0, ?, ?, ?, 0, 0, ?, ?)",
        (clock.wall_us(), clock.boot_id(), clock.wall_us() - clock.boot_us(), GENESIS, Policy().to_text()),
    )


def _version_of(path: Path) -> int:
    with translated:
        db = apsw.Connection(str(path))
        try:
            db.set_busy_timeout(SAFETY_BUSY_MS)
            return schema_version(db)
        finally:
            db.close()


def open_ledger(url: str, clock: Clock) -> SqlLedger:
    """Open `sqlite:PATH`. A new file gets its schema; an old or newer one is refused."""
    path = Path(url.removeprefix("sqlite:")).expanduser()
    check_library(library_version())
    try:
        make_private_folder(path.parent)
    except OSError as e:
        raise Misconfigured(f"the ledger's folder {path.parent} cannot be made: {e.strerror}") from e
    check_place(path)
    make_ledger_private(Path(os.path.realpath(path)))
    found = _version_of(path)
    if found == 0:
        _make_ledger(path, clock)
    else:
        versions.check_version("sqlite", found)
    return SqlLedger(SqliteEngine(path, clock))


def _make_ledger(path: Path, clock: Clock) -> None:
    """In an empty file, unless a ledger was there: its log may still be put back, and leases may live."""
    stamp = LedgerStamp(path)
    try:
        known = stamp.read()
        if known is not None and known.ledger_id and not _version_of(path):
            raise LedgerFromThePast(
                f"a ledger was here, which granted up to epoch {known.state.epoch}, and its file is lost or "
                f"empty ({path}); nothing was changed"
            )
    finally:
        stamp.close()
    apply_migrations(path, clock)


def backup(path: Path, target: Path) -> None:
    """A consistent copy of a live ledger."""
    with translated:
        source = apsw.Connection(str(path))
        copy = apsw.Connection(str(target))
        try:
            with copy.backup("main", source, "main") as running:
                while not running.done:
                    running.step(1000)
        finally:
            copy.close()
            source.close()
