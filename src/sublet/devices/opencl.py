"""The OpenCL driver: any OpenCL GPU, and on a machine without one PoCL on the CPU.

Rules of this file:
- A platform is never touched in a process that may fork later (a forked child deadlocks): probing happens in
  a process of its own, and a device is opened only where it will be used.
- PoCL does not cap its memory; the session's quota does. What a process held goes when the process goes, so
  only its death is proof here (`used_bytes` is None).
- A device whose compiler builds nothing is passed over, and why is kept: a PoCL older than the processor is
  one.
- A CPU that two installations of OpenCL show is one device.
- A CPU device's memory comes zeroed from the kernel. A GPU's may still hold what the last process wrote, and
  is scrubbed.
- Argument types are checked against the kernel's own signature before they are set.
- Starting a kernel is the hot path: what a kernel takes is worked out at its first launch, device time is
  added up at `sync`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sublet.core.errors import BadInput, CompileFailed, DeviceFault, KernelTimeout, OutOfMemory
from sublet.core.progress.kernel_arguments import Scalar, Shape3
from sublet.core.values import format_size
from sublet.devices.scrub import overwrite_free
from sublet.ports.device import Capabilities
from sublet.ports.ledger import FoundDevice

_WORDS = {
    "u32": ("uint", "unsigned int"),
    "u64": ("ulong", "unsigned long", "size_t"),
    "i32": ("int",),
    "i64": ("long",),
    "f32": ("float",),
    "f64": ("double",),
}
_KINDS = {word: kind for kind, words in _WORDS.items() for word in words}
_DTYPES = {
    "u32": "uint32",
    "u64": "uint64",
    "i32": "int32",
    "i64": "int64",
    "f32": "float32",
    "f64": "float64",
}
_BUFFER = "a buffer"
_INSTALL = "pip install 'sublet[opencl]'"
_NEWER = "install a newer OpenCL (Debian: pocl-opencl-icd), or use main memory: SUBLET_DEVICES=host:1x16GiB"
_EMPTY_KERNEL = "__kernel void nothing(__global uint* out) { out[0] = 1; }"
#: Spinning is cheaper than sleeping for kernels this short.
_SPIN_NS = 300_000
#: How often launches look for older ones whose device time can be added up.
_SETTLE_EVERY = 256


def _installed() -> bool:
    return find_spec("pyopencl") is not None


class _ReadyKernel:
    """One kernel of a module, ready to be started, and what its arguments must be."""

    __slots__ = ("start", "takes", "types")

    def __init__(self, cl: Any, program: Any, name: str) -> None:
        numpy: Any = import_module("numpy")
        self.start = cl.Kernel(program, name)
        self.types: list[str] = [
            self.start.get_arg_info(place, cl.kernel_arg_info.TYPE_NAME).strip()
            for place in range(self.start.num_args)
        ]
        #: The kind of Scalar, `_BUFFER`, or nothing we could give it.
        self.takes = [_BUFFER if word.endswith("*") else _KINDS.get(word, "") for word in self.types]
        # Without this pyopencl guesses what each argument is by trying: 25 us instead of 5 for a launch.
        self.start.set_arg_types(
            [getattr(numpy, _DTYPES[kind]) if kind in _DTYPES else None for kind in self.takes]
        )


class _Program:
    """A loaded module: each of its kernels is made once."""

    def __init__(self, cl: Any, program: Any) -> None:
        self.cl = cl
        self.program = program
        self.kernels: dict[str, _ReadyKernel] = {}

    def find(self, name: str) -> _ReadyKernel:
        found = self.kernels.get(name)
        if found is None:
            try:
                found = self.kernels[name] = _ReadyKernel(self.cl, self.program, name)
            except self.cl.LogicError as e:
                known = self.program.kernel_names if hasattr(self.program, "kernel_names") else ""
                raise BadInput(f"the module has no kernel {name[:60]!r}; it has {known or 'others'}") from e
        return found


class OpenClContext:
    """Implements `ports.device.Context`."""

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
        self._complete = cl.command_execution_status.COMPLETE
        self._start, self._end = cl.profiling_info.START, cl.profiling_info.END
        self._events: list[Any] = []  # of launches not yet added up, oldest first
        self._spent_ns = 0

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
        with _OpenClErrors(self._cl):
            self._cl.enqueue_copy(self._queue, buffer, data, dst_offset=offset, is_blocking=True)

    def read(self, buffer: Any, offset: int, size: int) -> bytes:
        out = self._empty(size, dtype=self._byte)
        with _OpenClErrors(self._cl):
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
        code = module.find(kernel)
        takes = code.takes
        if len(args) != len(takes):
            raise BadInput(
                f"{kernel} takes {len(takes)} arguments ({', '.join(code.types)}), not {len(args)}"
            )
        values = []
        for place, arg in enumerate(args):
            scalar = isinstance(arg, Scalar)
            given = arg.kind if scalar else _BUFFER
            if given != takes[place]:
                raise BadInput(f"argument {place} of {kernel} is {code.types[place]}, not {given}")
            values.append(arg.value if scalar else arg)
        total = (grid[0] * block[0], grid[1] * block[1], grid[2] * block[2])
        try:
            self._events.append(code.start(self._queue, total, block, *values))
        except self._cl.LogicError as e:
            # The device is well, the request is not: a block too large for it, memory where it wants a size.
            raise BadInput(f"the device cannot launch {kernel} as grid {grid} of block {block}: {e}") from e
        except self._cl.Error as e:
            raise _fault(self._cl, e) from e
        if len(self._events) % _SETTLE_EVERY == 0:
            self._settle_old()

    def _settle_old(self) -> None:
        """Add up the older half, if it is over. Waiting for it here would be a wait without a watchdog."""
        half = self._events[: len(self._events) // 2]
        if half[-1].command_execution_status <= self._complete:
            with _OpenClErrors(self._cl):
                self._settle(half)
            del self._events[: len(half)]

    def _settle(self, events: list[Any]) -> None:
        """Add up launches whose last is over, and so all of them: the queue keeps their order."""
        self._cl.wait_for_events(events)  # raises if one of them failed
        for event in events:
            # `event.profile` does the same, twenty times slower.
            self._spent_ns += event.get_profiling_info(self._end) - event.get_profiling_info(self._start)

    def sync(self, timeout_us: int | None) -> int:
        if self._events:
            with _OpenClErrors(self._cl):
                self._queue.flush()
                self._await(self._events[-1], timeout_us)
                self._settle(self._events)
            self._events.clear()
        # A remainder below a microsecond counts next time: a million tiny kernels are not free.
        spent_us, self._spent_ns = divmod(self._spent_ns, 1000)
        return spent_us

    def _await(self, event: Any, timeout_us: int | None) -> None:
        """Poll for the end, because a wait inside the library cannot be given up."""
        begun = time.perf_counter_ns()
        pause = 50e-6
        while event.command_execution_status > self._complete:
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


class _OpenClErrors:
    """Turns the library's errors into ours. A class, because a generator costs more than a launch."""

    __slots__ = ("_cl",)

    def __init__(self, cl: Any) -> None:
        self._cl = cl

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, self._cl.Error):
            raise _fault(self._cl, error) from error


def _fault(cl: Any, error: Any) -> DeviceFault:
    if isinstance(error, cl.MemoryError):
        return OutOfMemory(f"the device has no memory left: {error}")
    return DeviceFault(f"the device failed: {error}")


def _log_of(error: Any) -> str:
    text = str(error)
    marker = "Build on <"
    return text[text.index(marker) :].strip()[:4000] if marker in text else text[:4000]


def _all_devices(cl: Any) -> list[Any]:
    return [d for platform in cl.get_platforms() for d in platform.get_devices()]


def _describe() -> list[dict[str, object]]:
    """List the devices. Runs in a process of its own, started by `probe`."""
    cl: Any = import_module("pyopencl")
    found: list[dict[str, object]] = []
    cpu_shown_by: Any = None
    for ordinal, device in enumerate(_all_devices(cl)):
        on_cpu = bool(device.type & cl.device_type.CPU)
        unusable = _why_unusable(cl, device)
        if on_cpu and not unusable:
            cpu_shown_by = cpu_shown_by or device.platform
            if device.platform != cpu_shown_by:
                unusable = f"{cpu_shown_by.version.strip()} shows the same processor"
        found.append(
            {
                "ordinal": ordinal,
                "name": device.name.strip(),
                "memory": int(device.global_mem_size),
                "cpu": on_cpu,
                "float64": bool(device.double_fp_config),
                "platform": device.platform.version.strip(),
                "unusable": unusable,
                "physical": "" if on_cpu else _uuid(device) or f"opencl-{ordinal}",
            }
        )
    return found


def _uuid(device: Any) -> str:
    """By which NVIDIA's own driver knows it too; empty where the platform does not tell."""
    try:
        return f"GPU-{uuid.UUID(bytes=bytes(device.uuid_khr))}"
    except Exception:  # each platform fails in its own way at what it does not know
        return ""


def _why_unusable(cl: Any, device: Any) -> str:
    """Empty when the device's compiler builds a kernel; else what it says."""
    try:
        cl.Program(cl.Context([device]), _EMPTY_KERNEL).build()
    except cl.Error as e:
        said = [line.strip() for line in _log_of(e).splitlines()]
        error = next((line for line in said if "error" in line.lower()), "it does not say why")
        return f"the compiler of {device.platform.version.strip()} builds nothing here: {error[:200]}"
    return ""


class OpenClDriver:
    """Implements `ports.device.Driver`."""

    name = "opencl"

    def __init__(self) -> None:
        self._seen: list[dict[str, Any]] | None = None

    def capabilities(self, ordinal: int = 0) -> Capabilities:
        if self._seen is None:
            self._seen = self._see() if _installed() else []
        # A device that was not seen is taken for a GPU: needless scrubbing does no harm.
        on_cpu = any(d["ordinal"] == ordinal and d["cpu"] for d in self._seen)
        return Capabilities(
            sources=("opencl-c",),
            measures_memory=False,
            keeps_contents=not on_cpu,
            float64=all(d.get("float64", True) for d in self._seen if d["ordinal"] == ordinal),
        )

    def probe(self, spec: str, host: str) -> list[FoundDevice]:
        """`auto` is real GPUs, or the CPU device if there is none; else `all`, or ordinals joined by '+'."""
        if not _installed():
            if spec == "auto":
                return []
            raise BadInput("SUBLET_DEVICES asks for OpenCL, which is not installed", remedy=_INSTALL)
        self._seen = self._see()
        seen = [d for d in self._seen if not d["unusable"]]
        cpus = sum(bool(d["cpu"]) for d in seen)
        passed_over = self.passed_over()
        if spec == "auto" and cpus < len(seen):
            seen = [d for d in seen if not d["cpu"]]
        elif spec not in ("", "auto", "all"):
            wanted = {int(part) for part in spec.split("+") if part.isdigit()}
            seen = [d for d in seen if d["ordinal"] in wanted]
            if len(seen) < len(wanted) or not wanted:
                raise BadInput(
                    f"SUBLET_DEVICES opencl:{spec[:40]} names a device that is not there or runs nothing"
                    + "".join(f"; {words}" for words in passed_over),
                    remedy=_NEWER if passed_over else "'sublet doctor' says which are there",
                )
        if not seen and spec != "auto":
            raise (
                BadInput(f"no OpenCL device can run anything: {'; '.join(passed_over)}", remedy=_NEWER)
                if passed_over
                else BadInput("no OpenCL device was found", remedy=_INSTALL)
            )
        return [self._device(d, host, cpus) for d in seen]

    def passed_over(self) -> list[str]:
        return [f"{d['name']}: {d['unusable']}" for d in self._seen or () if d["unusable"]]

    def _see(self) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, "-m", "sublet.devices.opencl"],
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
            physical=str(seen.get("physical", "")),
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
