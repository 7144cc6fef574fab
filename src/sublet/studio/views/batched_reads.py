"""The two reads of every request, batched: whose token is it, and what is that session.

Rules of this file:
- A question that arrives while a statement runs goes into the next one: every answer was read after its
  question came, so a revoked token is refused for every later request.
- A fixed number of statements run at a time. An idle service asks at once; a busy one asks for many in one
  statement, and wakes a thread per statement instead of per request.
- An answer is found by the key it was asked with: nobody gets what was read for somebody else (T1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

from sublet.core.errors import Disconnected

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: The most rows of one statement: with more, an answer would wait for the rows of others.
MOST = 256

_Waiting = dict[K, list[asyncio.Future[V | None]]]


class BatchedReads(Generic[K, V]):
    def __init__(
        self, threads: Executor, read: Callable[[Sequence[K]], Mapping[K, V]], statements_at_once: int
    ) -> None:
        self._threads = threads
        self._read = read
        self._free = statements_at_once
        self._asked: _Waiting[K, V] = {}
        self._called = False

    async def ask(self, key: K) -> V | None:
        """The value for a key, or None if there is none."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[V | None] = loop.create_future()
        self._asked.setdefault(key, []).append(answer)
        if self._free and not self._called:
            self._called = True
            loop.call_soon(self._begin, loop)  # with what else has come by then
        return await answer

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._called = False
        if not self._asked:
            return
        self._free -= 1
        keys = list(self._asked)[:MOST]
        taken = {key: self._asked.pop(key) for key in keys}
        try:
            reading = loop.run_in_executor(self._threads, self._read, keys)
        except RuntimeError:  # the threads are gone
            self._free += 1
            _tell(taken, lambda answer, _: answer.set_exception(_leaving()))
            loop.call_soon(self._begin, loop)
            return
        reading.add_done_callback(lambda done: self._told(loop, taken, done))

    def _told(
        self, loop: asyncio.AbstractEventLoop, taken: _Waiting[K, V], done: asyncio.Future[Mapping[K, V]]
    ) -> None:
        self._free += 1
        self._begin(loop)  # before answers are made of it: the next statement runs meanwhile
        if done.cancelled():
            _tell(taken, lambda answer, _: answer.set_exception(_leaving()))
        elif (error := done.exception()) is not None:
            _tell(taken, lambda answer, _: answer.set_exception(error))
        else:
            found = done.result()
            _tell(taken, lambda answer, key: answer.set_result(found.get(key)))


def _leaving() -> Disconnected:
    return Disconnected("the service is leaving; nothing was changed")


def _tell(taken: _Waiting[K, V], tell: Callable[[asyncio.Future[V | None], K], object]) -> None:
    for key, waiting in taken.items():
        for answer in waiting:
            if not answer.done():  # whoever asked may have gone away
                tell(answer, key)
