"""The writer lock: who may write to the embedded ledger now.

Rules of this file:
- It is `flock` on a sidecar file, held from before BEGIN to after COMMIT. The kernel queues the waiters and
  releases a dead owner's lock.
- The lock belongs to one open file of one thread; it is never shared and never broken.
- Nobody waits without a limit (threat 26). `flock` itself has none, so whoever must wait does so in a thread,
  on an open file of its own that is given up with the wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from pathlib import Path

from sublet.core.errors import Disconnected

#: Longer than any transaction takes on a slow disk.
WAIT_SECONDS = 30.0


class writer_lock:
    """The right to write now. Entered at every verb, so a class and not a generator."""

    __slots__ = ("_fd", "_held")

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._held = fd

    def __enter__(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._held = self._fd
        except BlockingIOError:
            self._held = _Wait(self._fd).locked()

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._held, fcntl.LOCK_UN)
        if self._held != self._fd:
            os.close(self._held)


class _Wait:
    """One wait for the lock, which may be given up."""

    def __init__(self, fd: int) -> None:
        # Another open file of the same inode: what is given up here must not unlock what `fd` holds later.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._over = threading.Event()
        self._guard = threading.Lock()
        self._locked = self._given_up = False

    def locked(self) -> int:
        """The descriptor that holds the lock; raises `Disconnected` when it was not free in time."""
        try:
            threading.Thread(target=self._queue, name="sublet-writer-lock", daemon=True).start()
            self._over.wait(WAIT_SECONDS)
        finally:
            with self._guard:
                mine = self._given_up = not self._locked
        if mine:
            raise Disconnected(
                f"the ledger's writer lock was not free within {WAIT_SECONDS:g} s; it is held by "
                f"{_holder(self._fd)}; nothing was changed",
                remedy="let that process go on, or end it; then try again",
            )
        return self._fd

    def _queue(self) -> None:
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        with self._guard:
            self._locked = not self._given_up
            if self._given_up:
                os.close(self._fd)
        self._over.set()


def _holder(fd: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        pid = writer_lock_owner(f"/proc/self/fd/{fd}", Path("/proc/locks").read_text())
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        return f"process {pid} ({name!a}) of uid {os.stat(f'/proc/{pid}').st_uid}"
    return "a process that cannot be seen from here"


def writer_lock_owner(path: str, locks: str) -> int:
    """The pid that holds the writer lock according to the kernel's lock table, or 0."""
    info = os.stat(path)
    place = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    for line in locks.splitlines():
        parts = line.split()
        if len(parts) >= 6 and parts[1] == "FLOCK" and parts[5] == place:
            return int(parts[4])
    return 0


def free_writer_lock(path: str) -> str:
    """Free the writer lock from a process that was stopped (Ctrl-Z, SIGSTOP) inside a transaction: let it run
    until it has left the transaction, then stop it again. Nothing is killed."""
    try:
        owner = writer_lock_owner(path, Path("/proc/locks").read_text())
        if not owner or owner == os.getpid():
            return ""
        stat = Path(f"/proc/{owner}/stat").read_text()
        if stat[stat.rindex(")") + 2] != "T":
            return ""
        os.kill(owner, signal.SIGCONT)
        for _ in range(200):
            time.sleep(0.001)
            if writer_lock_owner(path, Path("/proc/locks").read_text()) != owner:
                break
        os.kill(owner, signal.SIGSTOP)
        return f"let the stopped process {owner} finish its ledger transaction"
    except OSError:
        return ""
