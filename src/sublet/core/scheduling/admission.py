"""Who gets a slice now, who waits and where, who is offered less, who is refused. Each with its reason.

Rules of this file:
- `admit` answers one new request; `place` walks the waitlist. Both read a `PoolView` and write nothing.
- Order of the waitlist: tier, then tenants that are not cooling down, then tenants below their fair share,
  then least decayed use per weight less what the wait has earned, then who came first.
- A decision looks at the first of each line, and at no more of the pool than it needs: what it costs grows
  with the logarithm of the devices.
- Somebody who does not fit yet lets smaller requests pass for a while (`patience_us`); after it devices are
  kept for the first such one, so that neither a gang nor a whole-device request starves (T3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush, nsmallest

from sublet.core.billing.allowance import paid, payable_us, used_up
from sublet.core.errors import DeviceTaken, NeverFits, NoCapacity, QuotaReached, Refused, WaitlistFull
from sublet.core.leasing.lease import HOLDING, LeaseRecord, LeaseState, Request, Tier
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.tenancy import Tenant, never_within_quota, over_quota, rate_of, tenant_changed
from sublet.core.scheduling.device import Exclusivity, Resident, Shape, Slice, join, occupy
from sublet.core.scheduling.device_index import DeviceIndex
from sublet.core.scheduling.pool_index import PoolIndex, PoolView
from sublet.core.scheduling.preemption import protected_us
from sublet.core.scheduling.spread import Spread
from sublet.core.values import format_duration, format_size

__all__ = [
    "Grant",
    "Offer",
    "PoolIndex",
    "PoolView",
    "Refusal",
    "Wait",
    "WaitlistOrder",
    "WaitlistWalk",
    "admit",
    "expect",
    "fair_shares",
    "hold_cap_of",
    "in_order",
    "known_end",
    "patience_us",
    "place",
    "tier_now",
    "why_waiting",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    lease_id: str
    slices: tuple[Slice, ...]
    vram_bytes: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A smaller slice, held until `until` for somebody to say yes."""

    lease_id: str
    slices: tuple[Slice, ...]
    vram_bytes: int
    until: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    position: int
    eta_us: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    error: type[Refused]
    reason: str


def hold_cap_of(request: Request, policy: Policy) -> int:
    """A request may ask for a shorter cap than the policy's, never for a longer one (T3)."""
    policy_cap = policy.hold_cap_us if request.tier is Tier.INTERACTIVE else 0
    return min((cap for cap in (request.hold_cap_us or 0, policy_cap) if cap), default=0)


def tier_now(waiter: LeaseRecord, policy: Policy, now: int) -> int:
    """The tier's rank, one better for each `rises_after_us` waited: no tier starves another for ever."""
    rank = waiter.request.tier.rank
    return rank - max(0, now - waiter.joined_at) // max(1, policy.rises_after_us(rank))


def patience_us(request: Request, policy: Policy) -> int:
    """How long a request that does not fit lets smaller ones pass. Keeping devices for a gang leaves many
    idle for long, and its job is in no hurry."""
    if request.count > 1 and request.tier is not Tier.INTERACTIVE:
        return max(policy.backfill_patience_us, policy.gang_patience_us)
    return policy.backfill_patience_us


def fair_shares(
    view: PoolView | PoolIndex, now: int, names: Iterable[str] | None = None
) -> dict[str, tuple[bool, int]]:
    """For each tenant, or each of `names`: is it above its share, and its decayed use per weight."""
    pool = view.pool()
    wanted = pool.tenants if names is None else names
    return {name: pool.shares.of(pool.tenants[name], now) for name in wanted if name in pool.tenants}


Rank = tuple[int, bool, bool, int, int, str]


def rank(waiter: LeaseRecord, share: tuple[bool, int], pool: PoolIndex, now: int) -> Rank:
    above, used = share
    tenant = pool.tenants.get(waiter.tenant)
    waited = max(0, now - waiter.joined_at)
    return (
        tier_now(waiter, pool.policy, now),
        bool(tenant and tenant.cooldown_until > now),
        above,
        used - waited * pool.policy.aging_per_1000 // 1000,
        waiter.joined_at,
        waiter.id,
    )


class WaitlistOrder:
    """The waitlist in order, worked out as far as somebody looks. Only the first of each line
    (`core.scheduling.pool_index.Line`) is compared with the others.

    Whoever walks along it may `pass_over` the line of the waiter it was just given, and `come_back` to all
    such lines; waiters in them that stood before the place it has reached are left out."""

    def __init__(self, pool: PoolIndex, now: int) -> None:
        self._pool, self._now = pool, now
        self._begun = False
        self._ahead: list[tuple[Rank, tuple[bool, int], Iterator[tuple[int, str]]]] = []
        self._passed: list[tuple[tuple[bool, int], Iterator[tuple[int, str]]]] = []
        self._reached: Rank | None = None
        self._left: tuple[tuple[bool, int], Iterator[tuple[int, str]]] | None = None

    def _begin(self) -> None:
        self._begun = True
        pool = self._pool
        shares: dict[str, tuple[bool, int]] = {}
        for (name, *_), line in pool.lines.items():
            if name not in shares:
                # With nobody to compare with, what every tenant has used need not be known.
                tenant = pool.tenants.get(name) if len(pool.lines) > 1 else None
                shares[name] = pool.shares.of(tenant, self._now) if tenant is not None else (False, 0)
            self._next_of(shares[name], iter(line))

    def __iter__(self) -> Iterator[LeaseRecord]:
        if not self._begun:
            self._begin()
        while True:
            if self._left is not None:
                self._next_of(*self._left)
                self._left = None
            if not self._ahead:
                return
            self._reached, share, line = heappop(self._ahead)
            self._left = share, line
            yield self._pool.waiters[self._reached[-1]]

    def pass_over(self) -> None:
        if self._left is not None:
            self._passed.append(self._left)
            self._left = None

    def come_back(self) -> None:
        for share, line in self._passed:
            self._next_of(share, line)
        self._passed.clear()

    def _next_of(self, share: tuple[bool, int], line: Iterator[tuple[int, str]]) -> None:
        for _, name in line:
            ranked = rank(self._pool.waiters[name], share, self._pool, self._now)
            if self._reached is None or ranked > self._reached:
                heappush(self._ahead, (ranked, share, line))
                return


def in_order(view: PoolView | PoolIndex, now: int) -> list[LeaseRecord]:
    return list(WaitlistOrder(view.pool(), now))


def why_waiting(waiter: LeaseRecord, view: PoolView | PoolIndex, now: int) -> str:
    """The one thing that keeps this request from starting, in the user's words."""
    pool = view.pool()
    device_index = pool.device_index
    shape = waiter.request.shape()
    tenant = pool.tenants.get(waiter.tenant)
    if tenant is not None:
        quota = over_quota(tenant, device_index.least_bytes(waiter.request, lost_too=True))
        quota = quota or used_up(tenant, waiter.request, device_index.least_rate(waiter.request), now)
        if quota:
            return f"quota: {quota}"
    roomy = device_index.roomy(shape)
    if roomy >= shape.count:
        return f"exclusivity: {shape.exclusivity.value} cannot share a device with the leases on it"
    if shape.count > 1:
        needs = f"resources: needs {shape.count} × {format_size(shape.vram_bytes)}"
        if shape.of_any_one_host and device_index.several_hosts:
            return (
                f"{needs} on one host, {roomy} such devices are free there{_if_spread(shape, device_index)}"
            )
        return f"{needs}, {roomy} such devices are free"
    most = device_index.most_free(shape.host)
    free = f"the most free is {format_size(most)}" if most else "nothing is free"
    return f"resources: needs {format_size(shape.vram_bytes)}, {free}"


def _if_spread(shape: Shape, device_index: DeviceIndex) -> str:
    """What else could be asked for, if that helps now."""
    anywhere = device_index.fit(replace(shape, spread=Spread.OK))
    return "; spread=ok takes them from several hosts now" if anywhere is not None else ""


@dataclass(frozen=True, slots=True)
class Placed:
    """A waiter that gets something: all it asked for, less, or less for a while to think about."""

    waiter: LeaseRecord
    slices: tuple[Slice, ...]
    vram_bytes: int
    offered: bool = False

    def decision(self, view: PoolView | PoolIndex, now: int) -> Grant | Offer:
        waiter, asked, given = self.waiter, self.waiter.request.vram_bytes, self.vram_bytes
        if self.offered:
            return Offer(
                lease_id=waiter.id,
                slices=self.slices,
                vram_bytes=given,
                until=now + view.policy.offer_hold_us,
                reason=f"{format_size(given)} is free now; {why_waiting(waiter, view, now)}",
            )
        return Grant(
            lease_id=waiter.id,
            slices=self.slices,
            vram_bytes=given,
            reason=f"first in order after waiting {format_duration(now - waiter.joined_at)}"
            if given == asked
            else f"{format_size(given)} now rather than {format_size(asked)} later",
        )


class WaitlistWalk:
    """Walks the waitlist and hands out what is free. Changes the pool: call it in `PoolIndex.scratch`."""

    def __init__(self, pool: PoolIndex, now: int) -> None:
        self._pool, self._now = pool, now
        self._tenants: dict[str, Tenant] = {}  # as they are after what this walk has given
        self._kept: set[str] = set()
        self._no_room: set[tuple[object, ...]] = set()  # shapes that did not fit; room only gets less
        self._out_of_room = False  # for the one that was given nothing last, and all who ask for the same

    def run(self, order: WaitlistOrder, *, until: str = "") -> list[Placed]:
        """`until`: the waiter to stop after."""
        placed: list[Placed] = []
        if self._full():
            return placed  # who would be first need not be known
        for waiter in order:
            if self._full():
                break
            found = self._give(waiter)
            if found is not None:
                self._take(found)
                placed.append(found)
            elif self._out_of_room:
                order.pass_over()
            if waiter.id == until:
                break
        return placed

    def _full(self) -> bool:
        """Whether nothing that is free is enough for anybody who waits."""
        return self._pool.device_index.most_free() < self._pool.smallest_wanted()

    def _give(self, waiter: LeaseRecord) -> Placed | None:
        request, now, device_index = waiter.request, self._now, self._pool.device_index
        self._out_of_room = False
        if waiter.offer_until > now:
            return None  # it already holds an offer
        tenant = self._tenants.get(waiter.tenant) or self._pool.tenants.get(waiter.tenant)
        wanted = _within_quota(request, tenant) if tenant is not None else 0
        if tenant is None or not wanted:
            return None  # blocked by its own quota: it must not hold anything back from others
        if tenant.gpu_us_per_day and used_up(tenant, request, device_index.least_rate(request), now):
            return None
        shape = request.shape(wanted)
        asks_less = bool(request.least_bytes or request.wants_offers)
        fruitless = (as_asked(shape), request.least_bytes, asks_less)
        if fruitless not in self._no_room:
            slices = device_index.fit(shape, self._kept)
            if slices is not None and over_quota(tenant, sum(s.vram_bytes for s in slices)):
                return None  # a whole device is more than was asked for, and counts whole
            if slices is not None and wanted == request.vram_bytes:
                return Placed(waiter, slices, wanted)
            smaller = wanted if slices is not None else 0
            if not smaller and asks_less:
                smaller = device_index.largest_smaller(shape, request.least_bytes, self._kept)
            less = device_index.fit(request.shape(smaller), self._kept) if smaller else None
            if less is not None and request.least_bytes and not request.wants_offers:
                return Placed(waiter, less, smaller)
            if less is not None and not waiter.offer_until:
                return Placed(waiter, less, smaller, offered=True)
            if less is None:
                self._no_room.add(fruitless)
        self._out_of_room = fruitless in self._no_room
        if not self._kept and self._has_waited_enough(request, shape, now - waiter.joined_at):
            self._kept.update(
                device_index.nearest(shape)
            )  # for the first who does not fit, and for nobody after
        return None

    def _has_waited_enough(self, request: Request, shape: Shape, waited_us: int) -> bool:
        """Whether devices are kept for it. Those that leases are leaving anyway are kept sooner: no lease is
        revoked for a gang whose place others then take."""
        policy = self._pool.policy
        if waited_us < policy.backfill_patience_us:
            return False
        return waited_us >= patience_us(request, policy) or self._pool.enough_is_left(shape)

    def _take(self, placed: Placed) -> None:
        request, devices = placed.waiter.request, self._pool.devices
        rate = 0
        for s in placed.slices:
            device = devices[s.device_id]
            rate += rate_of(request.exclusivity, s.vram_bytes, device.capacity_bytes)
            self._pool.set_device(join(device, Resident(request.tenant, request.exclusivity, s.vram_bytes)))
        tenant = self._tenants.get(request.tenant) or self._pool.tenants[request.tenant]
        tenant = _paying(tenant, request, rate, self._pool.policy, self._now)
        self._tenants[request.tenant] = tenant_changed(
            tenant,
            live_leases=tenant.live_leases + 1,
            live_bytes=tenant.live_bytes + sum(s.vram_bytes for s in placed.slices),
        )


def as_asked(shape: Shape) -> tuple[object, ...]:
    """What decides whether a shape fits. The tenant does not, for a whole device."""
    tenant = "" if shape.exclusivity is Exclusivity.DEVICE else shape.tenant
    return tenant, shape.vram_bytes, shape.count, shape.exclusivity.value, shape.host, shape.spread.value


def _paying(tenant: Tenant, request: Request, rate_ppm: int, policy: Policy, now: int) -> Tenant:
    """What is left after a waiter's grant: it pays until it has to be taken up, and for the rest when it
    is."""
    most = payable_us(tenant, rate_ppm, now)
    if most is None:
        return tenant
    return paid(tenant, rate_ppm, min(most, request.ttl_us, policy.claim_us), now)


def _within_quota(request: Request, tenant: Tenant) -> int:
    """The most VRAM per device the quota allows now: all that was asked, less for a request that accepts
    less, or 0."""
    if not over_quota(tenant, request.vram_bytes * request.count):
        return request.vram_bytes
    if not request.least_bytes or over_quota(tenant, request.least_bytes * request.count):
        return 0
    return (tenant.max_vram_bytes - tenant.live_bytes) // request.count


def place(view: PoolView | PoolIndex, now: int) -> list[Grant | Offer]:
    """Walk the waitlist in order and hand out what is free."""
    pool = view.pool()
    with pool.scratch():
        placed = WaitlistWalk(pool, now).run(WaitlistOrder(pool, now))
    return [p.decision(pool, now) for p in placed]


def known_end(lease: LeaseRecord, view: PoolView | PoolIndex, waiter: LeaseRecord, now: int) -> int | None:
    """When this lease will make room for that waiter at the latest, if anything bounds it."""
    policy = view.policy
    if lease.state is LeaseState.REVOKING:
        return max(now, lease.deadline_at)
    if lease.state is LeaseState.WAITING:
        return max(now, lease.offer_until)
    if lease.state not in HOLDING:
        return now  # ended, being torn down
    if not lease.busy and now - lease.active_at >= policy.idle_after_us:
        return now + policy.grace_us
    if lease.request.tier.rank > waiter.request.tier.rank:
        return max(now, lease.granted_at + protected_us(lease, policy)) + policy.grace_us
    if lease.hold_cap_us:
        return max(now, lease.granted_at + lease.hold_cap_us) + policy.grace_us
    return None


def expect(
    waiter: LeaseRecord,
    view: PoolView | PoolIndex,
    now: int,
    *,
    horizon: int = 256,
) -> Wait:
    """Position, and the moment at which the leases whose end is known would have made room. A forecast for
    people: it looks at every lease, and no decision waits for it."""
    pool = view.pool()
    queue: list[LeaseRecord] = []
    for w in WaitlistOrder(pool, now):
        queue.append(w)
        if w.id == waiter.id:
            break
    else:
        queue.append(waiter)
    position = len(queue)
    reason = why_waiting(waiter, pool, now)
    ends = nsmallest(
        horizon,
        (
            (end, lease.id, lease)
            for lease in pool.leases.values()
            if lease.holds_slices and (end := known_end(lease, pool, waiter, now)) is not None
        ),
    )
    if not ends:
        return Wait(position=position, eta_us=None, reason=reason)
    gone: set[str] = set()
    joined: dict[str, list[tuple[str, Resident]]] = {}
    with pool.scratch():
        for end, lease_id, lease in ends:
            gone.add(lease_id)
            for s in lease.slices:
                device = pool.devices.get(s.device_id)
                if device is not None:
                    # Who took an offer in this forecast has left with it.
                    new = [x for x in joined.get(s.device_id, ()) if x[0] != lease_id]
                    joined[s.device_id] = new
                    residents = [
                        Resident(x.tenant, x.request.exclusivity, t.vram_bytes)
                        for x in pool.on(s.device_id)
                        if x.id not in gone
                        for t in x.slices
                        if t.device_id == s.device_id
                    ]
                    pool.set_device(occupy(device, [*residents, *(r for _, r in new)]))
            still: list[LeaseRecord] = []
            no_room: set[tuple[object, ...]] = set()
            for w in queue:
                shape = w.request.shape()
                slices = pool.device_index.fit(shape) if (asked := as_asked(shape)) not in no_room else None
                if slices is None:
                    still.append(w)
                    no_room.add(asked)
                    continue
                if w.id == waiter.id:
                    return Wait(position=position, eta_us=max(0, end - now), reason=reason)
                for s in slices:
                    resident = Resident(w.tenant, w.request.exclusivity, s.vram_bytes)
                    joined.setdefault(s.device_id, []).append((w.id, resident))
                    pool.set_device(join(pool.devices[s.device_id], resident))
            queue = still
    return Wait(position=position, eta_us=None, reason=reason)


def refusal(request: Request, tenant: Tenant, view: PoolView | PoolIndex, waiting: int) -> Refusal | None:
    """Reasons to say no at once, waiting or not."""
    device_index = view.pool().device_index
    least_shape = request.shape(request.least_bytes or request.vram_bytes)
    if not device_index.could_ever_fit(least_shape):
        asked = f"{request.count} × {format_size(request.vram_bytes)}"
        if least_shape.of_any_one_host and device_index.could_ever_fit(
            replace(least_shape, spread=Spread.OK)
        ):
            return Refusal(
                error=NeverFits,
                reason=f"{asked} never fits on one host; spread=ok takes them from several",
            )
        taken = device_index.taken(least_shape)
        if taken:
            return Refusal(error=DeviceTaken, reason="; ".join(taken))
        count, largest = device_index.not_lost()
        have = f"{count} device(s), the largest {format_size(largest)}" if count else "no device"
        return Refusal(error=NeverFits, reason=f"{asked} never fits: the pool has {have}")
    least = device_index.least_bytes(request, lost_too=False)
    if never_within_quota(tenant, least):
        return Refusal(
            error=QuotaReached,
            reason=f"tenant {tenant.name} may hold {format_size(tenant.max_vram_bytes)}, "
            f"the request needs {format_size(least)}",
        )
    if request.wait_us == 0:
        return None
    if waiting >= view.policy.waitlist_max:
        return Refusal(error=WaitlistFull, reason=f"{waiting} requests are waiting, the most allowed")
    most = tenant.max_waiting or view.policy.tenant_waiting_max
    if tenant.waiting >= most:
        return Refusal(
            error=WaitlistFull,
            reason=f"tenant {tenant.name} has {tenant.waiting} requests waiting, the most allowed",
        )
    return None


def admit(
    newcomer: LeaseRecord, view: PoolView | PoolIndex, now: int, *, forecast: bool = True
) -> Grant | Offer | Wait | Refusal:
    """Answer one new request against the whole waitlist: nobody ahead in order is passed unfairly. Without
    `forecast` a wait has no position (0) and no ETA: both take a walk over who waits and who holds."""
    pool = view.pool()
    no = refusal(newcomer.request, pool.tenants[newcomer.tenant], pool, len(pool.waiters))
    if no is not None:
        return no
    with pool.scratch():
        pool.set_waiter(newcomer)
        with pool.scratch():
            placed = WaitlistWalk(pool, now).run(WaitlistOrder(pool, now), until=newcomer.id)
        mine = next((p for p in placed if p.waiter.id == newcomer.id), None)
        if mine is not None and not (newcomer.request.wait_us == 0 and mine.offered):
            decision = mine.decision(pool, now)
            if isinstance(decision, Grant) and decision.vram_bytes == newcomer.request.vram_bytes:
                return replace(decision, reason="capacity is free")
            return decision
        if not forecast and newcomer.request.wait_us != 0:
            return Wait(position=0, eta_us=None, reason=why_waiting(newcomer, pool, now))
        expected = expect(newcomer, pool, now)
    if newcomer.request.wait_us == 0:
        quota = expected.reason.startswith("quota:")
        return Refusal(error=QuotaReached if quota else NoCapacity, reason=expected.reason)
    return expected
