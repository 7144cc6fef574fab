"""Finding the session host of this machine, and starting it.

Rules of this file:
- There is one per machine, ledger and home. Whoever needs it starts it, and it outlives whoever did.
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
from sublet.processes.channel.channel import reachable
from sublet.processes.daemonize import last_line, spawn_detached
from sublet.processes.ladder import read_stat
from sublet.processes.loop_watch import ProcessHealth, process_health
from sublet.processes.pid_lock import state_of
from sublet.settings import Settings
from sublet.wiring import CLOCK, resolved_environment

START_SECONDS = 20.0
_SETTINGS = (
    "home",
    "ledger",
    "store",
    "devices",
    "host",
    "preload",
    "price",
    "placement",
    "isolation",
    "worker_memory",
    "worker_processes",
    "worker_cpu_weight",
    "disk_reserve",
    "scratch_limit",
    "tenant_network",
)


def _name(settings: Settings) -> str:
    key = f"{settings['ledger']}|{settings['host']}"
    return f"session-host-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def lock_path(settings: Settings) -> Path:
    return settings.home / "run" / f"{_name(settings)}.lock"


def socket_name(settings: Settings) -> str:
    """The socket's name in the folder `run` of the home."""
    return f"{_name(settings)}.sock"


def session_host_pid(settings: Settings) -> int:
    """The pid of the running session host, or 0."""
    running, _, pid = state_of(lock_path(settings))
    return pid if running else 0


def session_host_health(settings: Settings) -> ProcessHealth:
    return process_health(lock_path(settings), CLOCK)


def _look(settings: Settings) -> tuple[bool, bool]:
    """Whether the lock is held, and whether its holder takes calls. A session host that was killed while it
    started a process leaves the lock to that child until it runs another program: then the lock is held, and
    nobody takes calls."""
    running, ready, pid = state_of(lock_path(settings))
    return running, ready and not _is_gone(pid)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # a process of another user
    found = read_stat(pid)
    return found is not None and found.exiting  # a zombie whose status nobody has read yet


def session_host_alive(settings: Settings) -> bool:
    """Whether a session host runs and takes calls."""
    return _look(settings)[1]


def ensure_session_host(settings: Settings, *, wait: bool = True) -> None:
    """Starts a session host unless one runs, and waits until it takes calls."""
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
                "the session host, which holds sessions, could not start: "
                f"{last_line(settings.home / 'session-host.log')}",
                remedy="see session-host.log in SUBLET_HOME",
            )
        if not running and not started:
            command = [sys.executable, "-m", "sublet.studio.holder"]
            started = spawn_detached(
                command, resolved_environment(settings, _SETTINGS), settings.home / "session-host.log"
            )
        if not wait:
            return
        if time.monotonic() > deadline:
            raise Misconfigured(
                "the session host did not become ready", remedy="see session-host.log in SUBLET_HOME"
            )
        time.sleep(0.01)


def connected(settings: Settings, timeout: float = 10.0) -> socket.socket:
    """A connection to the session host, for one operation."""
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
    """Ends the session host and every session it holds, for tests and for taking a host out of service."""
    pid = session_host_pid(settings)
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 15)
