"""The session host's socket: calls, answers, interrupts and states, as frames.

Rules of this file:
- Only processes of the session host's own user may connect. A request's head names tenant and session, which
  are compared with the ledger's row: another tenant's session does not exist.
- A connection is one operation. One that breaks ends only itself: the call it began goes on.
- Sizes are checked before bytes are read, and the bytes are never opened here.
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
from sublet.core.studio import frames
from sublet.processes.channel.channel import reachable
from sublet.processes.loop_watch import LoopBeats
from sublet.studio.holder.call_record import CHUNK_BYTES, Bytes, CallRecord
from sublet.studio.holder.held_session import HeldSession, told

BEAT_SECONDS = 10.0
#: A client that sends nothing, or reads nothing, for this long is gone.
SILENCE_SECONDS = 60.0
CONNECTIONS_MOST = 2048
PAUSE_SECONDS = 0.1
ACCEPT_SECONDS = 5.0
ACCEPTS = "accepts"
_PEER = struct.Struct("3i")


class SessionLookup(Protocol):
    def held_session(self, session_id: str, tenant: str) -> HeldSession:
        """The session; raises `NotFound`, also for another tenant's."""


class SessionHostServer:
    def __init__(
        self,
        folder: Path,
        name: str,
        sessions: SessionLookup,
        beats: LoopBeats,
        log: Callable[[str], None],
    ) -> None:
        self._folder, self._name = folder, name
        self._sessions = sessions
        self._beats = beats
        self._log = log
        self._open = threading.BoundedSemaphore(CONNECTIONS_MOST)
        with contextlib.suppress(FileNotFoundError), reachable(folder, name) as path:
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with reachable(folder, name) as path:
            self._listener.bind(path)
            os.chmod(path, 0o600)
        self._listener.listen(512)
        self._listener.settimeout(ACCEPT_SECONDS)  # so that its loop turns while nobody connects

    def start(self) -> None:
        threading.Thread(target=self._accept, name="accepts", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._beats.turn(ACCEPTS)
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
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
                    HostOperation(sock, self._sessions).run()
                except SubletError as e:
                    _send(sock, [frames.head_frame(frames.FAIL, told(e))])
        except OSError:
            pass  # it went away
        except Exception as e:
            self._log(f"an operation failed: {type(e).__name__}: {e}")
        finally:
            self._open.release()


def _send(sock: socket.socket, pieces: Iterable[Bytes]) -> None:
    """In small pieces, because the socket's timeout is for each of them: who still reads is not gone."""
    for piece in pieces:
        view = memoryview(piece)
        for at in range(0, view.nbytes, CHUNK_BYTES):
            sock.sendall(view[at : at + CHUNK_BYTES])


class HostOperation:
    """The operation of one connection."""

    def __init__(self, sock: socket.socket, sessions: SessionLookup) -> None:
        self._sock = sock
        self._sessions = sessions
        self._frames = frames.FrameReader(frames.REQUEST_KINDS)
        self._waiting: list[tuple[int, bytes]] = []

    def run(self) -> None:
        kind, data = self._next()
        if kind != frames.HEAD:
            raise BadInput("an operation begins with its head")
        head = frames.read_head(data)
        op = frames.text_of(head, "op", most=20)
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
        for _ in range(frames.count_of(head, "parts", default=0)):
            kind, data = self._next()
            if kind != frames.PART:
                raise BadInput("a part was expected")
            found.append(data)
        return found

    def _held_session(self, head: dict[str, Any]) -> HeldSession:
        return self._sessions.held_session(
            frames.text_of(head, "session", most=64), frames.text_of(head, "tenant", most=64)
        )

    def _done(self, fields: dict[str, Any], parts: list[Bytes] | None = None) -> None:
        _send(self._sock, frames.message(frames.DONE, {"ok": True, **fields}, parts or []))

    def _ping(self, head: dict[str, Any]) -> None:
        self._done({"pid": os.getpid()})

    def _call(self, head: dict[str, Any]) -> None:
        held = self._held_session(head)
        call = frames.call_id_of(head)
        target = frames.text_of(head, "target", most=20, default="code")
        after = frames.count_of(head, "after", most=1 << 62, default=0)
        parts = self._parts(head)
        attach = frames.flag_of(head, "attach", default=not parts)
        self._follow(held.call(call, target, parts, attach=attach), after)

    def _follow(self, record: CallRecord, at: int) -> None:
        """Sends the call's output until the call is over or nobody reads."""
        while not record.ended_at(at):
            gap = record.gap(at)  # also of a reader that was overtaken by a faster one
            if gap:
                _send(self._sock, [frames.head_frame(frames.GAP, {"to": gap})])
                at = gap
            pieces, reached = record.read(at, BEAT_SECONDS)
            if not pieces:
                _send(self._sock, [frames.frame(frames.BEAT)])
                continue
            _send(self._sock, pieces)
            record.was_read(reached)
            at = reached

    def _answer(self, head: dict[str, Any]) -> None:
        held = self._held_session(head)
        number = frames.count_of(head, "number", most=1 << 31)
        held.tell(
            frames.call_id_of(head), number, frames.flag_of(head, "ok", default=True), self._parts(head)
        )
        self._done({})

    def _interrupt(self, head: dict[str, Any]) -> None:
        self._held_session(head).interrupt(frames.text_of(head, "call", most=64, default=""))
        self._done({})

    def _save(self, head: dict[str, Any]) -> None:
        parts = self._parts(head)
        if len(parts) != 1:
            raise BadInput("a state is one part")
        version, written = self._held_session(head).save(parts[0])
        self._done({"version": version, "bytes_written": written})

    def _load(self, head: dict[str, Any]) -> None:
        version = frames.count_of(head, "version", most=1 << 62, default=0)
        found = self._held_session(head).load(version or None)
        if found is None:
            raise NotFound("nothing was saved there yet")
        self._done({}, [found])
