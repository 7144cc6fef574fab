"""The shared engine: PostgreSQL 14 or newer, many hosts.

Rules of this file:
- A verb locks its rows first and reads `clock_timestamp()` in a later statement; never both in one.
- There are two kinds of connections: durable ones, and ones with `synchronous_commit = off` for what may be
  lost in a crash. A process opens a limited number of both; a thread that finds all of them in use waits.
- Only a server that takes writes is used, also for reads: a standby may not have heard yet of what was done.
- A connection that fails in the middle leaves the outcome unknown. Every verb is idempotent by its key and
  looks that key up under the lock first, so it is run again on a new connection, with limited
  patience (S5).
- NOTIFY is sent after the commit by a separate thread, so no transaction waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from sublet.core.errors import Disconnected, LedgerFromThePast, Misconfigured
from sublet.core.journal.chain import GENESIS
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.stamp import LedgerState, past_reason
from sublet.ledger.engines.connection_pool import ConnectionPool, PoolExhausted
from sublet.ledger.engines.postgres.bell import Notifier, NotifyListener, PostgresBell
from sublet.ledger.engines.postgres.connection import (
    SERVER_SILENCE,
    LedgerConnection,
    connection_options,
    split_connections,
    split_url,
)
from sublet.ledger.engines.postgres.errors import RetryTransaction, StandbyAnswered, translated
from sublet.ledger.engines.postgres.hot_verbs import PostgresLedger
from sublet.ledger.engines.postgres.psycopg_import import psycopg
from sublet.ledger.engines.postgres.transaction import PostgresTx, placed
from sublet.ledger.engines.stamp_file import LedgerStamp
from sublet.ledger.schema import versions
from sublet.ledger.tx import Row, Tx
from sublet.machine.failpoints import failpoint
from sublet.machine.private_files import make_private_folder
from sublet.ports.bell import Bell
from sublet.ports.clock import Clock

T = TypeVar("T")
DEFAULT_PATIENCE_US = 10_000_000
OPEN_PATIENCE_US = 3_000_000  # a wrong address should be reported soon
CONNECT_SECONDS = 3
OLDEST_SERVER = 140_000
LOCK_TIMEOUT = "3s"  # a wait for a row ends here and is tried again, so that patience bounds it too
IDLE_IN_TRANSACTION = "2s"  # a client stopped inside a transaction must not hold the pool's lock

#: A transaction that wrote nothing is not waited for at its commit.
_WRITE_TO_LOG = "pg_logical_emit_message(true, 'sublet', '')::text"

#: Whose the stamp is. Another database at the same address is told by its lower epoch, and one that was
#: marked as restored on another host has a higher one.
_STAMPED = "postgresql"

#: Connections inherited through fork: never used, never closed by the child.
_inherited: list[object] = []


class PostgresEngine:
    """Implements `ledger.engine.Engine`."""

    def __init__(self, url: str, *, patience_us: int = DEFAULT_PATIENCE_US) -> None:
        self._address = url
        self._url, self.schema = split_url(url)
        self._url, self._connections = split_connections(self._url)
        self._options = connection_options(self._url)
        self.patience_us = patience_us
        self.skew_us = 0  # for tests: added to the server's clock
        self._pid = os.getpid()
        self._lending = self._make_lendings()
        self._local = threading.local()  # the snapshot a thread reads in, see `at_once`
        self._listener: NotifyListener | None = None
        self._notifier: Notifier | None = None
        self._skewed = False
        self._lock = threading.Lock()
        self._closed = False
        self._stamp: LedgerStamp | None = None

    # what this host knows to have been granted

    def keep_stamp(self, folder: Path) -> None:
        """A database has nothing beside it, so each host keeps a stamp of its own. A host without one, or
        with a home it cannot write, takes the database as it is."""
        stamp = LedgerStamp(folder / f"postgres-{sha256(self._address.encode()).hexdigest()[:16]}")
        with contextlib.suppress(OSError):
            make_private_folder(folder)
            stamp.prepare()
            self._stamp = stamp

    def highest_epoch(self) -> int:
        known = self._stamp.read() if self._stamp is not None else None
        return known.state.epoch if known is not None else 0

    def confirmed(self, state: LedgerState | None) -> None:
        """A durable commit left the ledger in this state."""
        if self._stamp is not None and state is not None:
            self._stamp.raise_to(_STAMPED, state)

    def _check(self, state: LedgerState) -> None:
        known = self._stamp.read() if self._stamp is not None else None
        why = past_reason(known, _STAMPED, state) if known is not None else ""
        if why:
            raise LedgerFromThePast(f"{why}, as this host knows; nothing was changed")

    # connections

    def connect(self, *, durable: bool = True) -> LedgerConnection:
        connection = LedgerConnection.connect(
            self._url,
            autocommit=True,
            connect_timeout=CONNECT_SECONDS,
            prepare_threshold=1,
            application_name="sublet",
            **self._options,  # type: ignore[arg-type]
        )
        try:
            self._set_up(connection, durable)
        except BaseException:
            connection.close()
            raise
        return connection

    def _set_up(self, connection: LedgerConnection, durable: bool) -> None:
        row = connection.execute(
            "SELECT set_config('search_path', %s, false), set_config('synchronous_commit', %s, false), "
            "set_config('sublet.skew_us', %s, false), "
            "set_config('idle_in_transaction_session_timeout', %s, false), "
            "set_config('lock_timeout', %s, false), "
            # Every statement is written for an index. When a table grew since it was last analysed, the
            # planner would sort all of it instead: with a million new items each pull took a second.
            "set_config('enable_bitmapscan', 'off', false), set_config('enable_seqscan', 'off', false), "
            f"{''.join('set_config(%s, %s, false), ' for _ in SERVER_SILENCE)}"
            "pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean",
            (
                f'"{self.schema}"',
                "on" if durable else "off",
                str(self.skew_us),
                IDLE_IN_TRANSACTION,
                LOCK_TIMEOUT,
                *itertools.chain.from_iterable(SERVER_SILENCE.items()),
            ),
        ).fetchone()
        if row is not None and row[-1]:
            raise StandbyAnswered

    def _connect_relaxed(self) -> LedgerConnection:
        return self.connect(durable=False)

    def _make_lendings(self) -> dict[bool, ConnectionPool[LedgerConnection]]:
        """One pool of connections whose commits wait for the disk, one whose commits do not."""

        def lending(durable: bool) -> ConnectionPool[LedgerConnection]:
            return ConnectionPool(
                lambda: self.connect(durable=durable),
                lambda connection: connection.close(),
                most=self._connections // 2,
            )

        return {durable: lending(durable) for durable in (True, False)}

    def _here(self) -> None:
        """Make sure that the connections are this process's own: a forked child must not use its parent's."""
        if self._closed:
            raise Disconnected("the ledger was closed")
        if self._pid != os.getpid():
            _inherited.extend((self._lending, self._listener, self._notifier))
            self._pid, self._lending = os.getpid(), self._make_lendings()
            self._listener = self._notifier = None
            self._lock = threading.Lock()

    def _run_on_one(
        self, durable: bool, work: Callable[[LedgerConnection], T], until: float | None = None
    ) -> T:
        self._here()
        lending = self._lending[durable]
        connection = lending.take(until)
        while connection.closed or connection.broken:
            lending.drop(connection)
            connection = lending.take(until)
        well = False
        try:
            if self.skew_us or self._skewed:
                self._skewed = True
                connection.execute("SELECT set_config('sublet.skew_us', %s, false)", (str(self.skew_us),))
            result = work(connection)
            well = True
            return result
        finally:
            # A connection left in the middle of something (an interrupt, a lost answer) is not lent again.
            if well or connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                lending.give_back(connection)
            else:
                lending.drop(connection)

    # transactions

    def attempt(self, durable: bool, work: Callable[[LedgerConnection], T], patience_us: int | None) -> T:
        """Run `work` on a connection; when the connection is lost, run it again on a new one until patience
        is over."""
        patience = self.patience_us if patience_us is None else patience_us
        give_up = time.monotonic() + patience / 1e6
        pause = 0.005
        while True:
            try:
                with translated():
                    return self._run_on_one(durable, work, give_up)
            except PoolExhausted as all_lent:
                raise Disconnected(
                    f"all {self._connections // 2} connections of this process to the ledger's PostgreSQL "
                    "server were in use; "
                    "nothing was changed, and nothing is assumed to be held",
                    remedy="use the ledger from fewer threads at once, "
                    "or allow more: ?sublet_connections=N in SUBLET_LEDGER",
                ) from all_lent
            except RetryTransaction as again:
                if again.lost:
                    self._lending[durable].drop_free()
                left = give_up - time.monotonic()
                if left <= 0:
                    raise again.gave_up() from again.__cause__
                time.sleep(min(pause * (0.5 + secrets.randbelow(1000) / 1000), left))
                pause = min(pause * 2, 0.25)

    def write(self, work: Callable[[Tx], T], *, durable: bool, patience_us: int | None = None) -> T:
        return self._written(work, durable, patience_us, self._check)

    def write_restored(self, work: Callable[[Tx, int], T]) -> T:
        highest = self.highest_epoch()
        return self._written(lambda tx: work(tx, highest), True, None, lambda state: None)

    def _written(
        self,
        work: Callable[[Tx], T],
        durable: bool,
        patience_us: int | None,
        check: Callable[[LedgerState], None],
    ) -> T:
        tries = itertools.count()

        def run(connection: LedgerConnection) -> tuple[PostgresTx, T]:
            failpoint("before_begin")
            with connection.transaction():
                tx = PostgresTx(connection, writing=True, again=next(tries) > 0, check=check)
                result = work(tx)
                tx.flush()
                failpoint("before_commit")
            failpoint("after_commit_before_reply")
            return tx, result

        tx, result = self.attempt(durable, run, patience_us)
        if durable:
            self.confirmed(tx.state)
        if tx.rings:
            self.ring(tx.rings)
        return result

    def read(self, work: Callable[[Tx], T], *, patience_us: int | None = None) -> T:
        around: Tx | None = getattr(self._local, "around", None)
        if around is not None:
            return work(around)

        def run(connection: LedgerConnection) -> T:
            with connection.transaction():
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                return work(PostgresTx(connection, writing=False))

        return self.attempt(False, run, patience_us)

    def call(
        self, sql: str, params: Sequence[object], *, durable: bool, patience_us: int | None = None
    ) -> Row | None:
        """Call one function in one round trip, which is its own transaction."""
        rows = self.call_rows(sql, params, durable=durable, patience_us=patience_us)
        return rows[0] if rows else None

    def call_rows(
        self,
        sql: str,
        params: Sequence[object],
        *,
        durable: bool,
        patience_us: int | None = None,
        repeat: bool = True,
    ) -> list[Row] | None:
        """Without `repeat`, None when the connection and with it the answer was lost."""
        tries = itertools.count()

        def run(connection: LedgerConnection) -> list[Row] | None:
            if next(tries) and not repeat:
                return None
            failpoint("before_begin")
            found = connection.call(sql, params)
            failpoint("after_commit_before_reply")
            return found

        return self.attempt(durable, run, patience_us)

    def at_once(self, work: Callable[[], T]) -> T:
        def read(tx: Tx) -> T:
            self._local.around = tx
            try:
                return work()
            finally:
                self._local.around = None

        return self.read(read)

    def glance(self, sql: str, *params: object) -> Row | None:
        return self.call(placed(sql), params, durable=False)

    def now(self) -> int:
        row = self.call("SELECT sublet_now()", (), durable=False)
        assert row is not None
        return int(row[0])

    # the rest

    def ring(self, topics: set[str]) -> None:
        with self._lock:
            if self._notifier is None:
                self._notifier = Notifier(self._connect_relaxed)
            notifier = self._notifier
        notifier.ring(topics)

    def bell(self) -> Bell:
        self._here()
        with self._lock:
            if self._listener is None:
                self._listener = NotifyListener(self._connect_relaxed)
            return PostgresBell(self._listener)

    def confirm(self, sql: str, *params: object) -> Row | None:
        """A durable commit flushes the log up to itself, and so everything its statement saw. It writes to
        the log but no row, so concurrent callers share one flush and block nobody."""
        row = self.call(placed(sql.replace("SELECT ", f"SELECT {_WRITE_TO_LOG}, ", 1)), params, durable=True)
        return row[1:] if row is not None else None

    def barrier(self) -> None:
        self.confirm("SELECT 1")

    def unstick(self) -> str:
        """Nothing to do: the server itself ends a session that stops inside a transaction."""
        return ""

    def describe(self) -> dict[str, str]:
        def read(tx: Tx) -> dict[str, str]:
            version = tx.row("SELECT value FROM meta WHERE key = 'schema_version'")
            server = tx.row("SHOW server_version")
            return {
                "engine": f"PostgreSQL {server[0] if server else '?'}",
                "namespace": self.schema,
                "schema": str(version[0]) if version else "none",
            }

        return self.read(read)

    def close(self) -> None:
        self._closed = True
        if self._pid != os.getpid():
            _inherited.extend((self._lending, self._listener))
            return
        if self._notifier is not None:
            self._notifier.stop()
        if self._listener is not None:
            self._listener.stop()
        for lending in self._lending.values():
            lending.close()


# --- opening ------------------------------------------------------------------------------------------------


def _schema_version(connection: LedgerConnection, schema: str) -> int:
    found = connection.execute("SELECT to_regclass(%s)", (f'"{schema}".meta',)).fetchone()
    if not found or found[0] is None:
        return 0
    row = connection.execute(f"SELECT value FROM \"{schema}\".meta WHERE key = 'schema_version'").fetchone()
    return int(row[0]) if row else 0


def apply_migrations(url: str) -> list[str]:
    engine = PostgresEngine(url)
    try:
        return engine.attempt(True, lambda connection: _apply(connection, engine.schema), None)
    finally:
        engine.close()


def _apply(connection: LedgerConnection, schema: str) -> list[str]:
    if connection.info.server_version < OLDEST_SERVER:
        raise Misconfigured("the PostgreSQL server is older than 14", remedy="use PostgreSQL 14 or newer")
    done: list[str] = []
    with connection.transaction():
        # Two processes that start at once must not both create it.
        connection.execute("SELECT pg_advisory_xact_lock(hashtext('sublet-migrate'))")
        connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        found = _schema_version(connection, schema)
        if found > versions.newest("postgres"):
            versions.check_version("postgres", found)
        for step in versions.migrations("postgres"):
            if step.number <= found:
                continue
            connection.execute(step.sql.encode())
            if step.number == 1:
                _first_rows(connection)
            connection.execute(
                "INSERT INTO meta VALUES ('schema_version', %s) ON CONFLICT (key) DO UPDATE SET value = "
                "excluded.value",
                (str(step.number),),
            )
            done.append(f"{step.number:04d} {step.name}")
    return done


def _first_rows(connection: LedgerConnection) -> None:
    connection.execute("INSERT INTO meta VALUES ('incarnation', %s)", (secrets.token_hex(8),))
    connection.execute(
        "INSERT INTO pool VALUES (1, 0, 0, 'server', 0, 0, 0, %s, %s)", (GENESIS, Policy().to_text())
    )


def open_ledger(url: str, clock: Clock, *, patience_us: int = DEFAULT_PATIENCE_US) -> PostgresLedger:
    """Open `postgresql://…`. An empty database gets its schema; an old or newer one is refused."""
    engine = PostgresEngine(url, patience_us=patience_us)
    found = engine.attempt(
        True, lambda connection: _schema_version(connection, engine.schema), OPEN_PATIENCE_US
    )
    if found == 0:
        apply_migrations(url)
    else:
        versions.check_version("postgres", found)
    return PostgresLedger(engine)
