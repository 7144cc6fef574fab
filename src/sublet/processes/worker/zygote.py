"""The zygote: a warm process that has imported what workers need, and forks them.

Rules of this file:
- It imports and forks. It never computes, never touches a GPU platform, never runs user code: a library that
  has started threads or opened its device cannot be forked.
- A spare worker is kept ready, contained and waiting. Whoever asks gets it at once; the next one is made
  afterwards.
- A zygote for tenants has a clean environment, and removes the scratch folders its workers leave.
- It serves its own user only, and exits when nobody has wanted anything for a while or its socket is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

from sublet.core.studio.worker_limits import WorkerLimits
from sublet.machine.private_files import make_private_folder
from sublet.machine.process_log import ProcessLog
from sublet.processes.channel.channel import pair, reachable, receive_with_fds, send_with_fds
from sublet.processes.ladder import children_of
from sublet.processes.sandbox import containment, kernel_calls, tenant_sandbox
from sublet.processes.supervisor.supervisor import spare
from sublet.processes.worker.worker import serve

IDLE_EXIT_SECONDS = 600.0
LOOK_SECONDS = 1.0
#: A new worker's first moments matter more than the next spare.
SPARE_AFTER_SECONDS = 0.15
ASK_PATIENCE_SECONDS = 5.0
#: A spare that lives is waited for: on a crowded machine a fork takes seconds. Whoever asks waits longer.
SPARE_PATIENCE_SECONDS = 30.0
#: The descriptors a request brings: control, calls, standard output and error, the page, the screen.
FDS = 6
_CREDENTIALS = struct.Struct("iII")
#: The order of the limits on its command line.
LIMITS = ("processes", "memory_bytes", "cpu_weight")


class Zygote:
    def __init__(
        self,
        folder: Path,
        name: str,
        idle_exit: float,
        lock: int,
        limits: WorkerLimits,
        home: Path | None = None,
    ) -> None:
        """`home` is SUBLET_HOME, if the workers are tenants' and must not see it."""
        self._folder, self._name, self._home = folder, name, home
        self._limits = limits
        self._sweeper = 0
        self._to_sweep = home is not None
        self._lock = lock
        self._idle_exit = idle_exit
        self._supervisors: set[int] = set()
        self._spare: socket.socket | None = None
        self._spare_pid = 0
        self._in_hand: list[int] = []  # descriptors of the request being answered
        self._spare_at: float | None = 0.0
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with contextlib.suppress(FileNotFoundError), reachable(folder, name) as path:
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with reachable(folder, name) as path:
            self._listener.bind(path)
            os.chmod(path, 0o600)
            self._inode = os.stat(path).st_ino
        self._listener.listen(64)

    def begin(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        # Processes that outlive a killed supervisor, where nothing better contains them, become our children.
        kernel_calls.prctl(kernel_calls.PR_SET_CHILD_SUBREAPER, 1)

    def serve_who_waits(self) -> None:
        """Serve requests between two imports: such a worker lacks what is not imported yet, but nobody waits
        for all of it."""
        while select.select([self._listener.fileno()], [], [], 0)[0]:
            self._reap()
            self._answer()

    def run(self) -> None:
        wanted_at = time.monotonic()
        while self._still_mine():
            now = time.monotonic()
            if self._spare is None and self._spare_at is not None and now >= self._spare_at:
                self._make_spare()
            self._sweep()
            if self._supervisors - ({self._spare_pid} if self._spare is not None else set()):
                wanted_at = now
            elif now - wanted_at > self._idle_exit:
                return
            pause = LOOK_SECONDS
            if self._spare is None and self._spare_at is not None:
                pause = max(0.0, self._spare_at - now)
            ready, _, _ = select.select([self._listener.fileno(), self._wake_read], [], [], pause)
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            self._reap()
            if self._listener.fileno() in ready:
                wanted_at = time.monotonic()
                self._answer()

    def _still_mine(self) -> bool:
        with contextlib.suppress(OSError), reachable(self._folder, self._name) as path:
            return os.stat(path).st_ino == self._inode
        return False

    def _make_spare(self) -> None:
        here, there = pair()
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self._listener.close()
                here.close()
                # The lock too: a zygote that was killed must not seem to live on in its workers. A request's
                # descriptors reach the worker by the hand-over alone.
                for fd in (self._wake_read, self._wake_write, self._lock, *self._in_hand):
                    os.close(fd)
                os.setsid()
                spare(there, self._folder, serve, self._limits, self._home)
            except BaseException as e:
                ProcessLog("supervisor")(f"{type(e).__name__}: {e}")
            finally:
                os._exit(1)
        there.close()
        self._supervisors.add(pid)
        here.settimeout(SPARE_PATIENCE_SECONDS)
        self._spare, self._spare_pid, self._spare_at = here, pid, None

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            asker, _ = self._listener.accept()
            with asker:
                asker.settimeout(ASK_PATIENCE_SECONDS)
                raw = asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                pid, uid, _ = _CREDENTIALS.unpack(raw)
                message, fds = receive_with_fds(asker)
                try:
                    if message and uid == os.getuid() and len(fds) == FDS:
                        self._in_hand = [asker.fileno(), *fds]
                        order = {"client_pid": pid}
                        if self._home is not None:
                            order["sandbox"] = json.loads(message)
                        self._hand_over(order, fds)
                finally:
                    self._in_hand = []
                    for fd in fds:
                        os.close(fd)

    def _hand_over(self, order: dict[str, Any], fds: list[int]) -> None:
        for _ in range(2):  # a spare may have died since it was made
            if self._spare is None:
                self._make_spare()
            assert self._spare is not None
            given, self._spare, self._spare_pid = self._spare, None, 0
            self._spare_at = time.monotonic() + SPARE_AFTER_SECONDS
            with given, contextlib.suppress(OSError):
                if receive_with_fds(given)[0]:
                    send_with_fds(given, json.dumps(order).encode(), fds)
                    return

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                self._supervisors.discard(pid)
                if pid == self._sweeper:
                    self._sweeper = 0
                else:
                    self._to_sweep = True
        for orphan in children_of(os.getpid()):
            if orphan.pid not in self._supervisors and orphan.pid != self._sweeper:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan.pid, signal.SIGKILL)

    def _sweep(self) -> None:
        """Remove scratch folders in a process of its own: they may be large, and somebody may want a
        worker."""
        if self._home is None or not self._to_sweep or self._sweeper:
            return
        self._to_sweep = False
        root = tenant_sandbox.scratch_root(self._home, containment.namespaces_work())
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                self._listener.close()
                os.close(self._lock)
                tenant_sandbox.remove_left_scratch(root)
            os._exit(0)
        self._sweeper = pid


def main() -> int:
    parser = argparse.ArgumentParser(prog="sublet.processes.worker.zygote")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--preload", default="")
    parser.add_argument("--hidden-home", type=Path, help="SUBLET_HOME, for workers of tenants")
    parser.add_argument("--limits", default=(), nargs=3, type=int, metavar="NUMBER", help="as in LIMITS")
    parser.add_argument("--idle-exit", type=float, default=IDLE_EXIT_SECONDS)
    wanted = parser.parse_args()
    # Whoever started this may have blocked signals, as Ray's processes do; a worker must receive them.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    make_private_folder(wanted.folder)
    lock = os.open(wanted.folder / f"{wanted.name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0  # somebody else's start won
    os.ftruncate(lock, 0)  # a longer pid may stand there
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    if not containment.namespaces_work() and wanted.hidden_home is not None and os.getuid() == 0:
        os.chmod(wanted.hidden_home, 0o700)  # nothing else keeps a tenant's user out of it
    limits = WorkerLimits(**dict(zip(LIMITS, wanted.limits, strict=False)))
    zygote = Zygote(wanted.folder, wanted.name, wanted.idle_exit, lock, limits, wanted.hidden_home)
    zygote.begin()
    for module in filter(None, wanted.preload.split(",")):
        try:
            importlib.import_module(module.strip())
        except ImportError as e:
            ProcessLog("zygote")(f"{module} was not preloaded: {e}")
        zygote.serve_who_waits()
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page it touches
    zygote.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
