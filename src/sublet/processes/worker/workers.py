"""Where this host's workers come from: finding the zygote they are forked from, or starting it.

Rules of this file:
- One zygote serves all processes that would import the same modules the same way; an upgrade starts a new
  one.
- If a zygote exits just as it is asked, a new one is started and asked, once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import sys
import sysconfig
import time
from pathlib import Path

from sublet.core.errors import Misconfigured
from sublet.core.studio.worker_limits import DEFAULT_LIMITS, WorkerLimits
from sublet.machine.private_files import make_private_folder
from sublet.machine.spill import SpillRoom
from sublet.processes.channel.channel import reachable, send_with_fds
from sublet.processes.daemonize import last_line, spawn_detached
from sublet.processes.sandbox.tenant_sandbox import TenantSandbox, zygote_environment
from sublet.processes.supervisor.link import START_SECONDS
from sublet.processes.worker.local import LocalWorker, NotServed

EXPLAIN_AFTER_SECONDS = 1.0


def _files_seen() -> str:
    """Identify the mount namespace: containers that share a home must not fork workers from each other's
    zygotes."""
    try:
        return os.readlink("/proc/self/ns/mnt")
    except OSError:
        return ""


class LocalWorkers:
    """Implements `ports.worker.Workers`."""

    def __init__(
        self,
        home: Path,
        host: str,
        preload: str,
        *,
        idle_exit: float | None = None,
        sandbox: TenantSandbox | None = None,
        limits: WorkerLimits = DEFAULT_LIMITS,
        room: SpillRoom | None = None,
    ) -> None:
        """With a `sandbox` the workers are a tenant's: they see nothing of this process, and are called
        sealed only. Their large answers wait in `room`."""
        self._room = room
        self._home = home
        self._sandbox = sandbox
        self._limits = [str(limits.processes), str(limits.memory_bytes), str(limits.cpu_weight)]
        self._folder = home / "run"
        self._log = home / "zygote.log"
        self._host = host
        self._preload = preload
        self._idle_exit = idle_exit
        self._name = f"zygote-{self._fingerprint()}"

    def _fingerprint(self) -> str:
        """Digest what decides which zygote can serve: the interpreter, the preloaded modules, the installed
        code."""
        facts = [
            sys.executable,
            sys.prefix,
            self._preload,
            str(os.getuid()),
            "" if self._sandbox is None else "sandbox",
            _files_seen(),
            *self._limits,
            *(os.environ.get(name, "") for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")),
        ]
        installed = Path(sysconfig.get_path("purelib"))
        package = Path(__file__).parents[2]
        # An installed package changes with the folder it is in; one that somebody works on changes file by
        # file.
        for place in (
            [installed] if package.is_relative_to(installed) else [installed, *package.rglob("*.py")]
        ):
            with contextlib.suppress(OSError):
                facts.append(str(os.stat(place).st_mtime_ns))
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]

    def start(self) -> LocalWorker:
        try:
            return LocalWorker(self._ask, self._host, self._sandbox, self._room)
        except NotServed:  # by a zygote that was just leaving, perhaps: the next one will
            return LocalWorker(self._ask, self._host, self._sandbox, self._room)

    def warm(self) -> None:
        """Start the zygote if there is none, and wait silently until it serves."""
        self._connect(explain=False).close()

    def _ask(self, fds: list[int]) -> None:
        with self._connect() as sock:
            try:
                send_with_fds(sock, self._order(), fds)
            except ConnectionError as e:
                raise NotServed("the zygote left") from e

    def _order(self) -> bytes:
        if self._sandbox is None:
            return b"worker"
        hide = [os.path.abspath(path) for path in self._sandbox.hide]
        said = {
            "number": self._sandbox.number,
            "hide": hide,
            "file_bytes": self._sandbox.file_bytes,
            "network": self._sandbox.network.value,
        }
        return json.dumps(said).encode()

    def _connect(self, *, explain: bool = True) -> socket.socket:
        began = time.monotonic()
        spawned = 0
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with reachable(self._folder, self._name) as path:
                    sock.connect(path)
                return sock
            except OSError:
                sock.close()
            if spawned and not os.path.exists(f"/proc/{spawned}") and not self._starting():
                raise Misconfigured(
                    f"the zygote, which workers are forked from, could not start: {last_line(self._log)}",
                    remedy=f"see {self._log}",
                )
            if not spawned and not self._starting():
                spawned = self._spawn()
            waited = time.monotonic() - began
            if waited > START_SECONDS:
                raise Misconfigured("the zygote did not become ready", remedy=f"see {self._log}")
            if waited > EXPLAIN_AFTER_SECONDS and explain and sys.stderr is not None:
                explain = False
                if sys.stderr.isatty():
                    print("sublet: warming up workers, once …", file=sys.stderr)
            time.sleep(0.01)

    def _starting(self) -> bool:
        """Whether somebody's zygote holds the lock and is still importing."""
        try:
            fd = os.open(self._folder / f"{self._name}.lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def _spawn(self) -> int:
        make_private_folder(self._folder)
        command = [sys.executable, "-m", "sublet.processes.worker.zygote", "--folder", str(self._folder)]
        command += ["--name", self._name, "--preload", self._preload]
        command += ["--limits", *self._limits]
        if self._idle_exit is not None:
            command += ["--idle-exit", str(self._idle_exit)]
        if self._sandbox is not None:
            command += ["--hidden-home", os.path.realpath(self._home)]
            return spawn_detached(command, zygote_environment(os.environ), self._log)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
        return spawn_detached(command, environment, self._log)
