"""A driver: the few things a device can do, for one process.

Rules of this port:
- A driver does what it is told with raw handles; `drivers.session.GpuSession` has checked owner, bounds, liveness, quota and
  lease before it is told. Only a session calls a Context; so do scrubbing and the self-test, which no lease stands behind.
- Memory freed by one process may be handed to the next with what is in it (`keeps_contents`). `scrub` is what is done about it, by
  a process of its own, before memory that somebody had is granted again.
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
    keeps_contents: bool  # may memory freed by one process be read by the next that gets it?
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
        """Let go of the device, and of all that an interrupted `alloc`, `free`, `load` or `unload` left on it. Called once, last."""


class Driver(Protocol):
    """One kind of device on this host."""

    name: str

    def capabilities(self, ordinal: int = 0) -> Capabilities:
        """What that device can. Never opens it."""

    def probe(self, spec: str, host: str) -> Sequence[FoundDevice]:
        """Called by a warden: the devices a part of SUBLET_DEVICES names. Empty when there is none; never raises for that."""

    def open(self, device_id: str, ordinal: int, lease_id: str) -> Context:
        """Called in the process that will use it, never in one that later forks."""

    def used_bytes(self, device_id: str, ordinal: int, besides: frozenset[int] = frozenset()) -> int | None:
        """Called by a warden: what is in use on the device by anybody except the processes `besides` (pids as the host counts
        them), also by processes that are gone. None when only process death can tell."""

    def scrub(self, device_id: str, ordinal: int, size: int) -> int:
        """Called in a process of its own before memory is granted again: overwrite `size` bytes of free memory, or as much as
        is free. How many bytes were overwritten: 0 where freed memory does not keep its contents. `DeviceFault` when the
        device does not read back what was written."""
