"""A process that exists once per lock file: its pid, and whether it serves yet.

Rules of this file:
- The lock is the truth, and the text in the file only says who holds it: a process that died holds nothing.
- Readiness is written into the locked file, so that whoever starts one can wait for it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # a client of a studio, not on Linux: this file is imported there, and not used
    fcntl = None  # type: ignore[assignment]


def state_of(path: Path) -> tuple[bool, bool, int]:
    """Return whether one is running, whether it is ready, and its pid."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # it may be another user's
    except FileNotFoundError:
        return False, False, 0
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(fd, 100, 0).decode(errors="replace").split()
            pid = int(text[0]) if text and text[0].isdigit() else 0
            return True, "ready" in text, pid
        return False, False, 0
    finally:
        os.close(fd)


class LockTaken(Exception):
    """Another process holds the lock."""

    def __init__(self, pid: str) -> None:
        super().__init__(pid)
        self.pid = pid


@contextlib.contextmanager
def held(path: Path) -> Iterator[int]:
    """Hold the lock, or raise `LockTaken`. Yields the file's descriptor, so that readiness can be written
    into it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        for _ in range(50):
            # A process that only looks holds the lock for a moment.
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.004)
        else:
            pid = os.pread(fd, 20, 0).decode(errors="replace").split()[:1]
            raise LockTaken(pid[0] if pid else "?")
        _say(fd, "starting")
        yield fd
    finally:
        os.close(fd)


def say_ready(fd: int) -> None:
    _say(fd, "ready")


def _say(fd: int, word: str) -> None:
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()} {word}\n".encode(), 0)
