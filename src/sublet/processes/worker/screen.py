"""What a cell shows: its output and its displays, in the one order in which they were made.

Rules of this file:
- One pipe carries frames: text of standard output, text of standard error, things to show. One thread of the
  worker writes them, so that nothing that happens to the code that prints (an interrupt, a handler that
  prints itself, a finalizer) can tear one.
- Code that prints waits only when much output is unread. Nobody reads between two cells: a thread that goes
  on printing then waits for the next cell.
- A forked child has no part in the pipe: what it prints goes to descriptors 1 and 2, as does what C code
  writes. They come by the worker's other pipes, in their own order.
- What was taken off the pipe is shown once. When showing fails, the rest is shown by the next call.
- A display is JSON, bytes in it as {"base64": text}. Nothing that comes through the pipe is unpickled, and no
  frame is larger than its reader takes.
"""

from __future__ import annotations

import _thread
import base64
import codecs
import contextlib
import io
import itertools
import json
import numbers
import os
import queue
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from sublet.core.errors import BadInput
from sublet.core.studio.frames import SHOW_MOST_BYTES
from sublet.ports.worker import CallSink, Screen

OUT, ERR, SHOW = 1, 2, 3
_HEADER = struct.Struct("<BI")
#: Text is cut into frames of at most this size, so that it appears while more of it is on its way.
_PIECE = 1 << 20
#: This many writes, or one this large, wait until they are read.
_WAITING_MOST = 1000
_LARGE = 1 << 14
_CHUNK = 1 << 18
#: Many times what a pipe holds.
_READS_MOST = 64
_DRAIN_MOST = 64
_STREAMS = {OUT: "stdout", ERR: "stderr"}
#: A display larger than this would not fit its frame.
SHOWN_MOST_BYTES = (1 << 32) - 1
#: A kind and its bytes.
_Item = tuple[int, bytes]


# --- a display as JSON ---


def packed_display(what: Mapping[str, Any]) -> bytes:
    """Encode a display as JSON. What JSON cannot express becomes the nearest thing it can: a NumPy number a
    number, NaN null, anything else its text."""
    quoted = 0

    def other(value: Any) -> Any:
        nonlocal quoted
        if isinstance(value, bytes | bytearray | memoryview):
            quoted += 1
        return _nearest(value)

    try:
        text = json.dumps(what, default=other, allow_nan=False)
        if text.count('"base64":') == quoted:
            return text.encode()
    except (TypeError, ValueError):
        pass  # NaN, or a key that is no text
    try:
        return json.dumps(_plain(what), default=_nearest).encode()
    except (ValueError, RecursionError) as e:
        raise BadInput(
            "a display that contains itself cannot be shown; nothing of it was", remedy="show a part of it"
        ) from e


def _nearest(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, set | frozenset):
        return list(value)
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    return str(value)


def _plain(value: Any) -> Any:
    """Convert to plain JSON types, slowly, for the few displays that need it. A dict that looks like encoded
    bytes is quoted by a list around it."""
    if isinstance(value, Mapping):
        made = {str(key): _plain(member) for key, member in value.items()}
        return {"base64": [made]} if set(made) == {"base64"} else made
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, bytes | bytearray | memoryview):
        return _nearest(value)
    return _plain(_nearest(value))


def opened_display(data: bytes) -> dict[str, Any]:
    found = _with_bytes(json.loads(data))
    if not isinstance(found, dict):
        raise ValueError("a display is a JSON object")
    return found


def _with_bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_bytes(member) for member in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and "base64" in value:
        inner = value["base64"]
        if isinstance(inner, list):
            return {key: _with_bytes(member) for key, member in inner[0].items()}
        return base64.b64decode(inner, validate=True)
    return {key: _with_bytes(member) for key, member in value.items()}


# --- in the worker ---


class WorkerScreen:
    """The worker's end."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._in_child = False
        self._begin()

    def _begin(self) -> None:
        # A SimpleQueue may be put into from anywhere, even from a signal handler that interrupts another put.
        self._waiting: queue.SimpleQueue[_Item | threading.Lock] = queue.SimpleQueue()
        self._writing = threading.Lock()
        self._started = False
        self._writer = 0

    def after_fork(self) -> None:
        """Called in a forked child: the pipe, and what waits to be written to it, belong to the parent."""
        self._in_child = True
        self._begin()

    def text(self, kind: int, data: bytes) -> None:
        if self._in_child:
            _write_all(kind, data)
            return
        self._waiting.put((kind, data))
        if not self._started:
            self._start_writer()
        if len(data) >= _LARGE or self._waiting.qsize() > _WAITING_MOST:
            self.flush()

    def show(self, what: Mapping[str, Any]) -> None:
        data = packed_display(what)
        if len(data) > SHOWN_MOST_BYTES:
            raise BadInput(
                f"a display of {len(data)} bytes is too large to be shown; nothing of it was",
                remedy="show less of it, or save it to a file",
            )
        if self._in_child:
            plain = what["data"].get("text/plain") if isinstance(what.get("data"), Mapping) else None
            _write_all(OUT, f"{plain}\n".encode() if plain is not None else b"")
            return
        self._waiting.put((SHOW, data))
        self.flush()

    def flush(self) -> None:
        """Returns when everything put before is in the pipe."""
        if self._in_child or (not self._started and self._waiting.empty()):
            return
        if threading.get_ident() == self._writer or sys.is_finalizing():
            return  # something finalized there printed, and it cannot wait for itself; or it is gone already
        reached = threading.Lock()
        reached.acquire()
        self._waiting.put(reached)
        if not self._started:
            self._start_writer()
        reached.acquire()

    def _start_writer(self) -> None:
        """Start the writer, then note it: an interrupt between the two starts a second writer, which has
        nothing to do."""
        _thread.start_new_thread(self._write, ())
        self._started = True

    def _write(self) -> None:
        """Write frames for as long as the process lives. What arrives while one is written goes into the
        next."""
        if not self._writing.acquire(blocking=False):
            return
        self._writer = threading.get_ident()
        waiting = self._waiting
        while True:
            items = [waiting.get()]
            with contextlib.suppress(queue.Empty):
                while len(items) <= _WAITING_MOST:
                    items.append(waiting.get_nowait())
            texts: list[_Item] = []
            for item in items:
                if isinstance(item, tuple):
                    texts.append(item)
                else:  # somebody waits for what was put before it
                    self._write_frames(texts)
                    texts = []
                    item.release()
            self._write_frames(texts)
            del items, texts, item

    def _write_frames(self, items: list[_Item]) -> None:
        if items:
            with contextlib.suppress(OSError):  # nobody is there to read it any more
                _write_fd(self._fd, _framed(items))

    def stream(self, kind: int) -> _Stream:
        return _Stream(self, kind)


_frames: WorkerScreen | None = None


def installed(fd: int) -> WorkerScreen:
    """This worker's frames; `sys.stdout` and `sys.stderr` go through them from the first call on."""
    global _frames
    if _frames is None:
        _frames = WorkerScreen(fd)
        sys.stdout, sys.stderr = _frames.stream(OUT), _frames.stream(ERR)
        os.register_at_fork(after_in_child=_frames.after_fork)
    return _frames


def _framed(items: list[_Item]) -> bytes:
    parts: list[bytes] = []
    for kind, of_kind in itertools.groupby(items, key=lambda item: item[0]):
        if kind == SHOW:
            for _, data in of_kind:
                parts += (_HEADER.pack(SHOW, len(data)), data)
            continue
        text = b"".join([data for _, data in of_kind])
        for at in range(0, len(text), _PIECE):
            piece = text[at : at + _PIECE]
            parts += (_HEADER.pack(kind, len(piece)), piece)
    return b"".join(parts)


def _write_all(kind: int, data: bytes) -> None:
    """Write everything to the descriptor, in a forked child that has no writer thread."""
    _write_fd(1 if kind == OUT else 2, data)


def _write_fd(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


class _Stream(io.TextIOBase):
    """A cell's `sys.stdout` or `sys.stderr`. Nothing is buffered here, so even an unfinished line appears at
    once."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, frames: WorkerScreen, kind: int) -> None:
        self._frames, self._kind = frames, kind
        self.buffer = _Bytes(frames, kind)

    @property
    def name(self) -> str:
        return f"<{_STREAMS[self._kind]}>"

    @property
    def line_buffering(self) -> bool:
        return True

    def reconfigure(self, **_: Any) -> None:
        """Accept requests for UTF-8 or line buffering, which is how it works already."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """The descriptor that a subprocess prints to."""
        return self._kind

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            self._frames.text(self._kind, text.encode("utf-8", "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        self._frames.flush()

    def close(self) -> None:
        """Stay open, because the next cell prints here too."""


class _Bytes(io.RawIOBase):
    """The stream's `buffer`."""

    def __init__(self, frames: WorkerScreen, kind: int) -> None:
        self._frames, self._kind = frames, kind

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._kind

    def write(self, data: Any) -> int:
        text = bytes(memoryview(data).cast("B"))
        if text:
            self._frames.text(self._kind, text)
        return len(text)

    def flush(self) -> None:
        self._frames.flush()

    def close(self) -> None:
        pass  # a cell that closes its output closes nobody else's


# --- in the process that called ---


class UnreadableFrame(Exception):
    """What came through the pipe is not a frame."""


class SealedScreen:
    """The screen of a sealed call, which passes displays on as bytes."""

    most_bytes = SHOW_MOST_BYTES

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink

    def text(self, stream: str, text: str) -> None:
        """Pass text on in pieces that fit a frame each."""
        for at in range(0, len(text), _PIECE):
            self._sink.text(stream, text[at : at + _PIECE])

    def show_sealed(self, data: bytes) -> None:
        self._sink.show(data)


class ScreenPipe:
    """The caller's end: takes frames off the pipe and gives them to whoever shows them."""

    def __init__(self, fd: int, fallback: Screen) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.most_bytes = SHOWN_MOST_BYTES  # of one frame
        self._fallback = fallback
        self._unread = bytearray()
        self._frames: deque[tuple[int, bytes]] = deque()  # taken off the pipe, not shown yet
        self._decoders = {kind: codecs.getincrementaldecoder("utf-8")("replace") for kind in _STREAMS}

    def relay(self, screen: Screen | SealedScreen | None) -> bool:
        """Show what is there now, up to one pipe's worth; whether more can come."""
        try:
            chunk = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            chunk = None
        self._take(chunk or b"")
        self._show(screen or self._fallback)
        return chunk != b""

    def drain(self, screen: Screen | SealedScreen | None) -> None:
        """Show everything written so far, but do not follow a thread that goes on writing."""
        for _ in range(_DRAIN_MOST):
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                break
            if not chunk:
                break
            self._take(chunk)
        self._show(screen or self._fallback)

    def end(self, screen: Screen | SealedScreen | None) -> None:
        """Show everything, including a truncated frame and half a character, when nobody writes any more."""
        self.drain(screen)
        if len(self._unread) >= _HEADER.size and self._unread[0] in _STREAMS:
            self._frames.append((self._unread[0], bytes(self._unread[_HEADER.size :])))
        self._unread.clear()
        self._show(screen or self._fallback)
        for kind, decoder in self._decoders.items():
            if rest := decoder.decode(b"", final=True):
                (screen or self._fallback).text(_STREAMS[kind], rest)

    def _take(self, chunk: bytes) -> None:
        self._unread += chunk
        at, size = 0, len(self._unread)
        while size - at >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._unread, at)
            if kind not in (OUT, ERR, SHOW) or length > self.most_bytes:
                self._unread.clear()
                raise UnreadableFrame(f"a frame of kind {kind} with {length} bytes")
            if size - at - _HEADER.size < length:
                break
            at += _HEADER.size
            with memoryview(self._unread) as whole:
                self._frames.append((kind, bytes(whole[at : at + length])))
            at += length
        del self._unread[:at]

    def _show(self, screen: Screen | SealedScreen) -> None:
        frames = self._frames
        while frames:
            kind, data = frames.popleft()  # before it is shown: showing may raise, and nothing is shown twice
            if kind == SHOW:
                self._show_one(screen, data)
                continue
            parts = [data]
            while frames and frames[0][0] == kind:
                parts.append(frames.popleft()[1])
            if text := self._decoders[kind].decode(b"".join(parts)):
                screen.text(_STREAMS[kind], text)

    @staticmethod
    def _show_one(screen: Screen | SealedScreen, data: bytes) -> None:
        if isinstance(screen, SealedScreen):
            screen.show_sealed(data)
            return
        try:
            what = opened_display(data)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as e:
            screen.text("stderr", f"A display of the cell cannot be shown here: {type(e).__name__}: {e}\n")
            return
        screen.show(what)


class OutputPipe:
    """One of the worker's output streams, and where it goes."""

    def __init__(self, fd: int, name: str, stream: Callable[[], TextIO | None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self._name = name
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def relay(self, screen: SealedScreen | None = None) -> bool:
        """Pass on what is there now; whether more can come. A stream that never pauses is left until the next
        time."""
        shown, more = False, False
        stream = self._stream() if screen is None else None
        try:
            for _ in range(_READS_MOST):
                chunk = os.read(self.fd, 65536)
                if not chunk:
                    break
                text = self._decoder.decode(chunk)
                if text and screen is not None:
                    screen.text(self._name, text)
                elif text and stream is not None:
                    stream.write(text)
                    shown = True
            else:
                more = True
        except BlockingIOError:
            more = True
        if shown and stream is not None:
            stream.flush()
        return more


class PlainScreen:
    """Where a worker's output goes by default: this process's own streams, as text only."""

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
