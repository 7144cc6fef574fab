"""The output of a call so far: its frames, for the current reader and for one that comes back.

Rules of this file:
- Frames are numbered by the byte they begin at. A reader that was cut off continues at its byte; nothing is
  sent twice.
- Text is kept up to a limit. Text that was read may be dropped, except a stretch that may still have been on
  its way to a reader that died. Text that nobody has read is never dropped: the worker waits instead.
- Every frame counts with its header, and small ones lie together in blocks: a million empty frames take as
  much memory as they count for. Questions count like text once they were read.
- An answer is kept whole until the next call, or for a while after it was read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sublet.core.studio import frames

#: Of text. More than any pipe between here and the reader holds.
KEPT_BYTES = 32 << 20
#: How much of what was sent last is kept, because it may still be in service, proxy or sockets.
BEHIND_BYTES = 8 << 20
#: How long an answer that was read can be asked for again.
ANSWER_SECONDS = 60.0
#: The output rate of one session, because its output passes through processes it shares with others.
BYTES_PER_SECOND = 8 << 20
BURST_BYTES = 16 << 20

#: About how much is read, and passed on, at once.
CHUNK_BYTES = 1 << 18
#: Small frames lie together in blocks of this size.
BLOCK_BYTES = 64 << 10
#: What a block or a large frame takes beside its bytes, about.
BLOCK_OVERHEAD = 512

Bytes = bytes | bytearray | memoryview


@dataclass(slots=True)
class _RecordBlock:
    """Whole frames that follow each other: one large one, or as many small ones of text as fit."""

    begin: int
    end: int
    parts: tuple[Bytes, ...]
    is_text: bool
    is_open: bool  # another small frame may be added to its one part

    @property
    def cost(self) -> int:
        return self.end - self.begin + BLOCK_OVERHEAD


class CallRecord:
    def __init__(self, call: str) -> None:
        self.call = call
        #: True once somebody interrupted the call, whether it has begun or not.
        self.interrupted = False
        self._kept: deque[_RecordBlock] = deque()
        self._kept_bytes = 0
        self._text_bytes = 0
        self._end = 0
        self._read_to = 0
        self._over = False
        self._over_at = 0.0
        self._listeners = 0
        #: Since when nobody listens; None while somebody does.
        self.alone_since: float | None = time.monotonic()
        self._given_up = False
        self._changed = threading.Condition()
        self._credit = float(BURST_BYTES)
        self._credited_at = time.monotonic()

    @property
    def over(self) -> bool:
        return self._over

    # whoever runs the call

    def text(self, kind: int, data: Bytes) -> None:
        """Adds text. Waits while too much of it is unread, and while the session is over its rate."""
        size = frames.HEADER.size + len(data)
        self._slow_down(size)
        with self._changed:
            self._changed.wait_for(lambda: self._make_room(size) or self._given_up)
            if not self._given_up:
                self._add_text(kind, data, size)

    def say(self, kind: int, head: Bytes, parts: Sequence[Bytes] = (), *, last: bool = False) -> None:
        """Adds a question or an answer with its parts, which is never dropped or delayed."""
        with self._changed:
            self._make_room(0)
            self._add(kind, head)
            for part in parts:
                self._add(frames.PART, part)
            self._over = last
            self._over_at = time.monotonic()

    def give_up(self) -> None:
        """Called when the session is over: nobody waits for room any more."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def _add_text(self, kind: int, data: Bytes, size: int) -> None:
        last = self._kept[-1] if self._kept else None
        if last is not None and last.is_open and last.end - last.begin + size <= BLOCK_BYTES:
            held = last.parts[0]
            assert isinstance(held, bytearray)
            held += frames.header(kind, len(data))
            held += data
            last.end += size
            self._end += size
            self._kept_bytes += size
            self._text_bytes += size
            self._changed.notify_all()
        elif size <= BLOCK_BYTES:
            self._append((bytearray(frames.frame(kind, data)),), size, is_text=True, is_open=True)
        else:
            self._append((frames.header(kind, len(data)), data), size, is_text=True)

    def _add(self, kind: int, data: Bytes) -> None:
        size = memoryview(data).nbytes
        header = frames.header(kind, size)
        self._append((header, data), len(header) + size, is_text=False)

    def _append(self, parts: tuple[Bytes, ...], size: int, *, is_text: bool, is_open: bool = False) -> None:
        made = _RecordBlock(self._end, self._end + size, parts, is_text, is_open)
        self._kept.append(made)
        self._end = made.end
        self._kept_bytes += made.cost
        if is_text:
            self._text_bytes += made.cost
        self._changed.notify_all()

    def _make_room(self, size: int) -> bool:
        """Drops what was read, oldest first; returns whether there is room for so much text now."""
        while self._kept and self._kept_bytes + size + BLOCK_OVERHEAD > KEPT_BYTES:
            oldest = self._kept[0]
            if oldest.end > self._read_to - BEHIND_BYTES:
                break
            self._kept.popleft()
            self._kept_bytes -= oldest.cost
            if oldest.is_text:
                self._text_bytes -= oldest.cost
        # One frame may be larger than all that is kept: it comes when everything before it was read.
        return self._text_bytes + size + BLOCK_OVERHEAD <= KEPT_BYTES or self._read_to >= self._end

    def _slow_down(self, size: int) -> None:
        now = time.monotonic()
        self._credit = min(BURST_BYTES, self._credit + (now - self._credited_at) * BYTES_PER_SECOND) - size
        self._credited_at = now
        if self._credit < 0:
            time.sleep(min(1.0, -self._credit / BYTES_PER_SECOND))

    # whoever reads

    @contextmanager
    def listened_to(self) -> Iterator[None]:
        with self._changed:
            self._listeners += 1
            self.alone_since = None
        try:
            yield
        finally:
            with self._changed:
                self._listeners -= 1
                if not self._listeners:
                    self.alone_since = time.monotonic()

    def gap(self, after: int) -> int:
        """The byte to continue at if what came after this one was dropped, else 0."""
        with self._changed:
            begin = self._kept[0].begin if self._kept else self._end
            return begin if after < begin else 0

    def read(self, after: int, timeout: float) -> tuple[list[Bytes], int]:
        """The frames after this byte and the byte they reach to; nothing if none came within the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._end > after or self._over, timeout)
            found: list[Bytes] = []
            reached = after
            for kept in self._kept:
                if kept.end <= after:
                    continue
                if found and kept.end - after > CHUNK_BYTES:
                    break
                found += _from(kept, reached)
                reached = kept.end
            return found, reached

    def ended_at(self, at: int) -> bool:
        """Whether nothing comes after this byte."""
        with self._changed:
            return self._over and at >= self._end

    def was_read(self, to: int) -> None:
        with self._changed:
            self._read_to = max(self._read_to, to)
            self._changed.notify_all()

    def forget_old(self, now: float) -> bool:
        """Whether the call is over, was read whole, and was kept long enough since."""
        with self._changed:
            return self._over and self._read_to >= self._end and now - self._over_at > ANSWER_SECONDS


def _from(kept: _RecordBlock, at: int) -> list[Bytes]:
    """The block's bytes from this one on, because a reader may have been cut off in the middle of it. What
    more may be added to is copied."""
    skip = max(0, at - kept.begin)
    if kept.is_open:
        return [bytes(memoryview(kept.parts[0])[skip:])]
    found: list[Bytes] = []
    for part in kept.parts:
        view = memoryview(part).cast("B")
        if skip < view.nbytes:
            found.append(view[skip:] if skip else part)
        skip = max(0, skip - view.nbytes)
    return found
