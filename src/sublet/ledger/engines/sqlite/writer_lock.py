"""The writer lock: who may write to the embedded ledger now.

Rules of this file:
- It is `flock` on a sidecar file, held from before BEGIN to after COMMIT. The kernel queues the waiters and
  releases a dead owner's lock.
- The lock belongs to one open file of one thread; it is never shared and never broken.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path


class writer_lock:
    """The right to write now. Entered at every verb, so a class and not a generator."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)


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
