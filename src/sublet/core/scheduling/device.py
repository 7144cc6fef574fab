"""Devices, slices and who may sit beside whom.

Rules of this file:
- A device is described by sums (free bytes, how many leases of which exclusivity, whose), kept in its row by
  every grant and return. Fit reads only those sums, so it costs the same with ten leases or ten thousand.
- An exclusivity this code does not know fits nowhere: fail closed.
- The same question is asked in SQL for speed (`ledger/verbs/leasing/slices.py`); a property test holds the
  two equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from sublet.core.errors import BadInput, InvariantBroken
from sublet.core.replace import copier
from sublet.core.scheduling.spread import Spread, share_out


class Exclusivity(Enum):
    """How much company a lease accepts on its device."""

    SHARED = "shared"  # beside anyone who also shares
    SESSION = "session"  # beside leases of the same tenant only
    DEVICE = "device"  # alone


class DeviceState(Enum):
    READY = "ready"
    DRAINING = "draining"  # live leases go on, no new ones
    QUARANTINED = "quarantined"  # a teardown was not proven; an operator clears it, or proof that came late
    LOST = "lost"  # its host does not report it any more
    TAKEN = "taken"  # another ledger of its machine grants it


#: May a new lease (row) join a resident lease (column) of the same tenant / of another tenant?
MAY_JOIN: dict[tuple[Exclusivity, Exclusivity], tuple[bool, bool]] = {
    (Exclusivity.SHARED, Exclusivity.SHARED): (True, True),
    (Exclusivity.SHARED, Exclusivity.SESSION): (True, False),
    (Exclusivity.SHARED, Exclusivity.DEVICE): (False, False),
    (Exclusivity.SESSION, Exclusivity.SHARED): (True, False),
    (Exclusivity.SESSION, Exclusivity.SESSION): (True, False),
    (Exclusivity.SESSION, Exclusivity.DEVICE): (False, False),
    (Exclusivity.DEVICE, Exclusivity.SHARED): (False, False),
    (Exclusivity.DEVICE, Exclusivity.SESSION): (False, False),
    (Exclusivity.DEVICE, Exclusivity.DEVICE): (False, False),
}


def parse_exclusivity(text: str) -> Exclusivity:
    try:
        return Exclusivity(text)
    except ValueError:
        raise BadInput(f"exclusivity {str(text)[:40]!r} is unknown: use shared, session or device") from None


def may_join(new: object, resident: object, *, same_tenant: bool) -> bool:
    """Unknown on either side answers no."""
    if not isinstance(new, Exclusivity) or not isinstance(resident, Exclusivity):
        return False
    return MAY_JOIN[(new, resident)][0 if same_tenant else 1]


#: `Device.sole_tenant` when the residents belong to several tenants.
MANY_TENANTS = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    id: str
    host: str
    driver: str
    ordinal: int
    name: str
    capacity_bytes: int
    free_bytes: int
    state: DeviceState = DeviceState.READY
    leases: int = 0
    session_leases: int = 0
    device_leases: int = 0
    sole_tenant: str = ""  # '' nobody, a name, or MANY_TENANTS
    note: str = ""

    def accepts(self, exclusivity: Exclusivity, tenant: str) -> bool:
        """The matrix, answered from the sums."""
        if not isinstance(exclusivity, Exclusivity):
            return False
        if self.leases == 0:
            return True
        if self.device_leases or exclusivity is Exclusivity.DEVICE:
            return False
        if exclusivity is Exclusivity.SESSION or self.session_leases:
            return self.sole_tenant == tenant
        return True


_changed = copier(Device)


@dataclass(frozen=True, slots=True)
class Slice:
    """The VRAM one lease owns on one device."""

    device_id: str
    vram_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a request needs of the devices, and nothing else of it."""

    tenant: str
    vram_bytes: int
    count: int
    exclusivity: Exclusivity
    host: str = ""  # '' means any host
    spread: Spread = Spread.NO

    @property
    def of_any_one_host(self) -> bool:
        """Several devices that must be of one host, whichever."""
        return self.count > 1 and not self.host and self.spread is not Spread.OK


def usable(device: Device, shape: Shape) -> bool:
    """Could this device give the shape one slice right now?"""
    return (
        device.state is DeviceState.READY
        and device.free_bytes >= shape.vram_bytes
        and (not shape.host or device.host == shape.host)
        and device.accepts(shape.exclusivity, shape.tenant)
    )


def fit_order(device: Device) -> tuple[int, str]:
    """Fullest first: packing small leases together keeps whole devices free for those who need one."""
    return (device.free_bytes, device.id)


def slice_bytes(device: Device, shape: Shape) -> int:
    return device.capacity_bytes if shape.exclusivity is Exclusivity.DEVICE else shape.vram_bytes


def fit(shape: Shape, devices: Iterable[Device]) -> tuple[Slice, ...] | None:
    """`count` slices on distinct devices, all or nothing: of one host, or of several where that is asked for
    (`core.scheduling.spread`)."""
    found = sorted((d for d in devices if usable(d, shape)), key=fit_order)
    if shape.count == 1 or shape.host:
        chosen = found[: shape.count]
        if len(chosen) < shape.count:
            return None
    else:
        there: dict[str, list[Device]] = {}
        for d in found:
            there.setdefault(d.host, []).append(d)
        shares = share_out(shape.count, {host: len(of) for host, of in there.items()}, shape.spread)
        if shares is None:
            return None
        chosen = [d for host, n in shares for d in there[host][:n]]
    return tuple(Slice(d.id, slice_bytes(d, shape)) for d in chosen)


def could_ever_fit(shape: Shape, capacities: Sequence[tuple[str, int]]) -> bool:
    """Would an empty pool hold it? `capacities` are (host, bytes) of devices that are not lost."""
    room = Counter(
        host
        for host, capacity in capacities
        if capacity >= shape.vram_bytes and (not shape.host or host == shape.host)
    )
    if shape.of_any_one_host:
        return max(room.values(), default=0) >= shape.count
    return room.total() >= shape.count


def largest_smaller(shape: Shape, devices: Iterable[Device], least_bytes: int) -> int:
    """The most VRAM per device, below the request and at least `least_bytes`, that `count` devices have
    now."""
    if shape.of_any_one_host:
        known = list(devices)
        hosts = sorted({d.host for d in known})
        return max((largest_smaller(replace(shape, host=h), known, least_bytes) for h in hosts), default=0)
    free = sorted(
        (
            d.free_bytes
            for d in devices
            if d.state is DeviceState.READY
            and (not shape.host or d.host == shape.host)
            and d.accepts(shape.exclusivity, shape.tenant)
        ),
        reverse=True,
    )
    if len(free) < shape.count:
        return 0
    offered = min(free[shape.count - 1], shape.vram_bytes)
    return offered if offered >= max(1, least_bytes) else 0


@dataclass(frozen=True, slots=True)
class Resident:
    """A lease as its device sees it."""

    tenant: str
    exclusivity: Exclusivity
    vram_bytes: int


def _wants_all(resident: Resident) -> bool:
    """Whoever is neither shared nor session wants to be alone; a kind this code does not know too."""
    return resident.exclusivity is not Exclusivity.SHARED and resident.exclusivity is not Exclusivity.SESSION


def occupy(device: Device, residents: Sequence[Resident]) -> Device:
    """The device with its sums recomputed from who is on it; overcommit is a bug and says so."""
    used = sum(r.vram_bytes for r in residents)
    if used > device.capacity_bytes:
        raise InvariantBroken(f"device {device.id} is overcommitted: {used} of {device.capacity_bytes}")
    tenants = sorted({r.tenant for r in residents})
    return _changed(
        device,
        free_bytes=device.capacity_bytes - used,
        leases=len(residents),
        session_leases=sum(r.exclusivity is Exclusivity.SESSION for r in residents),
        device_leases=sum(_wants_all(r) for r in residents),
        sole_tenant="" if not tenants else tenants[0] if len(tenants) == 1 else MANY_TENANTS,
    )


def join(device: Device, resident: Resident) -> Device:
    """One more lease on the device; the sums move by one instead of being recomputed."""
    if resident.vram_bytes > device.free_bytes:
        raise InvariantBroken(
            f"device {device.id} has {device.free_bytes} bytes free, not {resident.vram_bytes}"
        )
    alone = device.sole_tenant in ("", resident.tenant)
    return _changed(
        device,
        free_bytes=device.free_bytes - resident.vram_bytes,
        leases=device.leases + 1,
        session_leases=device.session_leases + (resident.exclusivity is Exclusivity.SESSION),
        device_leases=device.device_leases + _wants_all(resident),
        sole_tenant=resident.tenant if alone else MANY_TENANTS,
    )


#: What a desktop's windows may come and go by.
SLACK_BYTES = 8 << 20


def left_behind(used_bytes: int, baseline_bytes: int) -> int:
    """What is in use beyond what was in use before anybody leased the device; 0 when it is only the usual
    coming and going."""
    excess = used_bytes - baseline_bytes
    return excess if excess > SLACK_BYTES else 0
