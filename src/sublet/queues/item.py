"""An item that was pulled, and the thread that extends its visibility.

Rules of this file:
- An item that was pulled is completed, given back, or lost to another consumer; leaving its block without
  completing it gives it back.
- While it is held its visibility is extended in the background, at a third of it. A process that is stopped
  or cut off extends nothing, and another one gets the item; its own late result is refused.
- An item that nobody refers to any more can never be completed: it is not extended, and its visibility runs
  out.
- A worker that is told to leave gives back what it did not finish, and no failure is counted.
"""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Protocol

from sublet.core.errors import Disconnected, LeaseLost, StaleDelivery, SubletError
from sublet.core.queues.items import Nack, from_text
from sublet.core.values import parse_duration
from sublet.ports.clock import Clock
from sublet.ports.items import Delivery

#: How many times a visibility is extended before it would run out.
EXTENSIONS = 3
#: The thread that extends ends after this long without an item.
IDLE_US = 5_000_000


class Desk(Protocol):
    """What an item needs of its queue."""

    @property
    def name(self) -> str: ...
    def complete(self, done: Iterable[tuple[Item, Any]]) -> list[SubletError | None]: ...
    def give_back(self, nacks: Iterable[tuple[Item, Nack]]) -> None: ...


class Item:
    """One delivery of an item: `with item: item.complete(result)`."""

    __slots__ = (
        "__weakref__",
        "_desk",
        "begun_us",
        "body",
        "delivery",
        "failures",
        "id",
        "key",
        "losses",
        "lost",
        "over",
        "priority",
        "published_at",
        "visibility_us",
    )

    def __init__(self, desk: Desk, given: Delivery, visibility_us: int, pulled_us: int) -> None:
        self._desk = desk
        self.begun_us = pulled_us  # when work on it began
        self.id = given.item
        self.key = given.key
        self.body = from_text(given.body)
        self.delivery = given.delivery  # which hand-out of it this is
        self.failures = given.failures
        self.losses = given.losses
        self.priority = given.priority
        self.published_at = given.published_at
        self.visibility_us = visibility_us
        self.lost = False  # somebody else has it; a result would be refused
        self.over = False  # completed or given back

    @property
    def idempotency_key(self) -> str:
        """A key that is the same at every delivery, for other systems that receive the result."""
        return f"{self._desk.name}/{self.id}"

    def complete(self, result: Any = None) -> None:
        """Store the result and acknowledge the item, in one transaction. `StaleDelivery` when somebody else
        has it by now."""
        (refused,) = self._desk.complete([(self, result)])
        if refused is not None:
            raise refused

    def nack(self, delay: str | float | None = None) -> None:
        """Give it back untouched: it is available again at once, or after a delay. No failure is counted."""
        delay_us = None if delay is None else parse_duration(delay, what="delay")
        self._desk.give_back([(self, self.untouched(delay_us))])

    def fail(self, error: BaseException | str, *, delay: str | float | None = None) -> None:
        """Count a failure: the item is tried again after the queue's backoff or this delay, and is dead after
        the queue's tries."""
        self._desk.give_back([(self, self.failed(error, delay))])

    def untouched(self, delay_us: int | None = None) -> Nack:
        return Nack(item=self.id, delivery=self.delivery, failed=False, delay_us=delay_us)

    def failed(self, error: BaseException | str, delay: str | float | None = None) -> Nack:
        told = "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else str(error)
        delay_us = None if delay is None else parse_duration(delay, what="delay")
        return Nack(item=self.id, delivery=self.delivery, failed=True, error=told, delay_us=delay_us)

    def __enter__(self) -> Item:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.over:
            return
        if kind is None:
            self.nack()  # left without complete(): given back, and no failure is counted
        elif not issubclass(kind, Exception) or issubclass(kind, LeaseLost | Disconnected | StaleDelivery):
            # Not the item's failure: told to leave, the GPU was taken away, or something it needs is down.
            with contextlib.suppress(SubletError):
                self.nack()
        else:
            assert error is not None
            self.fail(error)

    def __repr__(self) -> str:
        return f"<Item {self._desk.name}/{self.id} delivery={self.delivery}>"


class PulledItems:
    """The items this process has, and the thread that extends them."""

    def __init__(
        self, clock: Clock, extend: Callable[[list[tuple[int, int]], int], set[int]], name: str
    ) -> None:
        self._clock = clock
        self._extend = extend
        self._name = name
        self._items: dict[tuple[int, int], weakref.ref[Item]] = {}
        self._visibility_us: dict[tuple[int, int], int] = {}
        self._due_us: dict[tuple[int, int], int] = {}
        self._wakes_us = 0  # when the thread looks again by itself
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._items)

    def all(self) -> list[Item]:
        with self._changed:
            return [item for ref in self._items.values() if (item := ref()) is not None]

    def numbers(self) -> list[int]:
        with self._changed:
            return [item for item, _ in self._items]

    def add(self, items: Iterable[Item]) -> None:
        now = self._clock.monotonic_us()
        with self._changed:
            due_us = self._wakes_us
            for item in items:
                at = (item.id, item.delivery)
                self._items[at] = weakref.ref(item)
                self._visibility_us[at] = item.visibility_us
                self._due_us[at] = now + item.visibility_us // EXTENSIONS
                due_us = min(due_us, self._due_us[at])
            if self._items and self._thread is None:
                self._thread = threading.Thread(
                    target=self._keep, name=f"sublet-visibility-{self._name}", daemon=True
                )
                self._thread.start()
            elif due_us < self._wakes_us:
                # Only then: waking a thread costs more than pulling an item, and most items are done long
                # before they are due.
                self._changed.notify()

    def remove(self, items: Iterable[Item]) -> None:
        with self._changed:
            for item in items:
                self._forget((item.id, item.delivery))

    def _forget(self, at: tuple[int, int]) -> None:
        self._items.pop(at, None)
        self._visibility_us.pop(at, None)
        self._due_us.pop(at, None)

    def _keep(self) -> None:
        left_alone = False
        while True:
            with self._changed:
                now = self._clock.monotonic_us()
                if not self._items and left_alone:
                    # A moment later there may be more; a queue that is left alone keeps no thread.
                    self._thread = None
                    return
                left_alone = not self._items
                next_us = min(self._due_us.values(), default=now + IDLE_US)
                if next_us > now:
                    self._wakes_us = next_us
                    self._changed.wait((next_us - now) / 1e6)
                    continue
                for at in [at for at, item in self._items.items() if item() is None]:
                    self._forget(at)
                # All of one visibility together: one transaction for them, whenever they were pulled.
                visibility = next(
                    (self._visibility_us[at] for at, due in self._due_us.items() if due <= now), 0
                )
                batch = [at for at, one in self._visibility_us.items() if one == visibility]
            if batch:
                self._extend_batch(batch, visibility, now)

    def _extend_batch(self, batch: list[tuple[int, int]], visibility_us: int, now: int) -> None:
        try:
            lost = self._extend(batch, visibility_us)
            again_us = now + visibility_us // EXTENSIONS
        except SubletError:
            lost, again_us = set(), now + visibility_us // (EXTENSIONS * 4)  # soon: it may be the last chance
        with self._changed:
            for at in batch:
                if at not in self._items:
                    continue
                if at[0] in lost:
                    item = self._items[at]()
                    if item is not None:
                        item.lost = True
                    self._forget(at)
                else:
                    self._due_us[at] = again_us
