"""The gate: who may write to the embedded ledger now.

Rules of this file:
- `flock` on a sidecar file, held from before BEGIN to after COMMIT. The kernel queues the waiters, and lets go of a dead owner's.
- The lock belongs to one open file of one thread; it is never shared and never broken.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from pathlib import Path


class gate:
    """Who may write now. Entered at every verb, so a class and not a generator."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)


def gate_owner(path: str, locks: str) -> int:
    """The pid that holds the gate according to the kernel's lock table, or 0."""
    info = os.stat(path)
    place = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    for line in locks.splitlines():
        parts = line.split()
        if len(parts) >= 6 and parts[1] == "FLOCK" and parts[5] == place:
            return int(parts[4])
    return 0


def free_gate(path: str) -> str:
    """A process that was stopped (Ctrl-Z, SIGSTOP) inside a transaction holds up everybody. Let it run for the moment it
    needs to leave the transaction, then stop it again: nobody's intent is undone, and nothing is killed."""
    try:
        owner = gate_owner(path, Path("/proc/locks").read_text())
        if not owner or owner == os.getpid():
            return ""
        stat = Path(f"/proc/{owner}/stat").read_text()
        if stat[stat.rindex(")") + 2] != "T":
            return ""
        os.kill(owner, signal.SIGCONT)
        for _ in range(200):
            time.sleep(0.001)
            if gate_owner(path, Path("/proc/locks").read_text()) != owner:
                break
        os.kill(owner, signal.SIGSTOP)
        return f"let the stopped process {owner} finish its ledger transaction"
    except OSError:
        return ""
