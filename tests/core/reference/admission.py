"""How `core.scheduling.admission` decided before it looked at no more than it needs: every rule as a walk over everything. The tests hold the two equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from sublet.core.billing.allowance import least_rate, paid, payable_us, rate_on, used_up
from sublet.core.errors import DeviceTaken, NeverFits, NoCapacity, QuotaReached, WaitlistFull
from sublet.core.leasing.lease import HOLDING, LeaseRecord, LeaseState, Request
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.tenancy import Tenant, never_within_quota, over_quota, used_now
from sublet.core.scheduling.admission import Grant, Offer, Refusal, Wait
from sublet.core.scheduling.device import (
    Device,
    DeviceState,
    Exclusivity,
    Resident,
    Shape,
    Slice,
    could_ever_fit,
    fit,
    join,
    largest_smaller,
    occupy,
    usable,
)
from sublet.core.scheduling.pool_index import PoolView
from sublet.core.scheduling.preemption import protected_us
from sublet.core.scheduling.spread import Spread
from sublet.core.values import format_duration, format_size


def tier_now(waiter: LeaseRecord, policy: Policy, now: int) -> int:
    """The tier's rank, one better for each time to rise waited: no tier starves another for ever."""
    waited = max(0, now - waiter.joined_at)
    every = policy.batch_promote_after_us if waiter.request.tier.rank else policy.promote_after_us
    return waiter.request.tier.rank - waited // max(1, every)


def fair_shares(view: PoolView, now: int, names: Iterable[str] | None = None) -> dict[str, tuple[bool, int]]:
    """For each tenant, or each of `names`: is it above its share, and its decayed use per weight."""
    used = {n: used_now(t, now, view.policy.half_life_us) for n, t in view.tenants.items()}
    total_used = sum(used.values())
    total_weight = sum([t.weight for t in view.tenants.values()]) or 1
    shares: dict[str, tuple[bool, int]] = {}
    for name in view.tenants if names is None else names:
        tenant = view.tenants.get(name)
        if tenant is not None:
            above = used[name] * total_weight > total_used * tenant.weight
            shares[name] = (above, used[name] * 100 // max(1, tenant.weight))
    return shares


Rank = tuple[int, bool, bool, int, int, str]


def rank(waiter: LeaseRecord, shares: Mapping[str, tuple[bool, int]], view: PoolView, now: int) -> Rank:
    above, used = shares.get(waiter.tenant, (False, 0))
    tenant = view.tenants.get(waiter.tenant)
    waited = max(0, now - waiter.joined_at)
    return (
        tier_now(waiter, view.policy, now),
        bool(tenant and tenant.cooldown_until > now),
        above,
        used - waited * view.policy.aging_per_1000 // 1000,
        waiter.joined_at,
        waiter.id,
    )


def in_order(view: PoolView, now: int) -> list[LeaseRecord]:
    if len(view.waiters) < 2:
        return list(view.waiters)  # nobody to compare with: what every tenant has used need not be known
    shares = fair_shares(view, now, [w.tenant for w in view.waiters])
    return sorted(view.waiters, key=lambda w: rank(w, shares, view, now))


def why_waiting(waiter: LeaseRecord, view: PoolView, now: int) -> str:
    """The one thing that keeps this request from starting, in the user's words."""
    shape = waiter.request.shape()
    tenant = view.tenants.get(waiter.tenant)
    if tenant is not None:
        quota = over_quota(
            tenant, _least_bytes(waiter.request, [(d.host, d.capacity_bytes) for d in view.devices])
        )
        quota = quota or used_up(tenant, waiter.request, least_rate(waiter.request, view.devices), now)
        if quota:
            return f"quota: {quota}"
    ready = [
        d for d in view.devices if d.state is DeviceState.READY and (not shape.host or d.host == shape.host)
    ]
    roomy = [d for d in ready if d.free_bytes >= shape.vram_bytes]
    one_host = shape.of_any_one_host and len({d.host for d in view.devices}) > 1
    there = Counter(d.host for d in roomy)
    enough = max(there.values(), default=0) if one_host else len(roomy)
    if enough >= shape.count:
        return f"exclusivity: {shape.exclusivity.value} cannot share a device with the leases on it"
    most = max((d.free_bytes for d in ready), default=0)
    if one_host:
        spread = fit(replace(shape, spread=Spread.OK), view.devices)
        return (
            f"resources: needs {shape.count} × {format_size(shape.vram_bytes)} on one host, "
            f"{enough} such devices are free there"
            f"{'; spread=ok takes them from several hosts now' if spread is not None else ''}"
        )
    if shape.count > 1:
        return (
            f"resources: needs {shape.count} × {format_size(shape.vram_bytes)}, "
            f"{len(roomy)} such devices are free"
        )
    free = f"the most free is {format_size(most)}" if most else "nothing is free"
    return f"resources: needs {format_size(shape.vram_bytes)}, {free}"


@dataclass(slots=True)
class _Room:
    """The pool as `place` fills it: a scratch copy, local to one call."""

    devices: dict[str, Device]
    tenants: dict[str, Tenant]
    kept: set[str]
    policy: Policy
    now: int

    def take(self, lease: LeaseRecord, slices: Sequence[Slice]) -> None:
        request = lease.request
        for s in slices:
            self.devices[s.device_id] = join(
                self.devices[s.device_id], Resident(request.tenant, request.exclusivity, s.vram_bytes)
            )
        tenant = self.tenants.get(request.tenant)
        if tenant is not None:
            capacities = {d: device.capacity_bytes for d, device in self.devices.items()}
            tenant = _paying(tenant, request, rate_on(request.exclusivity, slices, capacities), self)
            self.tenants[request.tenant] = replace(
                tenant,
                live_leases=tenant.live_leases + 1,
                live_bytes=tenant.live_bytes + sum(s.vram_bytes for s in slices),
            )

    def open_devices(self) -> Iterable[Device]:
        return (d for d in self.devices.values() if d.id not in self.kept)

    def keep_for(self, shape: Shape) -> None:
        """Set aside the devices nearest to having room, for the first who does not fit and for nobody after."""
        if self.kept:
            return
        near = sorted(
            (
                d
                for d in self.open_devices()
                if d.state is DeviceState.READY
                and d.capacity_bytes >= shape.vram_bytes
                and (not shape.host or d.host == shape.host)
            ),
            key=lambda d: (-d.free_bytes, d.id),
        )
        if shape.of_any_one_host:
            ways = [[d for d in near if d.host == h][: shape.count] for h in {d.host for d in near}]
            ways = [way for way in ways if len(way) == shape.count]
            near = min(ways, key=lambda way: (-way[-1].free_bytes, way[-1].id), default=[])
        if len(near) >= shape.count:
            self.kept.update(d.id for d in near[: shape.count])


def _paying(tenant: Tenant, request: Request, rate_ppm: int, room: _Room) -> Tenant:
    """What is left after a waiter's grant: it pays until it has to be taken up, and for the rest when it is."""
    most = payable_us(tenant, rate_ppm, room.now)
    if most is None:
        return tenant
    return paid(tenant, rate_ppm, min(most, request.ttl_us, room.policy.claim_us), room.now)


def _within_quota(request: Request, tenant: Tenant) -> int:
    """The most VRAM per device the quota allows now: all that was asked, less for a request that accepts less, or 0."""
    if not over_quota(tenant, request.vram_bytes * request.count):
        return request.vram_bytes
    if not request.least_bytes or over_quota(tenant, request.least_bytes * request.count):
        return 0
    return (tenant.max_vram_bytes - tenant.live_bytes) // request.count


def enough_is_left(view: PoolView, room: _Room, shape: Shape) -> bool:
    """Does it fit once who is on its way out has gone?"""
    found: Counter[str] = Counter()
    for device in room.devices.values():
        there = [(x, s) for x in view.leases if x.holds_slices for s in x.slices if s.device_id == device.id]
        staying = [
            Resident(x.tenant, x.request.exclusivity, s.vram_bytes)
            for x, s in there
            if x.state not in (LeaseState.REVOKING, LeaseState.ENDED)
        ]
        left = len(staying) < len(there) and usable(occupy(device, staying), shape)
        found[device.host] += usable(device, shape) or left
    most = max(found.values(), default=0) if shape.of_any_one_host else found.total()
    return most >= shape.count


def place(view: PoolView, now: int, order: Sequence[LeaseRecord] | None = None) -> list[Grant | Offer]:
    """Walk the waitlist in order and hand out what is free. `order` is `in_order` of this view, if it is known already."""
    room = _Room({d.id: d for d in view.devices}, dict(view.tenants), set(), view.policy, now)
    placed: list[Grant | Offer] = []
    for waiter in in_order(view, now) if order is None else order:
        if waiter.offer_until > now:
            continue  # it already holds an offer
        request = waiter.request
        tenant = room.tenants.get(waiter.tenant)
        wanted = _within_quota(request, tenant) if tenant is not None else 0
        if tenant is None or not wanted:
            continue  # blocked by its own quota: it must not hold anything back from others
        if used_up(tenant, request, least_rate(request, view.devices), now):
            continue
        shape = request.shape(wanted)
        slices = fit(shape, room.open_devices())
        if slices is not None and over_quota(tenant, sum(s.vram_bytes for s in slices)):
            continue  # a whole device is more than was asked for, and counts whole
        waited = format_duration(now - waiter.joined_at)
        if slices is not None and wanted == request.vram_bytes:
            room.take(waiter, slices)
            placed.append(
                Grant(
                    lease_id=waiter.id,
                    slices=slices,
                    vram_bytes=request.vram_bytes,
                    reason=f"first in order after waiting {waited}",
                )
            )
            continue
        smaller = wanted if slices is not None else 0
        if not smaller and (request.least_bytes or request.wants_offers):
            smaller = largest_smaller(shape, room.open_devices(), request.least_bytes)
        smaller_slices = fit(request.shape(smaller), room.open_devices()) if smaller else None
        if smaller_slices is not None and request.least_bytes and not request.wants_offers:
            room.take(waiter, smaller_slices)
            placed.append(
                Grant(
                    lease_id=waiter.id,
                    slices=smaller_slices,
                    vram_bytes=smaller,
                    reason=f"{format_size(smaller)} now rather than {format_size(request.vram_bytes)} later",
                )
            )
            continue
        if smaller_slices is not None and not waiter.offer_until:
            room.take(waiter, smaller_slices)
            placed.append(
                Offer(
                    lease_id=waiter.id,
                    slices=smaller_slices,
                    vram_bytes=smaller,
                    until=now + view.policy.offer_hold_us,
                    reason=f"{format_size(smaller)} is free now; {why_waiting(waiter, view, now)}",
                )
            )
            continue
        gang = waiter.request.count > 1 and waiter.request.tier.rank > 0
        patient = (
            now - waiter.joined_at < view.policy.gang_patience_us
            and gang
            and not enough_is_left(view, room, shape)
        )
        if now - waiter.joined_at >= view.policy.backfill_patience_us and not patient:
            room.keep_for(shape)
    return placed


def known_end(lease: LeaseRecord, view: PoolView, waiter: LeaseRecord, now: int) -> int | None:
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
    view: PoolView,
    now: int,
    *,
    horizon: int = 256,
    order: list[LeaseRecord] | None = None,
) -> Wait:
    """Position, and the moment at which the leases whose end is known would have made room. `order` as in `place`."""
    order = in_order(view, now) if order is None else order
    position = next((i for i, w in enumerate(order, 1) if w.id == waiter.id), len(order) + 1)
    reason = why_waiting(waiter, view, now)
    ends = sorted(
        (end, lease.id, lease)
        for lease in view.leases
        if lease.holds_slices and (end := known_end(lease, view, waiter, now)) is not None
    )[:horizon]
    residents: dict[str, list[tuple[str, Resident]]] = {d.id: [] for d in view.devices}
    for lease in view.leases:
        if lease.holds_slices:
            for s in lease.slices:
                residents.setdefault(s.device_id, []).append(
                    (lease.id, Resident(lease.tenant, lease.request.exclusivity, s.vram_bytes))
                )
    devices = {d.id: d for d in view.devices}
    queue = order[:position] if position <= len(order) else [*order, waiter]
    for end, lease_id, lease in ends:
        for s in lease.slices:
            residents[s.device_id] = [r for r in residents[s.device_id] if r[0] != lease_id]
            if s.device_id in devices:
                devices[s.device_id] = occupy(devices[s.device_id], [r for _, r in residents[s.device_id]])
        still: list[LeaseRecord] = []
        for w in queue:
            slices = fit(w.request.shape(), devices.values())
            if slices is None:
                still.append(w)
                continue
            if w.id == waiter.id:
                return Wait(position=position, eta_us=max(0, end - now), reason=reason)
            for s in slices:
                resident = Resident(w.tenant, w.request.exclusivity, s.vram_bytes)
                residents[s.device_id].append((w.id, resident))
                devices[s.device_id] = join(devices[s.device_id], resident)
        queue = still
    return Wait(position=position, eta_us=None, reason=reason)


def _least_bytes(request: Request, capacities: Sequence[tuple[str, int]]) -> int:
    """The least a grant of this request would count for. Whole devices count whole."""
    each = request.least_bytes or request.vram_bytes
    if request.exclusivity is not Exclusivity.DEVICE:
        return each * request.count
    fitting = sorted(c for h, c in capacities if c >= each and request.host in ("", h))
    return sum(fitting[: request.count])


def refusal(request: Request, tenant: Tenant, view: PoolView, waiting: int) -> Refusal | None:
    """Reasons to say no at once, waiting or not."""
    capacities = [
        (d.host, d.capacity_bytes)
        for d in view.devices
        if d.state not in (DeviceState.LOST, DeviceState.TAKEN)
    ]
    if not could_ever_fit(request.shape(request.least_bytes or request.vram_bytes), capacities):
        spread = request.shape(request.least_bytes or request.vram_bytes)
        if spread.of_any_one_host and could_ever_fit(replace(spread, spread=Spread.OK), capacities):
            asked = f"{request.count} × {format_size(request.vram_bytes)}"
            return Refusal(
                error=NeverFits, reason=f"{asked} never fits on one host; spread=ok takes them from several"
            )
        wanted = request.least_bytes or request.vram_bytes
        others = [d for d in view.devices if d.state is DeviceState.TAKEN and d.capacity_bytes >= wanted]
        if taken := sorted((d.id, d.note) for d in others if request.host in ("", d.host)):
            return Refusal(error=DeviceTaken, reason="; ".join(note for _, note in taken))
        largest = max((c for _, c in capacities), default=0)
        have = (
            f"{len(capacities)} device(s), the largest {format_size(largest)}" if capacities else "no device"
        )
        return Refusal(
            error=NeverFits,
            reason=f"{request.count} × {format_size(request.vram_bytes)} never fits: the pool has {have}",
        )
    least = _least_bytes(request, capacities)
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


def admit(newcomer: LeaseRecord, view: PoolView, now: int) -> Grant | Offer | Wait | Refusal:
    """Answer one new request against the whole waitlist: nobody ahead in order is passed unfairly."""
    tenant = view.tenants[newcomer.tenant]
    no = refusal(newcomer.request, tenant, view, len(view.waiters))
    if no is not None:
        return no

    joined = replace(view, waiters=(*view.waiters, newcomer))
    order = in_order(joined, now)
    for decision in place(joined, now, order):
        if decision.lease_id == newcomer.id:
            if newcomer.request.wait_us == 0 and isinstance(decision, Offer):
                break
            if isinstance(decision, Grant) and decision.vram_bytes == newcomer.request.vram_bytes:
                return replace(decision, reason="capacity is free")
            return decision
    expected = expect(newcomer, joined, now, order=order)
    if newcomer.request.wait_us == 0:
        quota = expected.reason.startswith("quota:")
        return Refusal(error=QuotaReached if quota else NoCapacity, reason=expected.reason)
    return expected
