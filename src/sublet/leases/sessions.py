"""Opening a GpuSession on a device of a lease, where the lease's work runs: in this process, in its worker,
or on another host."""

from __future__ import annotations

from sublet.devices.opening import Opening, open_device
from sublet.devices.worker_session import WorkerGpuSession
from sublet.leases.lease import Lease
from sublet.ports.device import GpuSession
from sublet.settings import Settings
from sublet.wiring import open_ledger, placement


def opening_of(settings: Settings, lease: Lease, index: int, watchdog_us: int) -> Opening:
    """Return what is needed to open one of the lease's devices, wherever its work runs."""
    device_id = lease.devices[index]
    placed = placement(settings) if not lease.here else None
    host = "" if placed is not None else settings["host"]
    device = next(d for d in open_ledger(settings).devices(host) if d.id == device_id)
    devices = placed.declared(device.host) if placed is not None else settings["devices"]
    return Opening(
        driver=device.driver,
        declared=_declared(devices, device.driver),
        host=device.host,
        device_id=device_id,
        ordinal=device.ordinal,
        quota_bytes=lease.vram_bytes,
        watchdog_us=watchdog_us,
    )


def open_session(settings: Settings, lease: Lease, index: int, watchdog_us: int) -> GpuSession:
    """Open one of the lease's devices where the lease's work runs: here, or in its worker."""
    wanted = opening_of(settings, lease, index, watchdog_us)
    return open_device(wanted, lease) if not lease.in_worker else WorkerGpuSession(lease.run, wanted)


def _declared(spec: str, driver: str) -> str:
    parts = [p.strip().partition(":")[2] for p in spec.split(",") if p.strip().startswith(f"{driver}:")]
    return parts[0] if parts else "auto"
