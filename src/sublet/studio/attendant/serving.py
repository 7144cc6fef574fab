"""The attendant's socket: calls, answers, interrupts and states, as frames.

Rules of this file:
- Only processes of the attendant's own user are let in. Who the request is for is in its head: tenant and session are compared with
  the ledger's row, and a session of somebody else is not there.
- A connection is one operation. One that breaks ends nothing but itself: the call it began goes on.
- Bytes are bounded before they are read, and are never opened here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from sublet.core.errors import BadInput, Disconnected, NotFound, SubletError
from sublet.hosting.channel import reachable
from sublet.ports import sealed
from sublet.studio.attendant.record import CHUNK_BYTES, Bytes, Record
from sublet.studio.attendant.stay import Stay, told

BEAT_SECONDS = 10.0
#: A client that sends nothing, or reads nothing, for so long is gone.
SILENCE_SECONDS = 60.0
CONNECTIONS_MOST = 2048
PAUSE_SECONDS = 0.1
_PEER = struct.Struct("3i")


class House(Protocol):
    def stay(self, session_id: str, tenant: str) -> Stay:
        """Raises `NotFound` also for another tenant's."""


class Server:
    def __init__(self, folder: Path, name: str, house: House, log: Callable[[str], None]) -> None:
        self._folder, self._name = folder, name
        self._house = house
        self._log = log
        self._open = threading.BoundedSemaphore(CONNECTIONS_MOST)
        with contextlib.suppress(FileNotFoundError), reachable(folder, name) as path:
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with reachable(folder, name) as path:
            self._listener.bind(path)
            os.chmod(path, 0o600)
        self._listener.listen(512)

    def start(self) -> None:
        threading.Thread(target=self._accept, name="accepts", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as e:  # too many files are open: some will be closed
                self._log(f"a connection could not be taken: {e}")
                time.sleep(PAUSE_SECONDS)
                continue
            peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            if _PEER.unpack(peer)[1] != os.getuid() or not self._open.acquire(blocking=False):
                sock.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
            except RuntimeError as e:  # no room for another thread
                self._log(f"a connection could not be served: {e}")
                self._open.release()
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                sock.settimeout(SILENCE_SECONDS)
                try:
                    Operation(sock, self._house).run()
                except SubletError as e:
                    _send(sock, [sealed.head_frame(sealed.FAIL, told(e))])
        except OSError:
            pass  # it went away
        except Exception as e:
            self._log(f"an operation failed: {type(e).__name__}: {e}")
        finally:
            self._open.release()


def _send(sock: socket.socket, pieces: Iterable[Bytes]) -> None:
    for piece in pieces:
        sock.sendall(piece)


class Operation:
    """What one connection is for."""

    def __init__(self, sock: socket.socket, house: House) -> None:
        self._sock = sock
        self._house = house
        self._frames = sealed.Frames(sealed.REQUEST_KINDS)
        self._waiting: list[tuple[int, bytes]] = []

    def run(self) -> None:
        kind, data = self._next()
        if kind != sealed.HEAD:
            raise BadInput("an operation begins with its head")
        head = sealed.read_head(data)
        op = sealed.text_of(head, "op", most=20)
        work = {
            "ping": self._ping,
            "call": self._call,
            "answer": self._answer,
            "interrupt": self._interrupt,
            "save": self._save,
            "load": self._load,
        }.get(op)
        if work is None:
            raise BadInput(f"there is no operation {op!r}")
        work(head)

    def _next(self) -> tuple[int, bytes]:
        while not self._waiting:
            data = self._sock.recv(CHUNK_BYTES)
            if not data:
                raise Disconnected("the connection was cut before the request was whole; nothing was begun")
            self._waiting = self._frames.feed(data)
        return self._waiting.pop(0)

    def _parts(self, head: dict[str, Any]) -> list[Bytes]:
        found: list[Bytes] = []
        for _ in range(sealed.count_of(head, "parts", default=0)):
            kind, data = self._next()
            if kind != sealed.PART:
                raise BadInput("a part was expected")
            found.append(data)
        return found

    def _stay(self, head: dict[str, Any]) -> Stay:
        return self._house.stay(
            sealed.text_of(head, "session", most=64), sealed.text_of(head, "tenant", most=64)
        )

    def _done(self, fields: dict[str, Any], parts: list[Bytes] | None = None) -> None:
        _send(self._sock, sealed.message(sealed.DONE, {"ok": True, **fields}, parts or []))

    def _ping(self, head: dict[str, Any]) -> None:
        self._done({"pid": os.getpid()})

    def _call(self, head: dict[str, Any]) -> None:
        stay = self._stay(head)
        call = sealed.call_id_of(head)
        target = sealed.text_of(head, "target", most=20, default="code")
        after = sealed.count_of(head, "after", most=1 << 62, default=0)
        parts = self._parts(head)
        attach = sealed.flag_of(head, "attach", default=not parts)
        self._follow(stay.call(call, target, parts, attach=attach), after)

    def _follow(self, record: Record, at: int) -> None:
        """Until the call is over, or nobody reads."""
        gap = record.gap(at)
        if gap:
            _send(self._sock, [sealed.head_frame(sealed.GAP, {"to": gap})])
            at = gap
        while not record.ended_at(at):
            pieces, reached = record.read(at, BEAT_SECONDS)
            if not pieces:
                _send(self._sock, [sealed.frame(sealed.BEAT)])
                continue
            _send(self._sock, pieces)
            record.was_read(reached)
            at = reached

    def _answer(self, head: dict[str, Any]) -> None:
        stay = self._stay(head)
        number = sealed.count_of(head, "number", most=1 << 31)
        stay.tell(
            sealed.call_id_of(head), number, sealed.flag_of(head, "ok", default=True), self._parts(head)
        )
        self._done({})

    def _interrupt(self, head: dict[str, Any]) -> None:
        self._stay(head).interrupt(sealed.text_of(head, "call", most=64, default=""))
        self._done({})

    def _save(self, head: dict[str, Any]) -> None:
        parts = self._parts(head)
        if len(parts) != 1:
            raise BadInput("a state is one part")
        version, written = self._stay(head).save(parts[0])
        self._done({"version": version, "bytes_written": written})

    def _load(self, head: dict[str, Any]) -> None:
        version = sealed.count_of(head, "version", most=1 << 62, default=0)
        found = self._stay(head).load(version or None)
        if found is None:
            raise NotFound("nothing was saved there yet")
        self._done({}, [found])
