"""What a cell shows: its output and its displays, in the one order in which they were made.

Rules of this file:
- One pipe carries frames: text of standard output, text of standard error, things to show. A frame is never torn: signals wait until
  it is written, and threads wait for each other.
- The worker's end is the cell's `sys.stdout` and `sys.stderr`. What C code writes to descriptors 1 and 2 comes by the worker's other
  pipes, in its own order.
"""

from __future__ import annotations

import codecs
import io
import itertools
import os
import pickle
import signal
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from sublet.ports.worker import Screen

OUT, ERR, SHOW = 1, 2, 3
_HEADER = struct.Struct("<BI")
#: So much text, or so long, waits for more of it.
_PIECE = 1 << 14
_PAUSE_SECONDS = 0.01
_CHUNK = 1 << 18
_DRAIN_MOST = 64
_HELD_BACK = {signal.SIGINT, signal.SIGTERM}
_STREAMS = {OUT: "stdout", ERR: "stderr"}


# --- in the worker -------------------------------------------------------------------------------------------


class Frames:
    """The worker's end. Text waits a moment for more, so that many small lines are few frames."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[tuple[int, bytes]] = []
        self._waiting_bytes = 0
        self._written_at = 0.0
        self._wanted = threading.Event()
        self._flusher: threading.Thread | None = None

    def after_fork(self) -> None:
        """In a child of the user's: what waits is the parent's to write, and so is its lock."""
        self._begin()

    def text(self, kind: int, data: bytes) -> None:
        with self._lock:
            self._waiting.append((kind, data))
            self._waiting_bytes += len(data)
            if self._waiting_bytes >= _PIECE or time.monotonic() - self._written_at >= _PAUSE_SECONDS:
                self.flush()
            elif not self._wanted.is_set():
                self._wanted.set()
                if self._flusher is None:
                    self._flusher = threading.Thread(
                        target=self._flush_behind, name="sublet-shows", daemon=True
                    )
                    self._flusher.start()

    def show(self, what: Mapping[str, Any]) -> None:
        with self._lock:
            self.flush()
            self._write([_HEADER.pack(SHOW, len(data := pickle.dumps(what, 5))), data])

    def flush(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
            parts: list[bytes] = []
            for kind, of_kind in itertools.groupby(waiting, key=lambda frame: frame[0]):
                text = b"".join(data for _, data in of_kind)
                parts += (_HEADER.pack(kind, len(text)), text)
            self._write(parts)
            self._written_at = time.monotonic()

    def _write(self, parts: list[bytes]) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        try:
            frame = memoryview(b"".join(parts))
            while frame:
                frame = frame[os.write(self._fd, frame) :]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _flush_behind(self) -> None:
        wanted = self._wanted
        while True:
            wanted.wait()
            time.sleep(_PAUSE_SECONDS)
            wanted.clear()
            self.flush()

    def stream(self, kind: int) -> TextIO:
        raw = io.BufferedWriter(_Raw(self, kind), _PIECE)
        return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)


class _Raw(io.RawIOBase):
    def __init__(self, frames: Frames, kind: int) -> None:
        self._frames, self._kind = frames, kind

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        text = bytes(data)
        self._frames.text(self._kind, text)
        return len(text)


# --- in the process that called ------------------------------------------------------------------------------


class ScreenPipe:
    """The caller's end: takes frames off the pipe and gives them to whoever shows them."""

    def __init__(self, fd: int, fallback: Screen) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._fallback = fallback
        self._unread = bytearray()
        self._decoders = {kind: codecs.getincrementaldecoder("utf-8")("replace") for kind in _STREAMS}

    def relay(self, screen: Screen | None) -> bool:
        """What is there now, a pipe's worth of it; whether there can be more."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return True
        self._unread += chunk
        self._show(screen or self._fallback)
        return bool(chunk)

    def drain(self, screen: Screen | None) -> None:
        """Everything written so far. A thread that goes on writing is not followed for ever."""
        for _ in range(_DRAIN_MOST):
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                break
            if not chunk:
                break
            self._unread += chunk
        self._show(screen or self._fallback)

    def _show(self, screen: Screen) -> None:
        at, text_kind = 0, 0
        text: list[str] = []
        size = len(self._unread)
        frames: list[tuple[int, bytes]] = []
        while size - at >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._unread, at)
            if size - at - _HEADER.size < length:
                break
            at += _HEADER.size
            frames.append((kind, bytes(self._unread[at : at + length])))
            at += length
        del self._unread[:at]  # before anything is shown: showing may raise, and nothing is shown twice
        for kind, data in frames:
            if kind != text_kind and text:
                screen.text(_STREAMS[text_kind], "".join(text))
                text = []
            if kind == SHOW:
                text_kind = 0
                screen.show(pickle.loads(data))
            else:
                text_kind = kind
                text.append(self._decoders[kind].decode(data))
        if text:
            screen.text(_STREAMS[text_kind], "".join(text))


class PlainScreen:
    """Where a worker's output goes when nobody said: to this process's own streams. Displays have no place there."""

    def __init__(self, streams: Mapping[str, Callable[[], TextIO | None]]) -> None:
        self._streams = streams

    def text(self, stream: str, text: str) -> None:
        found = self._streams[stream]()
        if found is not None:
            found.write(text)
            found.flush()

    def show(self, what: Mapping[str, Any]) -> None:
        data = what.get("data")
        if isinstance(data, Mapping) and "text/plain" in data:
            self.text("stdout", f"{data['text/plain']}\n")
