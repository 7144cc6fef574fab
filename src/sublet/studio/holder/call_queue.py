"""The calls of one session that wait for their turn.

Rules of this file:
- One call runs at a time, in the order in which they came.
- So many may wait, and no more: the next is refused in words, and nothing of it is kept.
- A call that waits leaves when nobody has listened to it for longer than a client tries to come back. One
  that began goes on whether or not anybody listens.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from sublet.core.errors import Stale, TooMany
from sublet.studio.holder.call_record import CallRecord

WAITING_MOST = 64
#: A client that was cut off tries for 60 s to come back.
ALONE_SECONDS = 75.0
LOOK_SECONDS = 1.0


class CallQueue:
    def __init__(self) -> None:
        self._waiting: deque[CallRecord] = deque()
        self._running: CallRecord | None = None
        self._changed = threading.Condition()

    @property
    def running(self) -> CallRecord | None:
        return self._running

    def __len__(self) -> int:
        return len(self._waiting)

    def check_room(self) -> None:
        if len(self._waiting) >= WAITING_MOST:
            raise TooMany(
                f"{WAITING_MOST} calls wait in this session already; nothing of this one was begun",
                remedy="wait until some of them are over, or interrupt them, then call again",
            )

    def enter(self, record: CallRecord) -> None:
        with self._changed:
            self.check_room()
            self._waiting.append(record)

    def leave(self, record: CallRecord) -> None:
        with self._changed:
            self._waiting.remove(record)
            self._changed.notify_all()

    @contextmanager
    def turn(self, record: CallRecord) -> Iterator[None]:
        """Waits for the turn of a record that entered; raises `Stale` when nobody listens to it."""
        with self._changed:
            while self._running is not None or self._waiting[0] is not record:
                if record.alone_since is not None and time.monotonic() - record.alone_since > ALONE_SECONDS:
                    self._waiting.remove(record)
                    self._changed.notify_all()
                    raise Stale(
                        f"nobody listened to call {record.call} any more while it waited for those before "
                        "it, so it left; nothing of it was begun",
                        remedy="make the call again, and keep its connection open",
                    )
                self._changed.wait(LOOK_SECONDS)
            self._waiting.popleft()
            self._running = record
        try:
            yield
        finally:
            with self._changed:
                self._running = None
                self._changed.notify_all()
