"""The open descriptors of this process, and where they lead.

Rules of this file:
- A descriptor may be closed by another thread at any time: then it was not there.
- A file that is open anyway is read through what is open: closing a second descriptor of a file lets go of
  the locks that the process has on it (POSIX' fcntl locks, which SQLite takes).
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def path_of_descriptor(fd: int) -> str:
    """Of what has no name (a pipe, a file that was removed): ""."""
    try:
        name = os.readlink(f"/proc/self/fd/{fd}")
        return name if name.startswith("/") and os.path.samestat(os.fstat(fd), os.lstat(name)) else ""
    except OSError:
        return ""


def open_for_writing() -> Iterator[tuple[int, int, os.stat_result]]:
    """Files, but for those that the standard streams go to: descriptor, flags and looks."""
    standard = {_file_of(info) for fd in range(3) if (info := _look(fd))}
    for fd in descriptors():
        info = _look(fd)
        if info is None or not stat.S_ISREG(info.st_mode) or _file_of(info) in standard:
            continue
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if flags & os.O_ACCMODE != os.O_RDONLY:
                yield fd, flags, info


def descriptors_of(wanted: os.stat_result) -> list[int]:
    return [fd for fd in descriptors() if (info := _look(fd)) and os.path.samestat(info, wanted)]


@contextlib.contextmanager
def opened(path: str, info: os.stat_result | None = None) -> Iterator[int]:
    """To read from. With `info`, what is open anyway is taken."""
    for fd in descriptors_of(info) if info is not None else ():
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
            yield fd
            return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def is_locked(info: os.stat_result) -> bool:
    """By any process."""
    try:
        return f":{info.st_ino} " in Path("/proc/locks").read_text()
    except OSError:
        return True


def descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def where_it_leads(fd: int) -> str:
    """In the words of the system: a pipe has some, too. "" if it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def held_by_files() -> set[int]:
    """Descriptors that belong to an object, which is found and opened again by what it is."""
    there = gc.get_objects()
    files = [one for one in there if type(one) is io.FileIO]
    ends = [one for one in there if type(one).__module__ == "multiprocessing.connection"]
    ends = [one for one in ends if hasattr(one, "fileno") and not one.closed]
    return {one.fileno() for one in (*(file for file in files if not file.closed), *ends)}


def _look(fd: int) -> os.stat_result | None:
    try:
        return os.fstat(fd)
    except OSError:
        return None


def _file_of(info: os.stat_result) -> tuple[int, int]:
    return info.st_dev, info.st_ino
