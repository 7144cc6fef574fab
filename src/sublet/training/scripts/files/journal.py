"""The journal of file changes on the disk: lines that are only added, each there before the next is begun.

Rules of this file:
- What `append` was given is on the disk when it returns, or it raises and nothing of it is there.
- The journal is written anew as a whole, under another name: it is the old one or the new one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from sublet.core.errors import Damaged
from sublet.machine.durable import sync_path, write_all
from sublet.training.scripts.files.notes import Record, decode, encode


class ChangeJournal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        sync_path(path.parent)
        self._length = 0

    def read(self) -> list[Record]:
        """A last line that was not finished is cut off: nothing was done yet of what it announced."""
        try:
            records, self._length = decode(self._path.read_bytes())
        except Damaged:
            self.close()
            raise
        self._cut()
        return records

    def append(self, records: Iterable[Record]) -> None:
        line = encode(records)
        try:
            write_all(self._fd, line)
            os.fdatasync(self._fd)
        except OSError:
            self._cut()  # half a line must not stand before others
            raise
        self._length += len(line)

    def replace(self, records: Iterable[Record]) -> None:
        path = self._path.with_name("journal.new")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        data = b"".join(encode([record]) for record in records)
        write_all(fd, data)
        os.fsync(fd)
        os.rename(path, self._path)
        sync_path(self._path.parent)
        os.close(self._fd)
        self._fd, self._length = fd, len(data)

    def close(self) -> None:
        os.close(self._fd)

    def _cut(self) -> None:
        os.ftruncate(self._fd, self._length)
