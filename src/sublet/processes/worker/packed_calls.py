"""Calls of Python functions in a worker, wherever it runs: how they are packed, taken in turn, and answered.

Rules of this file:
- One call at a time per worker. Whoever answers a question of the call cannot call the worker meanwhile.
- A worker belongs to the process that started it; a forked child has a copy of the object, and may not call
  it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sublet.core.errors import BadInput, SubletError, WorkerLost
from sublet.ports.worker import Call, Screen
from sublet.processes.channel.sealed_caller import result_of
from sublet.processes.worker.main_module import UNSENDABLE, Parcel, Shipped
from sublet.processes.worker.remote_exception import revived

Answer = Callable[[Any], Any]


class PackedCalls(ABC):
    """`call`, `call_many` and `call_shown` of `ports.worker.Callee`."""

    callee = "worker"  # what it is called in messages

    def __init__(self) -> None:
        self._shipped = Shipped()
        self._lock = threading.Lock()
        self._caller = 0  # the thread in whose call the worker is
        self._owner_pid = os.getpid()

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return result_of(*self._trip(function, (tuple(args), dict(kwargs)), several=False))

    def call_many(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[tuple[bool, Any]]:
        trip = self._trip(function, [(tuple(a), dict(k)) for a, k in calls], several=True)
        return [(well, result if well else revived(result)) for well, result in result_of(*trip)]

    def call_shown(
        self, function: Callable[..., Any], args: Sequence[Any], screen: Screen, answer: Answer
    ) -> Any:
        fine, value, _ = self._trip(function, (tuple(args), {}), several=False, screen=screen, answer=answer)
        return result_of(fine, value, False)

    @abstractmethod
    def _trip(
        self,
        function: Callable[..., Any],
        values: Any,
        *,
        several: bool,
        screen: Screen | None = None,
        answer: Answer | None = None,
    ) -> tuple[bool, Any, bool]:
        """Send the call and wait: return whether it succeeded, its result or what it raised, and whether it
        was interrupted."""

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time, and which thread is in it."""
        if self._owner_pid != os.getpid():
            raise WorkerLost(f"this {self.callee} belongs to the parent process", begun=False)
        if self._caller == threading.get_ident():
            raise BadInput(
                f"the {self.callee} is in the middle of a call, and what answers its question cannot call it",
                remedy="answer first, and call when the call is over",
            )
        with self._lock:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = 0

    def _parcel(self, function: Callable[..., Any], values: Any, several: bool) -> Parcel:
        with self._sendable():
            return self._shipped.parcel(function, values, several)

    @contextlib.contextmanager
    def _sendable(self) -> Iterator[None]:
        """What cannot be pickled is the caller's error."""
        try:
            yield
        except SubletError:
            raise
        except UNSENDABLE as e:
            raise BadInput(
                f"this cannot be sent to the {self.callee}: {e}",
                remedy="make it inside the function, or pass what it is made from",
            ) from e
