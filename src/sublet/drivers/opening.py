"""Opening a leased device with the driver that found it, in whichever process the lease's work runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sublet.core.errors import BadInput, Misconfigured
from sublet.drivers.session import GpuSession, Held
from sublet.plugins import installed
from sublet.ports.driver import Driver


def installed_drivers() -> dict[str, Driver]:
    """Every driver of this installation. A driver whose libraries are missing finds no devices."""
    return {point.name: point.load()() for point in installed("sublet.drivers")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What must be known to open a device somewhere else than where it was found."""

    driver: str
    declared: str  # what SUBLET_DEVICES says about the driver's devices
    host: str
    device_id: str
    ordinal: int
    quota_bytes: int
    watchdog_us: int


_leased: tuple[Opening, ...] = ()


def lend(openings: Sequence[Opening]) -> None:
    """In a worker, before its first call: the devices of its lease."""
    global _leased
    _leased = tuple(openings)


def leased() -> tuple[Opening, ...]:
    """In a worker: how the devices of its lease are opened."""
    return _leased


def leased_opening(index: int, watchdog_us: int) -> Opening:
    """In a worker, called by whoever holds its lease from afar and knows the device only by its number."""
    if not 0 <= index < len(_leased):
        raise BadInput(f"device {index} is not one of this lease's {len(_leased)}")
    return replace(_leased[index], watchdog_us=watchdog_us)


def open_device(wanted: Opening, lease: Held) -> GpuSession:
    driver = installed_drivers().get(wanted.driver)
    if driver is None:
        raise Misconfigured(
            f"device {wanted.device_id} needs the driver {wanted.driver}, which is not installed here"
        )
    if wanted.driver == "host":
        # The one driver whose devices are only what was declared about them.
        driver.probe(wanted.declared, wanted.host)
    context = driver.open(wanted.device_id, wanted.ordinal, lease.id)
    return GpuSession(
        context, lease, wanted.quota_bytes, device_id=wanted.device_id, watchdog_us=wanted.watchdog_us
    )
