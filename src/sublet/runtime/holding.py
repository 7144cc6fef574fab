"""A lease in the hands of its holder.

Rules of this file:
- Fail closed: a `Lease` that cannot show it is held is not held (L7). Its own deadline is earlier than the ledger's
  (L6), counted on this process's monotonic clock from before the question was sent.
- A lease belongs to the process that acquired it. A forked child has a copy of the object, not the lease.
- Releasing twice is fine; leaving the `with` block always releases.
- A lease held by a worker hands every new deadline to the worker's supervisor, which needs nobody else to enforce it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from sublet.core import notice as notices
from sublet.core.errors import BadInput, Disconnected, InvariantBroken, LeaseLost, SubletError, WorkerLost
from sublet.core.lease import EndReason, LeaseState
from sublet.core.lease import Lease as LeaseRow
from sublet.core.notice import Notice
from sublet.core.renewal import local_deadline
from sublet.ports.clock import Clock
from sublet.ports.ledger import Answer, LeaseKey, Ledger
from sublet.ports.session import Session
from sublet.ports.worker import Call, Part, Screen, Sink, Worker
from sublet.runtime.members import Members

#: Leaving must not hang: a lease that cannot be given back runs out by itself.
RELEASE_PATIENCE_US = 2_000_000
#: Nor must saying that it was lost: a ledger that does not answer now is not waited for to learn why.
EXPLAIN_PATIENCE_US = 300_000
#: The longest a kernel may run before its session is given up.
WATCHDOG_US = 600_000_000


class Lease:
    """What `with sublet.gpu(...) as lease` gives."""

    def __init__(self, ledger: Ledger, clock: Clock, secret: str, answer: Answer, sent_at: int) -> None:
        self._ledger = ledger
        self._clock = clock
        self._secret = secret
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._row = answer.lease
        self._sent_at = sent_at
        self._ends_us = sent_at + answer.lease.ends_at - answer.at  # when the ledger fences it, on our clock
        self._deadline_us = local_deadline(sent_at, self._span_us)
        self._worker: Worker | None = None
        self._notice: Notice | None = None
        self._callbacks: list[Callable[[Notice], None]] = []
        self._in_flight = 0
        self._idle_since_us = sent_at
        self._touched = True
        self._over = ""  # why, once it is over
        self._on_release: Callable[[Lease], None] = lambda lease: None
        self._on_yield: Callable[[], None] | None = None  # set: it is kept warm
        self.warm_us = answer.lease.request.ttl_us  # for so long after the last use
        self.yielded = ""  # why it was given back while nobody used it
        self._hosts: tuple[str, ...] = ()  # of a gang, or of one that was asked for by name
        self._opener: Callable[[Lease, int, int], Session] | None = None
        self._sessions: list[Session] = []

    # what it is

    @property
    def id(self) -> str:
        return self._row.id

    @property
    def epoch(self) -> int:
        return self._row.epoch

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(s.device_id for s in self._row.slices)

    @property
    def vram_bytes(self) -> int:
        """Per device. Less than asked for when a smaller slice was accepted."""
        return self._row.vram_bytes

    @property
    def ttl_us(self) -> int:
        return self._row.request.ttl_us

    @property
    def granted_at(self) -> int:
        return self._row.granted_at

    @property
    def here(self) -> bool:
        """Its work runs on this machine."""
        return self._worker is None or self._worker.here

    @property
    def host_lost(self) -> str:
        """Why the host its work ran on is taken for gone; '' while it is not. Its slices stay taken until that host's warden has looked."""
        return "" if self._worker is None or self._worker.here else self._worker.host_lost

    @property
    def tenant(self) -> str:
        return self._row.tenant

    @property
    def expires_at(self) -> datetime:
        """When the ledger ends it unless it is renewed."""
        return datetime.fromtimestamp(self._row.ends_at / 1e6, UTC)

    @property
    def key(self) -> LeaseKey:
        """What fenced writes carry. Keep it inside the process: the secret is the right to write."""
        return LeaseKey(self._row.id, self._row.epoch, self._secret)

    @property
    def notice(self) -> Notice | None:
        """The nearest warning of coming loss, or None."""
        return self._notice

    @property
    def seconds_left(self) -> float:
        """Until this holder must stop, by its own clock."""
        return max(0, self._deadline_us - self._clock.monotonic_us()) / 1e6 if not self._over else 0.0

    @property
    def status(self) -> str:
        """'active', 'revoking' or 'ended', as far as this process can be sure."""
        if self._over or self._pid != os.getpid() or self._clock.monotonic_us() >= self._deadline_us:
            return "ended"
        if self._worker is not None and self._worker.ending:
            return "ended"
        return "revoking" if self._row.state is LeaseState.REVOKING else "active"

    def __repr__(self) -> str:
        return f"<Lease {self.id} {self.status} epoch={self.epoch} on {', '.join(self.devices)}>"

    # what may be done with it

    def check(self) -> None:
        """Raise `LeaseLost` unless new work may be started now."""
        # The worker is not asked: whatever is sent to one that is gone says so.
        if self._over or self._clock.monotonic_us() >= self._deadline_us or self._pid != os.getpid():
            raise LeaseLost(f"lease {self.id} has ended: {self._why_over()}")

    def _why_over(self) -> str:
        if self._over:
            return self._over
        if self._pid != os.getpid():
            return "it belongs to the parent process"
        return "it was not renewed in time"

    def touch(self) -> None:
        """Say that the GPU is in use; an untouched lease outside a `with` block counts as idle. One that is kept warm is kept `warm_us` from
        now on."""
        self.check()
        with self._lock:
            self._touched = True
            self._idle_since_us = self._clock.monotonic_us()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work in flight: the lease is busy, and renewed, until the block ends. That it became idle is reported by the
        keeper, a moment later: work that comes in many small pieces must not cost a write each."""
        self._work_began()
        try:
            yield
        finally:
            self._work_ended()

    def _work_began(self) -> None:
        with self._lock:
            self._in_flight += 1
        if not self._row.busy:
            self._report(busy=True)

    def _work_ended(self) -> None:
        with self._lock:
            self._in_flight -= 1
            self._touched = True
            self._idle_since_us = self._clock.monotonic_us()

    def _report(self, *, busy: bool) -> None:
        """Tell the ledger, so that only leases nobody uses are taken for those who wait."""
        if self._over or self._row.busy == busy:
            return
        with contextlib.suppress(SubletError):
            self._ledger.mark(self.key, busy=busy)
            self._replace_row(busy=busy)

    def open(self, device: int = 0, *, watchdog_us: int = WATCHDOG_US) -> Session:
        """A GpuSession on one of the lease's devices; a gang lease opens one for each. Closed with the lease at the latest."""
        self.check()
        if self._opener is None:
            raise InvariantBroken("this lease was made without its drivers")
        if not 0 <= device < len(self.devices):
            raise BadInput(f"device {device} is not one of this lease's {len(self.devices)}")
        session = self._opener(self, device, watchdog_us)
        self._sessions.append(session)
        return session

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call it in the leased worker: what it prints appears here, what it returns or raises comes back."""
        return self._in_worker(lambda worker: worker.call(function, args, kwargs))

    def run_everywhere(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call it once in each member of a gang, all at the same time; what they returned, by rank. Each sees RANK, WORLD_SIZE,
        LOCAL_RANK, MASTER_ADDR and MASTER_PORT. A lease of one host has one member."""

        def call_all(worker: Worker) -> list[Any]:
            members = worker if isinstance(worker, Members) else Members([(worker, {})])
            return members.everywhere(self.key, function, args, kwargs)

        return self._in_worker(call_all)  # type: ignore[no-any-return]

    @property
    def ticket(self) -> str:
        """What makes a member of a process on one of its hosts: see `sublet.join`. It is the right to write, as the key is."""
        return self.key.ticket

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where its devices are, by rank: several for a gang."""
        return self._hosts or (self._row.holder.host,)

    def run_shown(
        self, function: Callable[..., Any], args: Sequence[Any], screen: Screen, answer: Callable[[Any], Any]
    ) -> Any:
        """Call it in the leased worker with its output on a screen; `answer` is what it may ask meanwhile."""
        return self._in_worker(lambda worker: worker.call_shown(function, args, screen, answer))

    def run_sealed(self, target: str, parts: Sequence[Part], sink: Sink) -> tuple[bool, list[memoryview]]:
        """Call "module:function" in the leased worker with bytes; nothing that comes back is opened here."""
        return self._in_worker(lambda worker: worker.call_sealed(target, parts, sink))  # type: ignore[no-any-return]

    @property
    def launches(self) -> int:
        """How many kernels the sealed calls in its worker said they launched."""
        return self._worker.launches if self._worker is not None else 0

    @property
    def containment(self) -> str:
        """What its worker is contained by, in words; '' without one."""
        return self._worker.containment if self._worker is not None else ""

    def interrupt(self) -> None:
        """KeyboardInterrupt in the call that runs in the leased worker; from any thread."""
        self._the_worker().interrupt()

    def run_many(self, function: Callable[..., Any], calls: list[Call]) -> list[tuple[bool, Any]]:
        """Several calls in one trip: (True, result) or (False, exception) each."""
        return self._in_worker(lambda worker: worker.call_many(function, calls))  # type: ignore[no-any-return]

    def _in_worker(self, work: Callable[[Worker], Any]) -> Any:
        self.check()
        worker = self._the_worker()
        self._work_began()
        try:
            if self._over:  # given back as we came
                raise LeaseLost(f"lease {self.id} has ended: {self._over}")
            return work(worker)
        except WorkerLost as lost:
            raise self._explained(lost) from lost.__cause__
        finally:
            self._work_ended()

    def _the_worker(self) -> Worker:
        if self._worker is None:
            raise BadInput(
                "this lease is held by this process, so there is no worker to run it in",
                remedy='call the function directly, or lease with holder="worker"',
            )
        return self._worker

    def _explained(self, lost: WorkerLost) -> WorkerLost:
        """The supervisor knows that it ended the worker; the ledger knows why."""
        why = reason = lost.message
        with contextlib.suppress(SubletError):
            row = self._ledger.look(self.id, patience_us=EXPLAIN_PATIENCE_US).lease
            if row.reason is not None:
                taken = f"{row.reason.value}: {row.detail}"
                why = f"GPU session ended ({taken}); {lost.message}"
                # That the holder is gone is all the ledger knows of a worker that died by itself; its supervisor knows how.
                reason = taken if row.reason is not EndReason.HOLDER_LOST else lost.message
        self._lost(why)
        return WorkerLost(why, begun=lost.begun, with_host=lost.with_host, reason=reason)

    def _adopt(self, worker: Worker, environment: Mapping[str, str]) -> None:
        """Granted: from here on the worker lives as long as the lease does."""
        self._worker = worker
        worker.arm(self._deadline_us, self._ends_us, confirm=True)
        worker.begin(self.id, self.epoch, environment)

    def _seated(self, answer: Answer) -> None:
        """It was asked for by name, and is the worker's from now on."""
        self._replace_row(holder=answer.lease.holder)

    def on_notice(self, callback: Callable[[Notice], None]) -> None:
        """Called once per new warning, from a thread of sublet's; set a flag there and return."""
        self._callbacks.append(callback)
        if self._notice is not None:
            callback(self._notice)

    def warn_worker(self) -> None:
        """It will go soon: whatever runs in its worker may save and stop."""
        if self._worker is not None:
            self._worker.warn()

    def keep_warm(self, then: Callable[[], None] = lambda: None) -> None:
        """Keep it between calls: renewed until nobody has used it for `warm_us`, then given back, and not held a moment longer than that.
        When somebody else is to have it meanwhile and nothing is in flight, it goes at once instead of at the end of its grace."""
        self._on_yield = then

    @property
    def _warm_until_us(self) -> int | None:
        """When a warm lease that nobody uses is given back; None while it is used, or not kept warm."""
        return None if self._on_yield is None or self._in_flight else self._idle_since_us + self.warm_us

    @property
    def seconds_to_go(self) -> float:
        """Until it is gone, if nobody uses it and nobody asks for it."""
        until = self._warm_until_us
        if until is None or self.status != "active":
            return self.seconds_left
        return max(0, until - self._clock.monotonic_us()) / 1e6

    def _begin_yield(self, why: str) -> None:
        # Not in the keeper's own thread: the end of a worker is waited for, and other leases must be renewed.
        threading.Thread(target=self._yield, args=(why,), name="sublet-gives-back", daemon=True).start()

    def _yield(self, why: str) -> None:
        with self._lock:
            if self._in_flight or self._over:
                return
            self._over = self.yielded = why
        self.release()
        if self._on_yield is not None:
            self._on_yield()

    def release(self, *, patience_us: int = RELEASE_PATIENCE_US) -> None:
        """Give it back. Safe to call at any time, any number of times."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._over == "released":
                return
            was_over, self._over = self._over, "released"
        for session in reversed(self._sessions):
            session.close()
        self._on_release(self)
        try:
            # The ledger first: a worker that ends before would look like one that was lost.
            if self.host_lost:
                self._ledger.end(
                    self._row.id, self.epoch, reason=EndReason.HOLDER_LOST, detail=self.host_lost[:500]
                )
            self._ledger.release(
                self._row.id,
                self._secret,
                torn_down=self._worker is None,
                patience_us=patience_us,
            )
        except Disconnected:
            # It runs out by itself, and this process will not use it again.
            pass
        except SubletError:
            if not was_over:
                raise
        finally:
            if self._worker is not None:
                self._worker.end("its lease was released")

    def __enter__(self) -> Lease:
        with self._lock:
            self._in_flight += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # what the keeper tells it

    def _replace_row(self, **changes: object) -> None:
        self._row = replace(self._row, **changes)  # type: ignore[arg-type]

    def _worked(self) -> bool:
        until = self._warm_until_us
        if until is not None:
            return self._clock.monotonic_us() < until
        return self._in_flight > 0 or self._touched

    def _busy(self) -> bool:
        return self._in_flight > 0

    @property
    def _span_us(self) -> int:
        """What was promised: the ttl, or less where a hold cap or what its tenant can pay for cut it short."""
        return max(0, min(self.ttl_us, self._ends_us - self._sent_at))

    def _renewed(self, answer: Answer, sent_at: int) -> None:
        self._row, self._sent_at = answer.lease, sent_at
        self._ends_us = sent_at + answer.lease.expires_at - answer.at
        self._deadline_us = local_deadline(sent_at, self._span_us)
        self._arm()
        if self._notice is not None and self._notice.source == "keeper":
            self._notice = None
        self._touched = self._in_flight > 0

    def _seen(self, row: LeaseRow, at: int, sent_at: int) -> None:
        """The ledger's row, as read now: notice a revoke, notice the end."""
        if self._over:
            return
        if row.state is LeaseState.ENDED or row.epoch != self._row.epoch:
            self._lost(f"{row.reason.value if row.reason else 'ended'}: {row.detail}")
            return
        if row.state is LeaseState.REVOKING:
            self._row = row
            self._deadline_us = self._ends_us = sent_at + row.deadline_at - at
            self._arm()
            why = f"{row.reason.value if row.reason else 'revoked'}: {row.detail}"
            self._warn(Notice(source="lease", reason=why, deadline_us=self._deadline_us))
            if self._warm_until_us is not None:
                self._begin_yield(why)

    def _arm(self) -> None:
        if self._worker is not None:
            self._worker.arm(self._deadline_us, self._ends_us)

    def _became_idle(self, now: int, after_us: int) -> bool:
        """Nothing has been in flight for a while, and the ledger does not know it yet."""
        return self._row.busy and not self._in_flight and now - self._idle_since_us >= after_us

    def _warn(self, warning: Notice) -> None:
        merged = notices.merge(self._notice, warning)
        if merged is self._notice or merged == self._notice:
            return
        self._notice = merged
        for callback in list(self._callbacks):
            with contextlib.suppress(Exception):
                callback(merged)

    def _lost(self, why: str) -> None:
        if self._over:
            return
        self._over = why
        self._warn(Notice(source="lease", reason=why, deadline_us=self._clock.monotonic_us()))
