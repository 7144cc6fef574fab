"""What a worker's scratch folder takes on disk, counted by somebody who trusts nothing in it.

Rules of this file:
- Folders are opened below their parent and never through a link. A folder that its owner closed is opened
  again where that is possible.
- What has no name any more and is still open counts, as far as the kernel lets it be seen.
- Counting stops at the limits: what is over them need not be known exactly.
"""

from __future__ import annotations

import contextlib
import os
import stat

from sublet.core.studio.scratch_quota import DEPTH_MOST, FILES_MOST, ScratchUse
from sublet.processes.ladder import descendants

#: Of all processes of a worker.
OPEN_FILES_MOST = 20_000
_BLOCK = 512
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class _Limits(Exception):
    """Enough was counted."""


class _Count:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.bytes = self.files = 0
        self._linked: set[tuple[int, int]] = set()  # counted once, however many names they have

    def add(self, found: os.stat_result) -> None:
        if found.st_nlink != 1 and not stat.S_ISDIR(found.st_mode):
            key = (found.st_dev, found.st_ino)
            if key in self._linked:
                return
            self._linked.add(key)
        self.files += 1
        self.bytes += found.st_blocks * _BLOCK
        if (self._limit_bytes and self.bytes > self._limit_bytes) or self.files > FILES_MOST:
            raise _Limits


def scratch_use(scratch: str, supervisor: int, limit_bytes: int) -> ScratchUse:
    """`supervisor`: whose descendants may hold files open that have no name."""
    count = _Count(limit_bytes)
    too_deep = False
    try:
        fd = os.open(scratch, _OPEN_FOLDER)
    except OSError:
        return ScratchUse()  # it is gone, and with it what it took
    try:
        device = os.fstat(fd).st_dev
        too_deep = _count_folder(fd, count)
        _count_unlinked(supervisor, device, count)
    except _Limits:
        pass
    finally:
        os.close(fd)
    return ScratchUse(bytes=count.bytes, files=count.files, too_deep=too_deep)


def _count_folder(fd: int, count: _Count, depth: int = 0) -> bool:
    """Count what lies in the folder; whether some of it was too deep."""
    too_deep = False
    with os.scandir(fd) as found:
        for entry in found:
            try:
                facts = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
            except OSError:
                continue  # removed in between
            count.add(facts)
            if not stat.S_ISDIR(facts.st_mode):
                continue
            if depth == DEPTH_MOST:
                too_deep = True
                continue
            below = _open_below(entry.name, fd)
            if below >= 0:
                try:
                    too_deep |= _count_folder(below, count, depth + 1)
                finally:
                    os.close(below)
    return too_deep


def _open_below(name: str, fd: int) -> int:
    try:
        return os.open(name, _OPEN_FOLDER, dir_fd=fd)
    except PermissionError:
        with contextlib.suppress(OSError):
            held = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                os.chmod(f"/proc/self/fd/{held}", stat.S_IRWXU)
            finally:
                os.close(held)
            return os.open(name, _OPEN_FOLDER, dir_fd=fd)
    except OSError:
        pass
    return -1


def _count_unlinked(supervisor: int, device: int, count: _Count) -> None:
    seen: set[int] = set()
    looks = 0
    for process in descendants(supervisor):
        try:
            names = os.listdir(f"/proc/{process.pid}/fd")
        except OSError:
            continue  # it ended, or may not be looked at
        for name in names:
            looks += 1
            if looks > OPEN_FILES_MOST:
                return
            try:
                facts = os.stat(f"/proc/{process.pid}/fd/{name}")
            except OSError:
                continue
            if facts.st_nlink or facts.st_dev != device or not stat.S_ISREG(facts.st_mode):
                continue
            if facts.st_ino not in seen:
                seen.add(facts.st_ino)
                count.add(facts)
