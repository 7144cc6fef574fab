"""How a worker waits: it hears every Notice at once, keeps its progress line fresh, and outlasts what is
down.

Rules of this file:
- Whatever a worker waits for, it waits here, so that a Notice interrupts all of it.
- Something that is down is reported once, tried again with growing pauses, and reported when it answers
  again.
- While results are in hand, they are tried until the last moment that the Notice leaves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from sublet.core.errors import Disconnected, SubletError
from sublet.core.notice import Notice
from sublet.core.runs.drain import BatchPlan, plan_batch
from sublet.core.values import SECOND_US
from sublet.leases.lease import Lease
from sublet.leases.progress_line import WorkLine
from sublet.ports.clock import Clock
from sublet.ports.items import QueueStats
from sublet.queues.tally import WorkTally

#: How often a waiting worker checks whether it is told to leave.
GLANCE_US = 200_000
#: The pause between two tries of something that is down.
FIRST_PAUSE_US = 100_000
LONGEST_PAUSE_US = 15 * SECOND_US
#: The queues' numbers are asked for this often, and never for more than a twentieth of the time.
COUNT_US = 2 * SECOND_US

T = TypeVar("T")


class WorkerNotices(Protocol):
    """What tells this process to leave."""

    @property
    def notice(self) -> Notice | None: ...
    def on_notice(self, callback: Callable[[Notice], None]) -> None: ...


class CountedQueue(Protocol):
    """A queue whose numbers the progress line shows."""

    def stats(self) -> QueueStats: ...


class ToldToLeave(Exception):
    """This process is told to leave. The items it has are given back on the way out."""


class Patience:
    """The waiting of one worker."""

    def __init__(
        self,
        notices: WorkerNotices,
        clock: Clock,
        line: WorkLine,
        tally: WorkTally,
        queues: Iterable[CountedQueue],
    ) -> None:
        self._notices = notices
        self._clock = clock
        self._line = line
        self._tally = tally
        self._queues = list(queues)
        self._woken = threading.Event()
        self._plans: dict[Notice, BatchPlan] = {}
        self._down = ""  # what does not answer
        self._pause_us = FIRST_PAUSE_US
        self._counted: tuple[int, int, list[QueueStats]] = (0, 0, [])  # next at, cost, numbers
        self.doing = ""
        self.lease: Lease | None = None  # the lease whose time left is shown

    @property
    def notice(self) -> Notice | None:
        return self._notices.notice

    def listen(self) -> None:
        """From now on a Notice wakes whoever waits here."""
        self._notices.on_notice(lambda _: self.wake())

    def wake(self) -> None:
        """Wake the waiting thread, because something happened."""
        self._woken.set()

    def now(self) -> int:
        return self._clock.monotonic_us()

    def check_told(self) -> None:
        if self.notice is not None:
            raise ToldToLeave

    def say(self, sentence: str) -> None:
        self._line.say(sentence)

    # what runs

    def must_end(self, lease: Lease, begun_us: int, usual_us: int | None, last_words_us: int) -> str:
        """Why the batch that runs must be ended now; '' while it may go on."""
        now = self.now()
        told, own = self.notice, lease.notice
        notices = [] if told is None else [told]
        if own is not None and own.source == "lease":
            if lease.status == "ended":
                # Its worker ends with it, or ended before it and says how in a moment: that is worth waiting
                # for.
                self._plans.setdefault(own, BatchPlan(now + last_words_us, ""))
            notices.append(own)
        for notice in notices:
            plan = self._plans.get(notice)
            if plan is None:
                plan = self._plans[notice] = plan_batch(notice, now, begun_us=begun_us, usual_us=usual_us)
                self.doing = f"LEAVING: {notice.reason}" if notice is told else notice.reason
                self.say(f"{notice.reason}; {plan.reason}")
            if now >= plan.end_at_us:
                return notice.reason
        return ""

    # what is down

    def retry(
        self, work: Callable[[], T], what: str, *, lease: Lease | None = None, keeping: bool = False
    ) -> T:
        """Try again while something the work needs is down. With `keeping` there are results in hand, which
        are tried until the last moment."""
        while True:
            try:
                value = work()
            except Disconnected as e:
                self._outlast(e, what, lease, keeping)
                continue
            if self._down:
                self.say(f"{self._down} answers again")
                self._down, self._pause_us, self.doing = "", FIRST_PAUSE_US, ""
            return value

    def _outlast(self, error: Disconnected, what: str, lease: Lease | None, keeping: bool) -> None:
        if self._tally.batches == 0 and not keeping:
            raise error  # nothing was done yet: the user sees the error
        if not self._down:
            held = "; the results are kept and nothing else is taken" if keeping else ""
            self.say(f"{error.message}{held}; trying again")
            self._down, self._pause_us = what, FIRST_PAUSE_US
            self.doing = f"{what} does not answer"
        until = self.now() + self._pause_us
        self._pause_us = min(LONGEST_PAUSE_US, self._pause_us * 2)
        while (now := self.now()) < until:
            notice = self.notice
            if notice is not None:
                if not keeping:
                    raise ToldToLeave
                plan = self._plans.setdefault(notice, plan_batch(notice, now, begun_us=now, usual_us=None))
                if now >= plan.end_at_us:
                    raise ToldToLeave
            if lease is not None:
                lease.check()
            self.pause(min(GLANCE_US, until - now))

    # showing

    def pause(self, most_us: int) -> None:
        """Wait until something happens, at most this long."""
        self.show()
        if self._woken.wait(most_us / 1e6):
            self._woken.clear()

    def show(self) -> None:
        now = self.now()
        if not self._line.due(now):
            return
        next_at, cost, numbers = self._counted
        if now >= next_at and not self._down:
            with contextlib.suppress(SubletError):
                numbers = [queue.stats() for queue in self._queues]
                cost = self.now() - now
            self._counted = (now + max(COUNT_US, 20 * cost), cost, numbers)
        self._line.show(
            now,
            here=self._tally.done,
            done=sum(n.done for n in numbers),
            depth=sum(n.depth for n in numbers),
            per_s=sum(n.rate for n in numbers),
            failed=self._tally.failed,
            dead=sum(n.dead for n in numbers),
            refused=self._tally.refused,
            lease_s=self.lease.seconds_left if self.lease is not None else 0.0,
            doing=self.doing,
        )

    def close(self) -> None:
        self._line.close()
