"""Connections to the ledger, lent to one thread at a time.

Rules of this file:
- The number of open connections follows the threads that use one at once, not the threads there are.
- With `most` there are never more: a thread that finds all of them lent waits for one, for a limited time.
- The connection given back last is lent first, because its statements are prepared already.
- A few unused connections are kept, the others are closed.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

C = TypeVar("C")
#: Kept though nobody uses them.
KEPT = 16


class PoolExhausted(Exception):
    """No connection came back in time."""


class ConnectionPool(Generic[C]):
    def __init__(self, make: Callable[[], C], close: Callable[[C], None], *, most: int = 0) -> None:
        """`most`: how many connections may be open at once; 0 means no limit."""
        self._make = make
        self._close = close
        self._most = most
        self._free: list[C] = []
        self._lock = threading.Lock()
        self._given_back = threading.Condition(self._lock)
        self._waiting = 0
        self._making = 0
        self._closed = False
        self.all: list[C] = []

    def take(self, until: float | None = None) -> C:
        """`until`: how long to wait when all are lent, by the monotonic clock; then `PoolExhausted`."""
        try:
            return self._free.pop()  # atomic: the hot path takes no lock
        except IndexError:
            pass
        if self._most:
            found = self._wait_for_one(until)
            if found is not None:
                return found
        else:
            with self._lock:
                self._making += 1
        return self._made()

    def _wait_for_one(self, until: float | None) -> C | None:
        """Returns a connection that came back, or None when a new one may be opened, which is then
        counted."""
        with self._given_back:
            # Announced before looking: whoever gives one back now either sees the waiter or has already put
            # the connection where the waiter looks.
            self._waiting += 1
            try:
                while True:
                    with contextlib.suppress(IndexError):
                        return self._free.pop()
                    if len(self.all) + self._making < self._most:
                        self._making += 1
                        return None
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        raise PoolExhausted
                    self._given_back.wait(left)
            finally:
                self._waiting -= 1

    def _made(self) -> C:
        try:
            made = self._make()
        except BaseException:
            with self._given_back:
                self._making -= 1
                self._given_back.notify()
            raise
        with self._lock:
            self._making -= 1
            self.all.append(made)
        return made

    def give_back(self, lent: C) -> None:
        if self._closed or len(self._free) >= KEPT:
            self.drop(lent)
            return
        self._free.append(lent)
        if self._waiting:
            with self._given_back:
                self._given_back.notify()

    def drop(self, lent: C) -> None:
        """Discard a connection that is of no more use."""
        with self._given_back:
            with contextlib.suppress(ValueError):
                self.all.remove(lent)
            self._given_back.notify()
        with contextlib.suppress(Exception):
            self._close(lent)

    def drop_free(self) -> None:
        """Close the free connections: what cut one connection has most likely cut them all."""
        while True:
            try:
                unused = self._free.pop()
            except IndexError:
                return
            self.drop(unused)

    def close(self) -> None:
        """Close all connections, lent ones too: their users find out at the next use."""
        self._closed = True
        with self._given_back:
            every, self.all, self._free = self.all, [], []
            self._given_back.notify_all()
        for lent in every:
            with contextlib.suppress(Exception):
                self._close(lent)
