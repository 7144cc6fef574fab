"""The pool as decisions look at it: devices, leases, waiters and tenants, each found by what is asked of it.

Rules of this file:
- `PoolView` is what a transaction has read: four plain collections. `PoolIndex` is the same with an order for
  every question the rules ask: who is over, who has gone, who waits longest in its own line, whose lease may
  be taken and at what price, when to look again. No rule is here, only where to look.
- A lease is in the lists of leases while it holds slices, a waiter in those of waiters while it waits; who
  holds an offer is in both.
- Time only moves on: what has come due is moved from 'will be' to 'is' when it is first looked at, once.
- `scratch` tries changes out and takes them all back, so that a decision leaves the pool as it found it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from sublet.core.billing.allowance import notice_at
from sublet.core.leasing.lease import HOLDING, LeaseRecord, LeaseState
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.tenancy import Tenant
from sublet.core.scheduling.device import Device, DeviceState, Resident, Shape, occupy, usable
from sublet.core.scheduling.device_index import DeviceIndex
from sublet.core.scheduling.fair_share_index import FairShareIndex
from sublet.core.scheduling.preemption import cap_notice_at, protected_us
from sublet.core.scheduling.sorted_keys import LAST, SortedKeys

LEAVING = (LeaseState.REVOKING, LeaseState.ENDED)
#: A tenant's waiters of one tier that ask for the same. Among them who came first is always first, and where
#: there is no room for one there is none for the others. The tenant's name first.
Line = tuple[str, int, int, str, str, int, int, bool, str]


def line_of(waiter: LeaseRecord) -> Line:
    request = waiter.request
    return (
        request.tenant,
        request.vram_bytes,
        request.count,
        request.exclusivity.value,
        request.host,
        request.tier.rank,
        request.least_bytes,
        request.wants_offers,
        request.spread.value,
    )


def _only_used_or_renewed(known: LeaseRecord, lease: LeaseRecord) -> bool:
    """Nothing else of it that any list is ordered by has changed."""
    return (
        known.state is LeaseState.ACTIVE
        and lease.state is LeaseState.ACTIVE
        and known.slices == lease.slices
        and known.holds_slices
        and lease.holds_slices
        and known.request is lease.request
        and known.granted_at == lease.granted_at
        and known.hold_cap_us == lease.hold_cap_us
        and known.committed_at == lease.committed_at
        and known.preemptions == lease.preemptions
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """All a decision may look at. `leases` hold slices (a held offer too), `waiters` are in state waiting."""

    devices: tuple[Device, ...]
    leases: tuple[LeaseRecord, ...] = ()
    waiters: tuple[LeaseRecord, ...] = ()
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    policy: Policy = field(default_factory=Policy)
    _pool: list[PoolIndex] = field(default_factory=list, init=False, repr=False, compare=False)

    def pool(self) -> PoolIndex:
        """Found by what is asked of it; made when it is first asked for."""
        if not self._pool:
            self._pool.append(PoolIndex(self.devices, self.leases, self.waiters, self.tenants, self.policy))
        return self._pool[0]


class PoolIndex:
    def __init__(
        self,
        devices: Iterable[Device] = (),
        leases: Iterable[LeaseRecord] = (),
        waiters: Iterable[LeaseRecord] = (),
        tenants: Mapping[str, Tenant] | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.policy = policy or Policy()
        self.device_index = DeviceIndex(devices)
        self.tenants: dict[str, Tenant] = dict(tenants or {})
        self.shares = FairShareIndex(self.tenants, self.policy.half_life_us)
        self.leases: dict[str, LeaseRecord] = {}
        self.waiters: dict[str, LeaseRecord] = {}
        self._undo: list[Callable[[], None]] | None = None
        # tenants
        self._cooldowns: SortedKeys[tuple[int, str]] = SortedKeys(
            (t.cooldown_until, t.name) for t in self.tenants.values() if t.cooldown_until
        )
        self._of_tenant: dict[str, dict[str, None]] = {}  # ids of its leases and waiters
        # leases
        self._on: dict[str, dict[str, None]] = {}  # device to leases
        self._ends: SortedKeys[tuple[int, str]] = SortedKeys()  # when each is over unless something changes
        self._notices: SortedKeys[tuple[int, str]] = SortedKeys()  # of those who pay by the day
        self._looks: SortedKeys[tuple[int, str, str]] = SortedKeys()  # when time changes what may be taken
        self._leaving: SortedKeys[tuple[str, str]] = SortedKeys()  # (device, lease)
        self._resting: SortedKeys[tuple[int, str, str]] = SortedKeys()  # (active_at, device, lease)
        self._caps_ahead: SortedKeys[tuple[int, str]] = SortedKeys()
        self._caps: SortedKeys[tuple[str, str]] = SortedKeys()  # (device, lease): past the notice of its cap
        self._protected: SortedKeys[tuple[int, str]] = SortedKeys()
        # (device, lease) by (tier, slices, committed or not); of those who committed the latest commit first
        self._open: dict[tuple[int, int, bool], SortedKeys[tuple[int, str, str]]] = {}
        self._ripe: dict[str, list[str]] = {}  # what of a lease has come due
        # waiters
        self.lines: dict[Line, SortedKeys[tuple[int, str]]] = {}
        self._sizes: SortedKeys[tuple[int, str]] = SortedKeys()  # the least each would take
        self._untils: SortedKeys[tuple[int, str]] = SortedKeys()
        self._seens: SortedKeys[tuple[int, str]] = SortedKeys()
        self._offers: SortedKeys[tuple[int, str]] = SortedKeys()
        self._promotions: SortedKeys[tuple[int, str]] = SortedKeys()
        self._promoted_at: dict[str, int] = {}
        self._rationed: dict[str, None] = {}  # waiters whose tenants pay by the day
        self._devices_wanted = 0
        self._bytes_wanted: Counter[int] = Counter()
        self._bound_to_host = 0
        self._of_any_one_host = 0
        self.leases = {lease.id: lease for lease in leases}
        self._unsorted = list(self.leases.values())
        for waiter in waiters:
            self.set_waiter(waiter)

    def _sort_in(self) -> None:
        """Leases that came with the pool, when something is first asked of them: many a question is not."""
        if self._unsorted:
            found, self._unsorted = self._unsorted, []
            for lease in found:
                self._of_tenant.setdefault(lease.tenant, {})[lease.id] = None
                self._put_in(lease)

    def pool(self) -> PoolIndex:
        return self

    # trying out

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """What is changed inside is changed back at the end, the last change first."""
        outer, self._undo = self._undo, []
        try:
            yield
        finally:
            undo, self._undo = self._undo, None
            for back in reversed(undo):
                back()
            self._undo = outer

    def _back(self, change: Callable[[], None]) -> None:
        if self._undo is not None:
            self._undo.append(change)

    # devices and tenants

    @property
    def devices(self) -> Mapping[str, Device]:
        return self.device_index.devices

    def set_device(self, device: Device) -> None:
        known = self.device_index.devices.get(device.id)
        if known is not None:
            self._back(lambda: self.device_index.set(known))
        self.device_index.set(device)

    def set_tenant(self, tenant: Tenant) -> None:
        known = self.tenants.get(tenant.name)
        self.tenants[tenant.name] = tenant
        self.shares.change(known, tenant)
        if (known.cooldown_until if known else 0) != tenant.cooldown_until:
            if known is not None:
                self._cooldowns.discard((known.cooldown_until, known.name))
            if tenant.cooldown_until:
                self._cooldowns.add((tenant.cooldown_until, tenant.name))
        if bool(known and known.gpu_us_per_day) is not bool(tenant.gpu_us_per_day):
            self._sort_in()
            for name in list(self._of_tenant.get(tenant.name, ())):
                self._ration(name, tenant)

    def _ration(self, name: str, tenant: Tenant) -> None:
        """Whether it pays by the day has changed for the owner of this lease or waiter."""
        lease = self.leases.get(name)
        if lease is not None and lease.state is LeaseState.ACTIVE:
            key = (notice_at(lease, self.policy.grace_us), name)
            (self._notices.add if tenant.gpu_us_per_day else self._notices.discard)(key)
        if name in self.waiters:
            self._rationed.pop(name, None)
            if tenant.gpu_us_per_day:
                self._rationed[name] = None

    def _pays_by_the_day(self, name: str) -> bool:
        tenant = self.tenants.get(name)
        return tenant is not None and tenant.gpu_us_per_day > 0

    # leases

    def set_lease(self, lease: LeaseRecord) -> None:
        """It holds slices; a known one has changed."""
        self._sort_in()
        known = self.leases.get(lease.id)
        if known is not None:
            if self._undo is not None:
                self._undo.append(lambda: self.set_lease(known))
            self.leases[lease.id] = lease
            if _only_used_or_renewed(known, lease):
                self._move(known, lease)
            else:
                self._take_out(known)
                self._put_in(lease)
            return
        self._back(lambda: self.drop_lease(lease.id))
        self.leases[lease.id] = lease
        self._of_tenant.setdefault(lease.tenant, {})[lease.id] = None
        self._put_in(lease)

    def _move(self, known: LeaseRecord, lease: LeaseRecord) -> None:
        """What `_take_out` and `_put_in` come to for a lease that was renewed, or is used or not: the most
        frequent change of all."""
        name = lease.id
        if known.expires_at != lease.expires_at:
            self._ends.discard((known.expires_at, name))
            self._ends.add((lease.expires_at, name))
            if self._pays_by_the_day(lease.tenant):
                self._notices.discard((notice_at(known, self.policy.grace_us), name))
                self._notices.add((notice_at(lease, self.policy.grace_us), name))
        if (known.busy, known.active_at) == (lease.busy, lease.active_at):
            return
        idle_after = self.policy.idle_after_us
        if not known.busy:
            self._looks.discard((known.active_at + idle_after, name, "idle"))
            for s in known.slices:
                self._resting.discard((known.active_at, s.device_id, name))
        if not lease.busy:
            self._looks.add((lease.active_at + idle_after, name, "idle"))
            for s in lease.slices:
                self._resting.add((lease.active_at, s.device_id, name))

    def drop_lease(self, lease_id: str) -> None:
        self._sort_in()
        lease = self.leases.pop(lease_id)
        self._take_out(lease)
        self._back(lambda: self.set_lease(lease))
        if lease_id not in self.waiters:
            self._forget(lease)

    def _forget(self, lease: LeaseRecord) -> None:
        mine = self._of_tenant[lease.tenant]
        del mine[lease.id]
        if not mine:
            del self._of_tenant[lease.tenant]

    def on(self, device_id: str) -> list[LeaseRecord]:
        if self._unsorted and not self._on:
            for lease in self._unsorted:
                if lease.holds_slices:
                    for s in lease.slices:
                        self._on.setdefault(s.device_id, {})[lease.id] = None
        return [self.leases[name] for name in self._on.get(device_id, ())]

    def _looks_of(self, lease: LeaseRecord) -> Iterator[tuple[int, str, str]]:
        yield lease.granted_at + protected_us(lease, self.policy), lease.id, "protected"
        if not lease.busy:
            yield lease.active_at + self.policy.idle_after_us, lease.id, "idle"
        if lease.hold_cap_us:
            yield cap_notice_at(lease, self.policy), lease.id, "cap"

    def _put_in(self, lease: LeaseRecord) -> None:
        name, active = lease.id, lease.state is LeaseState.ACTIVE
        if lease.holds_slices:
            for s in lease.slices:
                self._on.setdefault(s.device_id, {})[name] = None
                if lease.state in LEAVING:
                    self._leaving.add((s.device_id, name))
                elif active and not lease.busy:
                    self._resting.add((lease.active_at, s.device_id, name))
        if lease.state in HOLDING:
            self._ends.add((lease.ends_at, name))
        for key in self._looks_of(lease):
            self._looks.add(key)
        if not active:
            return
        if self._pays_by_the_day(lease.tenant):
            self._notices.add((notice_at(lease, self.policy.grace_us), name))
        if lease.hold_cap_us:
            self._caps_ahead.add((cap_notice_at(lease, self.policy), name))
        if lease.request.tier.rank:
            self._protected.add((lease.granted_at + protected_us(lease, self.policy), name))

    def _take_out(self, lease: LeaseRecord) -> None:
        name, active = lease.id, lease.state is LeaseState.ACTIVE
        if lease.holds_slices:
            for s in lease.slices:
                self._on[s.device_id].pop(name, None)
                if lease.state in LEAVING:
                    self._leaving.discard((s.device_id, name))
                elif active and not lease.busy:
                    self._resting.discard((lease.active_at, s.device_id, name))
        if lease.state in HOLDING:
            self._ends.discard((lease.ends_at, name))
        for key in self._looks_of(lease):
            self._looks.discard(key)
        if not active:
            return
        self._notices.discard((notice_at(lease, self.policy.grace_us), name))
        ripe = self._ripe.pop(name, ())
        if "cap" in ripe:
            for s in lease.slices:
                self._caps.discard((s.device_id, name))
        elif lease.hold_cap_us:
            self._caps_ahead.discard((cap_notice_at(lease, self.policy), name))
        if "open" in ripe:
            for s in lease.slices:
                self._open_list(lease).discard((-lease.committed_at, s.device_id, name))
        elif lease.request.tier.rank:
            self._protected.discard((lease.granted_at + protected_us(lease, self.policy), name))

    def _open_list(self, lease: LeaseRecord) -> SortedKeys[tuple[int, str, str]]:
        kind = (lease.request.tier.rank, max(1, len(lease.slices)), bool(lease.committed_at))
        return self._open.setdefault(kind, SortedKeys())

    def _advance(self, now: int) -> None:
        """Caps and protections that are over by now."""
        self._sort_in()
        while (key := self._caps_ahead.first()) is not None and key[0] <= now:
            self._caps_ahead.discard(key)
            self._ripe.setdefault(key[1], []).append("cap")
            for s in self.leases[key[1]].slices:
                self._caps.add((s.device_id, key[1]))
        while (key := self._protected.first()) is not None and key[0] <= now:
            self._protected.discard(key)
            lease = self.leases[key[1]]
            self._ripe.setdefault(key[1], []).append("open")
            for s in lease.slices:
                self._open_list(lease).add((-lease.committed_at, s.device_id, key[1]))

    def over(self, now: int) -> list[LeaseRecord]:
        """Leases whose time is up, by id."""
        self._sort_in()
        return [self.leases[name] for name in sorted(name for _, name in self._ends.below((now + 1,)))]

    def unpaid_soon(self, now: int) -> list[LeaseRecord]:
        """Leases of tenants that pay by the day that must be told now, by id."""
        self._sort_in()
        return [self.leases[name] for name in sorted(name for _, name in self._notices.below((now + 1,)))]

    # what may be taken, device by device, the cheapest first

    def leaving(self) -> Iterator[str]:
        """Devices with leases on their way out, by id."""
        self._sort_in()
        last = ""
        for device_id, _ in self._leaving:
            if device_id != last:
                last = device_id
                yield device_id

    def first_left_whole(self, vram_bytes: int) -> str:
        """The first device with somebody on its way out, if that one has it whole and it is large enough;
        else ''."""
        self._sort_in()
        key = self._leaving.first()
        device = self.device_index.devices.get(key[0]) if key is not None else None
        if (
            device is not None
            and device.state is DeviceState.READY
            and device.device_leases
            and device.capacity_bytes >= vram_bytes
            and len(self._on[device.id]) == 1
        ):
            return device.id
        return ""

    def close(self, device_id: str) -> None:
        """Take the device out of `leaving`: what becomes free there is promised to somebody."""
        self._sort_in()
        for key in self._leaving.between((device_id, ""), (device_id, LAST)):
            self._leaving.discard(key)
            self._back(partial(self._leaving.add, key))

    def idle(self, now: int) -> Iterator[tuple[int, str]]:
        """(since when, device) of idle leases, the longest idle first."""
        self._sort_in()
        for active_at, device_id, _ in self._resting.below((now - self.policy.idle_after_us + 1,)):
            yield active_at, device_id

    def past_cap(self, now: int) -> Iterator[str]:
        self._advance(now)
        return (device_id for device_id, _ in self._caps)

    def lower(self, now: int) -> list[tuple[int, int, bool, SortedKeys[tuple[int, str, str]]]]:
        """Leases past their protected time: tier, slices, whether they ever committed, and (-committed_at,
        device, lease)."""
        self._advance(now)
        return [(*kind, found) for kind, found in self._open.items() if found]

    def nothing_to_take(self, now: int) -> bool:
        """No lease may be taken for a waiter. Those that leave anyway make room without being told."""
        self._sort_in()
        if next(self.idle(now), None) is not None:
            return False
        self._advance(now)
        return not self._caps and not any(self._open.values())

    def room_is_made(self) -> bool:
        """Is there for each waiter, whatever it asks for, a device whose only lease is leaving? Then no other
        lease has to."""
        bound = self._bound_to_host or (self._of_any_one_host and self.device_index.several_hosts)
        if bound or not self.waiters:
            return not self.waiters
        self._sort_in()
        left, largest = self._devices_wanted, max(self._bytes_wanted)
        for device_id in self.leaving():
            device = self.device_index.devices.get(device_id)
            if (
                device is not None
                and device.state is DeviceState.READY
                and device.capacity_bytes >= largest
                and len(self._on[device_id]) == 1
            ):
                left -= 1
                if left <= 0:
                    return True
        return False

    def enough_is_left(self, shape: Shape) -> bool:
        """Does it fit once the leases on their way out have gone?"""
        if each := self.device_index.each_host(shape):
            return any(self.enough_is_left(on_host) for on_host in each)
        found = set(islice(self.device_index.usable(shape), shape.count))
        for device_id in self.leaving():
            if len(found) >= shape.count:
                break
            device = self.device_index.devices.get(device_id)
            staying = [
                Resident(x.tenant, x.request.exclusivity, s.vram_bytes)
                for x in self.on(device_id)
                if x.state not in LEAVING
                for s in x.slices
                if s.device_id == device_id
            ]
            if device is not None and usable(occupy(device, staying), shape):
                found.add(device_id)
        return len(found) >= shape.count

    # waiters

    def set_waiter(self, waiter: LeaseRecord) -> None:
        known = self.waiters.get(waiter.id)
        if known is not None:
            self._leave_line(known)
            self._back(lambda: self.set_waiter(known))
        else:
            self._back(lambda: self.drop_waiter(waiter.id))
        name = waiter.id
        self.waiters[name] = waiter
        self._of_tenant.setdefault(waiter.tenant, {})[name] = None
        self.lines.setdefault(line_of(waiter), SortedKeys()).add((waiter.joined_at, name))
        self._sizes.add((self._least(waiter), name))
        self._seens.add((max(waiter.seen_at, waiter.joined_at), name))
        if waiter.wait_until:
            self._untils.add((waiter.wait_until, name))
        if waiter.offer_until:
            self._offers.add((waiter.offer_until, name))
        every = self.policy.rises_after_us(waiter.request.tier.rank)
        if every:
            self._promoted_at[name] = waiter.joined_at + every
            self._promotions.add((self._promoted_at[name], name))
        if self._pays_by_the_day(waiter.tenant):
            self._rationed[name] = None
        self._count_wanted(waiter, 1)

    def _count_wanted(self, waiter: LeaseRecord, by: int) -> None:
        request = waiter.request
        self._devices_wanted += by * request.count
        self._bound_to_host += by * bool(request.host)
        self._of_any_one_host += by * request.shape().of_any_one_host
        self._bytes_wanted[request.vram_bytes] += by
        if not self._bytes_wanted[request.vram_bytes]:
            del self._bytes_wanted[request.vram_bytes]

    def drop_waiter(self, lease_id: str) -> None:
        waiter = self.waiters.pop(lease_id)
        self._leave_line(waiter)
        self._back(lambda: self.set_waiter(waiter))
        if lease_id not in self.leases:
            self._forget(waiter)

    def _least(self, waiter: LeaseRecord) -> int:
        request = waiter.request
        if request.wants_offers:
            return 1
        return request.least_bytes or request.vram_bytes

    def _leave_line(self, waiter: LeaseRecord) -> None:
        line, name = line_of(waiter), waiter.id
        self.lines[line].discard((waiter.joined_at, name))
        if not self.lines[line]:
            del self.lines[line]
        self._sizes.discard((self._least(waiter), name))
        self._seens.discard((max(waiter.seen_at, waiter.joined_at), name))
        self._untils.discard((waiter.wait_until, name))
        self._offers.discard((waiter.offer_until, name))
        if name in self._promoted_at:
            self._promotions.discard((self._promoted_at.pop(name), name))
        self._rationed.pop(name, None)
        self._count_wanted(waiter, -1)

    def smallest_wanted(self) -> int:
        """What the least demanding waiter would take."""
        key = self._sizes.first()
        return key[0] if key is not None else 0

    def gone(self, now: int) -> list[LeaseRecord]:
        """Waiters whose time is over or who fell silent, in the order they joined."""
        late = {name for _, name in self._untils.below((now + 1,))}
        late |= {name for _, name in self._seens.below((now - self.policy.waiter_silence_us + 1,))}
        return sorted((self.waiters[name] for name in late), key=lambda w: (w.joined_at, w.id))

    def lapsed(self, now: int) -> list[LeaseRecord]:
        """Waiters whose offer is over, in the order they joined."""
        found = [self.waiters[name] for _, name in self._offers.below((now + 1,))]
        return sorted((w for w in found if w.slices), key=lambda w: (w.joined_at, w.id))

    def rationed(self) -> list[LeaseRecord]:
        return [self.waiters[name] for name in self._rationed]

    # when to look again

    def next_moment(self, now: int) -> int | None:
        """The first moment after `now` that a row names; what must be worked out is not among them."""
        self._sort_in()
        later = (now + 1,)
        silence = self.policy.waiter_silence_us
        moments = [
            next((at for at, *_ in moments.at_least(later)), 0)
            for moments in (self._ends, self._notices, self._untils, self._offers)
        ]
        moments.append(next((at + silence for at, _ in self._seens.at_least((now - silence + 1,))), 0))
        if self.waiters:
            moments.append(self._next_promotion(now))
            moments.append(next((at for at, *_ in self._cooldowns.at_least(later)), 0))
            moments.append(next((at for at, *_ in self._looks.at_least(later)), 0))
        return min((m for m in moments if m), default=None)

    def _next_promotion(self, now: int) -> int:
        while (key := self._promotions.first()) is not None and key[0] <= now:
            waiter = self.waiters[key[1]]
            every = self.policy.rises_after_us(waiter.request.tier.rank)
            at = waiter.joined_at + (max(0, now - waiter.joined_at) // every + 1) * every
            self._promotions.discard(key)
            self._promotions.add((at, key[1]))
            self._promoted_at[key[1]] = at
        return key[0] if key is not None else 0
