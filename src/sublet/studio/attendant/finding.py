"""Finding the attendant of this host, and starting it.

Rules of this file:
- One per host, ledger and home. Whoever needs it starts it; it outlives whoever did.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
import time
from pathlib import Path

from sublet.core.errors import Disconnected, Misconfigured
from sublet.hosting.channel import reachable
from sublet.hosting.detached import last_line, spawn_detached
from sublet.hosting.processes import read_stat
from sublet.hosting.single import state_of
from sublet.settings import Settings
from sublet.wiring import resolved_environment

START_SECONDS = 20.0
_SETTINGS = ("home", "ledger", "store", "devices", "host", "preload", "price", "placement")


def _name(settings: Settings) -> str:
    key = f"{settings['ledger']}|{settings['host']}"
    return f"attendant-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def lock_path(settings: Settings) -> Path:
    return settings.home / "run" / f"{_name(settings)}.lock"


def socket_name(settings: Settings) -> str:
    """In the folder `run` of the home."""
    return f"{_name(settings)}.sock"


def attendant_pid(settings: Settings) -> int:
    """0 when none runs."""
    running, _, pid = state_of(lock_path(settings))
    return pid if running else 0


def _look(settings: Settings) -> tuple[bool, bool]:
    """Is the lock held, and does its holder take calls. One that was killed while it started a process leaves its lock with that one
    until it has become another program: a lock whose holder is gone is held, and nobody takes calls."""
    running, ready, pid = state_of(lock_path(settings))
    return running, ready and not _is_gone(pid)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's
    found = read_stat(pid)
    return found is not None and found.exiting  # nobody may have asked for its status yet


def attendant_alive(settings: Settings) -> bool:
    """It runs, and takes calls."""
    return _look(settings)[1]


def ensure_attendant(settings: Settings, *, wait: bool = True) -> None:
    """Start one unless one runs; wait until it takes calls."""
    deadline = time.monotonic() + START_SECONDS
    started = 0
    while True:
        running, ready = _look(settings)
        if ready:
            return
        if not running and started and not os.path.exists(f"/proc/{started}"):
            if _look(settings)[0]:
                continue  # another process's start won
            raise Misconfigured(
                f"the attendant, which holds sessions, could not start: {last_line(settings.home / 'attendant.log')}",
                remedy="see attendant.log in SUBLET_HOME",
            )
        if not running and not started:
            command = [sys.executable, "-m", "sublet.studio.attendant"]
            started = spawn_detached(
                command, resolved_environment(settings, _SETTINGS), settings.home / "attendant.log"
            )
        if not wait:
            return
        if time.monotonic() > deadline:
            raise Misconfigured(
                "the attendant did not become ready", remedy="see attendant.log in SUBLET_HOME"
            )
        time.sleep(0.01)


def connected(settings: Settings, timeout: float = 10.0) -> socket.socket:
    """A connection to it, for one operation."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        with reachable(settings.home / "run", socket_name(settings)) as path:
            sock.connect(path)
    except OSError as e:
        sock.close()
        raise Disconnected(
            "the process that holds this host's sessions cannot be reached; nothing was begun",
            remedy="try again in a few seconds: it is started again by itself",
        ) from e
    return sock


def stop(settings: Settings) -> None:
    """For tests and for taking a host out: ends it, and with it every session it holds."""
    pid = attendant_pid(settings)
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 15)
