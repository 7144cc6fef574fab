"""Bytes of others that wait here: a little in memory, the rest in files without a name.

Rules of this file:
- A message is collected part by part. A megabyte of it, counted with what each part costs, stays in memory;
  the rest is written to a file that was unlinked when it was made, and is given out as read-only views. The
  kernel may drop their pages whenever memory is short.
- The file is written with `write`, never through a mapping: a full disk is then an error and no signal.
- A room has a limit, and leaves the reserve of its disk alone. What is over it raises `TooLarge` and is not
  kept. Views that nobody holds any more give their room back.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from pathlib import Path

from sublet.core.errors import TooLarge
from sublet.core.values import format_size
from sublet.machine.disk_space import DiskReserve
from sublet.machine.private_files import make_private_folder

#: Of one message.
MEMORY_BYTES = 1 << 20
#: What a part costs beside its bytes, about.
PART_OVERHEAD = 256
#: Space is taken in the room, and looked for on the disk, in steps of this size.
STEP_BYTES = 8 << 20
REMEDY = "read the answers that wait, send less at once, or tell the operator"


class SpillRoom:
    """The room of one session or one worker."""

    def __init__(self, folder: Path, most_bytes: int, reserve: DiskReserve) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._reserve = reserve
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Bytes in files."""
        return self._used

    def collect(self) -> CollectedParts:
        return CollectedParts(self)

    def put(self, data: bytes | memoryview) -> memoryview:
        """Store one part, all at once."""
        parts = self.collect()
        parts.begin(memoryview(data).nbytes)
        parts.write(data)
        return parts.done()[0]

    def new_file(self) -> _SpillFile:
        try:
            make_private_folder(self._folder)
            fd, path = tempfile.mkstemp(dir=self._folder, prefix="spill-")
            os.unlink(path)
        except OSError as e:
            raise _disk_refused(e) from e
        return _SpillFile(self, fd)

    def take(self, size: int) -> None:
        why = self._reserve.refusal(self._folder, size)
        if why:
            raise TooLarge(f"this cannot wait on the host of the session: {why}", remedy=REMEDY)
        with self._lock:
            if self._used + size > self._most_bytes:
                raise TooLarge(
                    f"a session may have {format_size(self._most_bytes)} waiting on its host, and with this "
                    "it would have more",
                    remedy=REMEDY,
                )
            self._used += size

    def give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size


class _SpillFile:
    """Owns the descriptor and the room until it is mapped or dropped."""

    def __init__(self, room: SpillRoom, fd: int) -> None:
        self._room = room
        self._fd = fd
        self.size = 0
        self._taken = 0

    def write(self, piece: memoryview) -> None:
        while self.size + piece.nbytes > self._taken:
            self._room.take(STEP_BYTES)
            self._taken += STEP_BYTES
        try:
            while piece.nbytes:
                written = os.write(self._fd, piece)
                self.size += written
                piece = piece[written:]
        except OSError as e:
            raise _disk_refused(e) from e

    def mapped(self) -> memoryview:
        made = mmap.mmap(self._fd, self.size, prot=mmap.PROT_READ)
        weakref.finalize(made, self._room.give_back, self._taken)
        self._taken = 0
        self.close()
        return memoryview(made)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._room.give_back(self._taken)

    def __del__(self) -> None:
        self.close()


def _disk_refused(e: OSError) -> TooLarge:
    return TooLarge(f"this cannot wait on the disk of the session's host: {e.strerror}", remedy=REMEDY)


class CollectedParts:
    """The parts of one message, while they come."""

    def __init__(self, room: SpillRoom) -> None:
        self._room = room
        self._parts: list[bytearray | tuple[int, int]] = []  # in memory, or from and to in the file
        self._in_memory = 0
        self._file: _SpillFile | None = None

    def begin(self, size: int) -> None:
        """Begin a part of this size. Room is taken as it is written, not as it was announced."""
        self._in_memory += PART_OVERHEAD
        if self._in_memory + size <= MEMORY_BYTES:
            self._in_memory += size
            self._parts.append(bytearray())
            return
        if self._file is None:
            self._file = self._room.new_file()
        self._parts.append((self._file.size, self._file.size))

    def write(self, piece: bytes | bytearray | memoryview) -> None:
        last = self._parts[-1]
        if isinstance(last, bytearray):
            last += piece
        elif self._file is not None and len(piece):
            self._file.write(memoryview(piece).cast("B"))
            self._parts[-1] = (last[0], self._file.size)

    def done(self) -> list[memoryview]:
        view = self._file.mapped() if self._file is not None and self._file.size else memoryview(b"")
        parts, self._parts = self._parts, []
        return [
            memoryview(part) if isinstance(part, bytearray) else view[part[0] : part[1]] for part in parts
        ]
