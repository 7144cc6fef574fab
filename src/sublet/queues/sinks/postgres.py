"""Results in a table of the user's PostgreSQL database.

Rules of this file:
- A batch is one statement of its own, or one transaction when it is too large for one: nothing of it is ever
  held open while this process is stopped.
- Durable when it returns: a session of ours waits for the log even where the database's default is not to.
  What the user set stricter stays.
- The table is made only if it does not exist: a user who may write to it need not be allowed to make one.
- An error names the server's host, the database and the table, never the address.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from sublet.core.errors import BadInput, Misconfigured, MissingExtra, SinkDown, SubletError
from sublet.ports.sink import Made
from sublet.queues.sinks.connections import Connections, Lost
from sublet.queues.sinks.rows import (
    Row,
    TableName,
    batches,
    missing_columns,
    pieces,
    rows_of,
    split_table,
    wrong_shape,
)

try:
    import psycopg
    from psycopg import errors as pg
    from psycopg.conninfo import conninfo_to_dict
except ImportError as missing:
    raise MissingExtra(
        "a PostgreSQL sink needs the driver that is installed with the extra 'postgres'",
        remedy="pip install 'sublet[postgres]'",
    ) from missing

T = TypeVar("T")
Connection = psycopg.Connection[tuple[Any, ...]]

#: Unless the address says otherwise. A server that vanished without a word is given up after about twenty
#: seconds.
_CONNECT: dict[str, Any] = {
    "connect_timeout": 5,
    "application_name": "sublet sink",
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
#: A session that stops in a transaction, or waits for one, must not hold up the others for ever.
_SETTLE = """
SELECT set_config('idle_in_transaction_session_timeout', '20s', false),
       set_config('lock_timeout', '10s', false),
       CASE WHEN current_setting('synchronous_commit') = 'off'
            THEN set_config('synchronous_commit', 'on', false) END
"""
_SHAPE = """
SELECT c.relkind::text, has_table_privilege(c.oid, 'INSERT'), has_table_privilege(c.oid, 'SELECT'),
       has_table_privilege(c.oid, 'UPDATE'),
       ARRAY(SELECT a.attname::text FROM pg_attribute a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum),
       ARRAY(SELECT format_type(a.atttypid, NULL) FROM pg_attribute a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum),
       EXISTS (SELECT 1 FROM pg_index i JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = i.indkey[0]
               WHERE i.indrelid = c.oid AND i.indisunique AND i.indimmediate AND i.indisvalid
                 AND i.indnkeyatts = 1 AND i.indpred IS NULL AND a.attname = 'key')
FROM pg_class c WHERE c.oid = to_regclass(%s)
"""
_NUMBERS = ("bigint", "integer", "smallint", "numeric")
_ONCE_MORE = (
    pg.UndefinedTable,
    pg.UndefinedColumn,
    pg.InvalidSchemaName,
    pg.InvalidColumnReference,
    pg.SerializationFailure,
    pg.DeadlockDetected,
    pg.ReadOnlySqlTransaction,
)


class _SinkSession:
    def __init__(self, connection: Connection, casts: dict[str, str]) -> None:
        self.connection = connection
        self.casts = casts  # of columns the user made JSON


class PostgresSink:
    """Implements `ports.sink.Sink`."""

    def __init__(self, url: str, table: TableName) -> None:
        self._url, self.table = url, table
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError:
            # Not as a cause either: it quotes what it did not understand, which may be the password.
            raise BadInput(
                "the sink's address is no PostgreSQL address; nothing was opened",
                remedy="write postgresql://user@host/database?table=NAME; a password with @ : / ? in "
                "it has them as %40 %3A %2F %3F",
            ) from None
        self._more = {name: value for name, value in _CONNECT.items() if name not in given}
        self.place = f"{given.get('host') or 'the default server'}/{given.get('dbname') or ''}"
        self.statement = (
            f"CREATE TABLE {table.quoted} (key TEXT PRIMARY KEY, queue TEXT NOT NULL, item BIGINT NOT NULL, "
            "item_key TEXT NOT NULL, "
            "delivery BIGINT NOT NULL, body TEXT NOT NULL, result TEXT NOT NULL, stored_at TIMESTAMPTZ NOT "
            "NULL)"
        )
        self._sessions: Connections[_SinkSession] = Connections(
            self._open, lambda s: s.connection.close(), usable=lambda s: not s.connection.broken
        )

    def check(self) -> None:
        """`BadInput` or `Misconfigured` for what can never work, `SinkDown` for what does not work now."""
        self._sessions.check()

    def store(self, results: Sequence[Made]) -> None:
        parts = list(pieces(rows_of(results)))
        if parts:
            self._run(lambda session: self._write(session, parts))

    def known(self, keys: Sequence[str]) -> set[str]:
        sql = f"SELECT key::text FROM {self.table.quoted} WHERE key = ANY(%s)"

        def read(session: _SinkSession) -> set[str]:
            return {
                row[0]
                for some in batches(keys)
                for row in session.connection.execute(sql, (some,)).fetchall()
            }

        return self._run(read)

    def describe(self) -> dict[str, str]:
        return {"kind": "PostgreSQL", "place": self.place, "table": str(self.table)}

    def close(self) -> None:
        self._sessions.close()

    # the table

    def _open(self) -> _SinkSession:
        with self._translated(opening=True):
            # Never prepared under a name: a pooler in between may hand each statement to another session.
            connection: Connection = psycopg.connect(
                self._url, autocommit=True, prepare_threshold=None, client_encoding="UTF8", **self._more
            )
            try:
                connection.execute(_SETTLE)
                types = self._shaped(connection)
                if types is None:
                    with contextlib.suppress(pg.DuplicateTable, pg.UniqueViolation):  # somebody was faster
                        connection.execute(self.statement)
                    types = self._shaped(connection)
                if types is None:
                    raise SinkDown(f"the table {self.table} was made and is not there")
            except BaseException:
                connection.close()
                raise
        return _SinkSession(
            connection, {name: kind for name, kind in types.items() if kind in ("json", "jsonb")}
        )

    def _shaped(self, connection: Connection) -> dict[str, str] | None:
        """Return its columns' types. `BadInput` when the table exists and cannot take results."""
        row = connection.execute(_SHAPE, (self.table.quoted,)).fetchone()
        if row is None:
            return None
        kind, may_insert, may_select, may_update, names, kinds, unique = row
        if kind not in ("r", "p"):
            raise wrong_shape(self.table, "it is no table", self.statement)
        types = dict(zip(names, kinds, strict=True))
        missing_columns(self.table, [n for n in names if n == n.lower()], self.statement)
        if types["delivery"] not in _NUMBERS:
            # Texts do not compare as numbers, and the fence is a comparison.
            raise wrong_shape(self.table, "its column delivery is no integer", self.statement)
        if not unique:
            raise wrong_shape(
                self.table, "its column key is neither its primary key nor UNIQUE", self.statement
            )
        rights = {"SELECT": may_select, "INSERT": may_insert, "UPDATE": may_update}
        refused = [name for name, may in rights.items() if not may]
        if refused:
            raise Misconfigured(
                f"the sink's user has no right to {', '.join(refused)} in {self.table}",
                remedy=f"GRANT SELECT, INSERT, UPDATE ON {self.table.quoted} TO that user",
            )
        return types

    # statements

    def _run(self, work: Callable[[_SinkSession], T]) -> T:
        def translated(session: _SinkSession) -> T:
            with self._translated():
                return work(session)

        return self._sessions.run(translated)

    def _write(self, session: _SinkSession, parts: list[list[Row]]) -> None:
        body, result = (f"u.{c}::{session.casts.get(c, 'text')}" for c in ("body", "result"))
        sql = (
            f"INSERT INTO {self.table.quoted} AS old (key, queue, item, item_key, delivery, body, result, "
            "stored_at) "
            f"SELECT u.key, u.queue, u.item, u.item_key, u.delivery, {body}, {result}, now() "
            "FROM unnest(%s::text[], %s::text[], %s::bigint[], %s::text[], %s::bigint[], %s::text[], "
            "%s::text[]) "
            "AS u (key, queue, item, item_key, delivery, body, result) "
            "ON CONFLICT (key) DO UPDATE SET queue = excluded.queue, item = excluded.item, item_key = "
            "excluded.item_key, "
            "delivery = excluded.delivery, body = excluded.body, result = excluded.result, stored_at = "
            "excluded.stored_at "
            "WHERE excluded.delivery > old.delivery"
        )
        with contextlib.nullcontext() if len(parts) == 1 else session.connection.transaction():
            for rows in parts:
                session.connection.execute(sql, [list(column) for column in zip(*rows, strict=True)])

    @contextlib.contextmanager
    def _translated(self, *, opening: bool = False) -> Iterator[None]:
        try:
            yield
        except SubletError:
            raise
        except psycopg.Error as e:
            raise self._translation(e, opening) from e

    def _translation(self, error: psycopg.Error, opening: bool) -> Exception:
        server = f"the PostgreSQL server of {self.place}"
        said = str(error)
        match error:
            case pg.DiskFull():
                return SinkDown(
                    f"the disk of {server} is full; nothing was acknowledged",
                    remedy="free some space there: results are stored again from where they stopped",
                )
            case pg.InvalidSchemaName() if opening:
                return BadInput(
                    f"there is no schema {self.table.schema} for the table {self.table}",
                    remedy=f"CREATE SCHEMA {self.table.schema}, or name another table",
                )
            case pg.InsufficientPrivilege() if opening:
                return Misconfigured(
                    f"the sink's user may not make the table {self.table}",
                    remedy=f"make it: {self.statement}; and GRANT SELECT, INSERT, UPDATE on it",
                )
            case psycopg.OperationalError() if opening and (
                "authentication failed" in said or "does not exist" in said or "no password supplied" in said
            ):
                return Misconfigured(
                    f"{server} refused the sink's user, password or database",
                    remedy="check the sink's address, and ~/.pgpass if the password is there",
                )
            case pg.LockNotAvailable() | pg.QueryCanceled():
                return SinkDown(
                    f"{server} kept the table {self.table} locked for too long; nothing was acknowledged"
                )
            case psycopg.DataError() | psycopg.IntegrityError():
                return BadInput(
                    f"the table {self.table} does not take a result ({type(error).__name__}); nothing of "
                    "the batch was stored",
                    remedy="look at the table's own types and constraints, and at the database's "
                    "encoding: UTF8 takes every text",
                )
        if opening:
            return SinkDown(
                f"{server} could not be reached ({type(error).__name__}); nothing was acknowledged"
            )
        if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError, *_ONCE_MORE)):
            return Lost(f"{server} does not answer ({type(error).__name__})")
        return SinkDown(f"{server} refused a statement ({type(error).__name__}); nothing was acknowledged")


def open_postgres(url: str) -> PostgresSink:
    """`postgresql://user@host/database?table=SCHEMA.NAME`; `postgres://` is the same."""
    sink = PostgresSink(*split_table(url))
    with contextlib.suppress(SinkDown):  # the server may be up when it is needed
        sink.check()
    return sink
