"""A driver: the few things a device can do, for one process.

Rules of this port:
- A driver does what it is told with raw handles; `drivers.session.GpuSession` has checked owner, bounds, liveness, quota and
  lease before it is told. Only a session calls a Context.
- Failures of the device are `DeviceFault` with the device's own words in them; foreign exceptions do not pass this edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sublet.core.kernel import Scalar, Shape3
from sublet.ports.ledger import FoundDevice

#: Whatever a driver calls a buffer or a module. Opaque to everybody else.
RawBuffer = Any
RawModule = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    sources: tuple[str, ...]  # what `load` accepts: 'python', 'opencl-c', 'ptx', 'cubin', 'cuda-c'
    measures_memory: bool  # can `used_bytes` see what other processes hold?
    float64: bool = True


class Context(Protocol):
    """One device, opened in this process."""

    def alloc(self, size: int) -> RawBuffer:
        """Zeroed memory, or `DeviceFault` when the device has none left."""

    def free(self, buffer: RawBuffer) -> None: ...
    def write(self, buffer: RawBuffer, offset: int, data: memoryview) -> None: ...
    def read(self, buffer: RawBuffer, offset: int, size: int) -> bytes: ...

    def load(self, source: str | bytes) -> RawModule:
        """Compile or take code; a failed compile carries the compiler's log."""

    def unload(self, module: RawModule) -> None: ...

    def launch(
        self, module: RawModule, kernel: str, grid: Shape3, block: Shape3, args: Sequence[Scalar | RawBuffer]
    ) -> None:
        """Start it; `BadInput` for a kernel the module does not have or arguments it does not take."""

    def sync(self, timeout_us: int | None) -> int:
        """Wait for everything started; the device time spent, in microseconds. `DeviceFault` when it takes longer."""

    def close(self) -> None:
        """Let go of the device. Called once, last."""


class Driver(Protocol):
    """One kind of device on this host."""

    name: str

    def capabilities(self) -> Capabilities: ...

    def probe(self, spec: str, host: str) -> Sequence[FoundDevice]:
        """Called by a warden: the devices a part of SUBLET_DEVICES names. Empty when there is none; never raises for that."""

    def open(self, device_id: str, ordinal: int, lease_id: str) -> Context:
        """Called in the process that will use it, never in one that later forks."""

    def used_bytes(self, device_id: str, ordinal: int) -> int | None:
        """Called by a warden: what all processes hold on the device, or None when only process death can tell."""
