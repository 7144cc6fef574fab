"""The trainer's end of the writer process: one job at a time, started when it is first needed and again when
it died."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from sublet.core.checkpoints.checkpoint import ByteSpan
from sublet.core.errors import NotDurable
from sublet.store.arena import Arena
from sublet.store.save.packing import Packed


class Writer:
    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._arena: Arena | None = None  # the one the process has mapped
        self._pid = 0
        self._lock = threading.Lock()
        self._given_up = False
        self.away: dict[str, str] = {}  # replicas that do not answer it, as it said last

    def write(
        self, arena: Arena, spans: Sequence[ByteSpan], urls: Sequence[str], quorum: dict[str, Any]
    ) -> Packed:
        """Write a pack. It blocks its thread, not the interpreter, and raises `NotDurable` when the process
        died."""
        with self._lock:
            try:
                answer = self._ask(arena, spans, urls, quorum)
            except OSError as e:
                self._end()
                if self._given_up:
                    raise NotDurable(
                        f"the replicas were not waited for any longer{_said(self.away)}; nothing of this "
                        "save counts"
                    ) from None
                raise NotDurable(
                    f"the checkpoint writer died: {e.strerror or e}; nothing of this save counts"
                ) from e
        if "error" in answer:
            raise NotDurable(f"the checkpoint was not written: {answer['error']}")
        return Packed(
            answer["pack"],
            tuple(answer["digests"]),
            tuple(answer["places"]),
            tuple(answer["confirmed"]),
            answer["failed"],
            tuple(answer["late"]),
        )

    def give_up(self) -> None:
        """End the write under way, from any thread; the next write starts another process."""
        self._given_up = True
        process = self._process
        if process is not None and self._pid == os.getpid():
            with contextlib.suppress(OSError):
                process.kill()

    def take_up(self) -> None:
        self._given_up = False

    def is_there(self, replicas: Sequence[str]) -> None:
        """Note that these replicas answered this process: what the writer said of them is outdated."""
        self.away = {name: why for name, why in self.away.items() if name not in replicas}

    def _ask(
        self, arena: Arena, spans: Sequence[ByteSpan], urls: Sequence[str], quorum: dict[str, Any]
    ) -> dict[str, Any]:
        if self._given_up:
            raise ConnectionAbortedError("it was given up")
        link = self._running()
        job = {
            "size": arena.size,
            "spans": [[s.offset, s.size] for s in spans],
            "replicas": list(urls),
            "quorum": quorum,
        }
        data = json.dumps(job).encode()
        link.sendall(len(data).to_bytes(8, "little"))
        if self._arena is not arena:
            sent = socket.send_fds(link, [data], [arena.fd])
            link.sendall(data[sent:])
            self._arena = arena
        else:
            link.sendall(data)
        while True:
            length = int.from_bytes(self._exactly(link, 8), "little")
            answer: dict[str, Any] = json.loads(self._exactly(link, length))
            self.away = answer.pop("away")
            if answer:
                return answer

    @staticmethod
    def _exactly(link: socket.socket, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            more = link.recv(min(1 << 20, count - len(data)))
            if not more:
                raise ConnectionResetError("its end of the connection closed")
            data += more
        return bytes(data)

    def _running(self) -> socket.socket:
        if self._link is not None and self._pid == os.getpid():
            return self._link
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sublet.store.save.writer", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                # A Ctrl-C in the terminal is for the trainer, which will still want its last save.
                start_new_session=True,
            )
        self._link, self._arena, self._pid = ours, None, os.getpid()
        return ours

    def _end(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()
        process, self._process = self._process, None
        if process is not None and self._pid == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
                return
            process.kill()
            process.wait()

    def close(self) -> None:
        with self._lock:
            self._end()


def _said(away: dict[str, str]) -> str:
    return f" ({'; '.join(f'{name}: {why}' for name, why in sorted(away.items()))})" if away else ""
