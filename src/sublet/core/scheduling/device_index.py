"""Devices found by what they have free: the same answers as `core.scheduling.device.fit` and its neighbours,
without a walk over the pool.

Rules of this file:
- A ready device stands in one list for who may join it, and in one by capacity; in each twice, once under its
  host and once under any host. Lists are in the order in which a fit takes devices: fullest first.
- What `fit`, `largest_smaller`, `could_ever_fit` and `least_rate` say of the same devices is said here too;
  property tests hold them equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from heapq import merge
from itertools import islice

from sublet.core.leasing.lease import Request
from sublet.core.leasing.tenancy import rate_of
from sublet.core.scheduling.device import (
    MANY_TENANTS,
    Device,
    DeviceState,
    Exclusivity,
    Shape,
    Slice,
    slice_bytes,
    usable,
)
from sublet.core.scheduling.sorted_keys import LAST, SortedKeys
from sublet.core.scheduling.spread import share_out

ANY_HOST = ""
#: Who is on a device, as far as it decides who may join. The second part is whose it is, where that matters.
EMPTY, SHARED = ("empty", ""), ("shared", "")
Company = tuple[str, str]

_Free = SortedKeys[tuple[int, str]]


def _company(device: Device) -> list[Company]:
    if device.state is not DeviceState.READY or device.device_leases:
        return []
    if device.leases == 0:
        return [EMPTY]
    named = device.sole_tenant not in ("", MANY_TENANTS)
    if device.session_leases:
        return [("session", device.sole_tenant)] if named else []
    return [SHARED, ("sole", device.sole_tenant)] if named else [SHARED]


def _joinable(shape: Shape) -> list[Company]:
    """`Device.accepts`, as lists to look into. What is not known fits nowhere."""
    if shape.exclusivity is Exclusivity.DEVICE:
        return [EMPTY]
    if shape.exclusivity is Exclusivity.SESSION:
        return [EMPTY, ("session", shape.tenant), ("sole", shape.tenant)]
    if shape.exclusivity is Exclusivity.SHARED:
        return [EMPTY, SHARED, ("session", shape.tenant)]
    return []


class DeviceIndex:
    __slots__ = ("_by_capacity", "_capacities", "_free", "_not_lost", "devices")

    def __init__(self, devices: Iterable[Device]) -> None:
        self.devices: dict[str, Device] = {}
        self._free: dict[tuple[Company, str], _Free] = {}  # (free, id)
        self._by_capacity: dict[str, dict[int, _Free]] = {}  # ready ones: (-free, id)
        self._capacities: dict[str, Counter[int]] = {}
        self._not_lost: dict[str, Counter[int]] = {}
        free: dict[tuple[Company, str], list[tuple[int, str]]] = {}
        ready: dict[tuple[str, int], list[tuple[int, str]]] = {}
        for d in devices:
            self.devices[d.id] = d
            self._count(d, 1)
            for host in (ANY_HOST, d.host):
                for company in _company(d):
                    free.setdefault((company, host), []).append((d.free_bytes, d.id))
                if d.state is DeviceState.READY:
                    ready.setdefault((host, d.capacity_bytes), []).append((-d.free_bytes, d.id))
        for key, found in free.items():
            self._free[key] = SortedKeys(found)
        for (host, capacity), found in ready.items():
            self._by_capacity.setdefault(host, {})[capacity] = SortedKeys(found)

    def _count(self, device: Device, by: int) -> None:
        for host in (ANY_HOST, device.host):
            self._capacities.setdefault(host, Counter())[device.capacity_bytes] += by
            if device.state not in (DeviceState.LOST, DeviceState.TAKEN):
                self._not_lost.setdefault(host, Counter())[device.capacity_bytes] += by

    def set(self, device: Device) -> None:
        """A new one, or a known one that has changed."""
        known = self.devices.get(device.id)
        if known is not None:
            for host in (ANY_HOST, known.host):
                for company in _company(known):
                    self._free[(company, host)].discard((known.free_bytes, known.id))
                if known.state is DeviceState.READY:
                    self._by_capacity[host][known.capacity_bytes].discard((-known.free_bytes, known.id))
        if known is None or (known.capacity_bytes, known.host, known.state) != (
            device.capacity_bytes,
            device.host,
            device.state,
        ):
            if known is not None:
                self._count(known, -1)
            self._count(device, 1)
        self.devices[device.id] = device
        for host in (ANY_HOST, device.host):
            for company in _company(device):
                self._free.setdefault((company, host), SortedKeys()).add((device.free_bytes, device.id))
            if device.state is DeviceState.READY:
                lists = self._by_capacity.setdefault(host, {})
                lists.setdefault(device.capacity_bytes, SortedKeys()).add((-device.free_bytes, device.id))

    # where they are

    @property
    def several_hosts(self) -> bool:
        return len(self._capacities) > 2  # any host is one of the names

    def hosts(self) -> list[str]:
        return sorted(host for host in self._capacities if host != ANY_HOST)

    def each_host(self, shape: Shape) -> list[Shape] | None:
        """The shape for each host by itself, if all must be of one host and there are several; else None."""
        if not shape.of_any_one_host or not self.several_hosts:
            return None
        return [replace(shape, host=host) for host in self.hosts()]

    # what is free

    def usable(self, shape: Shape) -> Iterator[str]:
        """Devices that could give the shape a slice now, in `fit_order`."""
        low = (shape.vram_bytes, "")
        found = [
            lists.at_least(low)
            for company in _joinable(shape)
            if (lists := self._free.get((company, shape.host)))
        ]
        return (device_id for _, device_id in (found[0] if len(found) == 1 else merge(*found)))

    def _usable_on(self, host: str, shape: Shape, kept: Collection[str]) -> int:
        low = (shape.vram_bytes, "")
        found = sum(
            len(lists) - lists.count_below(low)
            for company in _joinable(shape)
            if (lists := self._free.get((company, host)))
        )
        here = (self.devices[name] for name in kept if name in self.devices)
        return found - sum(device.host == host and usable(device, shape) for device in here)

    def _fit_over_hosts(self, shape: Shape, kept: Collection[str]) -> tuple[Slice, ...] | None:
        room = {host: self._usable_on(host, shape, kept) for host in self.hosts()}
        shares = share_out(shape.count, room, shape.spread)
        if shares is None:
            return None
        chosen = [
            device_id
            for host, n in shares
            for device_id in islice((d for d in self.usable(replace(shape, host=host)) if d not in kept), n)
        ]
        return tuple(Slice(d, slice_bytes(self.devices[d], shape)) for d in chosen)

    def fit(self, shape: Shape, kept: Collection[str] = ()) -> tuple[Slice, ...] | None:
        if shape.count > 1 and not shape.host and self.several_hosts:
            return self._fit_over_hosts(shape, kept)
        chosen: list[Slice] = []
        for device_id in self.usable(shape):
            if device_id not in kept:
                chosen.append(Slice(device_id, slice_bytes(self.devices[device_id], shape)))
                if len(chosen) == shape.count:
                    return tuple(chosen)
        return None

    def largest_smaller(self, shape: Shape, least_bytes: int, kept: Collection[str] = ()) -> int:
        if each := self.each_host(shape):
            return max(self.largest_smaller(on_host, least_bytes, kept) for on_host in each)
        falling = merge(
            *(
                lists.falling()
                for company in _joinable(shape)
                if (lists := self._free.get((company, shape.host)))
            ),
            reverse=True,
        )
        seen = 0
        for free_bytes, device_id in falling:
            seen += device_id not in kept
            if seen == shape.count:
                offered = min(free_bytes, shape.vram_bytes)
                return offered if offered >= max(1, least_bytes) else 0
        return 0

    def nearest(self, shape: Shape) -> list[str]:
        """The ready devices nearest to having room, if there are enough that could have it."""
        if each := self.each_host(shape):
            ways = [way for on_host in each if (way := self.nearest(on_host))]
            return min(ways, key=lambda ids: (-self.devices[ids[-1]].free_bytes, ids[-1]), default=[])
        fitting = merge(
            *(
                lists
                for capacity, lists in self._by_capacity.get(shape.host, {}).items()
                if capacity >= shape.vram_bytes
            )
        )
        found: list[str] = []
        for _, device_id in fitting:
            found.append(device_id)
            if len(found) == shape.count:
                return found
        return []

    def most_free(self, host: str = ANY_HOST) -> int:
        firsts = (lists.first() for lists in self._by_capacity.get(host, {}).values())
        return max((-key[0] for key in firsts if key is not None), default=0)

    def roomy(self, shape: Shape) -> int:
        """How many ready devices have the bytes, whoever is on them; where they must be of one host, of that
        which has most."""
        if each := self.each_host(shape):
            return max(self.roomy(on_host) for on_host in each)
        high = (-shape.vram_bytes, LAST)
        return sum(lists.count_below(high) for lists in self._by_capacity.get(shape.host, {}).values())

    # what there is

    def not_lost(self) -> tuple[int, int]:
        """How many, and the largest."""
        found = self._not_lost.get(ANY_HOST, Counter())
        return found.total(), max((c for c, n in found.items() if n), default=0)

    def taken(self, shape: Shape) -> list[str]:
        """What is said of devices that would be large enough, if another ledger did not grant them."""
        return [
            d.note
            for _, d in sorted(self.devices.items())
            if d.state is DeviceState.TAKEN
            and d.capacity_bytes >= shape.vram_bytes
            and shape.host in (ANY_HOST, d.host)
        ]

    def could_ever_fit(self, shape: Shape) -> bool:
        if each := self.each_host(shape):
            return any(self.could_ever_fit(on_host) for on_host in each)
        found = self._not_lost.get(shape.host, Counter())
        return sum(n for capacity, n in found.items() if capacity >= shape.vram_bytes) >= shape.count

    def least_bytes(self, request: Request, *, lost_too: bool) -> int:
        """The least a grant of this request would count for. Whole devices count whole."""
        each = request.least_bytes or request.vram_bytes
        if request.exclusivity is not Exclusivity.DEVICE:
            return each * request.count
        found = (self._capacities if lost_too else self._not_lost).get(request.host, Counter())
        total, left = 0, request.count
        for capacity in sorted(found):
            if capacity >= each and left:
                taken = min(left, found[capacity])
                total, left = total + taken * capacity, left - taken
        return total

    def least_rate(self, request: Request) -> int:
        """`core.billing.allowance.least_rate` of these devices."""
        each = request.least_bytes or request.vram_bytes
        found = self._not_lost.get(request.host, Counter())
        largest = max((c for c, n in found.items() if n and c >= each), default=each)
        return rate_of(request.exclusivity, each, largest) * request.count
