"""The self-test of a device: everything sublet asks of it, tried for real, for hardware our tests have never
seen.

Rules of this file:
- Only the driver port is used, so whatever passes here is what a lease can rely on, with any driver.
- The device is touched in processes of their own, one per part: a device that hangs, crashes or must be left
  wedged ends that process and one row, never the command. The asking process only reads how much memory is in
  use, as a warden does.
- Each step is a row: ok, fail or skip, and what was seen. A step whose groundwork failed is skipped, not
  failed again.
- What is compared is the bytes that came back, never that a call returned.

It leases nothing; `cli.doctor` refuses devices that are leased.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from sublet.core.errors import BadInput, KernelTimeout, OutOfMemory, SubletError
from sublet.core.progress.kernel_arguments import f32, f64, i32, i64, u32, u64
from sublet.core.values import format_duration, format_size
from sublet.ports.device import Context, Driver, RawBuffer, RawModule
from sublet.ports.ledger import FoundDevice

BUFFER_BYTES = 8 << 20
IMPOSSIBLE_BYTES = 1 << 50
PART_SECONDS = 120.0
SETTLE_SECONDS = 10.0
WATCHDOG_US = 50_000
#: Time limit of a step that must end by itself; shorter than its part's, so that the step reports it.
SYNC_US = 30_000_000
#: Turns of `spin`: a fraction of a millisecond, and over a second on a GPU. Bounded, in case nobody ends it.
SHORT_TURNS, LONG_TURNS = 1 << 18, 1 << 28

#: By the names of `Capabilities.sources`: the kernels every device can take, and the one that needs double
#: precision.
KERNELS = {
    "python": """
import struct, time
def kinds(grid, a, b, c, d, e, out):
    out[:40] = struct.pack("<I4xQi4xqf4x", a, b, c, d, e)
def count(grid, out):
    out[:4] = struct.pack("<I", grid[0] * grid[1] * grid[2])
def spin(grid, turns, out):
    time.sleep(turns / 1e9)
    out[0] = 1
""",
    "opencl-c": """
__kernel void kinds(uint a, ulong b, int c, long d, float e, __global ulong* out) {
    out[0] = a; out[1] = b; out[2] = as_uint(c); out[3] = as_ulong(d); out[4] = as_uint(e);
}
__kernel void count(__global uint* out) { atomic_inc((volatile __global uint*)out); }
__kernel void spin(ulong turns, __global ulong* out) {
    ulong x = 1;
    for (ulong i = 0; i < turns; i++) { x = x * 6364136223846793005UL + 1442695040888963407UL; x ^= x >> 29; }
    out[0] = x | 1;
}
""",
    "ptx": """
.version 7.0
.target sm_50
.address_size 64

.visible .entry kinds(
    .param .u32 a, .param .u64 b, .param .s32 c, .param .s64 d, .param .f32 e, .param .u64 out)
{
    .reg .b64 %out, %wide;
    .reg .b32 %narrow;
    ld.param.u64        %out, [out];
    cvta.to.global.u64  %out, %out;
    mov.u64             %wide, 0;
    st.global.u64       [%out], %wide;          // the upper halves of the narrow ones
    st.global.u64       [%out+16], %wide;
    st.global.u64       [%out+32], %wide;
    ld.param.b32        %narrow, [a];
    st.global.b32       [%out], %narrow;
    ld.param.b64        %wide, [b];
    st.global.b64       [%out+8], %wide;
    ld.param.b32        %narrow, [c];
    st.global.b32       [%out+16], %narrow;
    ld.param.b64        %wide, [d];
    st.global.b64       [%out+24], %wide;
    ld.param.b32        %narrow, [e];
    st.global.b32       [%out+32], %narrow;
    ret;
}

.visible .entry count(.param .u64 out)
{
    .reg .b64 %out;
    .reg .b32 %before;
    ld.param.u64        %out, [out];
    cvta.to.global.u64  %out, %out;
    atom.global.add.u32 %before, [%out], 1;
    ret;
}

.visible .entry spin(.param .u64 turns, .param .u64 out)
{
    .reg .pred %more;
    .reg .b64 %out, %left, %x, %high;
    ld.param.u64        %left, [turns];
    mov.u64             %x, 1;
again:
    mad.lo.u64          %x, %x, 6364136223846793005, 1442695040888963407;
    shr.u64             %high, %x, 29;
    xor.b64             %x, %x, %high;
    sub.u64             %left, %left, 1;
    setp.ne.u64         %more, %left, 0;
    @%more bra          again;
    or.b64              %x, %x, 1;
    ld.param.u64        %out, [out];
    cvta.to.global.u64  %out, %out;
    st.global.u64       [%out], %x;
    ret;
}
""",
}
DOUBLE_KERNELS = {
    "python": "import struct\ndef real64(grid, a, out):\n    out[:8] = struct.pack('<d', a)\n",
    "opencl-c": "__kernel void real64(double a, __global double* out) { out[0] = a; }",
    "ptx": """
.version 7.0
.target sm_50
.address_size 64

.visible .entry real64(.param .f64 a, .param .u64 out)
{
    .reg .b64 %out;
    .reg .f64 %a;
    ld.param.f64        %a, [a];
    ld.param.u64        %out, [out];
    cvta.to.global.u64  %out, %out;
    st.global.f64       [%out], %a;
    ret;
}
""",
}


@dataclass(frozen=True, slots=True)
class Row:
    check: str
    status: str  # ok, fail, skip
    seen: str


class _Wrong(Exception):
    """The device answered, but not as it must."""


class _Skipped(Exception):
    """The step does not apply to this device."""


@dataclass(slots=True)
class _Bench:
    """What the steps of one part leave for the next."""

    driver: Driver
    device: FoundDevice
    contexts: list[Context] = field(default_factory=list)
    buffers: list[RawBuffer] = field(default_factory=list)
    modules: list[RawModule] = field(default_factory=list)

    @property
    def size(self) -> int:
        return min(BUFFER_BYTES, self.device.capacity_bytes // 4)

    def used_bytes(self, besides: frozenset[int] = frozenset()) -> int | None:
        return self.driver.used_bytes(self.device.id, self.device.ordinal, besides)

    def source(self, texts: dict[str, str]) -> tuple[str, str]:
        """Return the kind of source the device takes, and its text."""
        taken = self.driver.capabilities(self.device.ordinal).sources
        for kind in taken:
            if kind in texts:
                return kind, texts[kind]
        raise _Skipped(f"no kernel of ours is in {', '.join(taken)}")

    def run(self, kernel: str, args: Sequence[object], size: int, **shape: tuple[int, int, int]) -> bytes:
        """Launch a kernel on the zeroed beginning of the buffer, its last argument, and return what it left
        there."""
        context, buffer = self.contexts[0], self.buffers[0]
        context.write(buffer, 0, memoryview(bytes(size)))
        grid, block = shape.get("grid", (1, 1, 1)), shape.get("block", (1, 1, 1))
        context.launch(self.modules[-1], kernel, grid, block, [*args, buffer])
        context.sync(SYNC_US)
        return context.read(buffer, 0, size)


def _expect(seen: bytes, wanted: bytes) -> None:
    if seen != wanted:
        at = next((n for n, (a, b) in enumerate(zip(seen, wanted, strict=False)) if a != b), len(seen))
        raise _Wrong(
            f"byte {at} of {len(wanted)} differs: {seen[at : at + 8].hex() or 'nothing'} "
            f"and not {wanted[at : at + 8].hex()}"
        )


# the steps of a session, in order


def _open(bench: _Bench) -> str:
    begun = time.perf_counter_ns()
    bench.contexts.append(bench.driver.open(bench.device.id, bench.device.ordinal, "selftest"))
    return f"{bench.device.name}, in {format_duration((time.perf_counter_ns() - begun) // 1000)}"


def _alloc(bench: _Bench) -> str:
    bench.buffers.append(bench.contexts[0].alloc(bench.size))
    _expect(bench.contexts[0].read(bench.buffers[0], 0, bench.size), bytes(bench.size))
    return f"{format_size(bench.size)}, all zero"


def _copy(bench: _Bench) -> str:
    context, buffer = bench.contexts[0], bench.buffers[0]
    pattern = bytearray(os.urandom(bench.size))
    context.write(buffer, 0, memoryview(pattern))
    _expect(context.read(buffer, 0, bench.size), bytes(pattern))
    context.write(buffer, 3, memoryview(b"part"))
    pattern[3:7] = b"part"
    _expect(context.read(buffer, 0, 64), bytes(pattern[:64]))
    _expect(context.read(buffer, bench.size - 5, 5), bytes(pattern[-5:]))
    return f"{format_size(bench.size)} of noise, and parts of it"


def _measure(bench: _Bench) -> str:
    """Compare what a warden reads while this process holds one buffer more, and when this process is left
    out."""
    before = bench.used_bytes()
    if before is None:
        raise _Skipped("the driver cannot say; only the end of a process is proof")
    extra = bench.contexts[0].alloc(bench.size)
    after, others = bench.used_bytes() or 0, bench.used_bytes(frozenset([os.getpid()]))
    bench.contexts[0].free(extra)
    if after - before < bench.size:
        raise _Wrong(
            f"{format_size(bench.size)} more was allocated, "
            f"and use went from {_bytes(before)} to {_bytes(after)}"
        )
    if others is None:
        raise _Skipped(f"{_bytes(after)} in use, but the driver does not say by which process")
    if after - others < 2 * bench.size:
        raise _Wrong(
            f"without this process {_bytes(others)} of {_bytes(after)} would be in use: "
            "is this a PID namespace of its own?"
        )
    return f"{_bytes(after)} in use, {_bytes(others)} of it by others"


def _bytes(size: int) -> str:
    return format_size(size) if size else "nothing"


def _load(bench: _Bench) -> str:
    kind, source = bench.source(KERNELS)
    bench.modules.append(bench.contexts[0].load(source))
    return kind


def _arguments(bench: _Bench) -> str:
    args = [u32(0xDEADBEEF), u64(2**63 + 1), i32(-5), i64(-(2**40) - 3), f32(1.5)]
    _expect(bench.run("kinds", args, 40), struct.pack("<I4xQi4xqf4x", *(a.value for a in args)))
    return "u32, u64, i32, i64, f32 and a buffer arrived bit for bit"


def _double(bench: _Bench) -> str:
    if not bench.driver.capabilities(bench.device.ordinal).float64:
        raise _Skipped("the device has no double precision")
    bench.modules.append(bench.contexts[0].load(bench.source(DOUBLE_KERNELS)[1]))
    try:
        _expect(bench.run("real64", [f64(-0.1)], 8), struct.pack("<d", -0.1))
    finally:
        bench.contexts[0].unload(bench.modules.pop())
    return "f64 arrived bit for bit"


def _threads(bench: _Bench) -> str:
    for grid, block in (((3, 2, 1), (4, 2, 2)), ((5000, 1, 1), (1, 1, 1))):
        wanted = grid[0] * grid[1] * grid[2] * block[0] * block[1] * block[2]
        (seen,) = struct.unpack("<I", bench.run("count", [], 4, grid=grid, block=block))
        if seen != wanted:
            raise _Wrong(f"{seen} threads ran of grid {grid} with block {block}, and not {wanted}")
    return "of grid 3x2 with block 4x2x2, and of 5000 blocks"


def _time(bench: _Bench) -> str:
    begun = time.perf_counter_ns()
    bench.contexts[0].launch(
        bench.modules[-1], "spin", (1, 1, 1), (1, 1, 1), [u64(SHORT_TURNS), bench.buffers[0]]
    )
    spent = bench.contexts[0].sync(SYNC_US)
    took = (time.perf_counter_ns() - begun) // 1000
    # A device's clock and ours may differ a little, but not by half.
    if not 0 < spent <= took * 1.5 + 1000:
        raise _Wrong(f"the device says {spent} us, the clock on the wall {took} us")
    return f"{spent} us on the device, {took} us on the wall"


def _refusal(bench: _Bench) -> str:
    one = (1, 1, 1)
    for kernel, args in (("count", []), ("count", [bench.buffers[0]] * 2), ("no_such_kernel", [])):
        try:
            bench.contexts[0].launch(bench.modules[-1], kernel, one, one, args)
        except BadInput:
            continue
        raise _Wrong(f"{kernel} was launched with {len(args)} argument(s)")
    _arguments(bench)
    return "wrong launches refused, right ones go on"


def _exhaustion(bench: _Bench) -> str:
    try:
        bench.contexts[0].alloc(IMPOSSIBLE_BYTES)
    except OutOfMemory as e:
        said = e.message
    else:
        raise _Wrong(f"the device gave {format_size(IMPOSSIBLE_BYTES)}")
    _copy(bench)
    return f"the device goes on after: {said}"


def _close(bench: _Bench) -> str:
    for module in reversed(bench.modules):
        bench.contexts[0].unload(module)
    for buffer in reversed(bench.buffers):
        bench.contexts[0].free(buffer)
    bench.contexts[0].close()
    return f"{len(bench.modules)} module(s), {len(bench.buffers)} buffer(s), the context"


# the parts that need a process for themselves


def _watchdog(bench: _Bench) -> str:
    """Leaves the device in an unknown state; the end of this process cures that, and is part of the test."""
    _open(bench)
    bench.buffers.append(bench.contexts[0].alloc(bench.size))
    _load(bench)
    begun = time.perf_counter_ns()
    bench.contexts[0].launch(
        bench.modules[-1], "spin", (1, 1, 1), (1, 1, 1), [u64(LONG_TURNS), bench.buffers[0]]
    )
    try:
        spent = bench.contexts[0].sync(WATCHDOG_US)
    except KernelTimeout:
        took = (time.perf_counter_ns() - begun) // 1000
        return f"a long kernel was given up after {format_duration(took)}, and its process ended"
    raise _Wrong(f"a kernel of {spent} us was not given up after {WATCHDOG_US} us")


def _scrub(bench: _Bench) -> str:
    if not bench.driver.capabilities(bench.device.ordinal).keeps_contents:
        bench.driver.scrub(bench.device.id, bench.device.ordinal, BUFFER_BYTES)
        raise _Skipped("freed memory does not keep its contents here")
    done = bench.driver.scrub(bench.device.id, bench.device.ordinal, bench.device.capacity_bytes)
    if not done:
        raise _Wrong("nothing was overwritten")
    capacity = format_size(bench.device.capacity_bytes)
    return f"{format_size(done)} of {capacity} overwritten and read back as zeros"


Step = tuple[str, tuple[str, ...], Callable[[_Bench], str]]  # its name, the steps it stands on, what it does

PARTS: dict[str, tuple[Step, ...]] = {
    "session": (
        ("open", (), _open),
        ("alloc", ("open",), _alloc),
        ("write and read", ("alloc",), _copy),
        ("memory in use", ("alloc",), _measure),
        ("load", ("open",), _load),
        ("arguments", ("load", "alloc"), _arguments),
        ("double precision", ("load", "alloc"), _double),
        ("every thread", ("load", "alloc"), _threads),
        ("device time", ("load", "alloc"), _time),
        ("wrong launch", ("arguments",), _refusal),
        ("out of memory", ("write and read",), _exhaustion),
        ("free and close", ("open",), _close),
    ),
    "watchdog": (("watchdog", (), _watchdog),),
    "scrub": (("scrub", (), _scrub),),
}


def run_part(part: str, driver: Driver, device: FoundDevice) -> Iterator[Row]:
    """Run a part in this process. Whatever a driver raises becomes a row."""
    bench, stands = _Bench(driver, device), set[str]()
    for name, needs, step in PARTS[part]:
        missing = [n for n in needs if n not in stands]
        if missing:
            yield Row(name, "skip", f"not tried without: {', '.join(missing)}")
            continue
        try:
            seen = step(bench)
        except _Skipped as e:
            yield Row(name, "skip", str(e))
        except _Wrong as e:
            yield Row(name, "fail", str(e))
        except SubletError as e:
            yield Row(name, "fail", f"{e.message}; {e.remedy}")
        except Exception as e:  # a driver must not raise it, and a self-test must tell
            yield Row(name, "fail", f"the driver raised {type(e).__name__}: {e}")
        else:
            stands.add(name)
            yield Row(name, "ok", seen)


# the asking process


def try_device(driver: Driver, device: FoundDevice) -> Iterator[Row]:
    """Run every part in its own process, and check that the device is as it was."""
    try:
        before = driver.used_bytes(device.id, device.ordinal)
        for part in PARTS:
            yield from _in_a_process(part, driver, device)
        yield _as_before(driver, device, before)
    except SubletError as e:
        yield Row("memory in use", "fail", f"{e.message}; {e.remedy}")


def _in_a_process(part: str, driver: Driver, device: FoundDevice) -> Iterator[Row]:
    with subprocess.Popen(
        [sys.executable, "-m", "sublet.devices.selftest"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as child:
        ending = ""
        try:
            out, error = child.communicate(pickle.dumps((part, driver, device)), timeout=PART_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            out, error = child.communicate()
            ending = f"no answer within {PART_SECONDS:.0f} s"
    rows = [Row(**json.loads(line)) for line in out.splitlines()]
    yield from rows
    lines = error.decode(errors="replace").strip().splitlines()
    said = f": {lines[-1][:200]}" if lines else ""
    ending = ending or f"its process ended with {child.returncode}{said}"
    for place, (name, _, _) in enumerate(PARTS[part][len(rows) :]):
        yield Row(name, "skip" if place else "fail", "not reached" if place else ending)


def _as_before(driver: Driver, device: FoundDevice, before: int | None) -> Row:
    name, deadline = "all given back", time.monotonic() + SETTLE_SECONDS
    if before is None:
        return Row(name, "skip", "the driver cannot say; only the end of a process is proof")
    while True:
        after = driver.used_bytes(device.id, device.ordinal) or 0
        if after <= before:
            return Row(name, "ok", f"{_bytes(after)} in use, {_bytes(before)} before")
        if time.monotonic() > deadline:
            return Row(
                name,
                "fail",
                f"{_bytes(after)} in use, {_bytes(before)} before: "
                "look with 'nvidia-smi' or 'sublet ps' who else uses the device",
            )
        time.sleep(0.05)


def _serve() -> None:
    """Run the part named on standard input; a line of JSON per row. What the device's libraries print goes to
    standard error."""
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    part, driver, device = pickle.load(sys.stdin.buffer)
    for row in run_part(part, driver, device):
        print(json.dumps(asdict(row)), file=rows, flush=True)
    # Not by a normal exit, which would wait for a kernel that does not end.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve()
