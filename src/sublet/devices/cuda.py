"""The CUDA driver: NVIDIA GPUs through the driver API, their inventory through NVML.

Rules of this file:
- A device is its UUID. NVML and CUDA count devices in different orders, and CUDA_VISIBLE_DEVICES hides some,
  so an ordinal is only ever shown.
- A warden asks NVML and never initialises CUDA: a process that did could not fork. Only `open` does, in the
  process that computes.
- Every verb leaves the calling thread's current context as it found it, so torch in the same process is not
  disturbed.
- Once a kernel has outlived the watchdog, nothing in this file calls the device again: every such call would
  wait for that kernel.
- `cuda.bindings` and `pynvml` are imported when needed, so that machines without them can import this file.

It does not touch MIG instances, peer access, managed memory or streams other than the context's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from sublet.core.errors import (
    BadInput,
    CompileFailed,
    DeviceFault,
    KernelTimeout,
    MissingExtra,
    OutOfMemory,
    SubletError,
)
from sublet.core.progress.kernel_arguments import Scalar, Shape3
from sublet.core.values import check_name, format_duration, format_size
from sublet.devices.cuda_code import (
    ELF,
    Code,
    Memory,
    Param,
    check_arguments,
    compile_cuda_c,
    pack,
    read_signatures,
    source_kind,
)
from sublet.devices.scrub import overwrite_free
from sublet.ports.device import Capabilities
from sublet.ports.ledger import FoundDevice

INSTALL = "pip install 'sublet[cuda]'"

# CUresult, as cuda.h numbers them.
_INVALID_VALUE, _OUT_OF_MEMORY, _UNSUPPORTED_PTX = 1, 2, 222
_NOT_FOUND, _NOT_READY, _TOO_MANY_RESOURCES = 500, 600, 701
_NOT_CODE = frozenset({200, 209, 218, 220, 221, _UNSUPPORTED_PTX, 300})  # what a module may be refused for
_LOST = frozenset({214, 700, 702, *range(709, 722)})  # the context is gone, and every later call says so too

_NVML_NOT_LOADED = 9  # NVML's own numbers begin anew

_LOG_BYTES = 16_384
_MOST_TIMED = 512  # launches whose events are kept before finished ones are added up
_MAX_PAUSE_S = 0.001


# the driver library


class CudaApi:
    """The driver API. Its calls return (CUresult, value…), which becomes a value or one of our errors
    here."""

    def __init__(self) -> None:
        try:
            driver: Any = import_module("cuda.bindings.driver")
        except ImportError as e:
            raise MissingExtra("the package cuda-bindings is not installed", remedy=INSTALL) from e
        self._driver = driver
        self.jit = driver.CUjit_option
        self.attribute = driver.CUdevice_attribute

    def ask(self, verb: str, *args: Any) -> tuple[int, Any]:
        """Return the result's number, and the value that came with it."""
        try:
            code, *values = getattr(self._driver, verb)(*args)
        except (AttributeError, RuntimeError) as e:  # the library, or this function of it, is not there
            raise DeviceFault(
                f"{verb} cannot be called: {e}", remedy="install or update the NVIDIA driver"
            ) from e
        return int(code), values[0] if len(values) == 1 else tuple(values)

    def do(self, verb: str, *args: Any) -> Any:
        code, value = self.ask(verb, *args)
        if code:
            raise self.fault(verb, code)
        return value

    def fault(self, verb: str, code: int) -> DeviceFault:
        words = f"{verb} failed: {self.words(code)}"
        if code == _OUT_OF_MEMORY:
            return OutOfMemory(words)
        if code in _LOST:
            return DeviceFault(words, remedy="end this process: its context on the device is lost")
        return DeviceFault(words)

    def words(self, code: int) -> str:
        """The device's own words: 'CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered'."""
        parts = []
        for verb in ("cuGetErrorName", "cuGetErrorString"):
            try:
                known, text = self.ask(verb, self._driver.CUresult(code))
            except (DeviceFault, ValueError):
                continue
            if known == 0 and text:
                parts.append(text.decode(errors="replace"))
        return ": ".join(parts) or f"CUDA error {code}"


# one device, opened


class CudaContext:
    """Implements `ports.device.Context`."""

    def __init__(self, api: CudaApi, device: Any) -> None:
        self._api = api
        self._device = device
        self._timed: list[tuple[Any, Any]] = []  # events before and after each launch not yet added up
        self._idle: list[tuple[Any, Any]] = []
        self._spent_ms = 0.0
        self._wedged = ""
        self._context = api.do("cuCtxCreate", None, 0, device)
        api.do("cuCtxPopCurrent")

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        if self._wedged:
            raise DeviceFault(
                f"{self._wedged}: only the end of this process returns what it holds",
                remedy="end this process",
            )
        self._api.do("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._api.ask("cuCtxPopCurrent")

    # memory

    def alloc(self, size: int) -> Memory:
        with self._current():
            code, pointer = self._api.ask("cuMemAlloc", size)
            if code == _OUT_OF_MEMORY:
                raise OutOfMemory(f"the device has not {format_size(size)} left: {self._api.words(code)}")
            if code:
                raise self._api.fault("cuMemAlloc", code)
            try:
                self._api.do("cuMemsetD8", pointer, 0, size)
            except DeviceFault:
                self._api.ask("cuMemFree", pointer)
                raise
            return Memory(int(pointer), size)

    def free(self, buffer: Memory) -> None:
        with self._current():
            self._api.do("cuMemFree", buffer.address)

    def write(self, buffer: Memory, offset: int, data: memoryview) -> None:
        with self._current():
            self._api.do("cuMemcpyHtoD", buffer.address + offset, data, data.nbytes)

    def read(self, buffer: Memory, offset: int, size: int) -> bytes:
        data = bytearray(size)
        with self._current():
            self._api.do("cuMemcpyDtoH", data, buffer.address + offset, size)
        return bytes(data)

    # code

    def load(self, source: str | bytes) -> Code:
        kind = source_kind(source)
        image = source.encode() if isinstance(source, str) else source
        with self._current():
            if kind == "cubin":
                return Code(self._module(image), None)
            if kind == "ptx":
                return Code(self._module(image + b"\0"), read_signatures(image.decode()))
            ptx, cubin = compile_cuda_c(image, self._arch())
            signatures = read_signatures(ptx.decode(errors="replace"))
            # A compiler newer than the driver writes PTX the driver cannot read; finished machine code it
            # can.
            return Code(self._module(ptx, otherwise=cubin), signatures)

    def _arch(self) -> str:
        which = self._api.attribute
        major, minor = (
            self._api.do("cuDeviceGetAttribute", name, self._device)
            for name in (
                which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                which.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return f"sm_{major}{minor}"

    def _module(self, image: bytes, otherwise: bytes = b"") -> Any:
        jit = self._api.jit
        log = bytes(_LOG_BYTES)  # the driver's assembler writes into it; nobody else has seen it yet
        options = [jit.CU_JIT_ERROR_LOG_BUFFER, jit.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        code, module = self._api.ask("cuModuleLoadDataEx", image, len(options), options, [log, _LOG_BYTES])
        if code == _UNSUPPORTED_PTX and otherwise:
            return self._module(otherwise)
        if code in _NOT_CODE:
            said = log.split(b"\0", 1)[0].decode(errors="replace").strip()
            what = "does not take this cubin" if image.startswith(ELF) else "did not compile this PTX"
            raise CompileFailed(
                f"the device {what}: {self._api.words(code)}{f'{chr(10)}{said}' if said else ''}"
            )
        if code:
            raise self._api.fault("cuModuleLoadDataEx", code)
        return module

    def unload(self, module: Code) -> None:
        module.functions.clear()
        with self._current():
            self._api.do("cuModuleUnload", module.handle)

    def _function(self, module: Code, kernel: str) -> tuple[Any, tuple[Param, ...] | None]:
        if kernel not in module.functions:
            code, function = self._api.ask("cuModuleGetFunction", module.handle, kernel.encode())
            if code == _NOT_FOUND:
                raise self._no_kernel(module, kernel)
            if code:
                raise self._api.fault("cuModuleGetFunction", code)
            known = module.signatures.get(kernel) if module.signatures is not None else None
            module.functions[kernel] = (function, known if known is not None else self._params(function))
        return module.functions[kernel]

    def _no_kernel(self, module: Code, kernel: str) -> BadInput:
        names = sorted(module.signatures if module.signatures is not None else self._kernels(module))
        remedy = ""
        if any(name.startswith(f"_Z{len(kernel)}{kernel}") for name in names):
            remedy = f'declare it extern "C" __global__ void {kernel[:60]}(…), so that it keeps its name'
        return BadInput(
            f"the module has no kernel {kernel[:60]!r}; it has {', '.join(names) or 'none'}", remedy=remedy
        )

    def _kernels(self, module: Code) -> list[str]:
        """List the kernels of a module without known PTX, where the driver can tell (12.4 and later)."""
        try:
            count = self._api.do("cuModuleGetFunctionCount", module.handle)
            found = self._api.do("cuModuleEnumerateFunctions", count, module.handle) if count else []
            return [self._api.do("cuFuncGetName", f).decode(errors="replace") for f in found]
        except DeviceFault:
            return []

    def _params(self, function: Any) -> tuple[Param, ...] | None:
        """Ask the driver what a kernel takes: sizes only. None where it cannot tell."""
        params: list[Param] = []
        try:
            while True:
                code, about = self._api.ask("cuFuncGetParamInfo", function, len(params))
                if code == _INVALID_VALUE:
                    return tuple(params)
                if code:
                    return None
                _, size = about
                params.append(Param(f"b{size * 8}" if size in (1, 2, 4, 8) else f"b8[{size}]", size))
        except DeviceFault:
            return None

    def launch(
        self, module: Code, kernel: str, grid: Shape3, block: Shape3, args: Sequence[Scalar | Memory]
    ) -> None:
        with self._current():
            function, params = self._function(module, kernel)
            if params is not None:
                check_arguments(kernel, params, args)
            packed, offsets = pack(args)
            values = ctypes.create_string_buffer(packed, len(packed) or 1)
            base = ctypes.addressof(values)
            pointers = (ctypes.c_void_p * (len(offsets) or 1))(*(base + offset for offset in offsets))
            before, after = self._events()
            self._api.do("cuEventRecord", before, 0)
            code, _ = self._api.ask(
                "cuLaunchKernel", function, *grid, *block, 0, 0, ctypes.addressof(pointers), 0
            )
            if code:
                self._idle.append((before, after))
                if code in (_INVALID_VALUE, _TOO_MANY_RESOURCES):
                    raise BadInput(
                        f"the device cannot launch {kernel} as grid {grid} of block {block}: "
                        f"{self._api.words(code)}"
                    )
                raise self._api.fault("cuLaunchKernel", code)
            self._timed.append((before, after))
            self._api.do("cuEventRecord", after, 0)

    # time

    def _events(self) -> tuple[Any, Any]:
        if len(self._timed) >= _MOST_TIMED:
            self._add_up()
        if self._idle:
            return self._idle.pop()
        return self._api.do("cuEventCreate", 0), self._api.do("cuEventCreate", 0)

    def _add_up(self) -> None:
        """Add the device time of launches that are over, oldest first, and reuse their events."""
        done = 0
        for before, after in self._timed:
            if self._api.ask("cuEventQuery", after)[0]:
                break
            code, took_ms = self._api.ask("cuEventElapsedTime", before, after)
            self._spent_ms += 0.0 if code else took_ms
            done += 1
        self._idle += self._timed[:done]
        del self._timed[:done]

    def sync(self, timeout_us: int | None) -> int:
        """Wait for the kernels by polling, because a blocking wait could not be given up."""
        begun, pause_s = time.monotonic_ns(), 0.0
        with self._current():
            while (code := self._api.ask("cuStreamQuery", 0)[0]) == _NOT_READY:
                if timeout_us is not None and time.monotonic_ns() - begun > timeout_us * 1000:
                    self._wedged = f"a kernel ran longer than {format_duration(timeout_us)}"
                    raise KernelTimeout(self._wedged)
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.5 + 2e-6, _MAX_PAUSE_S)
            if code:
                raise self._api.fault("the kernel", code)
            self._add_up()
        spent, self._spent_ms = round(self._spent_ms * 1000), 0.0
        return spent

    def close(self) -> None:
        with self._current():
            for event in (e for pair in (*self._timed, *self._idle) for e in pair):
                self._api.ask("cuEventDestroy", event)
        self._api.do("cuCtxDestroy", self._context)


# the devices of this host


class CudaDriver:
    """Implements `ports.device.Driver`."""

    name = "cuda"

    def __init__(self) -> None:
        self._nvml_pid = 0

    def capabilities(self, ordinal: int = 0) -> Capabilities:
        return Capabilities(sources=("ptx", "cubin", "cuda-c"), measures_memory=True, keeps_contents=True)

    def _nvml(self) -> Any:
        """Return NVML, initialised once per process: without a persistence daemon, doing it again takes a
        second each time."""
        try:
            pynvml: Any = import_module("pynvml")
        except ImportError as e:
            raise MissingExtra("the package nvidia-ml-py is not installed", remedy=INSTALL) from e
        if self._nvml_pid != os.getpid():
            try:
                pynvml.nvmlInit()
            except pynvml.NVMLError as e:
                raise DeviceFault(f"NVML does not start: {e}", remedy="install the NVIDIA driver") from e
            self._nvml_pid = os.getpid()
        return pynvml

    def probe(self, spec: str, host: str) -> list[FoundDevice]:
        """`auto`, `all`, or numbers (as nvidia-smi counts) and UUIDs joined by '+': `cuda:0+1`.

        `auto` passes over what cannot be used; `all` says why. A host without an NVIDIA driver has none, for
        both.
        """
        automatic = spec in ("", "auto")
        try:
            nvml = self._nvml()
            _find_libraries()
            count = _count(nvml)
        except SubletError as e:
            if automatic or (spec == "all" and _no_driver(e)):
                return []
            raise BadInput(
                f"SUBLET_DEVICES cuda:{spec[:40]} cannot be used: {e} ({e.remedy})", remedy=e.remedy
            ) from e
        found: list[FoundDevice] = []
        for ordinal in range(count) if automatic or spec == "all" else _named(nvml, spec, count):
            try:
                found.append(self._device(nvml, ordinal))
            except (nvml.NVMLError, SubletError) as e:
                if not automatic:
                    raise BadInput(f"SUBLET_DEVICES cuda:{spec[:40]}: device {ordinal}: {e}") from e
        return found

    def _device(self, nvml: Any, ordinal: int) -> FoundDevice:
        handle = nvml.nvmlDeviceGetHandleByIndex(ordinal)
        with contextlib.suppress(nvml.NVMLError):  # most devices have no MIG
            if nvml.nvmlDeviceGetMigMode(handle)[0]:
                raise BadInput("it is divided by MIG, which is not supported")
        name = check_name(nvml.nvmlDeviceGetUUID(handle), what="device")
        return FoundDevice(
            id=name,
            physical=name,
            driver=self.name,
            ordinal=ordinal,
            name=nvml.nvmlDeviceGetName(handle),
            capacity_bytes=_memory(nvml, handle)[0],
        )

    def passed_over(self) -> tuple[str, ...]:
        return ()

    def open(self, device_id: str, ordinal: int, lease_id: str) -> CudaContext:
        api = CudaApi()
        api.do("cuInit", 0)
        for index in range(api.do("cuDeviceGetCount")):
            device = api.do("cuDeviceGet", index)
            if f"GPU-{uuid.UUID(bytes=bytes(api.do('cuDeviceGetUuid', device).bytes))}" == device_id:
                return CudaContext(api, device)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise DeviceFault(
            f"CUDA does not show the device {device_id} to this process"
            + (f": CUDA_VISIBLE_DEVICES is {visible[:80]!r}" if visible is not None else "")
        )

    def used_bytes(self, device_id: str, ordinal: int, besides: frozenset[int] = frozenset()) -> int | None:
        """Return the device's own figure, which includes the memory of dead processes, less what NVML says
        the processes `besides` hold.

        None when NVML cannot attribute memory to processes. A driver too old to tell what it keeps for itself
        counts that as used.
        """
        try:
            nvml = self._nvml()
        except SubletError:
            return None
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(device_id)
            first = _held(nvml, handle, besides)
            _, used = _memory(nvml, handle)
            second = _held(nvml, handle, besides)
        except nvml.NVMLError as e:
            if e.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION):
                return None
            raise DeviceFault(f"NVML cannot say what {device_id} holds: {e}") from e
        if None in first.values() or None in second.values():
            return None
        # The processes go on working while we look. The smaller of two readings is subtracted: subtracting
        # too much would hide what somebody else left behind, and subtracting too little is corrected at the
        # next look.
        theirs = sum(int(min(first[pid], second[pid])) for pid in first.keys() & second.keys())
        return max(0, used - theirs)

    def scrub(self, device_id: str, ordinal: int, size: int) -> int:
        try:
            context = self.open(device_id, ordinal, "scrub")
        except OutOfMemory:  # not even a context fits: nothing is free
            return 0
        try:
            return overwrite_free(context, size)
        finally:
            context.close()


def _find_libraries() -> None:
    """Check that a session could be opened: a container may have been given NVML but not CUDA."""
    try:
        present = find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:
        present = False
    if not present:
        raise MissingExtra("the package cuda-bindings is not installed", remedy=INSTALL)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise DeviceFault(
            "the driver library libcuda.so.1 is missing", remedy="install the NVIDIA driver"
        ) from e


def _no_driver(error: SubletError) -> bool:
    """Tell whether there is no NVIDIA driver at all, rather than one that does not work."""
    if getattr(error.__cause__, "value", None) == _NVML_NOT_LOADED:
        return True
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return True
    return False


def _count(nvml: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError as e:
        raise DeviceFault(f"NVML cannot list the devices: {e}") from e


def _named(nvml: Any, spec: str, count: int) -> list[int]:
    """Return the ordinals of the devices that a list names, in its order."""
    chosen: list[int] = []
    for part in re.split(r"[+,]", spec):
        if part.isascii() and part.isdigit():
            ordinal = int(part)
            if ordinal >= count:
                raise BadInput(
                    f"SUBLET_DEVICES names cuda:{part[:20]}; this host has {count} devices, counted from 0"
                )
        elif part.startswith("GPU-"):
            try:
                ordinal = nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(part))
            except nvml.NVMLError as e:
                raise BadInput(
                    f"SUBLET_DEVICES names cuda:{part[:48]}; this host has no such device: {e}"
                ) from e
        else:
            raise BadInput(
                f"SUBLET_DEVICES cuda:{spec[:40]} is not understood: write cuda:all, cuda:0+1 or cuda:GPU-…"
            )
        if ordinal in chosen:
            raise BadInput(f"SUBLET_DEVICES cuda:{spec[:40]} names device {ordinal} twice")
        chosen.append(ordinal)
    return chosen


def _held(nvml: Any, handle: Any, pids: frozenset[int]) -> dict[int, Any]:
    """Return what NVML says these processes hold; None for a process it does not account for."""
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle) if pids else ()
    return {p.pid: p.usedGpuMemory for p in running if p.pid in pids}


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Return the memory that processes can use and the memory in use, both without the driver's own share
    where it reports that."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return int(memory.total - memory.reserved), int(memory.used)
    except nvml.NVMLError:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.used)
