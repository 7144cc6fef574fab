"""The shared engine: PostgreSQL 14 or newer, many hosts.

Rules of this file:
- A verb locks its rows first and reads `clock_timestamp()` in a later statement; never both in one.
- The hot verbs are one function call each (`sql/postgres/0002_hot_verbs.sql`). They do the plain success; anything else
  falls through to the verbs written once for both engines.
- Two kinds of connections: durable ones, and ones with `synchronous_commit = off` for what may be lost in a crash. A process opens at
  most so many of both, however many threads it has; a thread that finds all of them in use waits for one.
- Only a server that takes writes is talked to, also for reads: what a standby has not heard of yet would be read as not done.
- A connection that fails in the middle leaves the outcome unknown. Every verb is idempotent by its key and looks that key
  up under the lock first, so it is simply run again on a new connection, until its patience is over (S5).
- NOTIFY goes out after the commit, from a thread of its own, so no transaction waits for it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from sublet.core.effect import Commit, Committed, Duplicate
from sublet.core.errors import (
    BadInput,
    Disconnected,
    InvariantBroken,
    Misconfigured,
    NotDurable,
    SchemaMismatch,
    SubletError,
)
from sublet.core.journal import GENESIS
from sublet.core.lease import Holder, Request
from sublet.core.policy import Policy
from sublet.core.session import is_id
from sublet.core.token import Token
from sublet.core.values import check_job
from sublet.failpoints import ConnectionDropped, failpoint
from sublet.ledger import migrations, sessions, tokens
from sublet.ledger.credentials import secret_hash
from sublet.ledger.engine import raised
from sublet.ledger.ledger import SqlLedger, check_request
from sublet.ledger.lending import AllLent, Lending
from sublet.ledger.postgres_bell import Listener, Notifier, PostgresBell
from sublet.ledger.postgres_connection import LedgerConnection
from sublet.ledger.postgres_driver import pg, psycopg
from sublet.ledger.postgres_items import PostgresItemVerbs
from sublet.ledger.rows import SESSION_AND_LEASE, lease_of, of_table
from sublet.ledger.tx import Pool, Row, Tx
from sublet.ports.bell import Bell
from sublet.ports.clock import Clock
from sublet.ports.ledger import Answer, LeaseKey, SessionAnswer
from sublet.ports.topics import host_topic

T = TypeVar("T")
DEFAULT_PATIENCE_US = 10_000_000
OPEN_PATIENCE_US = 3_000_000  # a wrong address should be told soon
CONNECT_SECONDS = 3
#: Of one process, of both kinds together; the bell has up to two more. `?sublet_connections=N` in the address says otherwise.
CONNECTIONS = 16
#: A host that is gone without a word (power, a cut cable) is noticed by the kernel, or a verb would wait for it for a quarter of an hour.
SILENCE = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
#: And so is this one by the server's: else a connection that was cut is kept there for two hours, beside all that were made instead of it.
SERVER_SILENCE = {f"tcp_{name.removeprefix('tcp_')}": str(value) for name, value in SILENCE.items()}
OLDEST_SERVER = 140_000
LOCK_TIMEOUT = "3s"  # a wait for a row ends here and is tried again, so that patience bounds it too
STREAMED_ROWS = 2000  # fetched at a time of what may be millions
IDLE_IN_TRANSACTION = "2s"  # a client stopped inside a transaction must not hold the pool's lock

#: A transaction that wrote nothing is not waited for at its commit.
_WRITE_TO_LOG = "pg_logical_emit_message(true, 'sublet', '')::text"

_statements: dict[str, str] = {}


def _placed(sql: str) -> str:
    found = _statements.get(sql)
    if found is None:
        found = _statements[sql] = sql.replace("?", "%s")
    return found


class PostgresTx:
    """Implements `ledger.tx.Tx`."""

    def __init__(self, connection: LedgerConnection, *, writing: bool, again: bool = False) -> None:
        self.rings: set[str] = set()
        self.again = again
        self._wrote = False
        self._connection = connection
        self._writing = writing
        self._pool: Pool | None = None
        self._now: int | None = None
        self._streams = 0

    def rows(self, sql: str, *params: object) -> list[Row]:
        return self._connection.execute(_placed(sql), params).fetchall()

    def row(self, sql: str, *params: object) -> Row | None:
        return self._connection.execute(_placed(sql), params).fetchone()

    def stream(self, sql: str, *params: object) -> Iterator[Row]:
        self._streams += 1
        with self._connection.cursor(name=f"sublet_stream_{self._streams}") as cursor:
            cursor.itersize = STREAMED_ROWS
            yield from cursor.execute(_placed(sql), params)

    def locked(self, sql: str, *params: object, of: str = "") -> Row | None:
        found = self.row(f"{sql} FOR UPDATE{of and f' OF {of}'}", *params)
        if self._now is not None and not self._wrote:
            # It may have waited for this lock: the time known before is a time in the past. Once a transaction writes, its
            # time stands still.
            self._now = max(self._now, self._clock())
        return found

    def run(self, sql: str, *params: object) -> int:
        self._wrote = True
        return self._connection.execute(_placed(sql), params).rowcount

    def run_many(self, sql: str, rows: Sequence[Sequence[object]]) -> int:
        self._wrote = True
        with self._connection.cursor() as cursor:
            cursor.executemany(_placed(sql), rows)
            return cursor.rowcount

    def run_all(self, sql: str, rows: Sequence[Sequence[object]]) -> bool:
        with self._connection.transaction() as part:
            if self.run_many(sql, rows) == len(rows):
                return True
            raise psycopg.Rollback(part)
        return False

    def free_rows(self, sql: str, *params: object) -> list[Row]:
        return self.rows(f"{sql} FOR UPDATE SKIP LOCKED", *params)

    @property
    def pool(self) -> Pool:
        if self._pool is None:
            find = self.locked if self._writing else self.row
            row = find(
                "SELECT epoch, waiting, journal_seq, journal_hash, policy, clock_us FROM pool WHERE id = 1"
            )
            assert row is not None
            self._pool = Pool(*row[:5])
            self._now = max(row[5], self._clock())
        return self._pool

    @property
    def now(self) -> int:
        if self._now is None:
            self._now = self._clock()
        return self._now

    def others(self) -> tuple[int, int]:
        row = self.row(
            "SELECT pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint FROM pg_current_snapshot() s"
        )
        assert row is not None
        return int(row[0]), int(row[1])

    def _clock(self) -> int:
        row = self.row("SELECT sublet_now()")
        assert row is not None
        return int(row[0])

    def flush(self) -> None:
        pool = self._pool
        if pool is not None and pool.dirty:
            self.run(
                "UPDATE pool SET clock_us = ?, epoch = ?, waiting = ?, journal_seq = ?, journal_hash = ?, policy = ? "
                "WHERE id = 1",
                self.now,
                pool.epoch,
                pool.waiting,
                pool.journal_seq,
                pool.journal_hash,
                pool.policy_text,
            )


def _split_option(url: str, name: str) -> tuple[str, str | None]:
    """The address without an option of ours, and what it said."""
    found = re.search(rf"[?&]{name}=([^&]*)", url)
    if found is None:
        return url, None
    return re.sub(r"[?&]$", "", re.sub(rf"{name}=[^&]*&?", "", url)), found.group(1)


def split_url(url: str) -> tuple[str, str]:
    """The server's URL and our schema, which may be given as `?sublet_schema=NAME`."""
    url, schema = _split_option(url, "sublet_schema")
    if schema is not None and not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema):
        raise BadInput(f"sublet_schema {schema[:40]!r} is not a schema name: use a-z, 0-9 and _")
    return url, "sublet" if schema is None else schema


def split_connections(url: str) -> tuple[str, int]:
    """The server's URL and how many connections a process may open, which may be given as `?sublet_connections=N`."""
    url, text = _split_option(url, "sublet_connections")
    if text is None:
        return url, CONNECTIONS
    if not re.fullmatch(r"[0-9]{1,4}", text) or int(text) < 2:
        raise BadInput(f"sublet_connections {text[:40]!r} is not a number of connections: use 2 to 9999")
    return url, int(text)


def _how_to_connect(url: str) -> dict[str, object]:
    """What is needed of a connection where the address says nothing of it."""
    try:
        said: dict[str, object] = dict(psycopg.conninfo.conninfo_to_dict(url))
    except psycopg.ProgrammingError:
        return {}  # connecting says what is wrong with it
    wanted: dict[str, object] = {k: v for k, v in SILENCE.items() if k not in said}
    if "," in str(said.get("host", "")) and "target_session_attrs" not in said:
        wanted["target_session_attrs"] = "read-write"
    return wanted


#: Connections inherited through fork: never used, never closed by the child.
_inherited: list[object] = []


class PostgresEngine:
    """Implements `ledger.ledger.Engine`."""

    def __init__(self, url: str, *, patience_us: int = DEFAULT_PATIENCE_US) -> None:
        self._url, self.schema = split_url(url)
        self._url, self._connections = split_connections(self._url)
        self._options = _how_to_connect(self._url)
        self.patience_us = patience_us
        self.skew_us = 0  # for tests: added to the server's clock
        self._pid = os.getpid()
        self._lending = self._make_lendings()
        self._local = threading.local()  # the snapshot a thread reads in, see `at_once`
        self._listener: Listener | None = None
        self._notifier: Notifier | None = None
        self._skewed = False
        self._lock = threading.Lock()
        self._closed = False

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
            "set_config('sublet.skew_us', %s, false), set_config('idle_in_transaction_session_timeout', %s, false), "
            "set_config('lock_timeout', %s, false), "
            # Every statement of ours is written for an index. A table that grew since it was last analysed makes the planner sort it whole
            # instead: a million new items, and each pull took a second.
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

    def _make_lendings(self) -> dict[bool, Lending[LedgerConnection]]:
        """By whether a commit waits for the disk."""

        def lending(durable: bool) -> Lending[LedgerConnection]:
            return Lending(
                lambda: self.connect(durable=durable),
                lambda connection: connection.close(),
                most=self._connections // 2,
            )

        return {durable: lending(durable) for durable in (True, False)}

    def _here(self) -> None:
        """This process's own connections: a forked child must not use its parent's."""
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
            # One that was left in the middle of something (an interrupt, a lost answer) is nobody else's.
            if well or connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                lending.give_back(connection)
            else:
                lending.drop(connection)

    # transactions

    def attempt(self, durable: bool, work: Callable[[LedgerConnection], T], patience_us: int | None) -> T:
        """Run on a connection; on a lost one run again on a new one until patience is over."""
        patience = self.patience_us if patience_us is None else patience_us
        give_up = time.monotonic() + patience / 1e6
        pause = 0.005
        while True:
            try:
                with _translated():
                    return self._run_on_one(durable, work, give_up)
            except AllLent as all_lent:
                raise Disconnected(
                    f"all {self._connections // 2} connections of this process to the ledger's PostgreSQL server were in use; "
                    "nothing was changed, and nothing is assumed to be held",
                    remedy="use the ledger from fewer threads at once, or allow more: ?sublet_connections=N in SUBLET_LEDGER",
                ) from all_lent
            except _Again as again:
                if again.lost:
                    self._lending[durable].drop_free()
                left = give_up - time.monotonic()
                if left <= 0:
                    raise again.gave_up() from again.__cause__
                time.sleep(min(pause * (0.5 + secrets.randbelow(1000) / 1000), left))
                pause = min(pause * 2, 0.25)

    def write(self, work: Callable[[Tx], T], *, durable: bool, patience_us: int | None = None) -> T:
        tries = itertools.count()

        def run(connection: LedgerConnection) -> tuple[PostgresTx, T]:
            failpoint("before_begin")
            with connection.transaction():
                tx = PostgresTx(connection, writing=True, again=next(tries) > 0)
                result = work(tx)
                tx.flush()
                failpoint("before_commit")
            failpoint("after_commit_before_reply")
            return tx, result

        tx, result = self.attempt(durable, run, patience_us)
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
        """One function, one round trip, its own transaction."""
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
        """Without `repeat`, None when the connection was lost and the answer with it."""
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
        return self.call(_placed(sql), params, durable=False)

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
                self._listener = Listener(self._connect_relaxed)
            return PostgresBell(self._listener)

    def confirm(self, sql: str, *params: object) -> Row | None:
        """A durable commit flushes the log up to itself, and so everything its statement saw. It writes a word into the log and no row: those who
        wait for the disk at the same time wait for one flush, and hold nobody up."""
        row = self.call(_placed(sql.replace("SELECT ", f"SELECT {_WRITE_TO_LOG}, ", 1)), params, durable=True)
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


class StandbyAnswered(psycopg.OperationalError):
    """The server that answered takes no writes."""


class _Again(Exception):
    """The transaction may be run again; `lost` says the connection is gone and its outcome unknown."""

    def __init__(self, what: str = "", *, lost: bool, remedy: str = "") -> None:
        self.lost = lost
        self._what = what or "the ledger's PostgreSQL server does not answer; nothing is assumed to be held"
        self._remedy = remedy

    def gave_up(self) -> Disconnected:
        return Disconnected(self._what, remedy=self._remedy)


_LOCKED = (
    "others held the ledger's rows in PostgreSQL all the time; nothing was changed",
    "retry; if it stays, look on the server for a session that holds locks (pg_stat_activity)",
)
_STANDBY = (
    "the PostgreSQL server that answers is a standby, or set to read only; nothing was changed, and nothing is assumed to be held",
    "name the primary in SUBLET_LEDGER, or all of them: postgresql://user@one,two/database finds the one that takes writes",
)
_FULL = (
    "the ledger's PostgreSQL server has no connection left for this process; nothing was changed, and nothing is assumed to be held",
    "raise max_connections on the server, or let each process open fewer: ?sublet_connections=N in SUBLET_LEDGER "
    f"({CONNECTIONS} unless told, and two for wake-ups)",
)
#: What a server says that is full, or a standby. A connection that was never made has no error code.
_SAYS_FULL = ("too many clients", "too many connections", "remaining connection slots")
_SAYS_STANDBY = ("session is read-only", "server is in hot standby mode")


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (pg.SerializationFailure, pg.DeadlockDetected, pg.LockNotAvailable, pg.UniqueViolation) as e:
        raise _Again(_LOCKED[0], lost=False, remedy=_LOCKED[1]) from e
    except (StandbyAnswered, pg.ReadOnlySqlTransaction) as e:
        # During a failover the old primary may answer for a moment, or the new one before it was promoted.
        raise _Again(_STANDBY[0], lost=True, remedy=_STANDBY[1]) from e
    except (pg.InvalidPassword, pg.InvalidAuthorizationSpecification, pg.InvalidCatalogName) as e:
        raise Misconfigured(
            "the PostgreSQL server refused the ledger's credentials or database",
            remedy="check the user, password and database in SUBLET_LEDGER",
        ) from e
    except pg.InsufficientPrivilege as e:
        raise Misconfigured(
            "the PostgreSQL server lets the ledger's user in and not at the ledger's tables",
            remedy="let it own the schema: GRANT CREATE ON DATABASE … for the first start, and for one made by somebody else "
            "GRANT USAGE ON SCHEMA and SELECT, INSERT, UPDATE, DELETE ON ALL TABLES, USAGE ON ALL SEQUENCES, EXECUTE ON ALL FUNCTIONS in it",
        ) from e
    except (pg.UndefinedTable, pg.UndefinedFunction, pg.InvalidSchemaName) as e:
        raise SchemaMismatch("the database has no ledger in it", remedy="run 'sublet migrate'") from e
    except (pg.CheckViolation, pg.NotNullViolation) as e:
        raise InvariantBroken(f"the ledger refused an impossible change: {e.diag.constraint_name}") from e
    except psycopg.DataError as e:
        raise BadInput("a text holds something PostgreSQL cannot store, such as a NUL") from e
    except pg.DiskFull as e:
        raise NotDurable("the ledger's disk is full; the change was not made") from e
    except psycopg.ProgrammingError as e:
        if "connection option" in str(e) or "conninfo" in str(e) or "URI" in str(e):
            raise Misconfigured(
                "SUBLET_LEDGER is not a PostgreSQL address",
                remedy="write postgresql://user@host/database",
            ) from e
        raise
    except (
        psycopg.OperationalError,
        pg.AdminShutdown,
        pg.IdleInTransactionSessionTimeout,
        ConnectionDropped,
    ) as e:
        # A server that restarts, a dropped connection: another try may reach it.
        if any(words in str(e) for words in _SAYS_FULL):
            raise _Again(_FULL[0], lost=False, remedy=_FULL[1]) from e
        if any(words in str(e) for words in _SAYS_STANDBY):
            raise _Again(_STANDBY[0], lost=True, remedy=_STANDBY[1]) from e
        if "password authentication" in str(e) or "does not exist" in str(e):
            raise Misconfigured(
                "the PostgreSQL server refused the ledger's credentials or database",
                remedy="check the user, password and database in SUBLET_LEDGER",
            ) from e
        raise _Again(lost=True) from e


def _with_time(sql: str) -> str:
    """A standby's clock may be behind: not before any time the ledger has lived through."""
    return _placed(sql.replace(" FROM ", ", (SELECT greatest(clock_us, sublet_now()) FROM pool) FROM ", 1))


_LOOK_SESSION = _with_time(sessions.LOOK)
#: A session is only found with the tenant of the token that is shown (T1).
_LOOK_VISITS = _with_time(
    f"SELECT {SESSION_AND_LEASE}, {of_table('t', tokens.COLUMNS)}, k.session FROM unnest(?::text[], ?::text[]) AS k(token, session) "
    "JOIN token t ON t.id = k.token LEFT JOIN studio_session s ON s.id = k.session AND s.tenant = t.tenant "
    "LEFT JOIN lease l ON l.id = s.lease_id"
)
_TOKEN_WIDTH = len(tokens.COLUMNS.split(","))


class PostgresLedger(PostgresItemVerbs, SqlLedger):
    """The verbs of `SqlLedger`, with the hot ones tried as one function call first."""

    engine: PostgresEngine

    def acquire(self, lease_id: str, secret: str, request: Request, holder: Holder) -> Answer:
        check_request(lease_id, request, holder)
        if request.count == 1:
            row = self.engine.call(
                "SELECT * FROM sublet_acquire(%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s)",
                (
                    lease_id,
                    secret_hash(secret),
                    request.tenant,
                    request.job,
                    request.tier.value,
                    request.exclusivity.value,
                    request.vram_bytes,
                    request.least_bytes,
                    int(request.wants_offers),
                    request.ttl_us,
                    request.wait_us,
                    request.hold_cap_us,
                    request.host,
                    holder.host,
                    holder.pid,
                    holder.started,
                ),
                # Every grant locks the pool's row. It is let go before the disk is waited for: then the next one is granted meanwhile, and one
                # flush makes many grants durable.
                durable=False,
            )
            if row is not None and self._outlives_a_crash(lease := lease_of(row)):
                self.engine.ring({host_topic(holder.host)})
                return Answer(lease=lease, at=lease.granted_at)
        return super().acquire(lease_id, secret, request, holder)

    def renew(self, key: LeaseKey, *, busy: bool = True, patience_us: int | None = None) -> Answer:
        row = self.engine.call(
            "SELECT (r.renewed).*, r.answered_at FROM sublet_renew(%s,%s,%s,%s) AS r",
            (key.lease_id, key.epoch, secret_hash(key.secret), int(busy)),
            durable=False,
            patience_us=patience_us,
        )
        if row is not None:
            return Answer(lease=lease_of(row), at=row[-1])
        return super().renew(key, busy=busy, patience_us=patience_us)

    def renew_many(
        self, keys: Sequence[tuple[LeaseKey, bool]], *, patience_us: int | None = None
    ) -> list[Answer | SubletError]:
        ordered = sorted(keys, key=lambda k: k[0].lease_id)
        wanted = [(key.lease_id, key.epoch, secret_hash(key.secret), int(busy)) for key, busy in ordered]

        def run(connection: LedgerConnection) -> list[Row]:
            ids, epochs, hashes, busies = (list(column) for column in zip(*wanted, strict=True))
            return connection.execute(
                "SELECT (r.renewed).*, r.answered_at FROM unnest(%s::text[], %s::bigint[], %s::text[], %s::bigint[]) AS k(id, epoch, hash, busy), "
                "LATERAL sublet_renew(k.id, k.epoch, k.hash, k.busy) AS r",
                (ids, epochs, hashes, busies),
            ).fetchall()

        if not wanted:
            return []
        renewed = {
            row[0]: Answer(lease=lease_of(row), at=row[-1])
            for row in self.engine.attempt(False, run, patience_us)
        }
        others = [pair for pair in keys if pair[0].lease_id not in renewed]
        told = iter(super().renew_many(others, patience_us=patience_us) if others else ())
        return [renewed.get(key.lease_id) or next(told) for key, _ in keys]

    def release(
        self, lease_id: str, secret: str, *, torn_down: bool = True, patience_us: int | None = None
    ) -> bool:
        if not torn_down:
            return super().release(lease_id, secret, torn_down=False, patience_us=patience_us)
        row = self.engine.call(
            "SELECT sublet_release(%s,%s)",
            (lease_id, secret_hash(secret)),
            durable=False,
            patience_us=patience_us,
        )
        if row is not None and row[0]:
            return True
        return super().release(lease_id, secret, patience_us=patience_us)

    def look_session(self, session_id: str, tenant: str, *, explain: bool = False) -> SessionAnswer:
        """Called for each request of the studio: one round trip, without a transaction around it."""
        if explain:
            return super().look_session(session_id, tenant, explain=True)
        row = (
            self.engine.call(_LOOK_SESSION, (session_id, tenant), durable=False)
            if is_id(session_id)
            else None
        )
        return sessions.answer_of(row, row[-1]) if row is not None else raised(sessions.unknown(session_id))

    def look_visits(
        self, keys: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], tuple[Token, SessionAnswer | None]]:
        if not keys:
            return {}
        shown = [token_id for token_id, _ in keys]
        named = [session_id if is_id(session_id) else "" for _, session_id in keys]
        rows = self.engine.call_rows(_LOOK_VISITS, (shown, named), durable=False)
        found: dict[tuple[str, str], tuple[Token, SessionAnswer | None]] = {}
        for row in rows or ():
            token = tokens.of_row(row[-2 - _TOKEN_WIDTH : -2])
            session = sessions.answer_of(row, row[-1]) if row[0] is not None else None
            found[(token.id, row[-2])] = (token, session)
        asked = zip(keys, zip(shown, named, strict=True), strict=True)
        return {key: found[clean] for key, clean in asked if clean in found}

    def commit(self, key: LeaseKey, commit: Commit) -> Committed | Duplicate:
        check_job(commit.job)
        if commit.effects:
            return super().commit(key, commit)
        row = self.engine.call(
            "SELECT sublet_commit(%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s,%s)",
            (
                key.lease_id,
                key.epoch,
                secret_hash(key.secret),
                commit.job,
                commit.key,
                commit.begins,
                commit.step,
                commit.fingerprint,
                commit.expected_version,
                commit.digest,
                commit.cursor,
                commit.outcome,
                commit.new_bytes,
                commit.whole_bytes,
            ),
            durable=True,
        )
        if row is not None and row[0]:
            return Committed(int(row[0]))
        return super().commit(key, commit)


# --- opening -------------------------------------------------------------------------------------------------


def _schema_version(connection: LedgerConnection, schema: str) -> int:
    found = connection.execute("SELECT to_regclass(%s)", (f'"{schema}".meta',)).fetchone()
    if not found or found[0] is None:
        return 0
    row = connection.execute(f"SELECT value FROM \"{schema}\".meta WHERE key = 'schema_version'").fetchone()
    return int(row[0]) if row else 0


def apply_migrations(url: str, clock: Clock) -> list[str]:
    engine = PostgresEngine(url)
    try:
        return engine.attempt(True, lambda connection: _apply(connection, engine.schema, clock), None)
    finally:
        engine.close()


def _apply(connection: LedgerConnection, schema: str, clock: Clock) -> list[str]:
    if connection.info.server_version < OLDEST_SERVER:
        raise Misconfigured("the PostgreSQL server is older than 14", remedy="use PostgreSQL 14 or newer")
    done: list[str] = []
    with connection.transaction():
        # Two processes that start at once must not both create it.
        connection.execute("SELECT pg_advisory_xact_lock(hashtext('sublet-migrate'))")
        connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
        found = _schema_version(connection, schema)
        if found > migrations.newest("postgres"):
            migrations.check_version("postgres", found)
        for step in migrations.migrations("postgres"):
            if step.number <= found:
                continue
            connection.execute(step.sql.encode())
            if step.number == 1:
                _first_rows(connection, clock)
            connection.execute(
                "INSERT INTO meta VALUES ('schema_version', %s) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (str(step.number),),
            )
            done.append(f"{step.number:04d} {step.name}")
    return done


def _first_rows(connection: LedgerConnection, clock: Clock) -> None:
    connection.execute("INSERT INTO meta VALUES ('incarnation', %s)", (secrets.token_hex(8),))
    connection.execute(
        "INSERT INTO pool VALUES (1, 0, 0, 'server', 0, 0, 0, %s, %s)", (GENESIS, Policy().to_text())
    )


def open_ledger(url: str, clock: Clock, *, patience_us: int = DEFAULT_PATIENCE_US) -> PostgresLedger:
    """`postgresql://…`. An empty database gets its schema; an old or newer one is refused with what to do."""
    engine = PostgresEngine(url, patience_us=patience_us)
    found = engine.attempt(
        True, lambda connection: _schema_version(connection, engine.schema), OPEN_PATIENCE_US
    )
    if found == 0:
        apply_migrations(url, clock)
    else:
        migrations.check_version("postgres", found)
    return PostgresLedger(engine)
