"""One connection to the embedded ledger, and what its errors mean."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import apsw

from sublet.core.errors import Disconnected, InvariantBroken, Misconfigured, NotDurable, SubletError
from sublet.core.file_modes import unusable
from sublet.machine.private_files import open_private

SAFETY_BUSY_MS = 10_000  # for foreign tools that open the file without the writer lock
_PAGE_BYTES = (
    1024  # 15 % less per verb than 4096: commits write whole pages, and a verb changes little on each
)
_PAGES_BEFORE_CHECKPOINT = 8000


def translation(error: BaseException) -> SubletError | None:
    """Foreign errors become ours at this edge, with their cause kept."""
    match error:
        case apsw.FullError():
            return NotDurable("the ledger's disk is full; the change was not made")
        case apsw.NotADBError() | apsw.CorruptError():
            return Misconfigured(
                "the ledger file is damaged or not a ledger",
                remedy="restore a backup with 'sublet migrate --restore'",
            )
        case apsw.CantOpenError() | apsw.ReadOnlyError() | apsw.PermissionsError():
            return Misconfigured(
                "the ledger file cannot be opened for writing", remedy="check its path and permissions"
            )
        case apsw.ConstraintError():
            return InvariantBroken(f"the ledger refused an impossible change: {error}")
        case apsw.BusyError() | apsw.LockedError():
            return Disconnected("another program keeps the ledger file locked")
        case apsw.IOError():
            return NotDurable("the ledger's disk reported an error; the change was not made")
    return None


class _Translated:
    """Entered at every verb, so a class and not a generator."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ours = translation(error) if error is not None else None
        if ours is not None:
            raise ours from error


translated = _Translated()


def _open_gate(path: Path) -> int:
    try:
        return open_private(f"{path}-gate", os.O_RDWR)
    except OSError as e:
        raise unusable(f"the ledger {path}", e.errno) or e from e


class SqliteConnection:
    """A SQLite connection, with its writer lock and log descriptor; one thread uses it at a time."""

    def __init__(self, path: Path) -> None:
        self.db = apsw.Connection(str(path))
        self.db.set_busy_timeout(SAFETY_BUSY_MS)
        # Without it a statement with a range over a parameter is compiled anew at every call.
        self.db.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        self.db.execute(f"PRAGMA page_size = {_PAGE_BYTES}")  # of a new file; an old one keeps its own
        self.db.execute("PRAGMA journal_mode = wal")
        self.db.execute("PRAGMA synchronous = normal")
        self.db.execute(f"PRAGMA wal_autocheckpoint = {_PAGES_BEFORE_CHECKPOINT}")
        # The log must keep its inode while anybody may fsync it.
        keep = ctypes.c_int(1)
        self.db.file_control("main", apsw.SQLITE_FCNTL_PERSIST_WAL, ctypes.addressof(keep))
        self.writer_lock = _open_gate(path)
        self._wal_path = f"{path}-wal"
        self._wal = -1
        self._ledger_id = ""

    def sync(self) -> None:
        try:
            if self._wal < 0:
                self._wal = os.open(self._wal_path, os.O_RDONLY | os.O_CLOEXEC)
            os.fdatasync(self._wal)
        except OSError as e:
            raise NotDurable("the ledger's disk did not confirm the change") from e

    def ledger_id(self) -> str:
        if not self._ledger_id:
            row = self.db.execute("SELECT value FROM meta WHERE key = 'ledger_id'").fetchone()
            assert row is not None
            self._ledger_id = str(row[0])
        return self._ledger_id

    def close(self) -> None:
        self.db.close()
        os.close(self.writer_lock)
        if self._wal >= 0:
            os.close(self._wal)
