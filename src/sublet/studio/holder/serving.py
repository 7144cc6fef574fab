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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from sublet.core.errors import BadInput, Disconnected, NotFound, SubletError
from sublet.core.studio import frames
from sublet.machine.spill import SpillRoom
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
#: Pieces that are read of a request that was refused.
DISCARDS_MOST = 4096
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
                    _discard_rest(sock)
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


def _discard_rest(sock: socket.socket) -> None:
    """Reads what was refused to its end: closing a connection with bytes unread takes the refusal with it."""
    sock.shutdown(socket.SHUT_WR)
    for _ in range(DISCARDS_MOST):
        if not sock.recv(CHUNK_BYTES):
            return


class HostOperation:
    """The operation of one connection."""

    def __init__(self, sock: socket.socket, sessions: SessionLookup) -> None:
        self._sock = sock
        self._sessions = sessions
        self._unread = b""

    def run(self) -> None:
        head = frames.read_head(b"".join(self._payload(self._begun(frames.HEAD))))
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

    def _begun(self, kind: int) -> int:
        """Reads a frame's header; returns its length."""
        while len(self._unread) < frames.HEADER.size:
            self._unread += self._received()
        found, length = frames.HEADER.unpack_from(self._unread)
        if found != kind:
            raise BadInput(f"a frame of kind {found} came where one of kind {kind} was expected")
        frames.header(kind, length)  # refuses what its kind may not have
        self._unread = self._unread[frames.HEADER.size :]
        return int(length)

    def _payload(self, length: int) -> Iterator[bytes]:
        """The bytes of a frame as they come."""
        while length:
            data = self._unread or self._received()
            piece, self._unread = data[:length], data[length:]
            length -= len(piece)
            yield piece

    def _received(self) -> bytes:
        data = self._sock.recv(CHUNK_BYTES)
        if not data:
            raise Disconnected("the connection was cut before the request was whole; nothing was begun")
        return data

    def _parts(self, head: dict[str, Any], room: SpillRoom) -> list[Bytes]:
        collected = room.collect()
        for _ in range(frames.count_of(head, "parts", default=0)):
            length = self._begun(frames.PART)
            collected.begin(length)
            for piece in self._payload(length):
                collected.write(piece)
        return list(collected.done())

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
        if head.get("attach") is not True:
            held.check_room(call)
        parts = self._parts(head, held.room)
        attach = frames.flag_of(head, "attach", default=not parts)
        self._follow(held.call(call, target, parts, attach=attach), after)

    def _follow(self, record: CallRecord, at: int) -> None:
        """Sends the call's output until the call is over or nobody reads."""
        with record.listened_to():
            self._send_record(record, at)

    def _send_record(self, record: CallRecord, at: int) -> None:
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
            frames.call_id_of(head),
            number,
            frames.flag_of(head, "ok", default=True),
            self._parts(head, held.room),
        )
        self._done({})

    def _interrupt(self, head: dict[str, Any]) -> None:
        self._held_session(head).interrupt(frames.text_of(head, "call", most=64, default=""))
        self._done({})

    def _save(self, head: dict[str, Any]) -> None:
        held = self._held_session(head)
        parts = self._parts(head, held.room)
        if len(parts) != 1:
            raise BadInput("a state is one part")
        version, written = held.save(parts[0])
        self._done({"version": version, "bytes_written": written})

    def _load(self, head: dict[str, Any]) -> None:
        version = frames.count_of(head, "version", most=1 << 62, default=0)
        found = self._held_session(head).load(version or None)
        if found is None:
            raise NotFound("nothing was saved there yet")
        self._done({}, [found])
