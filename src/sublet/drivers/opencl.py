"""The OpenCL driver: any OpenCL GPU, and on a machine without one PoCL on the CPU.

Rules of this file:
- A platform is never touched in a process that may fork later (a forked child deadlocks): probing happens in a process of its own,
  and a device is opened only where it will be used.
- PoCL does not cap its memory; the session's quota does. What a process held goes when the process goes, so only its death is
  proof here (`used_bytes` is None).
- A CPU device's memory comes zeroed from the kernel. A GPU's may still hold what the last process wrote, and is scrubbed.
- Argument types are checked against the kernel's own signature before they are set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sublet.core.errors import BadInput, CompileFailed, DeviceFault, KernelTimeout, OutOfMemory
from sublet.core.kernel import Scalar, Shape3
from sublet.core.values import format_size
from sublet.drivers.scrub import overwrite_free
from sublet.ports.driver import Capabilities
from sublet.ports.ledger import FoundDevice

_WORDS = {
    "u32": ("uint", "unsigned int"),
    "u64": ("ulong", "unsigned long", "size_t"),
    "i32": ("int",),
    "i64": ("long",),
    "f32": ("float",),
    "f64": ("double",),
}
_INSTALL = "pip install 'sublet[opencl]'"
#: Spinning is cheaper than sleeping for kernels this short.
_SPIN_NS = 300_000
_KEEP_EVENTS = 256


def _installed() -> bool:
    return find_spec("pyopencl") is not None


class _Program:
    """A loaded module: its kernels are made once, with the types their arguments must have."""

    def __init__(self, cl: Any, program: Any) -> None:
        self.cl = cl
        self.program = program
        self.kernels: dict[str, tuple[Any, tuple[str, ...]]] = {}

    def find(self, name: str) -> tuple[Any, tuple[str, ...]]:
        found = self.kernels.get(name)
        if found is None:
            try:
                kernel = self.cl.Kernel(self.program, name)
            except self.cl.LogicError as e:
                known = self.program.kernel_names if hasattr(self.program, "kernel_names") else ""
                raise BadInput(f"the module has no kernel {name[:60]!r}; it has {known or 'others'}") from e
            info = self.cl.kernel_arg_info
            types = tuple(kernel.get_arg_info(i, info.TYPE_NAME).strip() for i in range(kernel.num_args))
            found = self.kernels[name] = (kernel, types)
        return found


class OpenClContext:
    """Implements `ports.driver.Context`."""

    def __init__(self, ordinal: int) -> None:
        cl: Any = import_module("pyopencl")
        numpy: Any = import_module("numpy")
        self._cl = cl
        self._zero = numpy.zeros(1, dtype=numpy.uint8)
        self._empty = numpy.empty
        self._byte = numpy.uint8
        devices = _all_devices(cl)
        if ordinal >= len(devices):
            raise DeviceFault(f"OpenCL device {ordinal} is gone: this process sees {len(devices)}")
        self._device = devices[ordinal]
        self._context = cl.Context([self._device])
        self._queue = cl.CommandQueue(
            self._context, self._device, properties=cl.command_queue_properties.PROFILING_ENABLE
        )
        self._events: list[Any] = []
        self._spent_us = 0

    def alloc(self, size: int) -> Any:
        cl = self._cl
        try:
            buffer = cl.Buffer(self._context, cl.mem_flags.READ_WRITE, size)
            cl.enqueue_fill_buffer(self._queue, buffer, self._zero, 0, size).wait()
        except (cl.MemoryError, cl.RuntimeError, cl.LogicError) as e:
            raise OutOfMemory(f"the device gave no {format_size(size)}: {e}") from e
        return buffer

    def free(self, buffer: Any) -> None:
        buffer.release()

    def write(self, buffer: Any, offset: int, data: memoryview) -> None:
        with _Faults(self._cl):
            self._cl.enqueue_copy(self._queue, buffer, data, dst_offset=offset, is_blocking=True)

    def read(self, buffer: Any, offset: int, size: int) -> bytes:
        out = self._empty(size, dtype=self._byte)
        with _Faults(self._cl):
            self._cl.enqueue_copy(self._queue, out, buffer, src_offset=offset, is_blocking=True)
        return out.tobytes()  # type: ignore[no-any-return]

    def load(self, source: str | bytes) -> _Program:
        cl = self._cl
        text = source.decode(errors="replace") if isinstance(source, bytes) else source
        try:
            built = cl.Program(self._context, text).build(options=["-cl-kernel-arg-info"])
        except cl.RuntimeError as e:
            raise CompileFailed(f"the kernel source did not compile:\n{_log_of(e)}") from e
        return _Program(cl, built)

    def unload(self, module: _Program) -> None:
        module.kernels.clear()
        module.program = None

    def launch(
        self, module: _Program, kernel: str, grid: Shape3, block: Shape3, args: Sequence[Scalar | Any]
    ) -> None:
        code, types = module.find(kernel)
        if len(args) != len(types):
            raise BadInput(f"{kernel} takes {len(types)} arguments ({', '.join(types)}), not {len(args)}")
        for place, arg in enumerate(args):
            if isinstance(arg, Scalar):
                if types[place] not in _WORDS[arg.kind]:
                    raise BadInput(f"argument {place} of {kernel} is {types[place]}, not {arg.kind}")
                code.set_arg(place, arg.encoded())
            else:
                if not types[place].endswith("*"):
                    raise BadInput(f"argument {place} of {kernel} is {types[place]}, not a buffer")
                code.set_arg(place, arg)
        total = (grid[0] * block[0], grid[1] * block[1], grid[2] * block[2])
        with _Faults(self._cl):
            self._events.append(self._cl.enqueue_nd_range_kernel(self._queue, code, total, block))
        if len(self._events) >= _KEEP_EVENTS:
            self._settle(self._events[: _KEEP_EVENTS // 2])
            del self._events[: _KEEP_EVENTS // 2]

    def _settle(self, events: list[Any]) -> None:
        for event in events:
            event.wait()
            self._spent_us += (event.profile.end - event.profile.start) // 1000

    def sync(self, timeout_us: int | None) -> int:
        if self._events:
            with _Faults(self._cl):
                self._queue.flush()
                self._await(self._events[-1], timeout_us)
                self._settle(self._events)
            self._events.clear()
        spent, self._spent_us = self._spent_us, 0
        return spent

    def _await(self, event: Any, timeout_us: int | None) -> None:
        """A wait inside the library cannot be given up, so the end is looked for instead."""
        complete = self._cl.command_execution_status.COMPLETE
        begun = time.perf_counter_ns()
        pause = 50e-6
        while event.command_execution_status > complete:
            spent = time.perf_counter_ns() - begun
            if timeout_us is not None and spent > timeout_us * 1000:
                raise KernelTimeout(
                    f"a kernel still runs after {timeout_us} us, the longest the watchdog allows"
                )
            if spent > _SPIN_NS:
                time.sleep(pause)
                pause = min(pause * 2, 2e-3)

    def close(self) -> None:
        self._events.clear()
        self._queue = self._context = None


class _Faults:
    """Errors of the library become ours at this edge. A class, because a generator costs more than a launch."""

    __slots__ = ("_cl",)

    def __init__(self, cl: Any) -> None:
        self._cl = cl

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, self._cl.MemoryError):
            raise OutOfMemory(f"the device has no memory left: {error}") from error
        if isinstance(error, self._cl.Error):
            raise DeviceFault(f"the device failed: {error}") from error


def _log_of(error: Any) -> str:
    text = str(error)
    marker = "Build on <"
    return text[text.index(marker) :].strip()[:4000] if marker in text else text[:4000]


def _all_devices(cl: Any) -> list[Any]:
    return [d for platform in cl.get_platforms() for d in platform.get_devices()]


def _describe() -> list[dict[str, object]]:
    """Run in a process of its own by `probe`."""
    cl: Any = import_module("pyopencl")
    found: list[dict[str, object]] = []
    for ordinal, device in enumerate(_all_devices(cl)):
        on_cpu = bool(device.type & cl.device_type.CPU)
        found.append(
            {
                "ordinal": ordinal,
                "name": device.name.strip(),
                "memory": int(device.global_mem_size),
                "cpu": on_cpu,
                "float64": bool(device.double_fp_config),
            }
        )
    return found


class OpenClDriver:
    """Implements `ports.driver.Driver`."""

    name = "opencl"

    def __init__(self) -> None:
        self._seen: list[dict[str, Any]] | None = None

    def capabilities(self, ordinal: int = 0) -> Capabilities:
        if self._seen is None:
            self._seen = self._see() if _installed() else []
        # A device that was not seen is taken for a GPU: scrubbing for nothing does no harm.
        on_cpu = any(d["ordinal"] == ordinal and d["cpu"] for d in self._seen)
        return Capabilities(
            sources=("opencl-c",),
            measures_memory=False,
            keeps_contents=not on_cpu,
            float64=all(d.get("float64", True) for d in self._seen if d["ordinal"] == ordinal),
        )

    def probe(self, spec: str, host: str) -> list[FoundDevice]:
        """`auto`: real GPUs, or the CPU device if there is none. `all`, or ordinals joined by '+'."""
        if not _installed():
            if spec == "auto":
                return []
            raise BadInput("SUBLET_DEVICES asks for OpenCL, which is not installed", remedy=_INSTALL)
        seen = self._seen = self._see()
        cpus = sum(bool(d["cpu"]) for d in seen)
        if spec == "auto" and cpus < len(seen):
            seen = [d for d in seen if not d["cpu"]]
        elif spec not in ("", "auto", "all"):
            wanted = {int(part) for part in spec.split("+") if part.isdigit()}
            seen = [d for d in seen if d["ordinal"] in wanted]
            if len(seen) < len(wanted) or not wanted:
                raise BadInput(f"SUBLET_DEVICES opencl:{spec[:40]} names a device that is not there")
        if not seen and spec != "auto":
            raise BadInput("no OpenCL device was found", remedy=_INSTALL)
        return [self._device(d, host, cpus) for d in seen]

    def _see(self) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "sublet.drivers.opencl"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        try:
            return json.loads(done.stdout)  # type: ignore[no-any-return]
        except ValueError:
            return []

    def _device(self, seen: dict[str, Any], host: str, cpus: int) -> FoundDevice:
        memory = int(seen["memory"])
        if seen["cpu"]:
            # The machine's own memory, of which the devices on it share half.
            memory = (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2 // cpus) >> 20 << 20
        return FoundDevice(
            id=f"{host}-opencl{seen['ordinal']}",
            driver=self.name,
            ordinal=int(seen["ordinal"]),
            name=str(seen["name"])[:60],
            capacity_bytes=memory,
        )

    def open(self, device_id: str, ordinal: int, lease_id: str) -> OpenClContext:
        if not _installed():
            raise DeviceFault(f"{device_id} needs OpenCL, which is not installed here", remedy=_INSTALL)
        return OpenClContext(ordinal)

    def used_bytes(self, device_id: str, ordinal: int, besides: frozenset[int] = frozenset()) -> int | None:
        return None

    def scrub(self, device_id: str, ordinal: int, size: int) -> int:
        if not self.capabilities(ordinal).keeps_contents:
            return 0
        context = self.open(device_id, ordinal, "scrub")
        try:
            return overwrite_free(context, size)
        finally:
            context.close()


if __name__ == "__main__":
    print(json.dumps(_describe()))
