"""Ports for the servers of tests, each given to one test of all that run at once.

Rules of this file:
- Below those the kernel gives to connections: a server that was killed must get its own again.
- Whoever was given one keeps it until its process ends: between the choice and the server's start another run might be given the same, and
  then talk to a server that is not its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import tempfile
from pathlib import Path

_FIRST, _LAST = 20_000, 32_000
_kept: list[int] = []


def free_port() -> int:
    folder = Path(tempfile.gettempdir()) / f"sublet-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    while True:
        port = _FIRST + secrets.randbelow(_LAST - _FIRST)
        lock = os.open(folder / str(port), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
            _kept.append(lock)
            return port
        os.close(lock)
