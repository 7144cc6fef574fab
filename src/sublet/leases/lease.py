"""A lease in the hands of its holder.

Rules of this file:
- Fail closed: a `Lease` that cannot show it is held is not held (L7). Its own deadline is earlier than the
  ledger's (L6), counted on this process's monotonic clock from before the question was sent.
- A lease belongs to the process that acquired it. A forked child has a copy of the object, not the lease.
- Releasing twice is fine; leaving the `with` block always releases.
- A lease held by a worker hands every new deadline to the worker's supervisor, which needs nobody else to
  enforce it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TypeVar

from sublet.core import notice as notices
from sublet.core.errors import BadInput, Disconnected, InvariantBroken, LeaseLost, SubletError, WorkerLost
from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.core.leasing.renewal import local_deadline
from sublet.core.notice import Notice
from sublet.core.scheduling.device import Slice
from sublet.leases.gangs.members import Members
from sublet.ports.clock import Clock
from sublet.ports.device import GpuSession
from sublet.ports.ledger import Answer, LeaseKey, Ledger
from sublet.ports.worker import Call, Callee, CallSink, LeaseHolder, Part, Screen

T = TypeVar("T")

#: Patience when leaving, which must not hang: a lease that cannot be given back runs out by itself.
RELEASE_PATIENCE_US = 2_000_000
#: Patience when reporting a loss: a silent ledger is not waited for to learn the reason.
EXPLAIN_PATIENCE_US = 300_000
#: The longest a kernel may run before its session is given up.
WATCHDOG_US = 600_000_000


#: Opens one of a lease's devices: the lease, which device, and the longest a kernel may run there.
Opener = Callable[["Lease", int, int], GpuSession]


class Lease:
    """What `with sublet.gpu(...) as lease` gives."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        secret: str,
        answer: Answer,
        sent_at: int,
        *,
        opener: Opener | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        """`hosts` are those of its devices, by rank, where they are not the holder's own."""
        self._ledger = ledger
        self._clock = clock
        self._secret = secret
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._row = answer.lease
        self._sent_at = sent_at
        self._ends_us = sent_at + answer.lease.ends_at - answer.at  # when the ledger fences it, on our clock
        self._deadline_us = local_deadline(sent_at, self.promised_us)
        self._worker: LeaseHolder | None = None
        self._members: Members | None = None  # what of it can be called
        self._notice: Notice | None = None
        self._callbacks: list[Callable[[Notice], None]] = []
        self._in_flight = 0
        self._idle_since_us = sent_at
        self._touched = True
        self._over = ""  # why, once it is over
        self._on_release: list[Callable[[], None]] = []
        self._on_yield: Callable[[], None] | None = None  # set: it is kept warm
        self.warm_us = answer.lease.request.ttl_us  # for so long after the last use
        self.yielded = ""  # why it was given back while nobody used it
        self._hosts = tuple(hosts)
        self._opener = opener
        self._sessions: list[GpuSession] = []

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
    def slices(self) -> tuple[Slice, ...]:
        return self._row.slices

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
    def in_worker(self) -> bool:
        """Whether its work runs in a leased worker and not in this process."""
        return self._worker is not None

    @property
    def here(self) -> bool:
        """Whether its work runs on this machine."""
        return self._worker is None or self._worker.here

    @property
    def host_lost(self) -> str:
        """Why the host its work ran on counts as gone; '' while it does not. Its slices stay taken until that
        host's warden has looked."""
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
        """Say that the GPU is in use; an untouched lease outside a `with` block counts as idle. One that is
        kept warm is kept `warm_us` from now on."""
        self.check()
        with self._lock:
            self._touched = True
            self._idle_since_us = self._clock.monotonic_us()

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Work in flight: the lease is busy, and renewed, until the block ends. The keeper reports it idle a
        moment later, because work in many small pieces must not cost a write each."""
        self.begin_work()
        try:
            yield
        finally:
            self.end_work()

    def begin_work(self) -> None:
        """As `working()`, for work that does not end in the block it began in."""
        with self._lock:
            self._in_flight += 1
        if not self._row.busy:
            self.report(busy=True)

    def end_work(self) -> None:
        with self._lock:
            self._in_flight -= 1
            self._touched = True
            self._idle_since_us = self._clock.monotonic_us()

    def report(self, *, busy: bool) -> None:
        """Tell the ledger, so that only leases nobody uses are taken for those who wait."""
        if self._over or self._row.busy == busy:
            return
        with contextlib.suppress(SubletError):
            self._ledger.mark(self.key, busy=busy)
            self._replace_row(busy=busy)

    def open(self, device: int = 0, *, watchdog_us: int = WATCHDOG_US) -> GpuSession:
        """A GpuSession on one of the lease's devices; a gang lease opens one for each. Closed with the lease
        at the latest."""
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
        return self._in_workers(lambda members: members.only().call(function, args, kwargs))

    def run_everywhere(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call it once in each member of a gang, all at the same time; what they returned, by rank. Each sees
        RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. A lease of one host has one member."""
        return self._in_workers(lambda members: members.everywhere(self.key, function, args, kwargs))

    @property
    def ticket(self) -> str:
        """What makes a member of a process on one of its hosts: see `sublet.join`. It is the right to write,
        as the key is."""
        return self.key.ticket

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where its devices are, by rank: several for a gang."""
        return self._hosts or (self._row.holder.host,)

    def run_shown(
        self, function: Callable[..., Any], args: Sequence[Any], screen: Screen, answer: Callable[[Any], Any]
    ) -> Any:
        """Call it in the leased worker with its output on a screen; `answer` is what it may ask meanwhile."""
        return self._in_workers(lambda members: members.only().call_shown(function, args, screen, answer))

    def run_sealed(self, target: str, parts: Sequence[Part], sink: CallSink) -> tuple[bool, list[memoryview]]:
        """Call "module:function" in the leased worker with bytes; nothing that comes back is opened here."""
        return self._in_workers(lambda members: members.only().call_sealed(target, parts, sink))

    @property
    def launches(self) -> int:
        """How many kernels the sealed calls in its worker said they launched."""
        return self._members.launches if self._members is not None else 0

    @property
    def containment(self) -> str:
        """What its worker is contained by, in words; '' without one."""
        return self._worker.containment if self._worker is not None else ""

    def interrupt(self) -> None:
        """KeyboardInterrupt in the call that runs in the leased worker; from any thread."""
        self._callable().interrupt()

    def run_many(self, function: Callable[..., Any], calls: list[Call]) -> list[tuple[bool, Any]]:
        """Several calls in one trip: (True, result) or (False, exception) each."""
        return self._in_workers(lambda members: members.only().call_many(function, calls))

    def _in_workers(self, work: Callable[[Members], T]) -> T:
        self.check()
        members = self._callable()
        self.begin_work()
        try:
            if self._over:  # released just before this call
                raise LeaseLost(f"lease {self.id} has ended: {self._over}")
            return work(members)
        except WorkerLost as lost:
            raise self._explained(lost) from lost.__cause__
        finally:
            self.end_work()

    def _callable(self) -> Members:
        if self._worker is None:
            raise BadInput(
                "this lease is held by this process, so there is no worker to run it in",
                remedy='call the function directly, or lease with holder="worker"',
            )
        if self._members is None:
            raise BadInput("what holds this lease runs by itself, and cannot be called")
        return self._members

    def _explained(self, lost: WorkerLost) -> WorkerLost:
        """Explain a lost worker: the supervisor knows that it ended the worker, and the ledger knows why."""
        why = reason = lost.message
        with contextlib.suppress(SubletError):
            row = self._ledger.look(self.id, patience_us=EXPLAIN_PATIENCE_US).lease
            if row.reason is not None:
                taken = f"{row.reason.value}: {row.detail}"
                why = f"GPU session ended ({taken}); {lost.message}"
                # Of a worker that died by itself the ledger knows only that it is gone; its supervisor knows
                # how it died.
                reason = taken if row.reason is not EndReason.HOLDER_LOST else lost.message
        self.lost(why)
        return WorkerLost(why, begun=lost.begun, with_host=lost.with_host, reason=reason)

    def adopt(self, worker: LeaseHolder, environment: Mapping[str, str]) -> None:
        """Make the worker the holder of the granted lease: it lives as long as the lease does."""
        self._worker = worker
        if isinstance(worker, Members):
            self._members = worker
        elif isinstance(worker, Callee):
            self._members = Members([(worker, {})])
        worker.arm(self._deadline_us, self._ends_us, confirm=True)
        worker.begin(self.id, self.epoch, environment)

    def seated(self, answer: Answer) -> None:
        """Note the row of a lease that was asked for by name and now has the worker as its holder."""
        self._replace_row(holder=answer.lease.holder)

    def on_notice(self, callback: Callable[[Notice], None]) -> None:
        """Called once per new warning, from a thread of sublet's; set a flag there and return."""
        self._callbacks.append(callback)
        if self._notice is not None:
            callback(self._notice)

    def warn_worker(self) -> None:
        """Warn what runs in its worker that the lease ends soon, so that it can save and stop."""
        if self._worker is not None:
            self._worker.warn()

    def keep_warm(self, then: Callable[[], None] = lambda: None) -> None:
        """Keep it between calls: renewed until nobody has used it for `warm_us`, then given back, and not
        held a moment longer than that. When somebody else is to have it meanwhile and nothing is in flight,
        it goes at once instead of at the end of its grace."""
        self._on_yield = then

    @property
    def warm_until_us(self) -> int | None:
        """When a warm lease that nobody uses is given back; None while it is used, or not kept warm."""
        return None if self._on_yield is None or self._in_flight else self._idle_since_us + self.warm_us

    @property
    def seconds_to_go(self) -> float:
        """Seconds until it ends if nobody uses it and nobody asks for it."""
        until = self.warm_until_us
        if until is None or self.status != "active":
            return self.seconds_left
        return max(0, until - self._clock.monotonic_us()) / 1e6

    def give_back(self, why: str) -> None:
        """Release it unless it is in use; in a thread of its own, because the end of a worker is waited
        for."""
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
        self._tell_released()
        try:
            self._give_up_row(patience_us)
        except Disconnected:
            # It runs out by itself, and this process will not use it again.
            pass
        except SubletError:
            if not was_over:
                raise
        finally:
            if self._worker is not None:
                self._worker.end("its lease was released")

    def _give_up_row(self, patience_us: int) -> None:
        # The ledger first: a worker that ends before would look like one that was lost.
        if self.host_lost:
            self._ledger.end(
                self._row.id, self.epoch, reason=EndReason.HOLDER_LOST, detail=self.host_lost[:500]
            )
        self._ledger.release(
            self._row.id, self._secret, torn_down=self._worker is None, patience_us=patience_us
        )

    def on_release(self, callback: Callable[[], None]) -> None:
        """Called when it is released, once."""
        self._on_release.append(callback)

    def _tell_released(self) -> None:
        for callback in self._on_release:
            callback()

    def __enter__(self) -> Lease:
        with self._lock:
            self._in_flight += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # what the keeper asks and tells (`leases.keeper.KeptLease`)

    def _replace_row(self, **changes: object) -> None:
        self._row = replace(self._row, **changes)  # type: ignore[arg-type]

    @property
    def is_over(self) -> bool:
        return bool(self._over)

    @property
    def sent_at(self) -> int:
        """When the renewal was sent that the ledger last confirmed, on this process's clock."""
        return self._sent_at

    @property
    def deadline_us(self) -> int:
        """When this holder must stop, on this process's clock."""
        return self._deadline_us

    @property
    def used(self) -> bool:
        """Whether it was used since its last renewal, so that it is renewed again."""
        until = self.warm_until_us
        if until is not None:
            return self._clock.monotonic_us() < until
        return self._in_flight > 0 or self._touched

    @property
    def busy(self) -> bool:
        return self._in_flight > 0

    def idle_report_at(self, after_us: int) -> int | None:
        """When to tell the ledger that it is idle; None when it knows, or when there is work in flight."""
        return self._idle_since_us + after_us if self._row.busy and not self._in_flight else None

    @property
    def promised_us(self) -> int:
        """The time that was promised: the ttl, or less where a hold cap or the tenant's budget cut it
        short."""
        return max(0, min(self.ttl_us, self._ends_us - self._sent_at))

    def renewed(self, answer: Answer, sent_at: int) -> None:
        self._row, self._sent_at = answer.lease, sent_at
        self._ends_us = sent_at + answer.lease.expires_at - answer.at
        self._deadline_us = local_deadline(sent_at, self.promised_us)
        self._arm()
        if self._notice is not None and self._notice.source == "keeper":
            self._notice = None
        self._touched = self._in_flight > 0

    def seen(self, answer: Answer, sent_at: int) -> None:
        """Take in the ledger's row: notice a revoke or the end."""
        row = answer.lease
        if self._over:
            return
        if row.state is LeaseState.ENDED or row.epoch != self._row.epoch:
            self.lost(f"{row.reason.value if row.reason else 'ended'}: {row.detail}")
            return
        if row.state is LeaseState.REVOKING:
            self._row = row
            self._deadline_us = self._ends_us = sent_at + row.deadline_at - answer.at
            self._arm()
            why = f"{row.reason.value if row.reason else 'revoked'}: {row.detail}"
            self.warn(Notice(source="lease", reason=why, deadline_us=self._deadline_us))
            if self.warm_until_us is not None:
                self.give_back(why)

    def _arm(self) -> None:
        if self._worker is not None:
            self._worker.arm(self._deadline_us, self._ends_us)

    def warn(self, warning: Notice) -> None:
        merged = notices.merge(self._notice, warning)
        if merged is self._notice or merged == self._notice:
            return
        self._notice = merged
        for callback in list(self._callbacks):
            with contextlib.suppress(Exception):
                callback(merged)

    def lost(self, why: str) -> None:
        if self._over:
            return
        self._over = why
        self.warn(Notice(source="lease", reason=why, deadline_us=self._clock.monotonic_us()))
