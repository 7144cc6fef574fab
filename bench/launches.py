"""What a session costs on top of OpenCL: starting kernels through a GpuSession and through bare pyopencl, on the same device.

Rules of this file:
- Both sides run the same tiny kernel on a profiling queue with a number that changes at every launch, typed by each side in its
  own way. The kernel does next to nothing, so what is measured is the road to it.
- The session is a real one, under a real lease with its keeper and warden: its checks are part of the price.
- Bare pyopencl is written as its manual teaches: the kernel is taken from the program once. It is measured in three ways, because
  they differ by more than the goal allows: a kernel that was not told its types guesses each argument by trying. The goal is held
  against what most people write and against the fastest.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sublet
from bench.measure import Goal, Section, Subject, interleave, median_ratio, progress, rate_row
from sublet import wiring
from sublet.leases.warden import warden_process
from sublet.settings import load_settings

SESSION = "GpuSession"
ENQUEUE = "pyopencl, set_args + enqueue"
CALL = "pyopencl, kernel(queue, ...)"
TYPED = "pyopencl, set_scalar_arg_dtypes"
WANTED = 1.3
ROUNDS = 9
BATCH = 100
THREADS = 8
SOURCE = """
__kernel void advance(ulong number, uint n, __global uchar* data) {
    uint i = get_global_id(0);
    if (i < n) data[i] = (uchar)(data[i] + number);
}
"""

Launch = Callable[[int], object]
Sync = Callable[[], object]


def run(place: Path) -> list[Section]:
    if find_spec("pyopencl") is None:
        return [Section("Kernel launches", [""], [["not run: pip install 'sublet[opencl]'"]])]
    with _lease(place) as lease, lease.open() as gpu:
        roads = {SESSION: _session(gpu), **_bare()}
        return [_compare(roads, BATCH), _compare(roads, 1)]


@contextlib.contextmanager
def _lease(place: Path) -> Iterator[sublet.Lease]:
    os.environ.update(
        SUBLET_HOME=str(place / "launches"),  # not the other suites': theirs have host devices
        SUBLET_LEDGER=f"sqlite:{place}/launches/ledger.db",
        SUBLET_DEVICES="opencl:auto",
    )
    try:
        with sublet.gpu(vram="16MiB", ttl="10m") as lease:
            yield lease
    finally:
        pid = warden_process.warden_state(load_settings())[2]
        wiring.close_all()
        if pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def _session(gpu: Any) -> tuple[Launch, Sync]:
    data, module = gpu.alloc(THREADS), gpu.load(SOURCE)
    u32, u64 = sublet.u32, sublet.u64

    def launch(number: int) -> None:
        gpu.launch(module, "advance", grid=(1,), block=(THREADS,), args=[u64(number), u32(THREADS), data])

    return launch, gpu.sync


def _bare() -> dict[str, tuple[Launch, Sync]]:
    cl: Any = import_module("pyopencl")
    numpy: Any = import_module("numpy")
    ordinal = wiring.open_ledger(load_settings()).devices(load_settings()["host"])[0].ordinal
    device = [d for platform in cl.get_platforms() for d in platform.get_devices()][ordinal]
    context = cl.Context([device])
    queue = cl.CommandQueue(context, properties=cl.command_queue_properties.PROFILING_ENABLE)
    program = cl.Program(context, SOURCE).build()
    data = cl.Buffer(context, cl.mem_flags.READ_WRITE, THREADS)
    plain, typed = cl.Kernel(program, "advance"), cl.Kernel(program, "advance")
    typed.set_scalar_arg_dtypes([numpy.uint64, numpy.uint32, None])
    u32, u64, shape = numpy.uint32, numpy.uint64, (THREADS,)

    def enqueue(number: int) -> None:
        plain.set_args(u64(number), u32(THREADS), data)
        cl.enqueue_nd_range_kernel(queue, plain, shape, shape)

    def call(number: int) -> None:
        plain(queue, shape, shape, u64(number), u32(THREADS), data)

    def call_typed(number: int) -> None:
        typed(queue, shape, shape, number, THREADS, data)

    return {ENQUEUE: (enqueue, queue.finish), CALL: (call, queue.finish), TYPED: (call_typed, queue.finish)}


def _cycle(launch: Launch, sync: Sync, batch: int) -> Callable[[], None]:
    def cycle() -> None:
        for number in range(batch):
            launch(number)
        sync()

    return cycle


def _compare(roads: dict[str, tuple[Launch, Sync]], batch: int) -> Section:
    shape = "one sync after each" if batch == 1 else f"one sync after {batch}"
    progress(f"launches: {shape} ...")
    rates = interleave(
        [Subject(name, _cycle(*road, batch), ops=batch) for name, road in roads.items()], rounds=ROUNDS
    )
    bare = [name for name in roads if name != SESSION]
    section = Section(
        f"Kernel launches per second, {shape}",
        ["", "per s", "spread", *(f"x {name.removeprefix('pyopencl, ')}" for name in bare), ""],
        [rate_row(name, rates, bare, "") for name in roads],
        notes=[
            "x below 1: slower. Only GpuSession checks lease, handles and types, and adds up device time."
        ],
        data=dict(rates),
    )
    slower = {name: median_ratio(rates[name], rates[SESSION]) for name in bare}
    section.goals += [
        Goal(f"a launch, {shape}, to {name}", slower[name], WANTED, at_most=True) for name in (ENQUEUE, TYPED)
    ]
    section.notes.append(
        "GpuSession costs " + ", ".join(f"{ratio:.2f} x {name}" for name, ratio in slower.items()) + "."
    )
    return section
