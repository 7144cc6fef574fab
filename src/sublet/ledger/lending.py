"""Connections to the ledger, lent to one thread at a time.

Rules of this file:
- As many are open as threads use one at once, not as many as there are threads: a process may have a thousand that wait.
- The one given back last is lent first: its statements are prepared already.
- A few that nobody uses are kept; more are closed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")
#: Kept though nobody uses them.
KEPT = 16


class Lending(Generic[C]):
    def __init__(self, make: Callable[[], C], close: Callable[[C], None]) -> None:
        self._make = make
        self._close = close
        self._free: list[C] = []
        self._lock = threading.Lock()
        self._closed = False
        self.all: list[C] = []

    def take(self) -> C:
        try:
            return self._free.pop()  # atomic: the hot path takes no lock
        except IndexError:
            made = self._make()
            with self._lock:
                self.all.append(made)
            return made

    def give_back(self, lent: C) -> None:
        if self._closed or len(self._free) >= KEPT:
            self.drop(lent)
        else:
            self._free.append(lent)

    def drop(self, lent: C) -> None:
        """It is of no more use."""
        with self._lock, contextlib.suppress(ValueError):
            self.all.remove(lent)
        with contextlib.suppress(Exception):
            self._close(lent)

    def close(self) -> None:
        """Also those that are lent: whoever has one is told by its next use."""
        self._closed = True
        with self._lock:
            every, self.all, self._free = self.all, [], []
        for lent in every:
            with contextlib.suppress(Exception):
                self._close(lent)
