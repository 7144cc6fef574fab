"""Results in any other database that SQLAlchemy speaks to.

Rules of this file:
- One way for all of them, in the SQL they share: look which keys are there, insert those that are not, update
  those whose delivery is older. The update says so itself, so what changed since the look is not written
  over; an insert of what came in between is refused by the primary key, and all is done again.
- Keys are compared byte by byte. Where the database would take A for a, its column is made so that it does
  not.
- The durability of a commit is a setting of the database.
- SQLAlchemy's own messages may hold values or addresses: they are not repeated, and values are hidden in its
  causes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from sublet.core.errors import BadInput, Misconfigured, MissingExtra, SinkDown, SubletError
from sublet.ports.sink import Made
from sublet.queues.sinks.opening import ACCEPTED
from sublet.queues.sinks.rows import (
    COLUMNS,
    DEFAULT_TABLE,
    TableName,
    batches,
    missing_columns,
    rows_of,
    table_name,
    wrong_shape,
)

try:
    import sqlalchemy as sa
    from sqlalchemy import exc
    from sqlalchemy.dialects import mssql, mysql
    from sqlalchemy.engine import URL
    from sqlalchemy.schema import CreateTable
except ImportError as missing:
    raise MissingExtra(
        "a sink in a database other than SQLite and PostgreSQL needs SQLAlchemy, which is not installed",
        remedy="pip install 'sublet[sqlalchemy]', and the database's driver",
    ) from missing

T = TypeVar("T")

#: How often an insert may find that others were faster.
RACES = 20
_KEY_BYTES = 255
#: Engines inherited through fork: neither used nor closed.
_inherited: list[object] = []


def results_table(name: TableName) -> sa.Table:
    key = (
        sa.Unicode(_KEY_BYTES)
        .with_variant(
            mysql.VARCHAR(_KEY_BYTES, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb"
        )
        .with_variant(mssql.NVARCHAR(_KEY_BYTES, collation="Latin1_General_BIN2"), "mssql")
    )
    # MySQL's TEXT ends at 64 KiB.
    text = sa.UnicodeText().with_variant(mysql.LONGTEXT(charset="utf8mb4"), "mysql", "mariadb")
    return sa.Table(
        name.name,
        sa.MetaData(schema=name.schema or None),
        sa.Column("key", key, primary_key=True),
        sa.Column("queue", sa.Unicode(_KEY_BYTES), nullable=False),
        sa.Column("item", sa.BigInteger, nullable=False, autoincrement=False),
        sa.Column("item_key", text),  # may be NULL: Oracle takes '' for it
        sa.Column("delivery", sa.BigInteger, nullable=False),
        sa.Column("body", text, nullable=False),
        sa.Column("result", text, nullable=False),
        sa.Column("stored_at", sa.DateTime(timezone=True), nullable=False),
    )


class SqlalchemySink:
    """Implements `ports.sink.Sink`."""

    def __init__(self, url: URL, table: TableName) -> None:
        self.table = table
        self._rows = results_table(table)
        self.kind = url.get_backend_name()
        self.place = f"{url.host or ''}/{url.database or ''}".removeprefix("/")
        try:
            self._engine: sa.Engine = sa.create_engine(url, hide_parameters=True)
        except exc.NoSuchModuleError:
            raise BadInput(
                f"{self.kind}:// is neither a sink nor a database SQLAlchemy knows here; nothing was opened",
                remedy=f"install SQLAlchemy's dialect for it, or write {ACCEPTED}",
            ) from None
        except ImportError as e:
            raise MissingExtra(
                f"the driver for {url.drivername} is not installed", remedy=f"pip install {e.name or 'it'}"
            ) from e
        except Exception as e:  # a dialect's own opinion of the address, which it may quote
            raise BadInput(
                f"the {self.kind} address is not usable ({type(e).__name__}); nothing was opened",
                remedy="write it as SQLAlchemy takes it: "
                "DIALECT+DRIVER://user:password@host/database?table=NAME",
            ) from None
        self.statement = " ".join(str(CreateTable(self._rows).compile(dialect=self._engine.dialect)).split())
        self._pid = os.getpid()
        self._ready = False
        self._closed = False

    def check(self) -> None:
        """`BadInput` or `Misconfigured` for what can never work, `SinkDown` for what does not work now."""
        with self._translated(opening=True):
            self._prepare(self._own_engine())

    def store(self, results: Sequence[Made]) -> None:
        rows = [dict(zip(COLUMNS, row, strict=False)) for row in rows_of(results)]
        if rows:
            self._run(lambda engine: self._write(engine, rows))

    def known(self, keys: Sequence[str]) -> set[str]:
        wanted = set(keys)

        def read(engine: sa.Engine) -> set[str]:
            with engine.connect() as connection:
                return set(self._deliveries(connection, sorted(wanted)))

        return self._run(read) & wanted

    def describe(self) -> dict[str, str]:
        return {"kind": f"{self.kind} (SQLAlchemy)", "place": self.place, "table": str(self.table)}

    def close(self) -> None:
        self._closed = True
        if self._pid == os.getpid():
            self._engine.dispose()

    # the table

    def _own_engine(self) -> sa.Engine:
        if self._closed:
            raise SinkDown("the sink was closed", remedy="open it again")
        if self._pid != os.getpid():
            _inherited.append(self._engine.pool)
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        return self._engine

    def _prepare(self, engine: sa.Engine) -> None:
        if not self._shaped(engine):
            try:
                self._rows.create(engine, checkfirst=False)
            except exc.DBAPIError:
                if not sa.inspect(engine).has_table(self.table.name, schema=self.table.schema or None):
                    raise
                # Somebody was faster.
            self._shaped(engine)
        self._ready = True

    def _shaped(self, engine: sa.Engine) -> bool:
        """Whether it is there. `BadInput` when it is, and cannot take results."""
        look = sa.inspect(engine)
        where: dict[str, Any] = {"table_name": self.table.name, "schema": self.table.schema or None}
        if not look.has_table(**where):
            return False
        types = {str(column["name"]).lower(): column["type"] for column in look.get_columns(**where)}
        missing_columns(self.table, types, self.statement)
        if not isinstance(types["delivery"], sa.Integer | sa.Numeric):
            # Texts do not compare as numbers, and the fence is a comparison.
            raise wrong_shape(self.table, "its column delivery is no integer", self.statement)
        unique: list[Sequence[str | None]] = [look.get_pk_constraint(**where)["constrained_columns"]]
        with contextlib.suppress(NotImplementedError):  # not every dialect can tell
            unique += [found["column_names"] for found in look.get_unique_constraints(**where)]
        with contextlib.suppress(NotImplementedError):
            unique += [found["column_names"] for found in look.get_indexes(**where) if found["unique"]]
        if ["key"] not in [[str(name).lower() for name in names] for names in unique]:
            raise wrong_shape(
                self.table, "its column key is neither its primary key nor UNIQUE", self.statement
            )
        return True

    # statements

    def _run(self, work: Callable[[sa.Engine], T]) -> T:
        """Once more on new connections if the first try fails for a reason that may pass."""
        for last in (False, True):
            try:
                with self._translated():
                    engine = self._own_engine()
                    if not self._ready:
                        self._prepare_late(engine)
                    return work(engine)
            except _Passing as e:
                self._engine.dispose()
                self._ready = False
                if last:
                    raise SinkDown(f"{e}; nothing was acknowledged") from e.__cause__
        raise AssertionError

    def _prepare_late(self, engine: sa.Engine) -> None:
        """Prepare the table after the start. Results wait until nothing is wrong with it."""
        try:
            self._prepare(engine)
        except (BadInput, Misconfigured) as e:
            raise SinkDown(f"{e.message}; nothing was acknowledged", remedy=e.remedy) from e

    def _deliveries(self, connection: sa.Connection, keys: Sequence[str]) -> dict[str, int]:
        c = self._rows.c
        return {
            row[0]: row[1]
            for some in batches(keys)
            for row in connection.execute(sa.select(c.key, c.delivery).where(c.key.in_(some)))
        }

    def _write(self, engine: sa.Engine, rows: list[dict[str, Any]]) -> None:
        c, now = self._rows.c, sa.func.current_timestamp()
        insert = sa.insert(self._rows).values(stored_at=now)
        update = (
            sa.update(self._rows)
            .where(c.key == sa.bindparam("its_key"), c.delivery < sa.bindparam("its_delivery"))
            .values(stored_at=now)
        )
        before: set[str] | None = None
        for _ in range(RACES):
            there: dict[str, int] = {}
            try:
                with engine.begin() as connection:
                    there = self._deliveries(connection, [row["key"] for row in rows])
                    older = [
                        {**_but_key(row), "its_key": row["key"], "its_delivery": row["delivery"]}
                        for row in rows
                        if there.get(row["key"], row["delivery"]) < row["delivery"]
                    ]
                    new = [row for row in rows if row["key"] not in there]
                    if older:
                        connection.execute(update, older)
                    if new:
                        connection.execute(insert, new)
                return
            except exc.IntegrityError as e:
                if before is not None and before == set(there):
                    # Nobody stored any of them since the last look: it is the table that does not want one.
                    raise BadInput(
                        f"the table {self.table} does not take a result; nothing of the batch was stored",
                        remedy="look at the table's own constraints",
                    ) from e
                before = set(there)
        raise SinkDown(f"others kept storing the same results in {self.table}; nothing was acknowledged")

    @contextlib.contextmanager
    def _translated(self, *, opening: bool = False) -> Iterator[None]:
        what = f"the {self.kind} database of {self.place}"
        try:
            yield
        except SubletError:
            raise
        except exc.DataError as e:
            raise BadInput(
                f"the table {self.table} does not take a result; nothing of the batch was stored",
                remedy="look at the table's own types and at the database's encoding",
            ) from e
        except (exc.SQLAlchemyError, OSError) as e:
            if isinstance(e, exc.ProgrammingError | exc.NotSupportedError) and opening:
                raise Misconfigured(
                    f"{what} does not let the table {self.table} be made or read",
                    remedy=f"make it: {self.statement}; and let the sink's user SELECT, INSERT and UPDATE",
                ) from e
            if opening:
                raise SinkDown(f"{what} could not be reached ({type(e).__name__})") from e
            raise _Passing(f"{what} does not answer ({type(e).__name__})") from e


def _but_key(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "key"}


class _Passing(Exception):
    """It may succeed on another connection."""


def open_sqlalchemy(url: str) -> SqlalchemySink:
    """`DIALECT+DRIVER://user:password@host/database?table=SCHEMA.NAME`, as SQLAlchemy takes it but for our
    `table`."""
    try:
        parsed = sa.make_url(url)
    except (exc.ArgumentError, ValueError):
        raise BadInput(
            "the sink's address is none that SQLAlchemy understands; nothing was opened",
            remedy="write DIALECT+DRIVER://user:password@host/database?table=NAME",
        ) from None
    table = parsed.query.get("table", DEFAULT_TABLE)
    if not isinstance(table, str):
        raise BadInput("the address names two tables; nothing was opened", remedy="write table=NAME once")
    if parsed.get_backend_name() in ("sqlite", "duckdb") and parsed.database in (None, "", ":memory:"):
        raise BadInput("a database in memory keeps no results; nothing was opened", remedy="name a file")
    sink = SqlalchemySink(parsed.difference_update_query(["table"]), table_name(table))
    with contextlib.suppress(SinkDown):  # the database may be up when it is needed
        sink.check()
    return sink
