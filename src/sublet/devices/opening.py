"""Opening a leased device with the driver that found it, in whichever process the lease's work runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sublet.core.errors import BadInput, Misconfigured
from sublet.devices.session import LocalGpuSession, SessionLease
from sublet.machine.plugins import installed
from sublet.ports.device import Driver


def installed_drivers() -> dict[str, Driver]:
    """Every driver of this installation. A driver whose libraries are missing finds no devices."""
    return {point.name: point.load()() for point in installed("sublet.drivers")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What must be known to open a device elsewhere than where it was found."""

    driver: str
    declared: str  # what SUBLET_DEVICES says about the driver's devices
    host: str
    device_id: str
    ordinal: int
    quota_bytes: int
    watchdog_us: int


_leased: tuple[Opening, ...] = ()


def lend(openings: Sequence[Opening]) -> None:
    """Called in a worker before its first call, with the devices of its lease."""
    global _leased
    _leased = tuple(openings)


def leased() -> tuple[Opening, ...]:
    """Called in a worker: how the devices of its lease are opened."""
    return _leased


def leased_opening(index: int, watchdog_us: int) -> Opening:
    """Called in a worker for whoever holds its lease remotely and knows the device only by its number."""
    if not 0 <= index < len(_leased):
        raise BadInput(f"device {index} is not one of this lease's {len(_leased)}")
    return replace(_leased[index], watchdog_us=watchdog_us)


def open_device(wanted: Opening, lease: SessionLease) -> LocalGpuSession:
    driver = installed_drivers().get(wanted.driver)
    if driver is None:
        raise Misconfigured(
            f"device {wanted.device_id} needs the driver {wanted.driver}, which is not installed here"
        )
    if wanted.driver == "host":
        # The one driver whose devices are only what was declared about them.
        driver.probe(wanted.declared, wanted.host)
    context = driver.open(wanted.device_id, wanted.ordinal, lease.id)
    return LocalGpuSession(
        context, lease, wanted.quota_bytes, device_id=wanted.device_id, watchdog_us=wanted.watchdog_us
    )
