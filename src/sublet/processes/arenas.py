"""Arenas held by the host's warden: a restart on the same host finds the committed state in memory.

`ArenaHolder` is the warden's end, `HeldArenas` everybody else's. Rules of this file:
- What is held are descriptors, not bytes: while its process lives an arena costs nothing, because it is that
  process's own.
- After its process died an arena is held for a while, bounded in time and in bytes, oldest let go first.
- One user's arenas are that user's: the kernel says who asks. An arena is given away once, and only when
  nobody writes to it any more.
- Nothing here fails anybody's save or load: without a warden there is simply nothing held.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublet.core.checkpoints.checkpoint import MAX_MANIFEST_BYTES
from sublet.core.values import check_job
from sublet.machine.private_files import make_private_folder, make_private_socket
from sublet.ports.store import Remembered
from sublet.processes.channel.channel import reachable, receive_with_fds, send_with_fds
from sublet.processes.clock import HostClock
from sublet.processes.loop_watch import LoopBeats

try:
    import fcntl
except ImportError:  # a client of a studio, not on Linux: this file is imported there, and not used
    fcntl = None  # type: ignore[assignment]

#: A preempted job is back within minutes, or somewhere else.
KEEP_SECONDS = 15 * 60.0
PATIENCE_SECONDS = 2.0
#: A client sends its question at once: a silent one must not keep the others waiting.
_ASKED_WITHIN_SECONDS = 0.25
_LOOK_SECONDS = 5.0
#: Each is three of the warden's descriptors.
MOST_ARENAS = 200
_CREDENTIALS = struct.Struct("iII")
ARENAS = "arenas"


@dataclass(slots=True)
class _HeldArena:
    arena: int
    manifest: int
    size: int
    digest: str
    process: int  # pidfd
    pid: int
    died_at: float | None = None

    def close(self) -> None:
        for fd in (self.arena, self.manifest, self.process):
            os.close(fd)


class ArenaHolder:
    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        keep_seconds: float = KEEP_SECONDS,
        most_bytes: int | None = None,
        log: Callable[[str], None] = lambda _: None,
        beats: LoopBeats | None = None,
    ) -> None:
        self._keep_seconds = keep_seconds
        self._most_bytes = most_bytes if most_bytes is not None else _half_of_memory()
        self._log = log
        self._beats = beats or LoopBeats(HostClock())
        self._held: dict[tuple[int, str], _HeldArena] = {}
        self._lock = threading.Lock()
        make_private_folder(folder)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with reachable(folder, name) as path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self._listener.bind(path)
            make_private_socket(path, str(folder))
        self._listener.listen(64)
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._loop, name="sublet-arenas", daemon=True)

    def __enter__(self) -> ArenaHolder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._stop_write, b"!")
        self._thread.join(timeout=PATIENCE_SECONDS + 1)
        self._listener.close()
        if not self._thread.is_alive():
            os.close(self._stop_read)
        os.close(self._stop_write)
        with self._lock:
            while self._held:
                self._held.popitem()[1].close()

    def holding(self) -> bool:
        """Whether exiting would lose somebody's arena."""
        with self._lock:
            return bool(self._held)

    def _loop(self) -> None:
        while True:
            self._beats.turn(ARENAS)
            poller = select.poll()
            poller.register(self._stop_read, select.POLLIN)
            poller.register(self._listener, select.POLLIN)
            with self._lock:
                living = {h.process: h for h in self._held.values() if h.died_at is None}
            for fd in living:
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll(_LOOK_SECONDS * 1000):
                if fd == self._stop_read:
                    self._beats.over(ARENAS)
                    return
                if fd == self._listener.fileno():
                    with contextlib.suppress(OSError):
                        self._serve(self._listener.accept()[0])
                elif fd in living:
                    living[fd].died_at = time.monotonic()
            self._let_go()

    def _let_go(self) -> None:
        """Let go of what was held long enough, and of the oldest beyond the limit."""
        now = time.monotonic()
        with self._lock:
            dead = sorted(
                ((h.died_at, key) for key, h in self._held.items() if h.died_at is not None), reverse=True
            )
            total = 0
            for died_at, key in dead:
                total += self._held[key].size
                if now - died_at > self._keep_seconds or total > self._most_bytes:
                    self._log(f"the arena of {key[1]} is let go")
                    self._held.pop(key).close()

    def _serve(self, asker: socket.socket) -> None:
        with asker:
            asker.settimeout(_ASKED_WITHIN_SECONDS)
            pid, uid, _ = _CREDENTIALS.unpack(
                asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            message, fds = receive_with_fds(asker)
            given: list[int] = []
            try:
                order = json.loads(message)
                answer, given = self._answer(order, (uid, check_job(order["job"])), pid, fds)
                send_with_fds(asker, json.dumps(answer).encode(), given)
            except Exception as e:  # whatever was asked: it must not end what is held for others
                self._log(f"an arena was not held: {type(e).__name__}: {str(e)[:200]!a}")
            finally:
                for fd in (*fds, *given):
                    os.close(fd)

    def _answer(
        self, order: dict[str, Any], key: tuple[int, str], pid: int, fds: list[int]
    ) -> tuple[dict[str, Any], list[int]]:
        """Answer one request. Descriptors given away are closed once they are sent; those that came, and are
        kept, are copies."""
        with self._lock:
            if order["op"] == "fetch":
                held = self._held.get(key)
                if held is None or held.digest != order["digest"] or not _is_dead(held.process):
                    return {}, []
                del self._held[key]
                os.close(held.process)
                return {"size": held.size}, [held.arena, held.manifest]
            before = self._held.get(key)
            held = None
            if order["op"] == "keep":
                if before is None and len(self._held) >= MOST_ARENAS:
                    raise ValueError(f"{MOST_ARENAS} are held already")
                held = _taken(order, pid, fds)
            elif before is None or (before.pid != pid and not _is_dead(before.process)):
                return {}, []  # only its own, or nobody's, is forgotten
            if before is not None:
                self._held.pop(key).close()
            if held is not None:
                self._held[key] = held
            return {}, []


def _taken(order: dict[str, Any], pid: int, fds: list[int]) -> _HeldArena:
    """Take all descriptors of an arena, or raise and take none: one left open here is memory nobody gets
    back."""
    arena, manifest = fds
    digest = str(order["digest"])
    # Measured, not believed: how much is held decides what is let go.
    size = os.fstat(arena).st_size
    with contextlib.ExitStack() as undo:
        copies = []
        for fd in (arena, manifest):
            copies.append(os.dup(fd))
            undo.callback(os.close, copies[-1])
        process = os.pidfd_open(pid)
        undo.pop_all()
    return _HeldArena(copies[0], copies[1], size, digest, process, pid)


class HeldArenas:
    """Implements `ports.store.HostMemory`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name

    def keep(self, job: str, fd: int, size: int, digest: str, manifest: bytes) -> None:
        with contextlib.suppress(OSError):
            copy = os.memfd_create("sublet-manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.write(copy, manifest)
                fcntl.fcntl(
                    copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
                )
                self._ask({"op": "keep", "job": job, "size": size, "digest": digest}, [fd, copy])
            finally:
                os.close(copy)

    def fetch(self, job: str, digest: str) -> Remembered | None:
        answer, fds = self._ask({"op": "fetch", "job": job, "digest": digest}, [])
        if len(fds) != 2 or "size" not in answer:
            for fd in fds:
                os.close(fd)
            return None
        try:
            data = os.pread(fds[1], MAX_MANIFEST_BYTES + 1, 0)
        except OSError:
            os.close(fds[0])
            return None
        finally:
            os.close(fds[1])
        return Remembered(fds[0], int(answer["size"]), data)

    def drop(self, job: str) -> None:
        self._ask({"op": "drop", "job": job}, [])

    def _ask(self, order: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[int]]:
        with (
            contextlib.suppress(OSError, ValueError),
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
        ):
            sock.settimeout(PATIENCE_SECONDS)
            with reachable(self._folder, self._name) as path:
                sock.connect(path)
            send_with_fds(sock, json.dumps(order).encode(), fds)
            message, given = receive_with_fds(sock)
            answer: dict[str, Any] = json.loads(message) if message else {}
            return answer, given
        return {}, []


def _is_dead(process: int) -> bool:
    return bool(select.select([process], [], [], 0)[0])


def _half_of_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
