"""A look at the machine that many threads need at once, taken once for all of them.

Rules of this file:
- A look counts for whoever asked before it began, never for who asked later, because it must show what a
  thread did before it asked (a kill, above all). So a look under way is waited for and not used; the next is
  shared by all who wait.
- What is shared is read and never changed.
- A look that hangs in the kernel is given up and another begins, again one for all who wait: on a crowded
  machine one for each would be a stampede in which none ends.
- A look that fails fails for the thread that took it; the others take another.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

#: Longer than a look at thousands of processes takes on a crowded machine.
PATIENCE_S = 5.0


class SharedLook(Generic[T]):
    def __init__(self, look: Callable[[], T]) -> None:
        self._look = look
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._begun = 0  # looks, ever
        self._give_up_at: float | None = None  # of the newest, while it is under way
        self._last: tuple[int, T] | None = None  # the newest that is over: its number, what it found

    def __call__(self) -> T:
        if self._pid != os.getpid():  # a forked child has none of the threads that were looking
            self._forget()
        with self._changed:
            wanted = self._begun + 1
            while True:
                if self._last is not None and self._last[0] >= wanted:
                    return self._last[1]
                now = time.monotonic()
                if self._give_up_at is None or now >= self._give_up_at:
                    break
                self._changed.wait(self._give_up_at - now)
            self._begun += 1
            mine, self._give_up_at = self._begun, now + PATIENCE_S
        found: tuple[int, T] | None = None
        try:
            found = (mine, self._look())
        finally:
            self._over(mine, found)
        return found[1]

    def _over(self, mine: int, found: tuple[int, T] | None) -> None:
        with self._changed:
            if mine == self._begun:
                self._give_up_at = None
            if found is not None and (self._last is None or mine > self._last[0]):
                self._last = found
            self._changed.notify_all()
