"""The output of a call so far: its frames, for the current reader and for one that comes back.

Rules of this file:
- Frames are numbered by the byte they begin at. A reader that was cut off continues at its byte; nothing is
  sent twice.
- Text is kept up to a limit. Text that was read may be dropped, except a stretch that may still have been on
  its way to a reader that died. Text that nobody has read is never dropped: the worker waits instead.
- An answer is kept whole until the next call, or for a while after it was read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
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

Bytes = bytes | memoryview


@dataclass(frozen=True, slots=True)
class _RecordedFrame:
    begin: int
    end: int
    parts: tuple[Bytes, ...]
    is_text: bool


class CallRecord:
    def __init__(self, call: str) -> None:
        self.call = call
        #: True once somebody interrupted the call, whether it has begun or not.
        self.interrupted = False
        self._kept: deque[_RecordedFrame] = deque()
        self._text_bytes = 0
        self._end = 0
        self._read_to = 0
        self._over = False
        self._over_at = 0.0
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
        self._slow_down(len(data))
        with self._changed:
            self._changed.wait_for(lambda: self._make_room(len(data)) or self._given_up)
            if not self._given_up:
                self._add(kind, (data,), is_text=True)

    def say(self, kind: int, head: Bytes, parts: Sequence[Bytes] = (), *, last: bool = False) -> None:
        """Adds a question or an answer with its parts, which is never dropped or delayed."""
        with self._changed:
            self._add(kind, (head,), is_text=False)
            for part in parts:
                self._add(frames.PART, (part,), is_text=False)
            self._over = last
            self._over_at = time.monotonic()

    def give_up(self) -> None:
        """Called when the session is over: nobody waits for room any more."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def _add(self, kind: int, payload: tuple[Bytes, ...], *, is_text: bool) -> None:
        size = sum(memoryview(part).nbytes for part in payload)
        header = frames.header(kind, size)
        end = self._end + len(header) + size
        self._kept.append(_RecordedFrame(self._end, end, (header, *payload), is_text))
        self._end = end
        if is_text:
            self._text_bytes += size
        self._changed.notify_all()

    def _make_room(self, size: int) -> bool:
        """Drops text that was read, oldest first; returns whether there is room now."""
        while self._text_bytes + size > KEPT_BYTES and self._kept:
            oldest = self._kept[0]
            if oldest.end > self._read_to - BEHIND_BYTES:
                return False
            self._kept.popleft()
            if oldest.is_text:
                self._text_bytes -= oldest.end - oldest.begin - frames.HEADER.size
        return True

    def _slow_down(self, size: int) -> None:
        now = time.monotonic()
        self._credit = min(BURST_BYTES, self._credit + (now - self._credited_at) * BYTES_PER_SECOND) - size
        self._credited_at = now
        if self._credit < 0:
            time.sleep(min(1.0, -self._credit / BYTES_PER_SECOND))

    # whoever reads

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
                if found and reached - after > CHUNK_BYTES:
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


def _from(kept: _RecordedFrame, at: int) -> list[Bytes]:
    """The frame's bytes from this one on, because a reader may have been cut off in the middle of it."""
    skip = max(0, at - kept.begin)
    found: list[Bytes] = []
    for part in kept.parts:
        view = memoryview(part).cast("B")
        if skip < view.nbytes:
            found.append(view[skip:] if skip else part)
        skip = max(0, skip - view.nbytes)
    return found
