"""A process that exists once per lock file: its pid, whether it serves yet, and when its loops last turned.

Rules of this file:
- The lock is the truth, and the text in the file only says who holds it: a process that died holds nothing.
- Readiness is written into the locked file, so that whoever starts one can wait for it. So are the instants
  at which its loops turned, on this machine's monotonic clock.
- The text has one length and is written in place, which needs no room on a full disk. Writing it never
  raises: what could not be written is written a second later.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sublet.machine.private_files import make_private_folder, open_private

try:
    import fcntl
except ImportError:  # a client of a studio, not on Linux: this file is imported there, and not used
    fcntl = None  # type: ignore[assignment]

STARTING, READY = "starting", "ready"
_TEXT_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LockState:
    """What the lock file says of its process."""

    running: bool = False
    ready: bool = False
    pid: int = 0
    turned_at: Mapping[str, int] = field(default_factory=dict)  # loop: monotonic microseconds


def read_lock(path: Path) -> LockState:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # it may be another user's
    except FileNotFoundError:
        return LockState()
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_text(os.pread(fd, _TEXT_BYTES, 0).decode(errors="replace"))
        return LockState()
    finally:
        os.close(fd)


def _read_text(text: str) -> LockState:
    words = text.split()
    turned_at = {}
    for word in words[2:]:
        name, equals, at = word.partition("=")
        if equals and at.isdigit():
            turned_at[name] = int(at)
    pid = int(words[0]) if words and words[0].isdigit() else 0
    return LockState(running=True, ready=READY in words[1:2], pid=pid, turned_at=turned_at)


def state_of(path: Path) -> tuple[bool, bool, int]:
    """Return whether one is running, whether it is ready, and its pid."""
    found = read_lock(path)
    return found.running, found.ready, found.pid


class LockTaken(Exception):
    """Another process holds the lock."""

    def __init__(self, pid: str) -> None:
        super().__init__(pid)
        self.pid = pid


@contextlib.contextmanager
def held(path: Path, *, public: bool = False) -> Iterator[int]:
    """Hold the lock, or raise `LockTaken`. Yields the file's descriptor, so that readiness can be written
    into it. With `public` every user of the machine may read it."""
    if public:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    else:
        make_private_folder(path.parent)
        fd = open_private(path, os.O_RDWR)
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
        write_state(fd, STARTING)
        yield fd
    finally:
        os.close(fd)


def say_ready(fd: int) -> None:
    write_state(fd, READY)


def write_state(fd: int, word: str, turned_at: Mapping[str, int] | None = None) -> None:
    loops = "".join(f" {name}={at}" for name, at in sorted((turned_at or {}).items()))
    text = f"{os.getpid()} {word}{loops}"
    with contextlib.suppress(OSError):
        os.pwrite(fd, f"{text[: _TEXT_BYTES - 1]:<{_TEXT_BYTES - 1}}\n".encode(), 0)


def is_found_at(fd: int, path: Path) -> bool:
    """Whether the path still leads to this open file or folder. A disk that cannot be asked proves
    nothing."""
    try:
        there, here = os.stat(path), os.fstat(fd)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
