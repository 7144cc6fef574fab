"""A stand-in for the network between a ledger and its PostgreSQL server: it forwards everything, and cuts where it is told.

Rules of this file:
- It reads the client's side of the protocol far enough to count statements: a simple query, or the Sync that ends an extended one.
- `before`: the statement never reaches the server. `after`: the server has done it, its COMMIT too, and the answer is lost.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import tempfile
import threading
from pathlib import Path

SOCKET = ".s.PGSQL.5432"


class Proxy:
    def __init__(self, server_folder: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sublet-proxy-"))
        self._server = str(server_folder / SOCKET)
        self._lock = threading.Lock()
        self._left = 0  # statements until the cut; 0: none is wanted
        self._side = ""
        self.statements = 0
        self.cuts = 0
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.folder / SOCKET))
        self._listening.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def url(self, server_url: str) -> str:
        head, _, rest = server_url.partition("host=")
        return f"{head}host={self.folder}{rest[rest.index('&') :]}"

    def cut(self, statement: int, side: str) -> None:
        """At this one, counted from now over all connections."""
        with self._lock:
            self._left, self._side, self.statements, self.cuts = statement, side, 0, 0

    def close(self) -> None:
        self._listening.close()
        with contextlib.suppress(OSError):
            (self.folder / SOCKET).unlink()
            self.folder.rmdir()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(self._server)
            except OSError:
                client.close()
                continue
            link = _Link(self, client, server)
            threading.Thread(target=link.upward, daemon=True).start()
            threading.Thread(target=link.downward, daemon=True).start()

    def counted(self) -> str:
        """One more statement has come; '' or the side it is to be cut on."""
        with self._lock:
            self.statements += 1
            if self._left:
                self._left -= 1
                if not self._left:
                    self.cuts += 1
                    return self._side
            return ""


class _Link:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy, self.client, self.server = proxy, client, server
        self.mute = threading.Event()  # the answer is not for the client any more
        self.answered = threading.Event()

    def upward(self) -> None:
        try:
            self.server.sendall(self._startup())
            while True:
                kind, message = self._message()
                side = self.proxy.counted() if kind in b"QS" else ""
                if side == "before":
                    return
                if side == "after":
                    self.mute.set()
                self.server.sendall(message)
                if side == "after":
                    self.answered.wait(10)
                    return
        except OSError:
            pass
        finally:
            self._end()

    def downward(self) -> None:
        try:
            while data := self.server.recv(65536):
                if not self.mute.is_set():
                    self.client.sendall(data)
                elif data[-6:-1] == b"Z\x00\x00\x00\x05":
                    self.answered.set()
        except OSError:
            pass
        finally:
            self.answered.set()
            self._end()

    def _startup(self) -> bytes:
        length = self._exactly(4)
        return length + self._exactly(struct.unpack("!I", length)[0] - 4)

    def _message(self) -> tuple[bytes, bytes]:
        head = self._exactly(5)
        return head[:1], head + self._exactly(struct.unpack("!I", head[1:])[0] - 4)

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            more = self.client.recv(count - len(found))
            if not more:
                raise OSError("the client is gone")
            found += more
        return found

    def _end(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(OSError):
                end.close()
