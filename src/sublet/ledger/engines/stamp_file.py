"""The stamp of a ledger in a file of its own, beside an embedded ledger and in each host's home for a
database: `core.leasing.stamp` says what it means.

Rules of this file:
- The file is written in place, in one sector, after each sync of the ledger's log, and is itself synced only
  when a ledger is made or restored: the kernel writes it out by itself. A write that fails leaves it behind,
  which refuses nobody.
- Of two processes that raise it at the same moment the slower one may win: it is then one commit behind.
- Whoever reads it while it is being written reads it again.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zlib
from pathlib import Path

from sublet.core.leasing.stamp import NEVER, LedgerState, Stamp, begun_again, raised
from sublet.machine.durable import sync_path
from sublet.machine.private_files import open_private

_MAGIC = b"sublet-stamp-1\0\0"
_BODY = struct.Struct(">16s32sQQQ")
_CHECK = struct.Struct(">I")
_SIZE = _BODY.size + _CHECK.size
_READS = 5


def packed(stamp: Stamp) -> bytes:
    body = _BODY.pack(_MAGIC, stamp.ledger_id.encode(), *stamp.state)
    return body + _CHECK.pack(zlib.crc32(body))


def fresh_stamp() -> bytes:
    """Of a ledger that is about to be made."""
    return packed(Stamp(ledger_id="", state=NEVER))


def _unpacked(data: bytes) -> Stamp | None:
    if len(data) != _SIZE or zlib.crc32(data[: _BODY.size]) != _CHECK.unpack_from(data, _BODY.size)[0]:
        return None
    magic, ledger_id, epoch, journal_seq, clock_us = _BODY.unpack_from(data)
    if magic != _MAGIC:
        return None
    return Stamp(ledger_id=ledger_id.rstrip(b"\0").decode(), state=LedgerState(epoch, journal_seq, clock_us))


class LedgerStamp:
    """One per engine. Its reads and writes have a place and no position, so threads and children share it."""

    def __init__(self, ledger: Path) -> None:
        self._path = Path(f"{ledger}-stamp")
        self._fd = -1
        self._seen: tuple[bytes, Stamp | None] = b"", None  # set at once: several threads read

    def read(self) -> Stamp | None:
        """None without one, or when it does not read."""
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                return None
        for _ in range(_READS):
            data = os.pread(self._fd, _SIZE, 0)
            seen, stamp = self._seen
            if data == seen:
                return stamp
            found = _unpacked(data)
            if found is not None:
                self._seen = data, found
                return found
        return None

    def prepare(self) -> None:
        """Before a ledger is made. It is on the disk before the ledger is."""
        if self.read() is None:
            self._write_durable(fresh_stamp())

    def raise_to(self, ledger_id: str, state: LedgerState) -> None:
        """The ledger was synced when it was in this state, or later."""
        with contextlib.suppress(OSError):
            wanted = raised(self.read(), ledger_id, state)
            if wanted is not None:
                os.pwrite(self._fd, packed(wanted), 0)

    def begin_again(self, ledger_id: str, epoch: int) -> int:
        """Before a ledger takes the place of the one that was here. Returns the highest epoch known of."""
        known = self.read()
        highest = max(epoch, known.state.epoch if known is not None else 0)
        wanted = begun_again(known, ledger_id, highest)
        if wanted is not None:
            self._write_durable(packed(wanted))
        return highest

    def _write_durable(self, data: bytes) -> None:
        fd = open_private(self._path, os.O_RDWR)
        try:
            os.pwrite(fd, data, 0)
            os.ftruncate(fd, len(data))
            os.fsync(fd)
            if self._fd >= 0 and not os.path.samestat(os.fstat(fd), os.fstat(self._fd)):
                self._fd = -1  # somebody had removed the file
        finally:
            os.close(fd)
        sync_path(self._path.parent)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
