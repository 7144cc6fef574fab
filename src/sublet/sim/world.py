"""The pool in virtual time: devices, leases, waiters and tenants as the ledger keeps them, in memory.

Rules of this file:
- Decisions come from `core`: `admission.admit` and `place`, `schedule.tick`, `lease.renew`. This file keeps
  the same frozen records the ledger loads, in the order of `core.scheduling.pool_index`, and applies each
  decision as the ledger's verbs do, in the same order.
- Time is an attribute that only the engine moves. Integers only; nothing depends on the order of a set.
- What happened to a lease is told in `news`, in order; the engine reads it after each call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sublet.core.errors import InvariantBroken
from sublet.core.leasing.lease import (
    EndReason,
    Holder,
    LeaseEvent,
    LeaseRecord,
    LeaseState,
    Renewed,
    Request,
    after,
    changed,
    last_active,
    overdue,
)
from sublet.core.leasing.lease import renew as decide_renew
from sublet.core.leasing.tenancy import Tenant, rate_of, tenant_changed, used_now
from sublet.core.scheduling import admission, schedule
from sublet.core.scheduling.admission import Grant, Offer, Refusal, Wait
from sublet.core.scheduling.device import Device, Exclusivity, Resident, join, occupy, usable
from sublet.core.scheduling.pool_index import PoolIndex
from sublet.core.scheduling.schedule import Drop, End, Instruction, Revoke, Withdraw
from sublet.core.values import MAX_DURATION_US
from sublet.sim.schemes import Scheme, ServiceOrder

GIB = 1 << 30
#: All devices are alike, and a request takes one whole: the requests of the trace are whole-GPU work.
CAPACITY_BYTES = 16 * GIB
#: Waiters of a simulation always look and never fall silent; their holders never die.
ALWAYS_LOOKS = 1_000 * MAX_DURATION_US
HOLDER = Holder(host="sim", pid=1)


class Happened(Enum):
    GRANTED = "granted"  # out of the waitlist
    REVOKED = "revoked"  # its holder has until the deadline
    ENDED = "ended"  # not by its holder


@dataclass(frozen=True, slots=True)
class News:
    happened: Happened
    lease: LeaseRecord


class World:
    def __init__(self, scheme: Scheme, gpus: int) -> None:
        self.scheme = scheme
        self.policy = scheme.policy
        self.now = 0
        self.pool = PoolIndex(
            devices=(
                Device(
                    id=name,
                    host=HOLDER.host,
                    driver="sim",
                    ordinal=i,
                    name="simulated",
                    capacity_bytes=CAPACITY_BYTES,
                    free_bytes=CAPACITY_BYTES,
                )
                for i, name in ((i, f"gpu-{i:05d}") for i in range(gpus))
            ),
            policy=self.policy,
        )
        self._first_come: dict[str, LeaseRecord] = {}  # who waits where the list is not ours
        self.news: deque[News] = deque()
        self.ends: dict[EndReason, int] = {}
        self.epoch = 0

    @property
    def devices(self) -> dict[str, Device]:
        return self.pool.device_index.devices

    @property
    def leases(self) -> Mapping[str, LeaseRecord]:
        """Those that hold slices."""
        return self.pool.leases

    @property
    def waiters(self) -> Mapping[str, LeaseRecord]:
        """In the order they joined, where that is the order they are served in."""
        return self.pool.waiters if self.scheme.order is ServiceOrder.OURS else self._first_come

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        return self.pool.tenants

    # asking

    def acquire(self, lease_id: str, request: Request) -> LeaseRecord:
        if request.tenant not in self.tenants:
            self.pool.set_tenant(Tenant(name=request.tenant, as_of=self.now))
        newcomer = LeaseRecord(
            id=lease_id,
            request=request,
            holder=HOLDER,
            state=LeaseState.WAITING,
            joined_at=self.now,
            seen_at=ALWAYS_LOOKS,
            active_at=self.now,
            busy=True,
            hold_cap_us=admission.hold_cap_of(request, self.policy),
        )
        decision: Grant | Offer | Wait | Refusal | None = None
        if not self.waiters:
            slices = self.pool.device_index.fit(request.shape())
            if slices is not None:
                decision = Grant(
                    lease_id=lease_id, slices=slices, vram_bytes=request.vram_bytes, reason="capacity is free"
                )
        if decision is None and self.scheme.order is ServiceOrder.OURS:
            # Without position and ETA: nobody reads them here.
            decision = admission.admit(newcomer, self.pool, self.now, forecast=False)
        if isinstance(decision, Refusal | Offer):
            raise InvariantBroken(f"a request that may wait was not let wait: {decision.reason}")
        if isinstance(decision, Grant):
            return self._grant(newcomer, decision, claimed=True)
        if self.scheme.order is ServiceOrder.OURS:
            self.pool.set_waiter(newcomer)
        else:
            self._first_come[lease_id] = newcomer
        self._shift(request.tenant, waiting=1)
        return newcomer

    def _grant(self, lease: LeaseRecord, decision: Grant, *, claimed: bool) -> LeaseRecord:
        self.epoch += 1
        ttl = lease.request.ttl_us
        granted = changed(
            lease,
            state=after(lease.state, LeaseEvent.GRANT),
            epoch=self.epoch,
            slices=decision.slices,
            vram_bytes=decision.slices[0].vram_bytes,
            granted_at=self.now,
            expires_at=self.now + (ttl if claimed else min(ttl, self.policy.claim_us)),
            active_at=self.now,
            busy=True,
            claimed=claimed,
            detail=decision.reason,
        )
        for s in decision.slices:
            device = self.devices[s.device_id]
            if not usable(device, lease.request.shape(decision.vram_bytes)):
                raise InvariantBroken(f"device {device.id} was granted to {lease.id} but has no room for it")
            self.pool.set_device(
                join(device, Resident(lease.tenant, lease.request.exclusivity, s.vram_bytes))
            )
        self.pool.set_lease(granted)
        was_waiting = lease.id in self.waiters
        if lease.id in self.pool.waiters:
            self.pool.drop_waiter(lease.id)
        self._first_come.pop(lease.id, None)
        self._shift(lease.tenant, leases=1, slices=granted, waiting=-1 if was_waiting else 0)
        return granted

    # holding

    def renew(self, lease: LeaseRecord, *, busy: bool) -> bool:
        known = self.leases.get(lease.id)
        if known is None:
            return False
        capped = bool(self.waiters) or self.policy.strict_hold
        decision = decide_renew(
            known, lease.epoch, self.now, capped=capped and self.scheme.order is ServiceOrder.OURS
        )
        if not isinstance(decision, Renewed):
            return False
        self.pool.set_lease(
            changed(
                known,
                expires_at=decision.expires_at,
                busy=busy,
                active_at=last_active(known, busy, self.now),
                claimed=True,
            )
        )
        return True

    def mark(self, lease: LeaseRecord, *, busy: bool) -> None:
        known = self.leases.get(lease.id)
        if known is not None and known.epoch == lease.epoch and known.state is LeaseState.ACTIVE:
            self.pool.set_lease(changed(known, busy=busy, active_at=self.now))

    def release(self, lease: LeaseRecord) -> None:
        """End a lease for its holder. The device goes back when its teardown is settled."""
        known = self.leases[lease.id]
        if known.state is LeaseState.ENDED:
            return
        late = overdue(known, self.now)
        if late is None:
            late = known.reason if known.state is LeaseState.REVOKING else EndReason.RELEASED
        self._end(known, late or EndReason.REVOKED, known.detail)

    def _end(self, lease: LeaseRecord, reason: EndReason, detail: str) -> LeaseRecord:
        ended = changed(
            lease,
            state=after(lease.state, LeaseEvent.END),
            reason=reason,
            detail=detail,
            ended_at=self.now,
            busy=False,
        )
        self.pool.set_lease(ended)
        self.ends[reason] = self.ends.get(reason, 0) + 1
        if reason is EndReason.HOLD_CAP:
            self.pool.set_tenant(
                tenant_changed(self.tenants[lease.tenant], cooldown_until=self.now + self.policy.cooldown_us)
            )
        return ended

    def settle(self, lease_id: str) -> None:
        """The teardown is proven: the slices are free, and go at once to the first in order."""
        lease = self.leases[lease_id]
        if lease.state is not LeaseState.ENDED:
            raise InvariantBroken(f"lease {lease_id} was settled while {lease.state.value}")
        self.pool.drop_lease(lease_id)
        for s in lease.slices:
            staying = [
                Resident(x.tenant, x.request.exclusivity, t.vram_bytes)
                for x in self.pool.on(s.device_id)
                for t in x.slices
                if t.device_id == s.device_id
            ]
            self.pool.set_device(occupy(self.devices[s.device_id], staying))
        self._shift(lease.tenant, leases=-1, slices=lease)
        self.hand_out()

    # deciding

    def hand_out(self) -> None:
        if not self.waiters:
            return
        if self.scheme.order is ServiceOrder.OURS:
            for decision in admission.place(self.pool, self.now):
                self._place(decision)
            return
        while self.waiters:
            waiter = next(iter(self.waiters.values()))
            slices = self.pool.device_index.fit(waiter.request.shape())
            if slices is None:
                return
            self._place(
                Grant(
                    lease_id=waiter.id,
                    slices=slices,
                    vram_bytes=waiter.request.vram_bytes,
                    reason="it was first",
                )
            )

    def _place(self, decision: Grant | Offer) -> None:
        if isinstance(decision, Offer):
            raise InvariantBroken("nobody here takes less than it asked for, and it was offered")
        granted = self._grant(self.waiters[decision.lease_id], decision, claimed=False)
        self.news.append(News(Happened.GRANTED, granted))

    def tick(self) -> int | None:
        """Do what the warden's tick does; return when to look again."""
        # Where the list is not ours nobody waits in the pool, and only what has run out is ended.
        decided = schedule.tick(self.pool, self.now)
        rest = [step for step in decided if not isinstance(step, Grant | Offer)]
        for step in rest:
            self._apply(step)
        placed = [step for step in decided if isinstance(step, Grant | Offer)]
        if any(not isinstance(step, Revoke) for step in rest):
            self.hand_out()
        else:
            for decision in placed:
                self._place(decision)
        if not self.waiters or self.scheme.order is ServiceOrder.ARRIVAL:
            return None  # each grant and renewal is looked at when it runs out
        return schedule.next_look_at(self.pool, self.now)

    def _apply(self, step: Instruction) -> None:
        if isinstance(step, Drop | Withdraw):
            raise InvariantBroken(f"a waiter of the simulation was sent away: {step.reason}")
        lease = self.leases[step.lease_id]
        if isinstance(step, End):
            reason = overdue(lease, self.now)
            if reason is None:
                raise InvariantBroken(f"lease {lease.id} was ended and is not over")
            self.news.append(News(Happened.ENDED, self._end(lease, reason, step.reason)))
        elif isinstance(step, Revoke):
            revoked = changed(
                lease,
                state=after(lease.state, LeaseEvent.REVOKE),
                deadline_at=step.deadline_at,
                reason=step.end_reason,
                detail=step.reason,
            )
            self.pool.set_lease(revoked)
            self.news.append(News(Happened.REVOKED, revoked))

    # counting

    def _shift(
        self, name: str, *, leases: int = 0, slices: LeaseRecord | None = None, waiting: int = 0
    ) -> None:
        """Bring the tenant's use forward to now, then change its rate and live numbers."""
        tenant = self.tenants[name]
        live_bytes = rate = 0
        if slices is not None:
            for s in slices.slices:
                live_bytes += s.vram_bytes
                rate += rate_of(
                    slices.request.exclusivity, s.vram_bytes, self.devices[s.device_id].capacity_bytes
                )
        shifted = tenant_changed(
            tenant,
            live_leases=tenant.live_leases + leases,
            live_bytes=tenant.live_bytes + leases * live_bytes,
            rate_ppm=tenant.rate_ppm + leases * rate,
            waiting=tenant.waiting + waiting,
            used_us=used_now(tenant, self.now, self.policy.half_life_us),
            as_of=self.now,
        )
        self.pool.set_tenant(shifted)

    def check(self) -> None:
        """Check what must hold after every event: no device holds more than it has (L2), the sums match the
        leases and waiters, and nobody both waits and holds."""
        held: dict[str, list[Resident]] = {name: [] for name in self.devices}
        for lease in self.leases.values():
            for s in lease.slices:
                held[s.device_id].append(Resident(lease.tenant, lease.request.exclusivity, s.vram_bytes))
        for name, device in self.devices.items():
            if occupy(device, held[name]) != device:
                raise InvariantBroken(f"device {name} says {device}, and has {held[name]} on it")
            alone = [r for r in held[name] if r.exclusivity is Exclusivity.DEVICE]
            if alone and len(held[name]) > 1:
                raise InvariantBroken(f"device {name} is leased whole and to others too")
        both = self.leases.keys() & self.waiters.keys()
        if both:
            raise InvariantBroken(f"{min(both)} waits and holds")
        self._check_tenants()

    def _check_tenants(self) -> None:
        counts: dict[str, tuple[int, int]] = {}
        for found, column in ((self.leases, 0), (self.waiters, 1)):
            for lease in found.values():
                was = counts.get(lease.tenant, (0, 0))
                counts[lease.tenant] = (was[0] + (column == 0), was[1] + (column == 1))
        for name, (live, waiting) in counts.items():
            tenant = self.tenants[name]
            if (tenant.live_leases, tenant.waiting) != (live, waiting):
                raise InvariantBroken(
                    f"tenant {name} says {tenant}, and has {live} leases and {waiting} waiting"
                )


def ends_of(world: World) -> Mapping[str, int]:
    return {reason.value: count for reason, count in sorted(world.ends.items(), key=lambda e: e[0].value)}
