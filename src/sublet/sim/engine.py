"""Replaying a workload: arrivals, restores, runs, pauses and losses, as events under a virtual clock.

Rules of this file:
- A tenant has one session. Its requests run one at a time, in the order they came; a session holds one GPU or
  none.
- The holder behaves as a warm lease of `leases.lease` does: it renews when `core.leasing.renewal` says,
  reports itself idle a quarter of a second after its last work, gives the GPU back when nobody used it for
  the ttl, leaves at once when it is warned while idle, and begins nothing after a warning.
- A session that got a GPU restores its state first. A run that the deadline cut off counts for nothing and
  begins again, later.
- Events of one instant happen in the order in which they were planned. No randomness, no clock, no sets: a
  run is a function of its arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush

from sublet.core.errors import BadInput, InvariantBroken
from sublet.core.leasing.lease import LeaseRecord, LeaseState, Request, overdue
from sublet.core.leasing.renewal import first_try_at, local_deadline, retry_at
from sublet.core.scheduling.device import Exclusivity
from sublet.core.values import SECOND_US
from sublet.sim.schemes import Scheme, ServiceOrder
from sublet.sim.workload import Arrival, Workload
from sublet.sim.world import CAPACITY_BYTES, Happened, World, ends_of

#: What coming back to a GPU costs: the median of 7,531 base model loads of the traced service.
RESTORE_US = 22_700_000
#: From the end of a lease to its device being proven clean: killing 4 GB resident takes a third of a second.
TEARDOWN_US = SECOND_US // 2
#: As `leases.keeper` does.
IDLE_REPORT_US = 250_000
MOST_GPUS = 100_000


class Doing(Enum):
    NOTHING = "nothing"  # no GPU, none asked for
    WAITING = "waiting"
    RESTORING = "restoring"
    RUNNING = "running"
    RESTING = "resting"  # holds a GPU and has no work for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of one request."""

    tenant: str
    arrived_at: int
    began_at: int  # of the run that ended
    ended_at: int
    alone_at: int  # when it was its session's turn: nothing of its own tenant was before it any more
    lost_runs: int

    @property
    def wait_us(self) -> int:
        """The whole wait: behind the tenant's own requests, for a GPU, and while the state was restored."""
        return self.began_at - self.arrived_at


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOutcome:
    """A whole replay."""

    scheme: Scheme
    gpus: int
    served: tuple[Served, ...]
    ended_at: int  # when the last device was clean again
    held_us: int  # GPU time from each grant until the device was clean again
    restored_us: int  # of that: bringing state back
    worked_us: int  # of that: runs that counted
    lost_us: int  # of that: runs and restores that were cut off
    grants: int
    ends: dict[str, int]
    events: int


@dataclass(slots=True)
class _SimulatedSession:
    tenant: str
    doing: Doing = Doing.NOTHING
    lease: LeaseRecord | None = None
    backlog: deque[Arrival] = field(default_factory=deque)
    number: int = 0  # of its leases so far
    turn: int = 0  # raised at each change; an event planned before it is stale
    since: int = 0  # when it began what it does
    alone_at: int = 0
    lost_runs: int = 0
    told: bool = False  # to leave


class TraceReplay:
    def __init__(
        self,
        workload: Workload,
        scheme: Scheme,
        *,
        gpus: int,
        restore_us: int = RESTORE_US,
        teardown_us: int = TEARDOWN_US,
        after_event: Callable[[TraceReplay], None] | None = None,
    ) -> None:
        if not 1 <= gpus <= MOST_GPUS:
            raise BadInput(f"{gpus} GPUs cannot be simulated: use 1 to {MOST_GPUS}")
        self.world = World(scheme, gpus)
        self._scheme = scheme
        self._gpus = gpus
        self._restore_us = restore_us
        self._teardown_us = teardown_us
        self._after_event = after_event
        self._arrivals = workload.arrivals
        self._planned: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self.sessions: dict[str, _SimulatedSession] = {}
        self._by_lease: dict[str, _SimulatedSession] = {}
        self._look_at: int | None = None
        self.served: list[Served] = []
        self._held_us = self._restored_us = self._worked_us = self._lost_us = 0
        self._events = self._clean_at = 0

    def run(self) -> ReplayOutcome:
        coming = iter(self._arrivals)
        arrival = next(coming, None)
        while arrival is not None or self._planned:
            if arrival is not None and (not self._planned or arrival.at <= self._planned[0][0]):
                self.world.now = arrival.at
                self._arrives(arrival)
                arrival = next(coming, None)
            else:
                at, _, happen = heappop(self._planned)
                self.world.now = at
                happen()
            self._react()
            self._events += 1
            if self._after_event is not None:
                self._after_event(self)
        if len(self.served) != len(self._arrivals):
            raise InvariantBroken(f"{len(self._arrivals)} requests came and {len(self.served)} were served")
        return ReplayOutcome(
            scheme=self._scheme,
            gpus=self._gpus,
            served=tuple(self.served),
            ended_at=self._clean_at,
            held_us=self._held_us,
            restored_us=self._restored_us,
            worked_us=self._worked_us,
            lost_us=self._lost_us,
            grants=self.world.epoch,
            ends=dict(ends_of(self.world)),
            events=self._events,
        )

    def _plan(self, at: int, happen: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._planned, (at, self._count, happen))

    def _later(
        self, session: _SimulatedSession, after_us: int, happen: Callable[[_SimulatedSession], None]
    ) -> None:
        """Plan an event, which is dropped if the session does something else by then."""
        turn = session.turn

        def still() -> None:
            if session.turn == turn:
                happen(session)

        self._plan(self.world.now + after_us, still)

    def _does(self, session: _SimulatedSession, doing: Doing) -> None:
        session.doing = doing
        session.turn += 1
        session.since = self.world.now

    # requests

    def _arrives(self, arrival: Arrival) -> None:
        session = self.sessions.get(arrival.tenant)
        if session is None:
            session = self.sessions[arrival.tenant] = _SimulatedSession(arrival.tenant)
        session.backlog.append(arrival)
        if len(session.backlog) > 1:
            return
        session.alone_at = self.world.now
        if session.doing is Doing.RESTING:
            if session.lease is not None and not self._known(session.lease).busy:
                self.world.mark(session.lease, busy=True)
            self._runs(session)
        elif session.doing is Doing.NOTHING:
            self._asks(session)

    def _asks(self, session: _SimulatedSession) -> None:
        session.number += 1
        request = Request(
            tenant=session.tenant,
            vram_bytes=CAPACITY_BYTES,
            ttl_us=self._scheme.ttl_us,
            exclusivity=Exclusivity.DEVICE,
        )
        self._does(session, Doing.WAITING)
        lease = self.world.acquire(f"{session.tenant}-{session.number:06d}", request)
        self._by_lease[lease.id] = session
        if lease.state is LeaseState.ACTIVE:
            self._got(session, lease)
        else:
            self._look_now()

    def _got(self, session: _SimulatedSession, lease: LeaseRecord) -> None:
        session.lease, session.told = lease, False
        self._keep(lease)
        if self._scheme.stay_us is not None:
            self._plan(lease.granted_at + self._scheme.stay_us, lambda: self._stay_over(session, lease))
        self._does(session, Doing.RESTORING)
        self._later(session, self._restore_us, self._restored)

    def _restored(self, session: _SimulatedSession) -> None:
        self._restored_us += self._restore_us
        if session.told:
            self._gives_back(session)
        else:
            self._runs(session)

    def _runs(self, session: _SimulatedSession) -> None:
        self._does(session, Doing.RUNNING)
        self._later(session, session.backlog[0].work_us, self._ran)

    def _ran(self, session: _SimulatedSession) -> None:
        arrival = session.backlog.popleft()
        now = self.world.now
        self._worked_us += arrival.work_us
        self.served.append(
            Served(
                tenant=session.tenant,
                arrived_at=arrival.at,
                began_at=session.since,
                ended_at=now,
                alone_at=session.alone_at,
                lost_runs=session.lost_runs,
            )
        )
        session.lost_runs = 0
        session.alone_at = now
        if session.told or self._scheme.idle_us == 0:
            self._gives_back(session)
        elif session.backlog:
            self._runs(session)
        else:
            self._rests(session)

    def _rests(self, session: _SimulatedSession) -> None:
        self._does(session, Doing.RESTING)
        self._later(session, IDLE_REPORT_US, self._says_idle)
        if self._scheme.idle_us is not None:
            self._later(session, self._scheme.idle_us, self._gives_back)

    def _says_idle(self, session: _SimulatedSession) -> None:
        assert session.lease is not None
        self.world.mark(session.lease, busy=False)
        self._look_now()

    # leases

    def _known(self, lease: LeaseRecord) -> LeaseRecord:
        return self.world.leases[lease.id]

    def _keep(self, lease: LeaseRecord) -> None:
        """Plan the renewal of a held lease for the moment at which the keeper would renew."""
        now, ttl = self.world.now, lease.request.ttl_us
        due = first_try_at(now, ttl, lease.epoch)
        self._plan(due, lambda: self._renews(lease, now, 0))
        if self._known(lease).expires_at <= due:  # cut short by its cap
            self._looked_at_when_over(lease)

    def _renews(self, lease: LeaseRecord, sent_at: int, attempt: int) -> None:
        """Renew. A refusal does not end the lease: the waiter behind it may be gone at the next try."""
        session = self._by_lease.get(lease.id)
        if session is None or session.told:
            return
        now, ttl = self.world.now, lease.request.ttl_us
        if self.world.renew(lease, busy=session.doing is not Doing.RESTING):
            self._keep(lease)
            return
        if attempt == 0:
            self._looked_at_when_over(lease)
        again = retry_at(now, ttl, attempt + 1, lease.epoch)
        if again < local_deadline(sent_at, ttl):
            self._plan(again, lambda: self._renews(lease, sent_at, attempt + 1))

    def _looked_at_when_over(self, lease: LeaseRecord) -> None:
        self._plan(self._known(lease).ends_at, lambda: self._runs_out(lease))

    def _runs_out(self, lease: LeaseRecord) -> None:
        known = self.world.leases.get(lease.id)
        if known is not None and overdue(known, self.world.now) is not None:
            self._tick()

    def _stay_over(self, session: _SimulatedSession, lease: LeaseRecord) -> None:
        if session.lease is None or session.lease.id != lease.id:
            return
        session.told = True
        if session.doing is Doing.RESTING:
            self._gives_back(session)

    def _gives_back(self, session: _SimulatedSession) -> None:
        assert session.lease is not None
        self.world.release(session.lease)
        self._is_without(session)

    def _is_without(self, session: _SimulatedSession) -> None:
        """The lease has ended: its device is torn down behind it, and what is left to do needs another."""
        lease = session.lease
        assert lease is not None
        session.lease = None
        self._does(session, Doing.NOTHING)
        del self._by_lease[lease.id]
        if self._teardown_us:
            self._plan(self.world.now + self._teardown_us, lambda: self._settled(lease))
        else:
            self._settled(lease)  # as a lease that nothing has to be torn down for
        if session.backlog:
            self._asks(session)

    def _settled(self, lease: LeaseRecord) -> None:
        self._held_us += self.world.now - lease.granted_at
        self._clean_at = self.world.now
        self.world.settle(lease.id)
        # Grants and waiters are looked at together, as after the bell.
        self._look_now()

    def _look_now(self) -> None:
        if self.world.waiters and self._scheme.order is ServiceOrder.OURS:
            self._tick()

    def _look(self) -> None:
        if self._look_at is not None and self.world.now >= self._look_at:
            self._look_at = None
            self._tick()

    def _tick(self) -> None:
        again = self.world.tick()
        if again is not None and (self._look_at is None or again < self._look_at):
            self._look_at = again
            self._plan(again, self._look)

    def _react(self) -> None:
        """Tell the holders what was decided about them."""
        while self.world.news:
            news = self.world.news.popleft()
            session = self._by_lease.get(news.lease.id)
            if session is None:
                continue  # it had gone by itself
            if news.happened is Happened.GRANTED:
                if not self.world.renew(news.lease, busy=True):  # takes it up
                    raise InvariantBroken(f"lease {news.lease.id} was over as it was granted")
                self._got(session, news.lease)
            elif news.happened is Happened.REVOKED:
                self._hears(session, news.lease)
            else:
                self._cut_off(session)

    def _hears(self, session: _SimulatedSession, lease: LeaseRecord) -> None:
        """Tell a session that its lease is revoked: an idle one leaves at once."""
        session.told = True
        if session.doing is Doing.RESTING:
            self._gives_back(session)
        else:
            self._looked_at_when_over(lease)

    def _cut_off(self, session: _SimulatedSession) -> None:
        if session.doing in (Doing.RESTORING, Doing.RUNNING):
            self._lost_us += self.world.now - session.since
            session.lost_runs += session.doing is Doing.RUNNING
        self._is_without(session)


def replay(
    workload: Workload,
    scheme: Scheme,
    *,
    gpus: int,
    restore_us: int = RESTORE_US,
    teardown_us: int = TEARDOWN_US,
) -> ReplayOutcome:
    return TraceReplay(workload, scheme, gpus=gpus, restore_us=restore_us, teardown_us=teardown_us).run()
