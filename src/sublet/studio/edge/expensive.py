"""Reads that take long: a lane of their own, so that whoever asks for much does not slow down the others.

Rules of this file:
- One at a time of each tenant, and few in all: they use the interpreter all the time that they take, and
  every other request waits for it.
- What a read took is charged to its tenant, which has a small part of the time (`EdgeLimits.read_share`). A
  tenant that has used its part is told when to come back.
- The same question has the same answer for a while, for nothing: the longer it took, the longer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sublet.studio.edge.limits import EdgeLimits, RateBuckets
from sublet.studio.edge.wire import TooManyNow

T = TypeVar("T")

#: An answer is fresh for so many times as long as it took, and never longer than this.
FRESH_TIMES = 20
FRESH_SECONDS = 10.0
AT_ONCE = 2
ANSWERS_MAX = 200
_MS = 1000.0


class ExpensiveReads:
    def __init__(self, limits: EdgeLimits) -> None:
        #: In milliseconds of computing.
        self._budget = RateBuckets(
            limits.read_share * _MS, limits.read_burst_seconds / (limits.read_share or 1)
        )
        self._threads = ThreadPoolExecutor(AT_ONCE, "expensive")
        self._turns: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()
        self._answers: dict[tuple[str, Hashable], tuple[float, Any]] = {}  # until when

    async def read(self, tenant: str, question: Hashable, verb: Callable[[], T]) -> T:
        """`verb` in a thread of its own, or what it returned to this tenant and question a moment ago."""
        turn = self._turns.setdefault(tenant, asyncio.Lock())
        self._waiting[tenant] += 1
        try:
            async with turn:
                return await self._answer(tenant, question, verb)
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant], self._turns[tenant]

    async def _answer(self, tenant: str, question: Hashable, verb: Callable[[], T]) -> T:
        now = time.monotonic()
        known = self._answers.get((tenant, question))
        if known is not None and now < known[0]:
            answer: T = known[1]
            return answer
        over = self._budget.over(tenant, now)
        if over:
            raise TooManyNow(
                f"tenant {tenant} has used its part of the service's time for long reads; nothing was read",
                over,
            )

        def timed() -> tuple[T, float]:
            begun = time.monotonic()
            return verb(), time.monotonic() - begun

        answer, took = await asyncio.get_running_loop().run_in_executor(self._threads, timed)
        now = time.monotonic()
        self._budget.charge(tenant, took * _MS, now)
        if len(self._answers) >= ANSWERS_MAX:
            self._answers = {k: v for k, v in self._answers.items() if now < v[0]}
        if len(self._answers) < ANSWERS_MAX:
            self._answers[tenant, question] = now + min(FRESH_SECONDS, took * FRESH_TIMES), answer
        return answer

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
