"""Results in a SQLite file of the user's.

Rules of this file:
- It uses Python's own SQLite, not the ledger's. The file is the user's, who may well read it with Python's in
  the same process, and two copies of SQLite in one process do not see each other's locks: one removes the log
  that the other still writes to.
- One transaction for a batch, `synchronous=EXTRA`: durable when it returns, in whatever journal mode the file
  is. A file that is there keeps the mode its owner gave it. A new one gets a write-ahead log where the
  library has no bug in it.
- What another process stored may be seen before it is durable if that process was killed in between. Before
  it is called known, the log and the folder are synced.
- A file that was deleted or replaced takes no more results: whatever is written to a file without a name is
  lost. It is opened anew by its name.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from sublet.core.errors import BadInput, Misconfigured, SinkDown, SubletError
from sublet.machine.durable import sync_path
from sublet.ports.sink import Made
from sublet.queues.sinks.connections import Connections, Lost
from sublet.queues.sinks.rows import (
    Row,
    TableName,
    batches,
    missing_columns,
    rows_of,
    split_table,
    wrong_shape,
)

T = TypeVar("T")

#: How long others may keep the file locked.
BUSY_SECONDS = 15.0
#: Before it, a write-ahead log that is reset while another connection reads it can be corrupted.
GOOD_LOG = (3, 51, 3)
_LOCKED = ("SQLITE_BUSY", "SQLITE_LOCKED")


class _SinkFile:
    def __init__(self, db: sqlite3.Connection, inode: tuple[int, int]) -> None:
        self.db = db
        self.inode = inode


class SqliteSink:
    """Implements `ports.sink.Sink`."""

    def __init__(self, path: Path, table: TableName) -> None:
        self.path, self.table = path, table
        t = table.quoted
        self.statement = (
            f"CREATE TABLE {t} (key TEXT PRIMARY KEY NOT NULL, queue TEXT NOT NULL, item INTEGER NOT NULL, "
            "item_key TEXT NOT NULL, "
            "delivery INTEGER NOT NULL, body TEXT NOT NULL, result TEXT NOT NULL, stored_at TEXT NOT NULL)"
        )
        self._upsert = (
            f"INSERT INTO {t} (key, queue, item, item_key, delivery, body, result, stored_at) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, strftime('%Y-%m-%dT%H:%M:%fZ', 'now')) "
            "ON CONFLICT (key) DO UPDATE SET queue = excluded.queue, item = excluded.item, item_key = "
            "excluded.item_key, "
            "delivery = excluded.delivery, body = excluded.body, result = excluded.result, stored_at = "
            "excluded.stored_at "
            f"WHERE excluded.delivery > {t}.delivery"
        )
        self._files: Connections[_SinkFile] = Connections(
            self._open, lambda file: file.db.close(), usable=self._is_it
        )

    def check(self) -> None:
        """`BadInput` or `Misconfigured` for what can never work, `SinkDown` for what does not work now."""
        self._files.check()

    def store(self, results: Sequence[Made]) -> None:
        rows = rows_of(results)
        if rows:
            self._run(lambda db: self._write(db, rows))

    def known(self, keys: Sequence[str]) -> set[str]:
        select = f"SELECT key FROM {self.table.quoted} WHERE key IN "

        def read(db: sqlite3.Connection) -> set[str]:
            return {
                row[0]
                for some in batches(keys)
                for row in db.execute(f"{select}({','.join('?' * len(some))})", some)
            }

        found = self._run(read)
        if found:
            self._make_durable()
        return found

    def describe(self) -> dict[str, str]:
        return {"kind": "SQLite", "place": str(self.path), "table": self.table.name}

    def close(self) -> None:
        self._files.close()

    # the file

    def _open(self) -> _SinkFile:
        with self._translated(opening=True):
            db = sqlite3.connect(
                self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._settle(db)
                there = os.stat(self.path)
            except BaseException:
                db.close()
                raise
        return _SinkFile(db, (there.st_dev, there.st_ino))

    def _settle(self, db: sqlite3.Connection) -> None:
        give_up = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                is_new = db.execute("PRAGMA page_count").fetchone()[0] == 0
                if is_new and sqlite3.sqlite_version_info >= GOOD_LOG:
                    db.execute("PRAGMA journal_mode = wal").fetchall()
                db.execute("PRAGMA synchronous = extra")
                self._make_table(db)
                return
            except sqlite3.OperationalError as e:
                # Two processes make the same new file: SQLite does not wait for a change of its mode.
                if _name(e) not in _LOCKED or time.monotonic() > give_up:
                    raise
                time.sleep(0.02)

    def _make_table(self, db: sqlite3.Connection) -> None:
        if self._shaped(db):
            return
        db.execute("BEGIN IMMEDIATE")
        try:
            if not self._shaped(db):
                db.execute(self.statement)
            db.execute("COMMIT")
        except BaseException:
            _roll_back(db)
            raise

    def _shaped(self, db: sqlite3.Connection) -> bool:
        """Whether it is there. `BadInput` when it is, and cannot take results."""
        name = self.table.name
        kind = db.execute("SELECT type FROM sqlite_master WHERE name = ? COLLATE NOCASE", (name,)).fetchone()
        if kind is None:
            return False
        if kind[0] != "table":
            raise wrong_shape(self.table, f"it is no table ({kind[0]})", self.statement)
        columns = db.execute("SELECT name, type, pk FROM pragma_table_info(?)", (name,)).fetchall()
        types = {str(column).lower(): str(kind).upper() for column, kind, _ in columns}
        missing_columns(self.table, types, self.statement)
        if "INT" not in types["delivery"]:
            # Texts do not compare as numbers, and the fence is a comparison.
            raise wrong_shape(self.table, "its column delivery is not INTEGER", self.statement)
        keys = [str(column).lower() for column, _, place in columns if place]
        if keys != ["key"] and not self._unique(db):
            raise wrong_shape(
                self.table, "its column key is neither its primary key nor UNIQUE", self.statement
            )
        return True

    def _unique(self, db: sqlite3.Connection) -> bool:
        indexes = db.execute(
            'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial', (self.table.name,)
        ).fetchall()
        return any(
            [str(c[0]).lower() for c in db.execute("SELECT name FROM pragma_index_info(?)", index)] == ["key"]
            for index in indexes
        )

    def _is_it(self, file: _SinkFile) -> bool:
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == file.inode

    def _make_durable(self) -> None:
        # Neither is a file that SQLite keeps locks on: closing one of those here would take its locks away.
        try:
            with contextlib.suppress(FileNotFoundError):
                sync_path(Path(f"{self.path}-wal"))
            sync_path(self.path.parent)
        except OSError as e:
            raise SinkDown(
                f"the disk of {self.path} did not confirm what is stored ({e.strerror}); nothing was "
                "acknowledged"
            ) from e

    # statements

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def translated(file: _SinkFile) -> T:
            with self._translated():
                return work(file.db)

        return self._files.run(translated)

    def _write(self, db: sqlite3.Connection, rows: list[Row]) -> None:
        db.execute("BEGIN IMMEDIATE")
        try:
            db.executemany(self._upsert, rows)
            db.execute("COMMIT")
        except BaseException:
            _roll_back(db)
            raise

    @contextlib.contextmanager
    def _translated(self, *, opening: bool = False) -> Iterator[None]:
        try:
            yield
        except SubletError:
            raise
        except (sqlite3.Error, OSError) as e:
            raise self._translation(e, opening) from e

    def _translation(self, error: Exception, opening: bool) -> Exception:
        what = f"the file {self.path}"
        match _name(error):
            case "SQLITE_FULL":
                return SinkDown(
                    f"the disk of {what} is full; nothing was acknowledged",
                    remedy="free some space: results are stored again from where they stopped",
                )
            case "SQLITE_BUSY" | "SQLITE_LOCKED":
                return SinkDown(f"another program keeps {what} locked; nothing was acknowledged")
            case "SQLITE_NOTADB" | "SQLITE_CORRUPT":
                kind = Misconfigured if opening else SinkDown
                return kind(f"{what} is damaged or no SQLite file", remedy="restore it, or name another file")
            case "SQLITE_CANTOPEN" | "SQLITE_READONLY" | "SQLITE_PERM" | "SQLITE_AUTH" if opening:
                return Misconfigured(
                    f"{what} cannot be opened for writing",
                    remedy="check that its folder exists and that you may write there",
                )
            case "SQLITE_CONSTRAINT" | "SQLITE_MISMATCH" | "SQLITE_TOOBIG":
                return BadInput(
                    f"the table {self.table} does not take a result ({_name(error)}); nothing of the batch "
                    "was stored",
                    remedy="look at the table's own constraints and limits",
                )
            case "SQLITE_ERROR" if opening:
                return wrong_shape(self.table, "SQLite does not let it be made or read", self.statement)
        return Lost(f"{what} could not be used ({_name(error) or type(error).__name__})")


def _name(error: Exception) -> str:
    """`SQLITE_FULL` and the like, without what SQLite adds behind them."""
    return "_".join(str(getattr(error, "sqlite_errorname", "")).split("_")[:2])


def _roll_back(db: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):  # some errors have rolled back already
        db.execute("ROLLBACK")


def open_sqlite(url: str) -> SqliteSink:
    """`sqlite:PATH`, `sqlite:PATH?table=NAME`."""
    address, table = split_table(url)
    path = address.removeprefix("sqlite:")
    if re.match("//(?!//)", path):
        # Read as a path it is absolute, read as others read such addresses it is relative.
        raise BadInput(
            "sqlite: is followed by a path, not by //; nothing was opened",
            remedy="write sqlite:results.db for a file here, sqlite:/data/results.db for one elsewhere",
        )
    if "?" in path or not path.strip("/") or path == ":memory:":
        raise BadInput(
            "a SQLite sink is a file; nothing was opened",
            remedy="write sqlite:PATH or sqlite:PATH?table=NAME, and nothing else behind the ?",
        )
    if table.schema not in ("", "main"):
        raise BadInput(
            f"a SQLite file has no schema {table.schema!r}; nothing was opened", remedy="write ?table=NAME"
        )
    sink = SqliteSink(Path(path).expanduser().absolute(), TableName("", table.name))
    with contextlib.suppress(SinkDown):  # the file may be usable when it is needed
        sink.check()
    return sink
