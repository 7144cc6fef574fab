"""Replaying a job log: gangs of whole GPUs, run to the end, under one pool or partitions of it.

Rules of this file:
- A job asks once for all its GPUs and gets all of them or waits (a gang). It is a batch lease that is renewed
  in time for as long as it runs.
- `dedicated` gives each tenant GPUs of its own and serves who came first; `fifo` is one pool that serves
  strictly who came first; `ours` asks `core.scheduling.admission` and `core.scheduling.schedule`.
- With a hold cap, a job that has held its GPUs for so long gives them up when others wait: told, or not
  renewed any further (which is how a gang gets the room of many), it saves within the grace, waits again, and
  pays `restart_us` when it goes on. Its wait is all of it: the time from submission to end that it was not
  doing its own work.
- Events of one instant happen in the order in which they were planned. No randomness, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heappop, heappush

from sublet.core.errors import BadInput, InvariantBroken
from sublet.core.leasing.lease import MAX_TTL_US, LeaseRecord, LeaseState, Request, Tier
from sublet.core.leasing.policy import Policy
from sublet.core.scheduling.device import Exclusivity
from sublet.core.values import SECOND_US
from sublet.sim.report import jain, percentile
from sublet.sim.schemes import OURS
from sublet.sim.traces import TraceJob
from sublet.sim.world import CAPACITY_BYTES, Happened, World

RESTART_US = 60 * SECOND_US
#: Shorter jobs count as this long in a slowdown: a job of one second that waits a minute is not sixty times
#: worse off.
SHORTEST_US = 60 * SECOND_US
MOST_WAITING = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJob:
    job: TraceJob
    ended_at: int
    preemptions: int = 0

    @property
    def wait_us(self) -> int:
        return self.ended_at - self.job.at - self.job.work_us

    @property
    def slowdown(self) -> float:
        return max(1.0, (self.wait_us + self.job.work_us) / max(self.job.work_us, SHORTEST_US))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFigures:
    scheme: str
    gpus: int
    jobs: int
    tenants: int
    mean_us: int
    p50_us: int
    p90_us: int
    p99_us: int
    most_us: int
    at_once: float  # of all jobs: began when they came
    slowdown: float  # mean over tenants of their jobs' mean
    worst_slowdown: float
    worst_tenant: str
    jain: float  # over 1 / slowdown of the tenants
    utilisation: float  # work over all GPUs, from the first submission to the last end
    preemptions: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def figures(scheme: str, gpus: int, ended: Sequence[FinishedJob]) -> JobFigures:
    waits = sorted(e.wait_us for e in ended)
    by_tenant: dict[str, list[float]] = {}
    for e in ended:
        by_tenant.setdefault(e.job.tenant, []).append(e.slowdown)
    means = {name: sum(found) / len(found) for name, found in sorted(by_tenant.items())}
    worst = max(means, key=lambda name: means[name])
    span = max(e.ended_at for e in ended) - min(e.job.at for e in ended)
    return JobFigures(
        scheme=scheme,
        gpus=gpus,
        jobs=len(ended),
        tenants=len(means),
        mean_us=sum(waits) // len(waits),
        p50_us=percentile(waits, 50),
        p90_us=percentile(waits, 90),
        p99_us=percentile(waits, 99),
        most_us=waits[-1],
        at_once=sum(w < SECOND_US for w in waits) / len(waits),
        slowdown=sum(means.values()) / len(means),
        worst_slowdown=means[worst],
        worst_tenant=worst,
        jain=jain([1 / m for m in means.values()]),
        utilisation=sum(e.job.work_us * e.job.gpus for e in ended) / (gpus * max(1, span)),
        preemptions=sum(e.preemptions for e in ended),
    )


# --- who came first -----------------------------------------------------------------------------------------


def fifo(jobs: Sequence[TraceJob], gpus: int) -> list[FinishedJob]:
    """Serve strictly in order: while the first job does not fit, all wait."""
    _check_fits(jobs, gpus)
    free = gpus
    ended: list[FinishedJob] = []
    line: deque[TraceJob] = deque()
    running: list[tuple[int, int, int]] = []

    def begin(now: int) -> None:
        nonlocal free
        while line and line[0].gpus <= free:
            job = line.popleft()
            free -= job.gpus
            heappush(running, (now + job.work_us, len(ended), job.gpus))
            ended.append(FinishedJob(job=job, ended_at=now + job.work_us))

    for job in jobs:
        while running and running[0][0] <= job.at:
            at, _, back = heappop(running)
            free += back
            begin(at)
        line.append(job)
        begin(job.at)
    while running:
        at, _, back = heappop(running)
        free += back
        begin(at)
    return ended


def partitions(jobs: Sequence[TraceJob], gpus: int) -> dict[str, int]:
    """Divide the GPUs by the tenants' work, with at least enough for each tenant's largest job."""
    work: dict[str, int] = {}
    least: dict[str, int] = {}
    for job in jobs:
        work[job.tenant] = work.get(job.tenant, 0) + job.work_us * job.gpus
        least[job.tenant] = max(least.get(job.tenant, 0), job.gpus)
    if sum(least.values()) > gpus:
        raise BadInput(
            f"{gpus} GPUs cannot be divided: the largest jobs of the tenants need {sum(least.values())} "
            "together",
            remedy="give more GPUs, or leave dedicated out with --scheme",
        )
    parts = dict(least)
    for _ in range(gpus - sum(least.values())):  # one by one to who has least for its work
        neediest = max(sorted(work), key=lambda name: work[name] / parts[name])
        parts[neediest] += 1
    return parts


def dedicated(jobs: Sequence[TraceJob], gpus: int) -> list[FinishedJob]:
    found: list[FinishedJob] = []
    for name, part in sorted(partitions(jobs, gpus).items()):
        found += fifo([j for j in jobs if j.tenant == name], part)
    return found


def _check_fits(jobs: Iterable[TraceJob], gpus: int) -> None:
    largest = max(j.gpus for j in jobs)
    if largest > gpus:
        raise BadInput(f"a job needs {largest} GPUs and there are {gpus}: use --gpus {largest} or more")


# --- ours ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _RunningJob:
    job: TraceJob
    number: int
    left_us: int
    asked: int = 0  # how often it asked for its GPUs
    lease: LeaseRecord | None = None
    began_at: int = 0  # its own work, after the restart


class JobReplay:
    def __init__(
        self,
        jobs: Sequence[TraceJob],
        gpus: int,
        *,
        policy: Policy | None = None,
        hold_cap_us: int = 0,
        restart_us: int = RESTART_US,
        after_event: Callable[[JobReplay], None] | None = None,
    ) -> None:
        _check_fits(jobs, gpus)
        known = policy or Policy()
        # A log has no waitlist that is full, and nobody in it has given up.
        open_to_all = replace(known, waitlist_max=MOST_WAITING, tenant_waiting_max=MOST_WAITING)
        self.world = World(replace(OURS, policy=open_to_all), gpus)
        self._jobs = jobs
        self._cap_us, self._restart_us = hold_cap_us, restart_us
        self._after_event = after_event
        self._planned: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._by_lease: dict[str, _RunningJob] = {}
        self._look_at: int | None = None
        self.ended: list[FinishedJob] = []

    def run(self) -> list[FinishedJob]:
        number, total = 0, len(self._jobs)
        while number < total or self._planned:
            if number < total and (not self._planned or self._jobs[number].at <= self._planned[0][0]):
                job = self._jobs[number]
                self.world.now = job.at
                self._asks(_RunningJob(job, number, job.work_us))
                number += 1
            else:
                at, _, happen = heappop(self._planned)
                self.world.now = at
                happen()
            self._react()
            if self._after_event is not None:
                self._after_event(self)
        if len(self.ended) != total:
            raise InvariantBroken(f"{total} jobs came and {len(self.ended)} ended")
        return self.ended

    def _plan(self, at: int, happen: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._planned, (at, self._count, happen))

    def _asks(self, run: _RunningJob) -> None:
        run.asked += 1
        request = Request(
            tenant=run.job.tenant,
            vram_bytes=CAPACITY_BYTES,
            ttl_us=MAX_TTL_US,
            count=run.job.gpus,
            exclusivity=Exclusivity.DEVICE,
            tier=Tier.BATCH,
            hold_cap_us=self._cap_us or None,
        )
        lease = self.world.acquire(f"j{run.number:08d}-{run.asked}", request)
        self._by_lease[lease.id] = run
        if lease.state is LeaseState.ACTIVE:
            self._begins(run, lease)
        else:
            self._look_now()

    def _begins(self, run: _RunningJob, lease: LeaseRecord) -> None:
        run.lease = lease
        run.began_at = self.world.now + (self._restart_us if run.asked > 1 else 0)
        self._plan(run.began_at + run.left_us, lambda: self._ends(run, lease))
        self._keep(run, lease)

    def _keep(self, run: _RunningJob, lease: LeaseRecord) -> None:
        """Plan the renewal at two thirds of what was promised: a cap that applied then may not apply any
        more."""
        left = self.world.leases[lease.id].expires_at - self.world.now
        if self.world.now + left <= run.began_at + run.left_us:
            self._plan(self.world.now + max(1, left * 2 // 3), lambda: self._renews(run, lease))

    def _renews(self, run: _RunningJob, lease: LeaseRecord) -> None:
        if run.lease is lease and self.world.renew(lease, busy=True):
            self._keep(run, lease)

    def _ends(self, run: _RunningJob, lease: LeaseRecord) -> None:
        if run.lease is not lease:
            return
        self.ended.append(FinishedJob(job=run.job, ended_at=self.world.now, preemptions=run.asked - 1))
        self._gives_back(run)

    def _gives_back(self, run: _RunningJob) -> None:
        lease = run.lease
        assert lease is not None
        self.world.release(self.world.leases[lease.id])
        self._is_without(run, lease)

    def _is_without(self, run: _RunningJob, lease: LeaseRecord) -> None:
        run.lease = None
        del self._by_lease[lease.id]
        self._plan(self.world.now, lambda: self._settled(lease.id))

    def _settled(self, lease_id: str) -> None:
        self.world.settle(lease_id)
        self._look_now()

    def _look_now(self) -> None:
        """Look only with a cap: without one no job loses GPUs, and free ones were handed out already."""
        if self.world.waiters and self._cap_us:
            again = self.world.tick()
            if again is not None and (self._look_at is None or again < self._look_at):
                self._look_at = again
                self._plan(again, self._look)

    def _look(self) -> None:
        if self._look_at is not None and self.world.now >= self._look_at:
            self._look_at = None
            self._look_now()

    def _react(self) -> None:
        while self.world.news:
            news = self.world.news.popleft()
            run = self._by_lease.get(news.lease.id)
            if run is None:
                continue
            if news.happened is Happened.GRANTED:
                self.world.renew(news.lease, busy=True)  # takes it up
                self._begins(run, news.lease)
                continue
            # Told, or not renewed past its cap and so told by its keeper: it has saved.
            run.left_us = max(1, run.left_us - max(0, self.world.now - run.began_at))
            if news.happened is Happened.REVOKED:
                self._gives_back(run)
            else:
                self._is_without(run, news.lease)
            self._asks(run)


def ours(
    jobs: Sequence[TraceJob],
    gpus: int,
    *,
    policy: Policy | None = None,
    hold_cap_us: int = 0,
    restart_us: int = RESTART_US,
) -> list[FinishedJob]:
    return JobReplay(jobs, gpus, policy=policy, hold_cap_us=hold_cap_us, restart_us=restart_us).run()
