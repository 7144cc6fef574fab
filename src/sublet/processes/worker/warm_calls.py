"""`on_gpu`: functions that run in a leased worker.

Rules of this file:
- A lease and its worker are kept warm between calls, renewed while a call runs, and run out by themselves
  when nobody calls. Functions with the same options share one.
- A call that found its lease gone before it was sent takes a new one. A call that lost its worker under way
  raises: it may have had effects, and only the caller knows whether they may happen twice.
- Inside a worker, and with SUBLET_DISABLE=1, it is a plain call.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar

from sublet.core.errors import BadInput, LeaseLost, WorkerLost
from sublet.core.values import parse_duration
from sublet.machine import lease_environment
from sublet.ports.held_lease import HeldLease
from sublet.ports.worker import Call

P = ParamSpec("P")
R = TypeVar("R")
Duration = str | int | float

#: From a ttl in microseconds to a lease that is kept and held by a worker.
Acquire = Callable[[int], HeldLease]


class Warm:
    """One lease and its worker, kept between calls and replaced when it is gone. The duration a call names
    counts only when a lease is taken: a warm one is renewed for as long as the call runs, because what its
    worker has loaded is worth more."""

    def __init__(self, acquire: Acquire) -> None:
        self._acquire = acquire
        self._lease: HeldLease | None = None
        self._pid = os.getpid()
        self.lock = threading.Lock()

    def lease(self, ttl_us: int) -> HeldLease:
        """Return the lease, or take a new one. Called with the lock held."""
        held = self._lease
        if held is None or self._pid != os.getpid():  # in a forked child it is the parent's
            held = self._lease = self._acquire(ttl_us)
            held.keep_warm()
            self._pid = os.getpid()
        return held

    def use(self, ttl_us: int, work: Callable[[HeldLease], Any]) -> Any:
        with self.lock:
            while True:
                fresh = self._lease is None
                lease = self.lease(ttl_us)
                try:
                    done = work(lease)
                    if lease.status == "revoking":  # and nothing is in flight any more
                        self.release()
                    return done
                except WorkerLost as lost:
                    self.release()
                    if fresh or lost.begun:
                        raise
                except LeaseLost:
                    # It ran out, or was taken while nobody used it.
                    if lease.status != "ended":
                        raise
                    self.release()
                    if fresh:
                        raise

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None and self._pid == os.getpid():
            lease.release()


class _Ticket:
    __slots__ = ("call", "outcome")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.outcome: tuple[bool, Any] | None = None


class OnGpu(Generic[P, R]):
    """What the decorator makes of a function."""

    __qualname__: str

    def __init__(
        self,
        function: Callable[P, R],
        warm: Callable[[], Warm],
        ttl_us: Callable[..., int],
        *,
        batch: int = 1,
        plainly: Callable[[], bool] = lambda: False,
    ) -> None:
        if not callable(function):
            raise BadInput("on_gpu decorates a function: write @sublet.on_gpu(vram=...) above a def")
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise BadInput(f"batch {batch!r} must be a whole number of calls, at least 1")
        functools.update_wrapper(self, function)
        self._function = function
        self._make_warm = warm
        self._warm: Warm | None = None
        self._ttl_us = ttl_us
        self._batch = batch
        self._plainly = plainly
        self._waiting: deque[_Ticket] = deque()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if lease_environment.process_lease() is not None or self._plainly():
            return self._function(*args, **kwargs)
        ttl_us = self._ttl_us(*args, **kwargs)
        if self._batch == 1:
            sent = self._sent
            result: R = self._warmed().use(ttl_us, lambda lease: lease.run(sent, *args, **kwargs))
            return result
        ticket = _Ticket((args, kwargs))
        self._waiting.append(ticket)
        # Whoever gets in first takes along those who wait behind.
        try:
            while ticket.outcome is None:
                self._warmed().use(ttl_us, self._serve_waiting)
        except BaseException:
            # The caller was told that it did not happen, so nobody may take it along later.
            with contextlib.suppress(ValueError):
                self._waiting.remove(ticket)
            raise
        fine, value = ticket.outcome
        if not fine:
            raise value
        return value  # type: ignore[no-any-return]

    def _serve_waiting(self, lease: HeldLease) -> None:
        taken: list[_Ticket] = []
        while self._waiting and len(taken) < self._batch:
            taken.append(self._waiting.popleft())
        if not taken:
            return
        try:
            outcomes = lease.run_many(self._sent, [ticket.call for ticket in taken])
        except BaseException as e:
            unsent = isinstance(e, WorkerLost) and not e.begun
            if unsent or (isinstance(e, LeaseLost) and not isinstance(e, WorkerLost)):
                self._waiting.extendleft(reversed(taken))
                raise
            outcomes = [(False, e) for _ in taken]
        for ticket, outcome in zip(taken, outcomes, strict=True):
            ticket.outcome = outcome

    def map(self, items: Iterable[Any]) -> Iterator[R]:
        """One call for each item, `batch` of them a trip, results in order. An exception is raised where its
        result would be."""
        if lease_environment.process_lease() is not None or self._plainly():
            for item in items:
                yield self._function(item)  # type: ignore[call-arg]
            return
        trip: list[Call] = []
        for item in items:
            trip.append(((item,), {}))
            if len(trip) == self._batch:
                yield from self._trip(trip)
                trip = []
        if trip:
            yield from self._trip(trip)

    def _trip(self, calls: list[Call]) -> Iterator[R]:
        ttl_us = max(self._ttl_us(*args, **kwargs) for args, kwargs in calls)
        for fine, value in self._warmed().use(ttl_us, lambda lease: lease.run_many(self._sent, calls)):
            if not fine:
                raise value
            yield value

    def release(self) -> None:
        """Give the warm GPU back now instead of when its ttl runs out."""
        if self._warm is not None:
            with self._warm.lock:
                self._warm.release()

    def _warmed(self) -> Warm:
        if self._warm is None:
            self._warm = self._make_warm()
        return self._warm

    # how it travels to a worker

    @property
    def travels_by_name(self) -> bool:
        """Whether importing its module gives it to the worker."""
        found: Any = sys.modules.get(self.__module__) if self.__module__ != "__main__" else None
        for part in self.__qualname__.split("."):
            found = getattr(found, part, None)
        return found is self

    @functools.cached_property
    def _sent(self) -> Callable[..., Any]:
        return self if self.travels_by_name else self._function

    def __reduce__(self) -> Any:
        if self.travels_by_name:
            return self.__qualname__
        return _as_plain, (self._function,)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """As a method it is called with the instance, like any function."""
        return self if instance is None else MethodType(self, instance)


def on_gpu_decorator(
    function: Callable[..., Any] | None,
    warm: Callable[[], Warm],
    ttl: Duration | Callable[..., Duration],
    *,
    batch: int,
    options: Mapping[str, Any],
    known: Callable[..., Any],
    plainly: Callable[[], bool] = lambda: False,
) -> Any:
    """Build the decorator of `@on_gpu` and `@on_gpu(...)`, wherever the GPU is leased. `known` takes the
    options there are."""
    if function is not None and not callable(function):
        raise BadInput("write @sublet.on_gpu or @sublet.on_gpu(vram=..., ttl=...) above a function")
    fixed_us = 0 if callable(ttl) else parse_duration(ttl, what="ttl")
    unknown = set(options) - (set(inspect.signature(known).parameters) - {"holder"})
    if unknown:
        raise BadInput(f"on_gpu does not know {', '.join(sorted(unknown))}")

    def ttl_us(*args: Any, **kwargs: Any) -> int:
        return parse_duration(ttl(*args, **kwargs), what="ttl") if callable(ttl) else fixed_us

    def decorate(decorated: Callable[..., Any]) -> OnGpu[..., Any]:
        return OnGpu(decorated, warm, ttl_us, batch=batch, plainly=plainly)

    return decorate if function is None else decorate(function)


def _as_plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the undecorated function, in the worker."""
    return function
