"""Connections to one database, lent to one thread at a time.

Rules of this file:
- A connection that is lost is replaced once, and the same is done again on the new one: storing twice is
  storing once. If that fails too, `SinkDown` is raised.
- When one is lost the idle ones are dropped as well: what ended one of them, a server's restart, ended them
  all.
- What cannot work is `Misconfigured` or `BadInput` when a sink is opened. Later the same is `SinkDown`: the
  database was changed while results wait, and none of them may be given up for it.
- A forked child opens its own. What it inherited it neither uses nor closes: the parent does.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from sublet.core.errors import BadInput, Misconfigured, SinkDown

C = TypeVar("C")
T = TypeVar("T")

#: Connections inherited through fork: kept for ever, because letting one go would close it.
_inherited: list[object] = []


class Lost(Exception):
    """The connection is gone, or its database is not as it was when the sink was opened."""


class _Idle(Generic[C]):
    """The idle connections of one process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.connections: list[C] = []


class Connections(Generic[C]):
    def __init__(
        self,
        open_one: Callable[[], C],
        close_one: Callable[[C], None],
        *,
        usable: Callable[[C], bool] = lambda _: True,
    ) -> None:
        self._open_one, self._close_one, self._usable = open_one, close_one, usable
        self._here: _Idle[C] = _Idle()
        self._closed = False

    def check(self) -> None:
        """Open one connection; what `open_one` raises is for whoever opens the sink."""
        self._give_back(self._take())

    def run(self, work: Callable[[C], T]) -> T:
        lost: Lost | None = None
        for _ in range(2):
            try:
                connection = self._take()
            except (BadInput, Misconfigured) as e:
                raise SinkDown(f"{e.message}; nothing was acknowledged", remedy=e.remedy) from e
            try:
                result = work(connection)
            except Lost as e:
                self._drop(connection)
                self._drop_idle()
                lost = e
            except BaseException:
                self._drop(connection)
                raise
            else:
                self._give_back(connection)
                return result
        assert lost is not None
        raise SinkDown(f"{lost}; nothing was acknowledged") from lost.__cause__

    def close(self) -> None:
        self._closed = True
        self._drop_idle()

    def _idle(self) -> _Idle[C]:
        here = self._here
        if here.pid != os.getpid():
            _inherited.append(here)
            here = self._here = _Idle()
        return here

    def _take(self) -> C:
        if self._closed:
            raise SinkDown("the sink was closed", remedy="open it again")
        here = self._idle()
        while True:
            with here.lock:
                found = here.connections.pop() if here.connections else None
            if found is None:
                return self._open_one()
            if self._usable(found):
                return found
            self._drop(found)

    def _give_back(self, connection: C) -> None:
        here = self._idle()
        with here.lock:
            here.connections.append(connection)
        if self._closed:  # while it was lent
            self._drop_idle()

    def _drop_idle(self) -> None:
        here = self._idle()
        with here.lock:
            dropped, here.connections = here.connections, []
        for connection in dropped:
            self._drop(connection)

    def _drop(self, connection: C) -> None:
        with contextlib.suppress(Exception):  # it is broken, or the other side is
            self._close_one(connection)
