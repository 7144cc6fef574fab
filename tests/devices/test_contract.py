"""One suite over every driver: here the host driver and OpenCL on PoCL.

CUDA runs the same tests in a process of its own, over the pretended driver of `shim/`: see
`test_cuda.test_the_contract_suite`.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sublet.core.errors import (
    BadInput,
    CompileFailed,
    DeviceFault,
    KernelTimeout,
    LeaseLost,
    OutOfMemory,
    SubletError,
)
from sublet.core.progress.kernel_arguments import f32, f64, i32, u32, u64
from sublet.devices import scrub
from sublet.devices.cuda import CudaDriver
from sublet.devices.host import HostDriver
from sublet.devices.opencl import OpenClDriver, _installed
from sublet.devices.session import LocalGpuSession
from sublet.ports.device import Driver
from tests.conftest import MORE_EXAMPLES, need
from tests.devices.cuda_shim import PTX

QUOTA = 1 << 20
#: Variable that names the one driver to run for.
ONLY = "CONTRACT_DRIVER"
DRIVERS: dict[str, type[Driver]] = {"host": HostDriver, "opencl": OpenClDriver, "cuda": CudaDriver}
SPECS = {"host": "1x1GiB", "opencl": "auto", "cuda": "all"}

SOURCES = {
    "host": """
import struct
def train_step(grid, step, n, buf):
    for i in range(n):
        buf[i] = (buf[i] + step) % 256
def mixed(grid, a, b, c, d, e, out):
    out[:] = struct.pack("<IQiif d".replace(" ", ""), a, b, c, 0, d, e)
def count(grid, out):
    out[:4] = struct.pack("<I", grid[0] * grid[1] * grid[2])
""",
    "opencl": """
__kernel void train_step(ulong step, uint n, __global uchar* buf) {
    uint i = get_global_id(0);
    if (i < n) buf[i] = (uchar)(buf[i] + step);
}
__kernel void mixed(uint a, ulong b, int c, float d, double e, __global uchar* out) {
    for (int i = 0; i < 4; i++) out[i] = ((uchar*)&a)[i];
    for (int i = 0; i < 8; i++) out[4 + i] = ((uchar*)&b)[i];
    for (int i = 0; i < 4; i++) out[12 + i] = ((uchar*)&c)[i];
    for (int i = 0; i < 4; i++) out[16 + i] = 0;
    for (int i = 0; i < 4; i++) out[20 + i] = ((uchar*)&d)[i];
    for (int i = 0; i < 8; i++) out[24 + i] = ((uchar*)&e)[i];
}
__kernel void count(__global uint* out) { atomic_inc((volatile __global uint*)out); }
""",
    "cuda": PTX.read_text(),
}
BROKEN = {
    "host": "def f(:",
    "opencl": "__kernel void f( { nonsense }",
    "cuda": ".version 7.0\n.target sm_50\n.address_size 64\n.visible .entry f() {",
}
SLOW = {
    "host": "import time\ndef slow(grid, out):\n    time.sleep(0.2)\n",
    "opencl": "__kernel void slow(__global uint* out) { for (uint i = 0; i < 400000000u; i++) out[i & 1] += i; }",
    "cuda": """
.version 7.0
.target sm_50
.address_size 64
.visible .entry slow(.param .u64 out)
{
again:
    bra again;
}
""",
}
#: The compiler's own words about it.
LOGS = {"host": "invalid syntax (<kernel>, line 1)", "opencl": "error: ", "cuda": "ptxas"}


class FakeLease:
    """Stands for the lease only: whether it is held is the test's to say."""

    id = "Ltest"

    def __init__(self) -> None:
        self.held = True

    def check(self) -> None:
        if not self.held:
            raise LeaseLost("lease Ltest has ended: test")

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        yield


class Rig:
    def __init__(self, name: str) -> None:
        self.name = name
        self.driver = DRIVERS[name]()
        self.lease = FakeLease()
        self.device = self.driver.probe(SPECS[name], "here")[0]

    def open(self, **options: int) -> LocalGpuSession:
        context = self.driver.open(self.device.id, self.device.ordinal, "Ltest")
        return LocalGpuSession(context, self.lease, QUOTA, device_id=self.device.id, **options)


@pytest.fixture(scope="module", params=[os.environ[ONLY]] if ONLY in os.environ else ["host", "opencl"])
def rig(request: pytest.FixtureRequest) -> Rig:
    if request.param == "opencl":
        need(_installed(), "pyopencl with PoCL")
    return Rig(request.param)


@pytest.fixture
def gpu(rig: Rig) -> Iterator[LocalGpuSession]:
    rig.lease.held = True
    session = rig.open()
    yield session
    session.close()


def test_the_recipe(rig: Rig, gpu: LocalGpuSession) -> None:
    """Load, allocate, write, launch with typed arguments, sync, read, unload, free: nothing left for
    teardown."""
    batch = gpu.alloc(4)
    gpu.write(batch, bytes([1, 2, 3, 254]))
    module = gpu.load(SOURCES[rig.name])
    gpu.launch(module, "train_step", grid=(4,), block=(1,), args=[u64(42), u32(4), batch])
    assert gpu.sync() >= 0
    assert gpu.read(batch) == bytes([43, 44, 45, 40])
    gpu.unload(module)
    gpu.free(batch)
    tally = gpu.close()
    assert (tally.launches, tally.left_buffers, tally.left_modules, tally.problems) == (1, 0, 0, [])
    assert (tally.bytes_written, tally.bytes_read) == (4, 4)


def test_arguments_arrive_bit_exact(rig: Rig, gpu: LocalGpuSession) -> None:
    out = gpu.alloc(32)
    module = gpu.load(SOURCES[rig.name])
    for a, b, c, d, e in (
        (0xDEADBEEF, 2**63 + 1, -5, 1.5, -0.1),
        (0, 2**64 - 1, -(2**31), 0.1, 5e-324),  # 0.1 is no f32: it is rounded, as C does
        (2**32 - 1, 0, 2**31 - 1, float("-inf"), float("inf")),
    ):
        gpu.launch(module, "mixed", args=[u32(a), u64(b), i32(c), f32(d), f64(e), out])
        gpu.sync()
        assert gpu.read(out) == struct.pack("<IQiifd", a, b, c, 0, d, e)


def test_every_thread_of_the_grid_runs(rig: Rig, gpu: LocalGpuSession) -> None:
    out = gpu.alloc(4)
    module = gpu.load(SOURCES[rig.name])
    gpu.launch(module, "count", grid=(3, 2), block=(4, 2, 2), args=[out])
    gpu.sync()
    assert struct.unpack("<I", gpu.read(out))[0] == 3 * 2 * 4 * 2 * 2
    gpu.write(out, bytes(4))
    gpu.launch(module, "count", grid=(5000,), args=[out])  # more blocks than a block may have threads
    gpu.sync()
    assert struct.unpack("<I", gpu.read(out))[0] == 5000


def test_memory_is_zeroed(gpu: LocalGpuSession) -> None:
    for _ in range(20):
        buffer = gpu.alloc(4096)
        assert gpu.read(buffer) == bytes(4096)
        gpu.write(buffer, b"\xaa" * 4096)
        gpu.free(buffer)


def test_partial_copies(gpu: LocalGpuSession) -> None:
    buffer = gpu.alloc(10)
    gpu.write(buffer, b"abc", offset=4)
    assert gpu.read(buffer, 5, offset=3) == b"\0abc\0"
    assert gpu.read(buffer, 0, offset=10) == b""
    gpu.write(buffer, b"", offset=10)


def test_wrong_use_is_refused_and_the_session_goes_on(rig: Rig, gpu: LocalGpuSession) -> None:
    other = rig.open()
    foreign_buffer, foreign_module = other.alloc(16), other.load(SOURCES[rig.name])
    buffer, module = gpu.alloc(16), gpu.load(SOURCES[rig.name])
    freed = gpu.alloc(16)
    gpu.free(freed)
    unloaded = gpu.load(SOURCES[rig.name])
    gpu.unload(unloaded)
    wrong = [
        lambda: gpu.alloc(0),
        lambda: gpu.alloc(-1),
        lambda: gpu.alloc(True),
        lambda: gpu.free(freed),
        lambda: gpu.read(freed),
        lambda: gpu.write(foreign_buffer, b"x"),
        lambda: gpu.read(foreign_buffer),
        lambda: gpu.free(foreign_buffer),
        lambda: gpu.unload(foreign_module),
        lambda: gpu.unload(buffer),
        lambda: gpu.free(module),
        lambda: gpu.write(buffer, b"x" * 17),
        lambda: gpu.write(buffer, b"x", offset=16),
        lambda: gpu.write(buffer, b"x", offset=-1),
        lambda: gpu.read(buffer, 17),
        lambda: gpu.read(buffer, -1),
        lambda: gpu.read(buffer, offset=17),
        lambda: gpu.read(buffer, 1, offset=-1),
        lambda: gpu.read(buffer, 2**64),
        lambda: gpu.read(buffer, 1.0),
        lambda: gpu.write(buffer, b"x", offset=2**64),
        lambda: gpu.write(buffer, b"x", offset=0.0),
        lambda: gpu.write(buffer, "text"),
        lambda: gpu.write(module, b"x"),
        lambda: gpu.read(module),
        lambda: gpu.load(7),
        lambda: gpu.unload(unloaded),
        lambda: gpu.launch(unloaded, "count", args=[buffer]),
        lambda: gpu.launch(buffer, "count", args=[buffer]),
        lambda: gpu.launch(module, 7, args=[buffer]),
        lambda: gpu.launch(module, "count", args=[module]),
        lambda: gpu.launch(module, "no_such_kernel"),
        lambda: gpu.launch(foreign_module, "count", args=[buffer]),
        lambda: gpu.launch(module, "count", args=[foreign_buffer]),
        lambda: gpu.launch(module, "count", args=[freed]),
        lambda: gpu.launch(module, "count", args=[]),
        lambda: gpu.launch(module, "count", args=[buffer, buffer]),
        lambda: gpu.launch(module, "train_step", args=[7, u32(4), buffer]),
        lambda: gpu.launch(module, "count", grid=(0,), args=[buffer]),
        lambda: gpu.launch(module, "count", grid=(1, 1, 1, 1), args=[buffer]),
        lambda: gpu.launch(module, "count", grid=(-1,), args=[buffer]),
    ]
    for n, call in enumerate(wrong):
        with pytest.raises(BadInput):
            call()
            pytest.fail(f"case {n} was allowed")
    with pytest.raises(CompileFailed) as failed:
        gpu.load(BROKEN[rig.name])
    assert "did not compile" in str(failed.value)
    assert LOGS[rig.name] in str(failed.value)
    assert gpu.used_bytes == 16
    with pytest.raises(OutOfMemory, match="would exceed the leased 1MiB"):
        gpu.alloc(QUOTA)
    gpu.write(buffer, b"still here......")
    gpu.launch(module, "train_step", grid=(16,), args=[u64(0), u32(16), buffer])
    gpu.sync()
    assert gpu.read(buffer) == b"still here......"
    other.close()


def test_all_that_was_leased_and_not_a_byte_more(gpu: LocalGpuSession) -> None:
    whole = gpu.alloc(QUOTA)
    for size in (1, QUOTA, 2**60):
        with pytest.raises(OutOfMemory, match="would exceed the leased 1MiB: 1MiB is in use"):
            gpu.alloc(size)
    gpu.free(whole)
    halves = gpu.alloc(QUOTA // 2), gpu.alloc(QUOTA // 2)
    with pytest.raises(OutOfMemory):
        gpu.alloc(1)
    gpu.write(halves[1], b"usable")
    assert gpu.read(halves[1], 6) == b"usable"
    assert gpu.tally.errors == 4
    assert gpu.tally.peak_bytes == QUOTA


def test_arguments_must_be_what_the_kernel_declares() -> None:
    """Where kernels declare types: a Python function takes anything."""
    need(_installed(), "pyopencl with PoCL")
    rig = Rig("opencl")
    with rig.open() as gpu:
        buffer, module = gpu.alloc(16), gpu.load(SOURCES["opencl"])
        local = gpu.load("__kernel void f(__local uint* scratch, uchar small) { scratch[0] = small; }")
        for args, words in (
            ([u32(1), u32(16), buffer], "argument 0 of train_step is ulong, not u32"),
            ([u64(1), f32(16), buffer], "argument 1 of train_step is uint, not f32"),
            ([u64(1), buffer, buffer], "argument 1 of train_step is uint, not a buffer"),
            ([u64(1), u32(16), u64(0)], r"argument 2 of train_step is uchar\*, not u64"),
            ([u64(1), u32(16)], r"takes 3 arguments \(ulong, uint, uchar\*\), not 2"),
        ):
            with pytest.raises(BadInput, match=words):
                gpu.launch(module, "train_step", args=args)
        with pytest.raises(BadInput, match="is uchar, not u32"):
            gpu.launch(local, "f", args=[buffer, u32(1)])
        with pytest.raises(BadInput, match="cannot launch count as grid"):
            gpu.launch(module, "count", block=1 << 20, args=[buffer])
        gpu.launch(module, "train_step", grid=16, args=[u64(3), u32(16), buffer])
        gpu.sync()
        assert gpu.read(buffer) == b"\x03" * 16
        assert (gpu.tally.launches, gpu.tally.errors) == (1, 7)


def test_many_launches_between_two_syncs(rig: Rig, gpu: LocalGpuSession) -> None:
    """More than a driver keeps events for: none is lost, and their device time is counted once."""
    buffer, module = gpu.alloc(4), gpu.load(SOURCES[rig.name])
    for _ in range(1300):
        gpu.launch(module, "train_step", grid=4, args=[u64(1), u32(4), buffer])
    spent = gpu.sync()
    assert gpu.read(buffer) == bytes([1300 % 256] * 4)
    assert spent > 0
    assert gpu.sync() == 0
    assert (gpu.tally.launches, gpu.tally.device_us) == (1300, spent)


def test_launching_behind_an_endless_kernel_does_not_hang() -> None:
    """Only `sync` waits, because only it has a watchdog."""
    need(_installed(), "pyopencl with PoCL")
    from sublet.core.errors import KernelTimeout

    gpu = Rig("opencl").open(watchdog_us=20_000)
    slow = "__kernel void slow(__global uint* out) { for (uint i = 0; i < 600000000u; i++) out[i & 1] += i; }"
    buffer, module = gpu.alloc(8), gpu.load(slow + SOURCES["opencl"])
    gpu.launch(module, "slow", args=[buffer])
    for _ in range(600):
        gpu.launch(module, "train_step", args=[u64(1), u32(4), buffer])
    with pytest.raises(KernelTimeout):
        gpu.sync()
    gpu.close()


def test_after_the_lease_nothing_but_freeing_works(rig: Rig) -> None:
    rig.lease.held = True
    gpu = rig.open()
    buffer, module = gpu.alloc(16), gpu.load(SOURCES[rig.name])
    rig.lease.held = False
    for call in (
        lambda: gpu.alloc(1),
        lambda: gpu.write(buffer, b"x"),
        lambda: gpu.read(buffer),
        lambda: gpu.load(SOURCES[rig.name]),
        lambda: gpu.launch(module, "count", args=[buffer]),
        lambda: gpu.sync(),
    ):
        with pytest.raises(LeaseLost):
            call()
    gpu.free(buffer)
    tally = gpu.close()
    assert (tally.left_buffers, tally.left_modules) == (0, 1)
    rig.lease.held = True


def test_teardown_counts_what_was_left(rig: Rig) -> None:
    rig.lease.held = True
    with pytest.raises(ZeroDivisionError), rig.open() as gpu:
        gpu.alloc(100)
        gpu.alloc(28)
        gpu.load(SOURCES[rig.name])
        1 / 0  # noqa: B018
    assert (gpu.tally.left_buffers, gpu.tally.left_modules, gpu.tally.left_bytes) == (2, 1, 128)
    assert gpu.used_bytes == 0


STEPS = ["alloc", "write", "load", "launch", "sync", "read", "unload", "free"]


@settings(max_examples=12 * MORE_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(stop=st.integers(0, len(STEPS)), lose=st.booleans())
def test_an_exception_at_every_line_leaks_nothing(rig: Rig, stop: int, lose: bool) -> None:
    """Whatever line a step dies at, and whether the lease dies with it, the device is as before."""
    rig.lease.held = True
    gpu = rig.open()
    before = rig.driver.used_bytes(rig.device.id, rig.device.ordinal)
    with contextlib.suppress(SubletError, KeyError), gpu:
        made: dict[str, object] = {}
        for number, step in enumerate(STEPS):
            if number == stop:
                rig.lease.held = not lose
                raise KeyError(step)
            if step == "alloc":
                made["buffer"] = gpu.alloc(64)
            elif step == "write":
                gpu.write(made["buffer"], b"x" * 64)
            elif step == "load":
                made["module"] = gpu.load(SOURCES[rig.name])
            elif step == "launch":
                gpu.launch(made["module"], "train_step", grid=(64,), args=[u64(1), u32(64), made["buffer"]])
            elif step == "sync":
                gpu.sync()
            elif step == "read":
                assert gpu.read(made["buffer"]) == b"y" * 64
            elif step == "unload":
                gpu.unload(made["module"])
            elif step == "free":
                gpu.free(made["buffer"])
    rig.lease.held = True
    assert gpu.used_bytes == 0
    assert not gpu._live
    assert gpu.tally.problems == []
    assert rig.driver.used_bytes(rig.device.id, rig.device.ordinal) == before


def test_the_watchdog_gives_a_kernel_up(rig: Rig) -> None:
    rig.lease.held = True
    gpu = rig.open(watchdog_us=20_000)
    buffer = gpu.alloc(8)
    gpu.launch(gpu.load(SLOW[rig.name]), "slow", args=[buffer])
    with pytest.raises(KernelTimeout):
        gpu.sync()
    with pytest.raises(DeviceFault, match="the session is over"):
        gpu.read(buffer)
    assert "longer than" in gpu.close().problems[0]


def test_memory_of_anybody_but_us(rig: Rig) -> None:
    rig.lease.held = True
    us = frozenset([os.getpid()])
    before = rig.driver.used_bytes(rig.device.id, rig.device.ordinal)
    with rig.open() as gpu:
        gpu.alloc(100_000)
        used = rig.driver.used_bytes(rig.device.id, rig.device.ordinal)
        others = rig.driver.used_bytes(rig.device.id, rig.device.ordinal, us)
    if rig.driver.capabilities(rig.device.ordinal).measures_memory:
        assert (used - before, others) == (100_000, 0)
    else:
        assert (before, used, others) == (None, None, None)


def test_scrubbing(rig: Rig) -> None:
    """Nothing to do where freed memory does not keep what was in it."""
    before = rig.driver.used_bytes(rig.device.id, rig.device.ordinal)
    keeps = rig.driver.capabilities(rig.device.ordinal).keeps_contents
    assert keeps is (rig.name == "cuda")
    assert rig.driver.scrub(rig.device.id, rig.device.ordinal, 1 << 20) == (1 << 20 if keeps else 0)
    assert rig.driver.used_bytes(rig.device.id, rig.device.ordinal) == before


def test_overwriting_free_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "PIECE_BYTES", 1 << 16)
    context = rig.driver.open(rig.device.id, rig.device.ordinal, "scrub")
    before = rig.driver.used_bytes(rig.device.id, rig.device.ordinal)
    for size in (0, 1, 1 << 16, (1 << 20) + 1):
        assert scrub.overwrite_free(context, size) == size
    assert rig.driver.used_bytes(rig.device.id, rig.device.ordinal) == before
    context.close()


class SmallMemory:
    """A context with so much room; `stuck` is a byte that cannot be changed, counted from where a piece
    begins."""

    def __init__(self, room: int, stuck: int | None = None) -> None:
        self.room = room
        self.stuck = stuck
        self.pieces: list[int] = []
        self.freed: list[int] = []

    def alloc(self, size: int) -> int:
        if size > self.room - sum(self.pieces):
            raise OutOfMemory("full")
        self.pieces.append(size)
        return len(self.pieces) - 1

    def free(self, buffer: int) -> None:
        self.freed.append(buffer)

    def read(self, buffer: int, offset: int, size: int) -> bytes:
        dirty = self.stuck is not None and offset <= self.stuck < offset + size
        return bytes(size - 1) + (b"\1" if dirty else b"\0")


def test_scrubbing_takes_what_is_free_and_holds_it_to_the_end() -> None:
    context = SmallMemory(200 << 20)
    assert scrub.overwrite_free(context, 1 << 40) == 200 << 20
    assert context.pieces[:3] == [64 << 20] * 3
    assert context.freed == list(reversed(range(len(context.pieces))))
    odd = SmallMemory((200 << 20) + 300)
    assert scrub.overwrite_free(odd, 1 << 40) == (200 << 20) + 256


@pytest.mark.parametrize("stuck", [0, 4095, 32 << 20, (64 << 20) - 1])
def test_memory_that_does_not_read_as_zero_is_a_fault(stuck: int) -> None:
    context = SmallMemory(64 << 20, stuck)
    with pytest.raises(DeviceFault, match="does not read so"):
        scrub.overwrite_free(context, 64 << 20)
    assert context.freed == [0]


def test_an_opencl_gpu_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PoCL, taken for a GPU: the only difference is what probing says."""
    need(_installed(), "pyopencl with PoCL")
    driver = OpenClDriver()
    device = driver.probe("auto", "here")[0]
    assert not driver.capabilities(device.ordinal).keeps_contents
    monkeypatch.setattr(driver, "_seen", [{"ordinal": device.ordinal, "cpu": False}])
    assert driver.capabilities(device.ordinal).keeps_contents
    assert driver.scrub(device.id, device.ordinal, 3 << 20) == 3 << 20


def test_held_memory_is_seen_from_outside_and_gone_with_its_process() -> None:
    """The host driver's `used_bytes` is what NVML's per-process memory is for a GPU."""
    import subprocess
    import sys

    driver = HostDriver()
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from sublet.devices.host import HostDriver\nimport sys\n"
            "c = HostDriver().open('outside-host0', 0, 'L')\nb = c.alloc(1 << 20)\nprint('up', flush=True)\nsys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    child.stdout.readline()
    assert driver.used_bytes("outside-host0", 0) == 1 << 20
    assert driver.used_bytes("outside-host0", 0, frozenset([child.pid])) == 0
    assert driver.used_bytes("outside-host0", 0, frozenset([os.getpid()])) == 1 << 20
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    assert driver.used_bytes("outside-host0", 0) == 0
