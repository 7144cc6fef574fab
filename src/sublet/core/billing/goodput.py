"""Where GPU time went: useful, overhead, wasted; what was lost and why; what is refunded and what it costs.

Rules of this file:
- Held time is cut at the commits. Every microsecond of every device is in exactly one part, so that
  held = useful + overhead + wasted + open + other, for a lease, a group and the total, without rounding.
- Useful is time in the bodies of steps that were committed and still count, as their commits say. It happened
  before its commit: what does not fit between two commits belongs to the time before them, and never to more
  time than was held.
- Wasted is the time after the last commit of a lease that was lost. Of a lease still held it is not known
  yet: that is open.
- Time before the grant belongs to nobody: a waiter holds nothing.
- Refunded is what was wasted because the lease was taken back (`REFUNDED`): whoever commits often gets little
  back and loses little. A spot lease preempted before anything was committed gets its last minutes back, and
  no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sublet.core.billing.meter import billed_until
from sublet.core.billing.price import Tariff
from sublet.core.leasing.lease import TAKEN, EndReason, LeaseRecord, LeaseState, Tier
from sublet.core.values import DAY_US, HOUR_US, MINUTE_US

#: Ends that the holder did not ask for.
LOSSES = (*TAKEN, EndReason.HOLDER_LOST)
#: Ends that were the system's doing.
REFUNDED = (EndReason.PREEMPTED, EndReason.REVOKED, EndReason.HOLD_CAP, EndReason.DEVICE_LOST)
REFUND_RULE = (
    "refunded: time since the last commit of leases taken back by the system (preempted, revoked, hold_cap, "
    "device_lost), "
    "of jobs that commit; of a spot lease preempted before anything was committed, its last five minutes"
)
#: Whoever takes a GPU on spot has agreed to lose it, not to pay for what could not be finished. As for
#: choosing who is preempted (`Policy.neutral_work_us`), one that never committed counts as if it last did so
#: five minutes ago: not committing must not pay.
SPOT_REFUND_US = 5 * MINUTE_US
#: Price is in millionths per GPU-hour.
MICRO = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitUse:
    """One commit, as the ledger records it."""

    lease: str
    job: str
    at: int
    steps: int
    compute_us: int  # 0 when it was not said, or was taken back by a rollback


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A part of a lease that ended with a commit, or with the lease. Times are GPU time, counted per
    device."""

    lease: str
    job: str
    tenant: str
    tier: str
    until: int  # the instant it ended
    held_us: int
    useful_us: int = 0
    overhead_us: int = 0
    wasted_us: int = 0
    open_us: int = 0
    other_us: int = 0
    refund_us: int = 0
    commits: int = 0
    steps: int = 0
    gap_us: int = 0  # since the commit before it, under the same lease
    loss: EndReason | None = None
    noticed: bool = False


@dataclass(slots=True)
class GoodputTotals:
    """The sums of one group."""

    name: str
    held_us: int = 0
    useful_us: int = 0
    overhead_us: int = 0
    wasted_us: int = 0
    open_us: int = 0
    other_us: int = 0
    refund_us: int = 0
    cost_micro: int = 0
    unpriced_us: int = 0  # held, of what has no price
    commits: int = 0
    steps: int = 0
    leases: set[str] = field(default_factory=set)
    losses: Counter[str] = field(default_factory=Counter)
    noticed: int = 0
    gaps: list[int] = field(default_factory=list)

    removed: int = 0  # leases whose rows are gone

    @property
    def lease_count(self) -> int:
        return len(self.leases) + self.removed

    def add_removed(self, use: DayUse, price_micro: int | None) -> None:
        """Add what leases used whose rows were removed. What was not on the price list costs
        `price_micro`."""
        self.removed += use.leases
        for name in ("held_us", "useful_us", "overhead_us", "wasted_us", "other_us", "refund_us"):
            setattr(self, name, getattr(self, name) + getattr(use, name))
        self.commits += use.commits
        self.steps += use.steps
        self.losses.update(use.losses)
        self.noticed += use.noticed
        self.cost_micro += use.cost_micro
        if price_micro is None:
            self.unpriced_us += use.unlisted_held_us
        else:
            self.cost_micro += cost_micro(use.unlisted_us, price_micro)

    @property
    def goodput_ppm(self) -> int | None:
        """Useful time in millionths of the time held for jobs that commit steps, or None without such
        time."""
        counted = self.held_us - self.other_us
        return self.useful_us * MICRO // counted if counted > 0 and self.commits else None

    @property
    def median_gap_us(self) -> int | None:
        gaps = sorted(self.gaps)
        middle = len(gaps) // 2
        if not gaps:
            return None
        return gaps[middle] if len(gaps) % 2 else (gaps[middle - 1] + gaps[middle]) // 2

    def add(self, part: Stretch, cost_micro: int | None) -> None:
        if cost_micro is None:
            self.unpriced_us += part.held_us
        else:
            self.cost_micro += cost_micro
        self.held_us += part.held_us
        self.useful_us += part.useful_us
        self.overhead_us += part.overhead_us
        self.wasted_us += part.wasted_us
        self.open_us += part.open_us
        self.other_us += part.other_us
        self.refund_us += part.refund_us
        self.commits += part.commits
        self.steps += part.steps
        self.leases.add(part.lease)
        if part.gap_us:
            self.gaps.append(part.gap_us)
        if part.loss is not None:
            self.losses[part.loss.value] += 1
            self.noticed += part.noticed


def cost_micro(gpu_us: int, price_micro: int) -> int:
    """The cost, rounded down once for each stretch, so that groups add up however they are grouped."""
    return gpu_us * price_micro // HOUR_US


@dataclass(slots=True)
class DayUse:
    """What removed leases used on one day, by tenant, job and tier: sums of stretches, without commit
    gaps."""

    day: int
    tenant: str
    job: str
    tier: str
    leases: int = 0
    held_us: int = 0
    useful_us: int = 0
    overhead_us: int = 0
    wasted_us: int = 0
    other_us: int = 0
    refund_us: int = 0
    cost_micro: int = 0  # of what was on the price list
    unlisted_us: int = 0  # to be paid, of what was not
    unlisted_held_us: int = 0
    commits: int = 0
    steps: int = 0
    losses: dict[str, int] = field(default_factory=dict)
    noticed: int = 0

    @property
    def key(self) -> tuple[int, str, str, str]:
        return self.day, self.tenant, self.job, self.tier

    def add(self, other: DayUse) -> None:
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, count in other.losses.items():
            self.losses[reason] = self.losses.get(reason, 0) + count

    def as_stretch(self) -> Stretch:
        """This use in the form that groups take."""
        return Stretch(
            lease="", job=self.job, tenant=self.tenant, tier=self.tier, until=self.day * DAY_US, held_us=0
        )


_SUMMED = (
    "leases",
    "held_us",
    "useful_us",
    "overhead_us",
    "wasted_us",
    "other_us",
    "refund_us",
    "cost_micro",
    "unlisted_us",
    "unlisted_held_us",
    "commits",
    "steps",
    "noticed",
)


def day_uses(parts: Sequence[Stretch], tariff: Tariff | None) -> list[DayUse]:
    """The stretches of one ended lease, summed by day. The lease itself counts on its last day."""
    found: dict[tuple[int, str, str, str], DayUse] = {}
    for number, part in enumerate(parts, 1):
        paid_us = part.held_us - part.refund_us
        one = DayUse(
            day=day_of(part.until),
            tenant=part.tenant,
            job=part.job,
            tier=part.tier,
            leases=int(number == len(parts)),
            held_us=part.held_us,
            useful_us=part.useful_us,
            overhead_us=part.overhead_us,
            wasted_us=part.wasted_us,
            other_us=part.other_us,
            refund_us=part.refund_us,
            cost_micro=tariff.cost(paid_us) if tariff is not None else 0,
            unlisted_us=paid_us if tariff is None else 0,
            unlisted_held_us=part.held_us if tariff is None else 0,
            commits=part.commits,
            steps=part.steps,
            losses={part.loss.value: 1} if part.loss is not None else {},
            noticed=int(part.noticed),
        )
        if one.key in found:
            found[one.key].add(one)
        else:
            found[one.key] = one
    return list(found.values())


def stretches(
    leases: Iterable[LeaseRecord],
    commits: Iterable[CommitUse],
    *,
    since: int,
    now: int,
    committing: Iterable[str] = (),
) -> list[Stretch]:
    """Every lease held between `since` and `now`, cut at its commits. What lies before `since` is left out.
    `committing` names further jobs that are known to commit steps."""
    by_lease: dict[str, list[CommitUse]] = {}
    committing = set(committing)
    for commit in commits:
        committing.add(commit.job)
        if commit.at >= since:
            by_lease.setdefault(commit.lease, []).append(commit)
    found: list[Stretch] = []
    for lease in leases:
        if lease.granted_at:
            own = sorted(by_lease.get(lease.id, ()), key=lambda c: c.at)
            found += _cut(lease, own, committing, since, now)
    return found


def _cut(
    lease: LeaseRecord, commits: Sequence[CommitUse], committing: set[str], since: int, now: int
) -> Iterable[Stretch]:
    ended = lease.state is LeaseState.ENDED
    start = max(lease.granted_at, since)
    end = max(start, lease.ended_at if ended else billed_until(lease, now))
    devices = len(lease.slices)
    jobs = {c.job for c in commits}
    job = lease.request.job or (jobs.pop() if len(jobs) == 1 else "")
    bare = Stretch(
        lease=lease.id, job=job, tenant=lease.tenant, tier=lease.request.tier.value, until=end, held_us=0
    )
    points = [min(max(c.at, start), end) for c in commits]
    useful = _useful([start, *points], [c.compute_us for c in commits])
    before, last = start, None
    for commit, at, own in zip(commits, points, useful, strict=True):
        held = at - before
        yield replace(
            bare,
            job=job or commit.job,
            until=at,
            held_us=held * devices,
            useful_us=own * devices,
            overhead_us=(held - own) * devices,
            commits=1,
            steps=commit.steps,
            gap_us=0 if last is None else at - last,
        )
        before = last = at
    tail = (end - before) * devices
    loss = lease.reason if ended and lease.reason in LOSSES else None
    rest = replace(bare, held_us=tail, loss=loss, noticed=loss is not None and lease.deadline_at > 0)
    if not commits and job not in committing:
        spot = loss is EndReason.PREEMPTED and lease.request.tier is Tier.SPOT
        yield replace(rest, other_us=tail, refund_us=min(tail, SPOT_REFUND_US * devices) if spot else 0)
    elif not ended:
        yield replace(rest, open_us=tail)
    elif loss is None:
        yield replace(rest, overhead_us=tail)
    else:
        yield replace(rest, wasted_us=tail, refund_us=tail if loss in REFUNDED else 0)


def _useful(points: Sequence[int], computes: Sequence[int]) -> list[int]:
    """How much of each stretch was useful, from the last one back: what does not fit was done earlier."""
    found = [0] * len(computes)
    carried = 0
    for i in range(len(computes) - 1, -1, -1):
        pool = carried + max(0, computes[i])
        found[i] = min(pool, points[i + 1] - points[i])
        carried = pool - found[i]
    return found


def day_of(instant: int) -> int:
    """Days since 1970 in UTC. A stretch counts on the day it ended."""
    return instant // DAY_US


def accounts(
    parts: Iterable[Stretch],
    group: Callable[[Stretch], str],
    price_micro: int = 0,
    *,
    tariffs: Mapping[str, Tariff] | None = None,
    removed: Iterable[DayUse] = (),
    unlisted_micro: int | None = None,
) -> tuple[list[GoodputTotals], GoodputTotals]:
    """Sums by group, in the order of their names, and the total, at one price or at the tariff of each lease
    by its id. A lease without a tariff costs nothing. `removed` is what leases used whose rows are gone."""
    found: dict[str, GoodputTotals] = {}
    total = GoodputTotals("total")
    for part in parts:
        name, paid_us = group(part), part.held_us - part.refund_us
        cost: int | None = cost_micro(paid_us, price_micro)
        if tariffs is not None:
            tariff = tariffs.get(part.lease)
            cost = tariff.cost(paid_us) if tariff is not None else None
        found.setdefault(name, GoodputTotals(name)).add(part, cost)
        total.add(part, cost)
    for use in removed:
        name = group(use.as_stretch())
        found.setdefault(name, GoodputTotals(name)).add_removed(use, unlisted_micro)
        total.add_removed(use, unlisted_micro)
    return [found[name] for name in sorted(found)], total
