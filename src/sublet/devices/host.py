"""The host driver: main memory as a device, Python functions as kernels. Needs nothing, works everywhere.

Rules of this file:
- It is the reference: what it does is what the contract suite asks of every driver.
- Device memory is anonymous files (memfd) named after their device. They vanish with the last process that
  holds them, as a GPU's memory does, and a warden can add up who still holds what from /proc, as NVML would
  tell it.
- A kernel is a Python function `kernel(grid, *args)`: scalars come as numbers, buffers as writable
  memoryviews. It runs at `launch`.
- Faults (latency, no memory, wedging on close, leaking) can be declared, so that every guarantee can be
  tested without a GPU.
"""

from __future__ import annotations

import contextlib
import inspect
import mmap
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublet.core.errors import BadInput, CompileFailed, DeviceFault, KernelTimeout, OutOfMemory
from sublet.core.progress.kernel_arguments import Scalar, Shape3
from sublet.core.values import format_size, parse_duration, parse_size
from sublet.machine.single_flight import SharedLook
from sublet.ports.device import Capabilities
from sublet.ports.ledger import FoundDevice

_SPEC = re.compile(r"(?:(\d+)x)?([^!]+)(?:!(.*))?")
MOST = 1024
#: The size of what a leaking device keeps: more than a desktop's use varies by. The pages are never touched,
#: so they cost no memory.
LEAK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What may go wrong, declared in SUBLET_DEVICES after a '!':
    `host:1x4GiB!latency=5ms+oom=2GiB+wedge+leak`."""

    latency_us: int = 0
    oom_bytes: int = 0  # the device fails above this, whatever it claims to have
    wedge: bool = False  # once opened, memory never comes back and closing hangs
    leak: bool = False  # closing leaves memory behind


def parse_faults(text: str) -> Faults:
    values: dict[str, Any] = {}
    for part in filter(None, text.split("+")):
        name, _, value = part.partition("=")
        if name == "latency":
            values["latency_us"] = parse_duration(value, what="latency")
        elif name == "oom":
            values["oom_bytes"] = parse_size(value, what="oom")
        elif name in ("wedge", "leak"):
            values[name] = True
        else:
            raise BadInput(f"host device fault {name[:40]!r} is unknown: use latency=, oom=, wedge or leak")
    return Faults(**values)


def memory_name(device_id: str) -> str:
    return f"sublet:{device_id}"


def _link(device_id: str) -> str:
    """The name /proc shows in the list of a process's open files."""
    return f"/memfd:{memory_name(device_id)} (deleted)"


_OURS = "/memfd:sublet:"


class _Memory:
    """One buffer."""

    __slots__ = ("fd", "map", "size", "view")

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = -1
        self.map: mmap.mmap | None = None
        self.view = memoryview(b"")

    def take(self, device_id: str) -> None:
        try:
            self.fd = os.memfd_create(memory_name(device_id), os.MFD_CLOEXEC)
            os.ftruncate(self.fd, self.size)
            self.map = mmap.mmap(self.fd, self.size)
        except (OSError, ValueError) as e:
            self.close()
            raise OutOfMemory(f"the host has not {format_size(self.size)} of memory left") from e
        self.view = memoryview(self.map)

    def close(self) -> None:
        """Safe to call twice, and when only half of it was taken."""
        self.view.release()
        if self.map is not None:
            with contextlib.suppress(BufferError):  # a kernel kept a view: the map goes when it lets go
                self.map.close()
        if self.fd >= 0:
            fd, self.fd = self.fd, -1  # the number may be another file's by the second time
            os.close(fd)


class HostContext:
    """Implements `ports.device.Context`."""

    def __init__(self, device_id: str, faults: Faults) -> None:
        self._device_id = device_id
        self._faults = faults
        self._held: dict[int, _Memory] = {}
        self._used = 0
        self._spent_us = 0
        self._slowest_us = 0

    def alloc(self, size: int) -> _Memory:
        if self._faults.oom_bytes and self._used + size > self._faults.oom_bytes:
            raise OutOfMemory(f"the device has not {format_size(size)} left")
        memory = _Memory(size)
        # Noted before it takes anything, so that `close` finds what a Ctrl-C cut short.
        self._held[id(memory)] = memory
        try:
            memory.take(self._device_id)
        except OutOfMemory:
            del self._held[id(memory)]
            raise
        self._used += size
        return memory

    def free(self, buffer: _Memory) -> None:
        self._used -= buffer.size
        buffer.close()
        del self._held[id(buffer)]

    def write(self, buffer: _Memory, offset: int, data: memoryview) -> None:
        buffer.view[offset : offset + data.nbytes] = data

    def read(self, buffer: _Memory, offset: int, size: int) -> bytes:
        return bytes(buffer.view[offset : offset + size])

    def load(self, source: str | bytes) -> dict[str, Callable[..., object]]:
        text = source.decode(errors="replace") if isinstance(source, bytes) else source
        space: dict[str, Any] = {"__name__": "sublet_kernel"}
        try:
            exec(compile(text, "<kernel>", "exec"), space)
        except Exception as e:
            raise CompileFailed(f"the kernel source did not compile: {type(e).__name__}: {e}") from e
        return {k: v for k, v in space.items() if inspect.isfunction(v)}

    def unload(self, module: dict[str, Callable[..., object]]) -> None:
        module.clear()

    def launch(
        self,
        module: dict[str, Callable[..., object]],
        kernel: str,
        grid: Shape3,
        block: Shape3,
        args: Sequence[Scalar | _Memory],
    ) -> None:
        code = module.get(kernel)
        if code is None:
            known = ", ".join(sorted(module)) or "none"
            raise BadInput(f"the module has no kernel {kernel[:60]!r}; it has {known}")
        total: Shape3 = (grid[0] * block[0], grid[1] * block[1], grid[2] * block[2])
        values: list[Any] = []
        try:
            values += [a.value if isinstance(a, Scalar) else a.view[:] for a in args]
            took = self._run(kernel, code, total, values)
        finally:
            # Also after a refused launch: whoever keeps its exception would keep the memory.
            for value in values:
                if isinstance(value, memoryview):
                    with contextlib.suppress(BufferError):
                        value.release()
        self._spent_us += took
        self._slowest_us = max(self._slowest_us, took)

    def _run(self, kernel: str, code: Callable[..., object], total: Shape3, values: list[Any]) -> int:
        try:
            inspect.signature(code).bind(total, *values)
        except TypeError as e:
            raise BadInput(f"{kernel} does not take these arguments: {e}") from e
        begun = time.perf_counter_ns()
        try:
            if self._faults.latency_us:
                time.sleep(self._faults.latency_us / 1e6)
            code(total, *values)
        except Exception as e:
            raise DeviceFault(f"kernel {kernel} failed: {type(e).__name__}: {e}") from e
        return (time.perf_counter_ns() - begun) // 1000

    def sync(self, timeout_us: int | None) -> int:
        spent, slowest = self._spent_us, self._slowest_us
        self._spent_us = self._slowest_us = 0
        if timeout_us is not None and slowest > timeout_us:
            raise KernelTimeout(f"a kernel ran for {slowest} us, the watchdog allows {timeout_us} us")
        return spent

    def close(self) -> None:
        """Free everything with the context, as a GPU does, also what an interrupted caller never knew it
        had."""
        while self._held:
            self._held.popitem()[1].close()
        if self._faults.wedge:
            while True:
                time.sleep(3600)
        if self._faults.leak:
            _leak(self._device_id)


def leaks(device_id: str) -> Path:
    """The file in which a faulty device keeps what it does not give back. Removing it resets the device."""
    return Path("/dev/shm") / f"sublet-leak-{device_id}"


def _leak(device_id: str) -> None:
    """Take memory that no process holds, as a wedged kernel module would."""
    with leaks(device_id).open("ab") as file:
        file.truncate(LEAK_BYTES)


@dataclass(slots=True)
class _MemoryFile:
    """One file of a device's memory, and who holds it."""

    size: int
    pids: set[int]


def _files() -> dict[str, list[_MemoryFile]]:
    """All memory of all devices, by the name /proc shows. This walks over every open file of every process,
    so one walk serves all callers that wait for it."""
    found: dict[tuple[str, int], _MemoryFile] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{fd}"
                try:
                    name = os.readlink(path)
                    if name.startswith(_OURS):
                        info = os.stat(path)
                        file = found.setdefault((name, info.st_ino), _MemoryFile(0, set()))
                        file.size = info.st_size
                        file.pids.add(int(pid))
                except OSError:
                    continue
    by_name: dict[str, list[_MemoryFile]] = {}
    for (name, _), file in found.items():
        by_name.setdefault(name, []).append(file)
    return by_name


#: It belongs to the module and not to a driver, because a driver is pickled to the process that tries it out.
_held = SharedLook(_files)


class HostDriver:
    """Implements `ports.device.Driver`."""

    name = "host"

    def __init__(self) -> None:
        self._faults: dict[str, Faults] = {}

    def capabilities(self, ordinal: int = 0) -> Capabilities:
        # The kernel zeroes pages before it gives them to anybody.
        return Capabilities(sources=("python",), measures_memory=True, keeps_contents=False)

    def probe(self, spec: str, host: str) -> list[FoundDevice]:
        """`spec` is what follows `host:`; empty or `auto` means one device of half the machine's memory."""
        if spec in ("", "auto"):
            half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
            return [self._device(host, 0, max(1 << 30, half >> 30 << 30), Faults())]
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise BadInput(f"SUBLET_DEVICES host:{spec[:40]} is not understood: write host:2x16GiB")
        count = int(match.group(1) or 1)
        if not 1 <= count <= MOST:
            raise BadInput(f"SUBLET_DEVICES declares {count} host devices: use 1 to {MOST}")
        size = parse_size(match.group(2), what="SUBLET_DEVICES size")
        faults = parse_faults(match.group(3) or "")
        return [self._device(host, ordinal, size, faults) for ordinal in range(count)]

    def _device(self, host: str, ordinal: int, size: int, faults: Faults) -> FoundDevice:
        device_id = f"{host}-host{ordinal}"
        self._faults[device_id] = faults
        return FoundDevice(
            id=device_id,
            driver=self.name,
            ordinal=ordinal,
            name=f"host memory {format_size(size)}",
            capacity_bytes=size,
        )

    def passed_over(self) -> tuple[str, ...]:
        return ()

    def open(self, device_id: str, ordinal: int, lease_id: str) -> HostContext:
        faults = self._faults.get(device_id, Faults())
        if faults.wedge:  # now: whoever is killed later gets no chance to
            _leak(device_id)
        return HostContext(device_id, faults)

    def used_bytes(self, device_id: str, ordinal: int, besides: frozenset[int] = frozenset()) -> int | None:
        """Count each anonymous file of the device once, however many processes hold it, except those that
        `besides` hold too."""
        held = sum(file.size for file in _held().get(_link(device_id), ()) if besides.isdisjoint(file.pids))
        with contextlib.suppress(OSError):
            held += leaks(device_id).stat().st_size
        return held

    def scrub(self, device_id: str, ordinal: int, size: int) -> int:
        return 0
