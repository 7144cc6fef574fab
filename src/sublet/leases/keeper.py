"""The keeper: renews the leases of this process, and warns before one is lost.

Rules of this file:
- Three threads, because a ledger call may hang and a warning must not: one decides (never blocks on the
  ledger), one calls, one listens for the bell.
- What to do when is `core.leasing.renewal.next_move`; this file only carries it out.
- All leases of the process that are due go in one `renew_many`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from sublet.core.errors import Disconnected, SubletError
from sublet.core.leasing.renewal import RenewalAction, Tenure, local_deadline, next_move
from sublet.core.notice import Notice
from sublet.core.values import format_duration
from sublet.machine.failpoints import failpoint
from sublet.ports.bell import lease_topic
from sublet.ports.clock import Clock
from sublet.ports.ledger import Answer, LeaseKey, Ledger

#: A lease with nothing in flight for this long is reported idle. This is shorter than any policy's idle time
#: and longer than the pause between two calls of a loop.
IDLE_REPORT_US = 250_000
#: How often a lease is looked at even when no bell rings.
LOOK_EVERY_US = 1_000_000


class KeptLease(Protocol):
    """What the keeper asks of a lease, and tells it."""

    warm_us: int

    @property
    def id(self) -> str: ...
    @property
    def key(self) -> LeaseKey: ...
    @property
    def status(self) -> str: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def sent_at(self) -> int: ...
    @property
    def promised_us(self) -> int: ...
    @property
    def deadline_us(self) -> int: ...
    @property
    def used(self) -> bool: ...
    @property
    def busy(self) -> bool: ...
    @property
    def warm_until_us(self) -> int | None: ...
    def idle_report_at(self, after_us: int) -> int | None: ...

    def on_release(self, callback: Callable[[], None]) -> None: ...
    def report(self, *, busy: bool) -> None: ...
    def renewed(self, answer: Answer, sent_at: int) -> None: ...
    def seen(self, answer: Answer, sent_at: int) -> None: ...
    def warn(self, warning: Notice) -> None: ...
    def give_back(self, why: str) -> None: ...
    def lost(self, why: str) -> None: ...


@dataclass(slots=True)
class _Kept:
    lease: KeptLease
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

    def keep(self, lease: KeptLease) -> None:
        seed = int.from_bytes(lease.id.encode()[-8:], "big")
        tenure = Tenure(ttl_us=lease.promised_us, sent_at=lease.sent_at, seed=seed, worked=lease.used)
        if not self.keeps(lease.id):
            lease.on_release(lambda: self._forget(lease.id))
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

    def _forget(self, lease_id: str) -> None:
        with self._changed:
            self._kept.pop(lease_id, None)
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._bell.unlisten(lease_topic(lease_id))

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
        """Carry out what is due; return when to look again."""
        wake_at: int | None = None
        due: list[_Kept] = []
        look: list[_Kept] = []
        idle: list[_Kept] = []
        for kept in list(self._kept.values()):
            lease = kept.lease
            if lease.is_over:
                self._kept.pop(lease.id, None)
                continue
            again = now + LOOK_EVERY_US
            if not kept.calling and now - kept.looked_at >= LOOK_EVERY_US:
                look.append(kept)
                kept.looked_at = now
            report_at = lease.idle_report_at(IDLE_REPORT_US)
            if report_at is not None and now < report_at:
                again = min(again, report_at)
            elif report_at is not None and not kept.reporting:
                kept.reporting = True
                idle.append(kept)
            until = lease.warm_until_us
            if until is not None and now < until:
                again = min(again, until)
            elif until is not None:
                lease.give_back(f"nobody used it for {format_duration(lease.warm_us)}")
            if lease.status == "revoking":
                again = min(again, lease.deadline_us)
            else:
                again = min(again, self._advance(kept, now, due))
                if now >= lease.deadline_us:
                    lease.lost(next_move(replace(kept.tenure, worked=lease.used), now).reason)
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
        kept.tenure = replace(kept.tenure, worked=lease.used, calling=kept.calling)
        move = next_move(kept.tenure, now)
        stop_at = local_deadline(kept.tenure.sent_at, kept.tenure.ttl_us)
        if move.todo is RenewalAction.RENEW:
            due.append(kept)
            return min(stop_at, now + max(1000, kept.tenure.ttl_us // 100))
        if move.todo in (RenewalAction.WARN_IDLE, RenewalAction.WARN_UNREACHABLE):
            self._warn(kept, move.reason, stop_at)
            return now + 1000
        return move.at

    def _warn(self, kept: _Kept, reason: str, deadline_us: int) -> None:
        kept.tenure = replace(kept.tenure, warned=True)
        kept.lease.warn(Notice(source="keeper", reason=reason, deadline_us=deadline_us))

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
        kept.lease.report(busy=False)
        kept.reporting = False
        if kept.lease.busy:  # it began to work meanwhile, in the belief that the ledger still counted it busy
            kept.lease.report(busy=True)

    def _renew(self, batch: list[_Kept]) -> None:
        with contextlib.suppress(Exception):
            self._before_renew()
        failpoint("before_renew")
        sent_at = self._clock.monotonic_us()
        patience = min(kept.tenure.ttl_us for kept in batch) // 20
        try:
            answers = self._ledger.renew_many(
                [(kept.lease.key, kept.lease.busy) for kept in batch], patience_us=patience
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
                    kept.lease.renewed(answer, sent_at)
                    kept.tenure = replace(
                        kept.tenure, ttl_us=kept.lease.promised_us, sent_at=sent_at, attempt=0, warned=False
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
                kept.lease.lost(f"the ledger does not know lease {kept.lease.id}")
            else:
                kept.lease.seen(answer, sent_at)
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
