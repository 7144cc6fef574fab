"""A device: the few things its driver can do for one process, and the session a program uses it through.

Rules of this port:
- A driver does what it is told with raw handles; `devices.session.LocalGpuSession` has checked owner, bounds,
  liveness, quota and lease before. Only a session calls a Context, except for scrubbing and the self-test,
  which run without a lease.
- Memory freed by one process may reach the next with its contents (`keeps_contents`). `scrub` overwrites it,
  in a process of its own, before it is granted again.
- Failures of the device are `DeviceFault` with the device's own words in them; foreign exceptions do not pass
  this port.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from sublet.core.progress.kernel_arguments import Scalar, Shape3
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
        """Return zeroed memory, or raise `DeviceFault` when the device has none left."""

    def free(self, buffer: RawBuffer) -> None: ...
    def write(self, buffer: RawBuffer, offset: int, data: memoryview) -> None: ...
    def read(self, buffer: RawBuffer, offset: int, size: int) -> bytes: ...

    def load(self, source: str | bytes) -> RawModule:
        """Compile or load code; a failed compile carries the compiler's log."""

    def unload(self, module: RawModule) -> None: ...

    def launch(
        self, module: RawModule, kernel: str, grid: Shape3, block: Shape3, args: Sequence[Scalar | RawBuffer]
    ) -> None:
        """Start it; `BadInput` for a kernel the module does not have or arguments it does not take."""

    def sync(self, timeout_us: int | None) -> int:
        """Wait for everything started, and return the device time spent in microseconds. `DeviceFault` when
        it takes longer."""

    def close(self) -> None:
        """Release the device, and all that an interrupted `alloc`, `free`, `load` or `unload` left on it.
        Called once, last."""


class Driver(Protocol):
    """One kind of device on this host."""

    name: str

    def capabilities(self, ordinal: int = 0) -> Capabilities:
        """What that device can do. Never opens it."""

    def probe(self, spec: str, host: str) -> Sequence[FoundDevice]:
        """Called by a warden: find the devices that a part of SUBLET_DEVICES names. Never raises when there
        is none."""

    def passed_over(self) -> Sequence[str]:
        """Devices that the last probe saw and that can run nothing, each with its reason."""

    def open(self, device_id: str, ordinal: int, lease_id: str) -> Context:
        """Called in the process that will use it, never in one that later forks."""

    def used_bytes(self, device_id: str, ordinal: int, besides: frozenset[int] = frozenset()) -> int | None:
        """Called by a warden: what is in use on the device, also by processes that are gone, except by
        `besides` (pids as the host counts them). None when only process death can tell."""

    def scrub(self, device_id: str, ordinal: int, size: int) -> int:
        """Called in a process of its own before memory is granted again: overwrite `size` bytes of free
        memory, or as much as is free, and return how many. 0 where freed memory does not keep its contents.
        `DeviceFault` when the device does not read back what was written."""


class DeviceClaims(Protocol):
    """Which physical devices of this machine this ledger may grant, and which another one grants (I3)."""

    def claim(self, found: Sequence[FoundDevice]) -> dict[str, str]:
        """Called by a warden before it reports them: keep what is ours until this process ends. Returns the
        ids of those that another ledger grants, each with who that is."""

    def changed(self) -> bool:
        """Called now and then: whether a device that was taken is ours now, or the other way round."""


class NoClaims:
    """For tests and simulations, whose devices are not physical."""

    def claim(self, found: Sequence[FoundDevice]) -> dict[str, str]:
        return {}

    def changed(self) -> bool:
        return False


class GpuSession(Protocol):
    """What `lease.open()` returns. Handles belong to the session that made them."""

    @property
    def used_bytes(self) -> int: ...
    def alloc(self, size: int) -> Any: ...
    def free(self, buffer: Any) -> None: ...
    def write(self, buffer: Any, data: bytes | bytearray | memoryview, offset: int = 0) -> None: ...
    def read(self, buffer: Any, size: int | None = None, offset: int = 0) -> bytes: ...
    def load(self, source: str | bytes) -> Any: ...
    def unload(self, module: Any) -> None: ...
    def launch(
        self,
        module: Any,
        kernel: str,
        *,
        grid: tuple[int, ...] | int = (1,),
        block: tuple[int, ...] | int = (1,),
        args: Sequence[Scalar | Any] = (),
    ) -> None: ...
    def sync(self) -> int: ...
    def close(self) -> Any: ...
    def __enter__(self) -> GpuSession: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
