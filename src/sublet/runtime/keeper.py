"""The keeper: renews the leases of this process, and warns before one is lost.

Rules of this file:
- Three threads, because a ledger call may hang and a warning must not: one decides (never blocks on the ledger), one
  calls, one listens for the bell.
- What to do when is `core.renewal.next_move`; this file only carries it out.
- All leases of the process that are due go in one `renew_many`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from sublet.core.errors import Disconnected, SubletError
from sublet.core.notice import Notice
from sublet.core.renewal import Tenure, Todo, local_deadline, next_move
from sublet.core.values import format_duration
from sublet.failpoints import failpoint
from sublet.ports.clock import Clock
from sublet.ports.ledger import Answer, Ledger
from sublet.ports.topics import lease_topic
from sublet.runtime.holding import Lease

#: A lease that had nothing in flight for so long is reported idle. Shorter than any policy's idle time, longer than the pause
#: between two calls of a loop.
IDLE_REPORT_US = 250_000
#: Behind the bell: how often a lease is looked at anyway.
LOOK_EVERY_US = 1_000_000


@dataclass(slots=True)
class _Kept:
    lease: Lease
    tenure: Tenure
    calling: bool = False
    reporting: bool = False
    looked_at: int = 0


class Keeper:
    def __init__(
        self, ledger: Ledger, clock: Clock, *, before_renew: Callable[[], None] = lambda: None
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._before_renew = before_renew
        self._kept: dict[str, _Kept] = {}
        self._changed = threading.Condition()
        self._calls: queue.SimpleQueue[tuple[str, list[_Kept]]] = queue.SimpleQueue()
        self._bell = ledger.bell()
        self._started = False
        self.pid = os.getpid()

    def keep(self, lease: Lease) -> None:
        seed = int.from_bytes(lease.id.encode()[-8:], "big")
        tenure = Tenure(ttl_us=lease._span_us, sent_at=lease._sent_at, seed=seed, worked=lease._worked())
        lease._on_release = self._forget
        with contextlib.suppress(OSError):
            self._bell.listen(lease_topic(lease.id))
        with self._changed:
            self._kept[lease.id] = _Kept(lease, tenure, looked_at=self._clock.monotonic_us())
            if not self._started:
                self._started = True
                for name, loop in (
                    ("decides", self._decide_loop),
                    ("calls", self._call_loop),
                    ("listens", self._listen_loop),
                ):
                    threading.Thread(target=loop, name=f"sublet-keeper-{name}", daemon=True).start()
            self._changed.notify_all()

    def keeps(self, lease_id: str) -> bool:
        with self._changed:
            return lease_id in self._kept

    def _forget(self, lease: Lease) -> None:
        with self._changed:
            self._kept.pop(lease.id, None)
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._bell.unlisten(lease_topic(lease.id))

    # decides

    def _decide_loop(self) -> None:
        while True:
            with self._changed:
                now = self._clock.monotonic_us()
                wake_at = self._decide(now)
                pause = None if wake_at is None else max(0.0, (wake_at - now) / 1e6)
                if pause is None or pause > 0:
                    self._changed.wait(pause)

    def _decide(self, now: int) -> int | None:
        """Carry out what is due; when to look again."""
        wake_at: int | None = None
        due: list[_Kept] = []
        look: list[_Kept] = []
        idle: list[_Kept] = []
        for kept in list(self._kept.values()):
            lease = kept.lease
            if lease._over:
                self._kept.pop(lease.id, None)
                continue
            again = now + LOOK_EVERY_US
            if not kept.calling and now - kept.looked_at >= LOOK_EVERY_US:
                look.append(kept)
                kept.looked_at = now
            if lease._became_idle(now, IDLE_REPORT_US):
                if not kept.reporting:
                    kept.reporting = True
                    idle.append(kept)
            elif lease._row.busy and not lease._in_flight:
                again = min(again, lease._idle_since_us + IDLE_REPORT_US)
            until = lease._warm_until_us
            if until is not None and now < until:
                again = min(again, until)
            elif until is not None:
                lease._begin_yield(f"nobody used it for {format_duration(lease.warm_us)}")
            if lease.status == "revoking":
                again = min(again, lease._deadline_us)
            else:
                again = min(again, self._advance(kept, now, due))
                if now >= lease._deadline_us:
                    lease._lost(next_move(replace(kept.tenure, worked=lease._worked()), now).reason)
            wake_at = again if wake_at is None else min(wake_at, again)
        if due:
            for kept in due:
                kept.calling = True
            self._calls.put(("renew", due))
        if look:
            self._calls.put(("look", look))
        if idle:
            self._calls.put(("idle", idle))
        return wake_at

    def _advance(self, kept: _Kept, now: int, due: list[_Kept]) -> int:
        lease = kept.lease
        kept.tenure = replace(kept.tenure, worked=lease._worked(), calling=kept.calling)
        move = next_move(kept.tenure, now)
        stop_at = local_deadline(kept.tenure.sent_at, kept.tenure.ttl_us)
        if move.todo is Todo.RENEW:
            due.append(kept)
            return min(stop_at, now + max(1000, kept.tenure.ttl_us // 100))
        if move.todo in (Todo.WARN_IDLE, Todo.WARN_UNREACHABLE):
            self._warn(kept, move.reason, stop_at)
            return now + 1000
        return move.at

    def _warn(self, kept: _Kept, reason: str, deadline_us: int) -> None:
        kept.tenure = replace(kept.tenure, warned=True)
        kept.lease._warn(Notice(source="keeper", reason=reason, deadline_us=deadline_us))

    # calls

    def _call_loop(self) -> None:
        while True:
            what, batch = self._calls.get()
            if what == "renew":
                self._renew(batch)
            elif what == "look":
                self._look(batch)
            else:
                for kept in batch:
                    self._report_idle(kept)

    @staticmethod
    def _report_idle(kept: _Kept) -> None:
        kept.lease._report(busy=False)
        kept.reporting = False
        if kept.lease._busy():  # it began to work meanwhile, and believed that the ledger still knew
            kept.lease._report(busy=True)

    def _renew(self, batch: list[_Kept]) -> None:
        with contextlib.suppress(Exception):
            self._before_renew()
        failpoint("before_renew")
        sent_at = self._clock.monotonic_us()
        patience = min(kept.tenure.ttl_us for kept in batch) // 20
        try:
            answers = self._ledger.renew_many(
                [(kept.lease.key, kept.lease._busy()) for kept in batch], patience_us=patience
            )
        except (SubletError, OSError) as failure:
            answers = [
                failure if isinstance(failure, SubletError) else Disconnected(str(failure)) for _ in batch
            ]
        failpoint("after_renew_reply")
        by_id = {a.lease.id: a for a in answers if isinstance(a, Answer)}
        errors = [a for a in answers if not isinstance(a, Answer)]
        with self._changed:
            for kept in batch:
                kept.calling = False
                answer = by_id.get(kept.lease.id)
                if answer is not None:
                    kept.lease._renewed(answer, sent_at)
                    kept.tenure = replace(
                        kept.tenure, ttl_us=kept.lease._span_us, sent_at=sent_at, attempt=0, warned=False
                    )
                    continue
                kept.tenure = replace(
                    kept.tenure, attempt=kept.tenure.attempt + 1, tried_at=self._clock.monotonic_us()
                )
            self._changed.notify_all()
        if any(not isinstance(error, Disconnected) for error in errors):
            self._look([kept for kept in batch if kept.lease.id not in by_id])

    def _look(self, batch: list[_Kept]) -> None:
        sent_at = self._clock.monotonic_us()
        try:
            answers = {a.lease.id: a for a in self._ledger.look_many([kept.lease.id for kept in batch])}
        except (SubletError, OSError):
            return
        for kept in batch:
            answer = answers.get(kept.lease.id)
            if answer is None:
                kept.lease._lost(f"the ledger does not know lease {kept.lease.id}")
            else:
                kept.lease._seen(answer.lease, answer.at, sent_at)
        with self._changed:
            self._changed.notify_all()

    # listens

    def _listen_loop(self) -> None:
        while True:
            if self._bell.wait(60_000_000):
                with self._changed:
                    for kept in self._kept.values():
                        kept.looked_at = 0
                    self._changed.notify_all()
