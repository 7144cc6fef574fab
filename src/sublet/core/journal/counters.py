"""Counters that never fall: what the journal tells, added up row by row.

Rules of this file:
- A counter is a fold over rows that are never edited or removed: folding them again after a restart gives the
  same numbers, and two services on one ledger show the same.
- All values are integers: microseconds, bytes, whole steps.
- What a lease used is `meter.Usage` (T4). What was useful, wasted and refunded follows `goodput`, but is
  added one commit at a time, because a scrape cannot read everything again. A rollback takes nothing back: a
  counter counts what happened.
- Of a lease that is still held, only what its next commit needs is remembered, until the lease ends.

It does not read rows (`ledger.verbs.journal.counters`) and does not name series (`studio.views.metrics`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from sublet.core.billing import meter
from sublet.core.billing.goodput import LOSSES, MICRO, REFUNDED
from sublet.core.leasing.lease import HOLDING, REVOCABLE_FOR, EndReason, LeaseRecord
from sublet.core.studio.session import StudioSession

_S = 1_000_000
#: Waits, from none to half a working day.
WAIT_BOUNDS_US = tuple(
    s * _S // 10 for s in (1, 5, 10, 50, 150, 300, 600, 1200, 3000, 6000, 18_000, 36_000, 144_000)
)
#: Teardowns, from a worker that left at once to one whose processes had to be found and killed.
TEARDOWN_BOUNDS_US = tuple(s * _S // 100 for s in (1, 5, 10, 25, 50, 100, 250, 500, 1000, 3000, 6000))
#: Jobs without a commit whose lost time may still turn out to be a training run's.
_UNDECIDED = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    lease: str
    tenant: str
    tier: str
    waited_us: int
    at: int
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded:
    """A lease that was held."""

    usage: meter.Usage
    devices: int
    committed_at: int  # its last commit, or 0
    trains: bool  # its job has committed at least once
    cost_micro: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaiterLeft:
    """A waiter that was never served."""

    tier: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TornDown:
    proven: bool
    duration_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsCommitted:
    lease: str
    tenant: str
    at: int
    steps: int
    compute_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted:
    """The first commit of a job: from here on its time is a training run's, also what was lost before."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """Somebody asked and got nothing, so many times; `code` is the error's."""

    code: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Something came a second time and was not done again."""

    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRefused:
    """A holder wrote too late, out of order, or with other inputs: the ledger did not take it."""

    verb: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Worked:
    """What was done in studio sessions: in one that ended, or in those that are open."""

    tenant: str
    calls: int = 0
    errors: int = 0
    launches: int = 0
    checkpoint_bytes: int = 0

    def plus(self, other: Worked) -> Worked:
        return Worked(
            tenant=self.tenant,
            calls=self.calls + other.calls,
            errors=self.errors + other.errors,
            launches=self.launches + other.launches,
            checkpoint_bytes=self.checkpoint_bytes + other.checkpoint_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Withheld:
    """A device was quarantined."""


def work_of(session: StudioSession) -> Worked:
    return Worked(
        tenant=session.tenant,
        calls=session.calls,
        errors=session.errors,
        launches=session.launches,
        checkpoint_bytes=session.checkpoint_bytes,
    )


Happened = (
    Granted
    | LeaseEnded
    | WaiterLeft
    | TornDown
    | StepsCommitted
    | JobStarted
    | Declined
    | Repeated
    | WriteRefused
    | Worked
    | Withheld
)


@dataclass(slots=True)
class Histogram:
    """Counts of durations, by bucket. A value equal to a bound is within it."""

    bounds_us: tuple[int, ...]
    counts: list[int] = field(default_factory=list)  # per bucket, the last one is everything beyond
    sum_us: int = 0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds_us) + 1)

    def add(self, us: int) -> None:
        self.counts[bisect_left(self.bounds_us, us)] += 1
        self.sum_us += us


@dataclass(slots=True)
class _RunningLease:
    """A lease that is held: what its next commit needs to know."""

    whose: Whose
    devices: int
    last_at: int
    spare_us: int = 0  # held before the last commit and not useful: a later step may have run there
    commits: int = 0


#: (tenant, tier)
Whose = tuple[str, str]


@dataclass(slots=True)
class GpuTime:
    """The sums of one tenant on one tier."""

    gpu_us: int = 0
    vram_byte_s: int = 0
    training_us: int = 0  # of gpu_us: held by jobs that commit steps
    useful_us: int = 0
    wasted_us: int = 0
    refund_us: int = 0
    cost_micro: int = 0

    def plus(self, other: GpuTime) -> GpuTime:
        return GpuTime(
            gpu_us=self.gpu_us + other.gpu_us,
            vram_byte_s=self.vram_byte_s + other.vram_byte_s,
            training_us=self.training_us + other.training_us,
            useful_us=self.useful_us + other.useful_us,
            wasted_us=self.wasted_us + other.wasted_us,
            refund_us=self.refund_us + other.refund_us,
            cost_micro=self.cost_micro + other.cost_micro,
        )

    @property
    def goodput_ppm(self) -> int | None:
        return self.useful_us * MICRO // self.training_us if self.training_us else None


@dataclass(slots=True)
class Totals:
    """Everything since the ledger's first row."""

    waits: dict[str, Histogram] = field(default_factory=dict)  # by tier
    teardowns: dict[bool, Histogram] = field(default_factory=dict)  # by whether they were proven
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)  # (reason, tier) of leases that were held
    taken_back: Counter[tuple[str, str]] = field(default_factory=Counter)  # those of them the system ended
    left: Counter[tuple[str, str]] = field(default_factory=Counter)  # (reason, tier) of waiters never served
    declined: Counter[str] = field(default_factory=Counter)
    repeated: Counter[str] = field(default_factory=Counter)
    stopped: Counter[tuple[str, str]] = field(default_factory=Counter)  # (verb, code)
    steps: Counter[str] = field(default_factory=Counter)  # by tenant
    commits: Counter[str] = field(default_factory=Counter)
    worked: dict[str, Worked] = field(default_factory=dict)  # by tenant, in sessions that ended
    withheld: int = 0
    time: dict[Whose, GpuTime] = field(default_factory=dict)
    _runs: dict[str, _RunningLease] = field(default_factory=dict)
    _undecided: dict[str, dict[Whose, GpuTime]] = field(default_factory=dict)

    def add(self, what: Happened) -> None:
        match what:
            case Granted():
                self.waits.setdefault(what.tier, Histogram(WAIT_BOUNDS_US)).add(what.waited_us)
                self._runs[what.lease] = _RunningLease((what.tenant, what.tier), what.devices, what.at)
            case LeaseEnded():
                self._end(what)
            case StepsCommitted():
                self._commit(what)
            case JobStarted():
                for whose, time in self._undecided.pop(what.job, {}).items():
                    self.time[whose] = self._of(whose).plus(time)
            case TornDown():
                self.teardowns.setdefault(what.proven, Histogram(TEARDOWN_BOUNDS_US)).add(what.duration_us)
            case WaiterLeft():
                self.left[what.reason, what.tier] += 1
            case Declined():
                self.declined[what.code] += what.count
            case Repeated():
                self.repeated[what.what] += 1
            case WriteRefused():
                self.stopped[what.verb, what.code] += 1
            case Worked():
                self.worked[what.tenant] = self.worked.get(what.tenant, Worked(tenant=what.tenant)).plus(what)
            case Withheld():
                self.withheld += 1
            case _:
                assert_never(what)

    def _of(self, whose: Whose) -> GpuTime:
        return self.time.setdefault(whose, GpuTime())

    def _commit(self, done: StepsCommitted) -> None:
        self.steps[done.tenant] += done.steps
        self.commits[done.tenant] += 1
        run = self._runs.get(done.lease)
        if run is None:  # a commit by a lease the journal never granted: the ledger's audit names it
            return
        room = max(0, done.at - run.last_at)
        useful = min(max(0, done.compute_us), room + run.spare_us)
        run.spare_us += room - useful
        run.last_at = max(run.last_at, done.at)
        run.commits += 1
        self._of(run.whose).useful_us += useful * run.devices

    def _end(self, ended: LeaseEnded) -> None:
        usage = ended.usage
        whose = (usage.tenant, usage.tier)
        reason = EndReason(usage.reason)
        run = self._runs.pop(usage.lease_id, None)
        self.ends[reason.value, usage.tier] += 1
        if reason in REVOCABLE_FOR:
            self.taken_back[reason.value, usage.tier] += 1
        time = self._of(whose)
        time.gpu_us += usage.gpu_us
        time.vram_byte_s += usage.vram_byte_s
        since = max(usage.from_at, min(ended.committed_at, usage.to_at))
        lost = (usage.to_at - since) * ended.devices if reason in LOSSES else 0
        refund = lost if reason in REFUNDED else 0
        time.cost_micro += ended.cost_micro
        training = GpuTime(training_us=usage.gpu_us, wasted_us=lost, refund_us=refund)
        if ended.trains or ended.committed_at or (run is not None and run.commits):
            self.time[whose] = time.plus(training)
        elif usage.job:
            undecided = self._undecided.setdefault(usage.job, {})
            undecided[whose] = undecided.get(whose, GpuTime()).plus(training)
            if len(self._undecided) > _UNDECIDED:
                self._undecided.pop(next(iter(self._undecided)))

    def with_open(self, sessions: Iterable[StudioSession]) -> dict[str, Worked]:
        """What was done in sessions, also in those that are still open."""
        found = dict(self.worked)
        for one in sessions:
            found[one.tenant] = found.get(one.tenant, Worked(tenant=one.tenant)).plus(work_of(one))
        return found

    def with_held(self, held: Iterable[LiveLease], now: int) -> dict[Whose, GpuTime]:
        """The sums including what held leases have used until now. A lease's end never lowers what was
        shown."""
        found = dict(self.time)
        for one in held:
            lease = one.lease
            if lease.state not in HOLDING or not lease.granted_at:
                continue
            usage = meter.so_far(lease, now)
            run = self._runs.get(lease.id)
            trains = one.trains or bool(lease.committed_at) or (run is not None and run.commits > 0)
            whose = (lease.tenant, lease.request.tier.value)
            found[whose] = found.get(whose, GpuTime()).plus(
                GpuTime(
                    gpu_us=usage.gpu_us,
                    vram_byte_s=usage.vram_byte_s,
                    training_us=usage.gpu_us if trains else 0,
                    cost_micro=one.cost_micro,
                )
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLease:
    """A lease that is live, and whether its job commits steps."""

    lease: LeaseRecord
    trains: bool
    cost_micro: int = 0
