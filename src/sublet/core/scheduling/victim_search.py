"""Where room is cheapest to make for somebody who waits: which device, and whose leases on it.

Rules of this file:
- A device costs what its dearest victim is (`preemption.Claim`), then how low that tier is, how much work is
  lost, how many are disturbed, and how recently the idlest of them worked. Of equals the first by name.
- Several that must be of one host are looked for on each: the host whose dearest device is cheapest gives
  them.
- Devices are looked at from the cheapest they could be, and no further than one that cannot be beaten: of ten
  thousand idle leases one is looked at. Where nothing may be taken nothing is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import merge

from sublet.core.leasing.lease import LeaseRecord, changed
from sublet.core.leasing.policy import Policy
from sublet.core.scheduling.device import Device
from sublet.core.scheduling.pool_index import PoolIndex
from sublet.core.scheduling.preemption import Claim, Victim, room_on, work_at_risk

#: (claim, -tier, work lost, victims, -idle, device)
Price = tuple[int, int, int, int, int, str]
Choice = tuple[list[Victim], list[str]]


class _Search:
    def __init__(self, waiter: LeaseRecord, pool: PoolIndex, now: int) -> None:
        self._waiter, self._pool, self._now = waiter, pool, now
        self._looked = False
        self._seen: set[str] = set()
        self._found: list[tuple[Price, list[Victim], str]] = []

    def run(self) -> Choice | None:
        return self._choice() if self._enough() else None

    def dearest_first(self) -> list[Price] | None:
        """The prices to compare with another search; None when there are too few devices."""
        count = self._waiter.request.count
        return [price for price, _, _ in reversed(self._found[:count])] if self._enough() else None

    def _enough(self) -> bool:
        if not self._looked:
            self._looked = True
            self._look()
        return len(self._found) >= self._waiter.request.count

    def _look(self) -> None:
        for device_id in self._pool.device_index.usable(self._waiter.request.shape()):
            self._look_at(device_id)  # kept for somebody, or not enough of them
        for cheapest, device_id in self._streams():
            if self._beaten(cheapest):
                break
            self._look_at(device_id)

    def _choice(self) -> Choice:
        picked = self._found[: self._waiter.request.count]
        chosen = {v.lease.id: v for _, found, _ in picked for v in found}
        return sorted(chosen.values(), key=lambda v: v.cost), [device_id for _, _, device_id in picked]

    def _beaten(self, cheapest: Price) -> bool:
        """Whether enough were found, and none from here on can be cheaper."""
        count = self._waiter.request.count
        return len(self._found) >= count and self._found[count - 1][0] <= cheapest

    def _streams(self) -> Iterator[tuple[Price, str]]:
        """Devices with something to take on them, by the least they could cost. One may come more than
        once."""
        now = self._now
        for device_id in self._pool.leaving():
            yield (Claim.LEAVING, 0, 0, 1, 0, device_id), device_id
        for active_at, device_id in self._pool.idle(now):
            yield (Claim.IDLE, 0, 0, 1, active_at - now, device_id), device_id
        for device_id in self._pool.past_cap(now):
            yield (Claim.HOLD_CAP, 0, 0, 1, 0, device_id), device_id
        mine = self._waiter.request.tier.rank
        lower = [self._lower(*kind) for kind in self._pool.lower(now) if kind[0] > mine]
        for tier, risk, device_id in merge(*lower):
            yield (Claim.LOWER_TIER, tier, risk, 1, 0, device_id), device_id

    def _lower(
        self, rank: int, slices: int, committed: bool, found: Iterable[tuple[int, str, str]]
    ) -> Iterator[tuple[int, int, str]]:
        neutral = self._pool.policy.neutral_work_us
        for minus_committed_at, device_id, _ in found:
            work = max(0, self._now + minus_committed_at) if committed else neutral
            yield -rank, work * slices, device_id

    def _look_at(self, device_id: str) -> None:
        if device_id in self._seen:
            return
        self._seen.add(device_id)
        device = self._pool.devices.get(device_id)
        if device is None:
            return
        policy, now = self._pool.policy, self._now
        victims = room_on(device, self._pool.on(device_id), self._waiter, policy, now)
        if victims is None:
            return
        worst = max((v.claim for v in victims), default=Claim.LEAVING)
        risk = sum(work_at_risk(v.lease, policy, now) for v in victims if v.claim is Claim.LOWER_TIER)
        lower = [v.lease.request.tier.rank for v in victims if v.claim is Claim.LOWER_TIER]
        # Between devices as on one: the longest idle is the least likely to come back soon.
        idle_us = min((now - v.lease.active_at for v in victims if v.claim is Claim.IDLE), default=0)
        price = (worst, -min(lower, default=0), risk, len(victims), -idle_us, device_id)
        self._found.append((price, victims, device_id))
        self._found.sort(key=lambda found: found[0])


def cheapest_room(waiter: LeaseRecord, pool: PoolIndex, now: int) -> Choice | None:
    """Victims that make room for the waiter, and the devices the room is on; None when nothing may be
    taken."""
    each = pool.device_index.each_host(waiter.request.shape())
    if each is None:
        return _Search(waiter, pool, now).run()
    searches = [
        _Search(changed(waiter, request=replace(waiter.request, host=on_host.host)), pool, now)
        for on_host in each
        if pool.device_index.could_ever_fit(on_host)
    ]
    priced = [(price, search) for search in searches if (price := search.dearest_first()) is not None]
    return min(priced, key=lambda found: found[0])[1].run() if priced else None


def choose(
    waiter: LeaseRecord, devices: Iterable[Device], leases: Sequence[LeaseRecord], policy: Policy, now: int
) -> Choice | None:
    """`cheapest_room` for plain collections."""
    return cheapest_room(waiter, PoolIndex(devices, leases, policy=policy), now)
