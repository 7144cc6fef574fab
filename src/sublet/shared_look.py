"""A look at the machine that many threads need at once, taken once for all of them.

Rules of this file:
- A look counts for whoever asked before it began, never for who asked later: what a thread did before it asked, a kill above all, is in what
  it is told. So one that is under way is waited for and not used; the next is shared by all who wait.
- What is shared is read and never changed.
- One that hangs in the kernel holds up nobody for long: whoever has waited long enough looks for itself.
- A look that fails fails for the thread that took it; the others take another.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

#: Longer than a look at thousands of processes takes on a crowded machine, shorter than anybody's patience with a device.
PATIENCE_S = 2.0


class SharedLook(Generic[T]):
    def __init__(self, look: Callable[[], T]) -> None:
        self._look = look
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._begun = 0  # looks, ever
        self._under_way = False
        self._last: tuple[int, T] | None = None  # the newest that is over: its number, what it found

    def __call__(self) -> T:
        if self._pid != os.getpid():  # a forked child has none of the threads that were looking
            self._forget()
        give_up = time.monotonic() + PATIENCE_S
        with self._changed:
            wanted = self._begun + 1
            while self._under_way and (self._last is None or self._last[0] < wanted):
                left = give_up - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            if self._last is not None and self._last[0] >= wanted:
                return self._last[1]
            if self._under_way:
                mine = 0
            else:
                self._under_way, self._begun = True, self._begun + 1
                mine = self._begun
        if not mine:
            return self._look()
        try:
            found = self._look()
        except BaseException:
            self._over(None)
            raise
        self._over((mine, found))
        return found

    def _over(self, found: tuple[int, T] | None) -> None:
        with self._changed:
            self._under_way = False
            self._last = found or self._last
            self._changed.notify_all()
