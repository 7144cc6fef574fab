"""An exception anywhere leaks nothing: in each driver call, at each line of a step, at each line of the
session itself.

Rules of this file:
- The driver below is real; a `Watched` context stands between it and the session, notes what was made and let
  go, and breaks one call, before or after its effect. What the device still holds is asked of the kernel
  (/proc/self/fd), not of our own counters.
- A drawn program is run once for every call it makes, breaking that one. A step is run once for every line it
  has.
- The lease closes its sessions when it ends, whatever happened to their blocks. Where Python itself offers no
  protection (a Ctrl-C between the last line of a `with` block and its `__exit__`) that is what the tests do,
  too.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import linecache
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sublet.core.errors import DeviceFault, OutOfMemory, SubletError
from sublet.core.progress.kernel_arguments import u32, u64
from sublet.devices import host, opencl, session
from sublet.devices.session import Buffer, LocalGpuSession, Module, SessionTally
from tests.conftest import MORE_EXAMPLES, need
from tests.devices.test_contract import SOURCES, FakeLease

QUOTA = 4096
ERRORS = [DeviceFault, OutOfMemory, RuntimeError, KeyboardInterrupt]
#: Calls that give something back. Breaking one leaves the device in doubt, and the Tally must say so.
GIVING_BACK = ("free", "unload", "close")

_numbers = itertools.count()


class Fuse:
    """Breaks the nth call to any context that shares it."""

    def __init__(
        self, at: int = -1, error: type[BaseException] = DeviceFault, *, after: bool = False
    ) -> None:
        self.at, self.error, self.after = at, error, after
        self.calls = 0
        self.blown = ""  # the call it broke
        self.in_teardown = False

    def around(self, verb: str, call: Callable[[], Any], over: Callable[[], bool] = lambda: False) -> Any:
        mine = self.calls == self.at
        self.calls += 1
        if mine:
            self.blown, self.in_teardown = verb, over()
            if self.after:
                call()
            raise self.error(f"injected at {verb}")
        return call()


class Watched:
    """A Context over a real one."""

    def __init__(self, real: Any, fuse: Fuse) -> None:
        self.real, self.fuse = real, fuse
        self.over: Callable[[], bool] = lambda: False  # is the session in its teardown?
        self.order: list[Any] = []  # what the session was given, in order of creation
        self.released: list[Any] = []
        self.torn_down: list[int] = []  # places in `order` of what teardown let go
        self.functions: list[weakref.ref[Any]] = []
        self.closed = 0

    def _made(self, raw: Any) -> Any:
        self.order.append(raw)
        return raw

    def _gone(self, raw: Any) -> None:
        assert not any(raw is r for r in self.released), "released twice"
        self.released.append(raw)
        if self.over():
            self.torn_down.append(next(i for i, r in enumerate(self.order) if r is raw))

    def forget(self) -> None:
        """So that nothing is kept alive by being watched."""
        self.order.clear()
        self.released.clear()

    def alloc(self, size: int) -> Any:
        return self._made(self.fuse.around("alloc", lambda: self.real.alloc(size)))

    def free(self, buffer: Any) -> None:
        self._gone(buffer)
        self.fuse.around("free", lambda: self.real.free(buffer), self.over)

    def write(self, buffer: Any, offset: int, data: memoryview) -> None:
        self.fuse.around("write", lambda: self.real.write(buffer, offset, data))

    def read(self, buffer: Any, offset: int, size: int) -> bytes:
        return self.fuse.around("read", lambda: self.real.read(buffer, offset, size))

    def load(self, source: str | bytes) -> Any:
        def load() -> Any:
            module = self.real.load(source)
            if isinstance(module, dict):
                self.functions += [weakref.ref(function) for function in module.values()]
            return module

        return self._made(self.fuse.around("load", load))

    def unload(self, module: Any) -> None:
        self._gone(module)
        self.fuse.around("unload", lambda: self.real.unload(module), self.over)

    def launch(self, module: Any, kernel: str, grid: Any, block: Any, args: Sequence[Any]) -> None:
        self.fuse.around("launch", lambda: self.real.launch(module, kernel, grid, block, args))

    def sync(self, timeout_us: int | None) -> int:
        return self.fuse.around("sync", lambda: self.real.sync(timeout_us))

    def close(self) -> None:
        self.closed += 1
        self.fuse.around("close", self.real.close, self.over)


class Bench:
    """A device of its own for one run, and the sessions opened on it."""

    def __init__(self, name: str, fuse: Fuse | None = None) -> None:
        self.name = name
        self.device_id = f"leaks{next(_numbers)}-{name}0"
        self.fuse = fuse or Fuse()
        self.lease = FakeLease()
        self.opened: list[tuple[LocalGpuSession, Watched]] = []
        self.told: list[SessionTally] = []

    def open(self) -> LocalGpuSession:
        driver = host.HostDriver() if self.name == "host" else opencl.OpenClDriver()
        watched = Watched(driver.open(self.device_id, 0, "Ltest"), self.fuse)
        gpu = LocalGpuSession(watched, self.lease, QUOTA, device_id=self.device_id, on_close=self.told.append)
        watched.over = lambda: gpu._over == "closed"
        self.opened.append((gpu, watched))
        return gpu

    def held_files(self) -> list[str]:
        """What this process holds on the device, in the kernel's words."""
        wanted, found = f"/memfd:{host.memory_name(self.device_id)} (deleted)", []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == wanted:
                    found.append(fd)
        return found

    def end_lease(self) -> None:
        """As `Lease.release` does."""
        for gpu, _ in reversed(self.opened):
            gpu.close()

    def assert_device_is_empty(self) -> None:
        assert self.held_files() == []
        for gpu, watched in self.opened:
            assert not gpu._live
            assert gpu.used_bytes == 0
            assert watched.torn_down == sorted(watched.torn_down, reverse=True)
            watched.forget()

    def assert_closed_for_good(self) -> None:
        for gpu, watched in self.opened:
            assert watched.closed == 1
            before = self.fuse.calls
            for call in every_operation(gpu, SOURCES[self.name]):
                with pytest.raises(SubletError):
                    call()
            gpu.close()
            assert self.fuse.calls == before, "the driver heard of it"
        assert len(self.told) == len(self.opened)
        assert all(any(gpu.tally is tally for tally in self.told) for gpu, _ in self.opened)


def assert_no_module_is_alive(benches: Sequence[Bench]) -> None:
    """Of many runs at once, because a module's functions and its names hold each other and collecting takes a
    while."""
    gc.collect()
    functions = [f() for bench in benches for _, watched in bench.opened for f in watched.functions]
    assert not any(functions), "a module is still alive"


def every_operation(gpu: LocalGpuSession, source: str) -> list[Callable[[], object]]:
    buffer, module = Buffer(gpu._number, 10**9, 8), Module(gpu._number, 10**9 + 1)
    return [
        lambda: gpu.alloc(1),
        lambda: gpu.free(buffer),
        lambda: gpu.write(buffer, b"x"),
        lambda: gpu.read(buffer),
        lambda: gpu.load(source),
        lambda: gpu.unload(module),
        lambda: gpu.launch(module, "count", args=[buffer]),
        lambda: gpu.sync(),
    ]


# (a) each driver call breaks in turn


VERBS = ["open", "close", "alloc", "write", "load", "launch", "sync", "read", "free", "unload"]
#: Twice as often as the rest: without something held there is nothing to leak.
MAKING = ["alloc", "load"]
programs = st.lists(st.tuples(st.sampled_from(VERBS + MAKING), st.integers(0, 5)), min_size=3, max_size=14)


class Program:
    """Carries a drawn list of verbs out, and knows what it holds in each session."""

    def __init__(self, bench: Bench, verbs: Sequence[tuple[str, int]]) -> None:
        self.bench, self.verbs = bench, verbs
        self.buffers: dict[LocalGpuSession, list[Buffer]] = {}
        self.modules: dict[LocalGpuSession, list[Module]] = {}
        self.open: list[LocalGpuSession] = []
        self.failures: list[BaseException] = []

    def run(self) -> None:
        """Goes on after what a program can handle; anything else leaves all its blocks."""
        with contextlib.ExitStack() as blocks:
            self._do("open", 0, blocks)
            for verb, choice in self.verbs:
                try:
                    self._do(verb, choice, blocks)
                except SubletError as e:
                    self.failures.append(e)
                for gpu in self.open:
                    assert gpu.used_bytes == sum(b.size for b in self.buffers[gpu])

    def _do(self, verb: str, choice: int, blocks: contextlib.ExitStack) -> None:
        if verb == "open":
            gpu = blocks.enter_context(self.bench.open())
            self.buffers[gpu], self.modules[gpu] = [], []
            self.open.append(gpu)
            return
        if not self.open:
            return
        gpu = self.open[choice % len(self.open)]
        buffers, modules = self.buffers[gpu], self.modules[gpu]
        buffer = buffers[choice % len(buffers)] if buffers else Buffer(gpu._number, 0, 64)
        module = modules[choice % len(modules)] if modules else Module(gpu._number, 0)
        if verb == "close":
            self.open.remove(gpu)
            gpu.close()
        elif verb == "alloc":
            buffers.append(gpu.alloc(64 << choice))
        elif verb == "write":
            gpu.write(buffer, b"x" * 64)
        elif verb == "load":
            modules.append(gpu.load(SOURCES["host"]))
        elif verb == "launch":
            gpu.launch(module, "train_step", grid=64, args=[u64(1), u32(64), buffer])
        elif verb == "sync":
            gpu.sync()
        elif verb == "read":
            gpu.read(buffer)
        elif verb == "free":
            if buffers:
                buffers.remove(buffer)
            gpu.free(buffer)
        elif verb == "unload":
            if modules:
                modules.remove(module)
            gpu.unload(module)


def run_program(verbs: Sequence[tuple[str, int]], fuse: Fuse) -> Bench:
    bench = Bench("host", fuse)
    program = Program(bench, verbs)
    caught: type[BaseException] | None = None
    try:
        program.run()
    except (RuntimeError, KeyboardInterrupt) as e:
        caught = type(e)
    program.failures.clear()
    # A program is told of a Ctrl-C wherever it came, and of what failed in its own calls. Teardown keeps the
    # rest to itself.
    handled = not fuse.blown or issubclass(fuse.error, SubletError)
    hidden = fuse.in_teardown and issubclass(fuse.error, Exception)
    assert caught is (None if handled or hidden else fuse.error)
    for gpu, watched in bench.opened:
        left = program.buffers.get(gpu, []), program.modules.get(gpu, [])
        assert (gpu.tally.left_buffers, gpu.tally.left_modules) == (len(left[0]), len(left[1]))
        assert gpu.tally.left_bytes == sum(b.size for b in left[0])
        assert len(watched.released) == len(watched.order)
    said = [p for gpu, _ in bench.opened for p in gpu.tally.problems]
    assert len(said) == (fuse.blown in GIVING_BACK), said
    assert all(fuse.error.__name__ in p and fuse.blown in p for p in said)
    bench.assert_device_is_empty()
    bench.assert_closed_for_good()
    return bench


@settings(max_examples=8 * MORE_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(verbs=programs)
@example(verbs=[("alloc", 0), ("load", 0), ("alloc", 1), ("free", 0), ("open", 0), ("alloc", 1), ("load", 1)])
def test_a_driver_call_that_breaks_leaks_nothing(verbs: list[tuple[str, int]]) -> None:
    """Each call of the program, with each error, before and after the call's effect."""
    whole = Fuse()
    benches = [run_program(verbs, whole)]
    for at, error, after in itertools.product(range(whole.calls), ERRORS, (False, True)):
        benches.append(run_program(verbs, Fuse(at, error, after=after)))
    assert_no_module_is_alive(benches)


# (b) and (c) each line breaks in turn


def step(bench: Bench, source: str) -> None:
    """What a program does with a device, with a second session inside the first."""
    with bench.open() as gpu:
        batch = gpu.alloc(64)
        gpu.write(batch, bytes(64))
        module = gpu.load(source)
        gpu.launch(module, "train_step", grid=64, args=[u64(1), u32(64), batch])
        with bench.open() as inner:
            scratch = inner.alloc(128)
            code = inner.load(source)
            more = inner.alloc(32)
            inner.launch(code, "train_step", grid=32, args=[u64(2), u32(32), more])
            inner.sync()
            inner.free(scratch)
        gpu.sync()
        assert gpu.read(batch) == b"\x01" * 64
        gpu.unload(module)
        last = gpu.alloc(16)
        gpu.free(batch)
        gpu.read(last)


#: No signal is handled between this line of `host.py` and the one before it, which has no call: Python looks
#: for signals when a function starts, when a call has returned and when a loop goes back. A tracer can still
#: raise there.
UNINTERRUPTIBLE = "os.close(fd)"


class Tripwire:
    """Raises at the nth line that is run in some files or functions; says which it was."""

    def __init__(self, watch: Callable[[FrameType], bool], at: int, error: type[BaseException]) -> None:
        self.watch, self.at, self.error = watch, at, error
        self.lines = 0
        self.seen: list[tuple[str, int]] = []
        self.text = ""  # of the line that broke

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not self.watch(frame):
            return None
        if event == "line":
            self.seen.append((frame.f_code.co_name, frame.f_lineno))
            if self.lines == self.at:
                self.lines += 1
                self.text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                raise self.error("injected")
            self.lines += 1
        return self._trace

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(before)


def run_step(name: str, watch: Callable[[FrameType], bool], at: int, error: type[BaseException]) -> Any:
    bench = Bench(name)
    wire = Tripwire(watch, at, error)
    try:
        with wire.armed():
            step(bench, SOURCES[name])
    except error:
        assert wire.lines > at >= 0
    else:
        assert not 0 <= at < wire.lines, "the exception was swallowed"
    return bench, wire


def in_the_step(frame: FrameType) -> bool:
    return frame.f_code is step.__code__


def in_the_session(frame: FrameType) -> bool:
    return frame.f_code.co_filename in (session.__file__, host.__file__)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["host", "opencl"])
def test_an_exception_at_each_line_of_a_step_leaks_nothing(name: str, error: type[BaseException]) -> None:
    if name == "opencl":
        need(opencl._installed(), "pyopencl with PoCL")
    benches, (_, whole) = [], run_step(name, in_the_step, -1, error)
    assert whole.lines > 15
    for at in range(whole.lines):
        bench, wire = run_step(name, in_the_step, at, error)
        leaving = wire.seen.count(wire.seen[-1]) > 1  # a `with` line is run again when its block is left
        assert not leaving or wire.text.startswith("with ")
        if leaving:
            bench.end_lease()
        for gpu, watched in bench.opened:
            assert len(watched.order) == len(watched.released), f"line {wire.seen[-1][1]}"
            assert gpu.tally.left_buffers + gpu.tally.left_modules == len(watched.torn_down)
            assert gpu.tally.problems == []
            if name == "opencl":
                assert_released_in_opencl(watched.order)
        bench.assert_device_is_empty()
        bench.assert_closed_for_good()
        benches.append(bench)
    assert_no_module_is_alive(benches)


def assert_released_in_opencl(raws: Sequence[Any]) -> None:
    import pyopencl as cl

    for raw in raws:
        if isinstance(raw, opencl._Program):
            assert raw.program is None
            assert not raw.kernels
        else:
            with pytest.raises(cl.LogicError):  # there is nothing left to release
                raw.release()


def test_ctrl_c_at_each_line_of_the_session_leaks_nothing() -> None:
    """The lines of `session.py` and `host.py` themselves, teardown included; then the lease ends."""
    _, whole = run_step("host", in_the_session, -1, KeyboardInterrupt)
    assert whole.lines > 200
    not_closed, kept, benches = 0, set[str](), []
    for at in range(whole.lines):
        bench, wire = run_step("host", in_the_session, at, KeyboardInterrupt)
        where = f"{wire.seen[-1]}"
        if not all(gpu._let_go for gpu, _ in bench.opened):
            assert wire.seen[-1][0] in ("__init__", "__enter__", "__exit__"), (
                where
            )  # its block was not entered, or left
        bench.end_lease()
        for gpu, watched in bench.opened:
            assert watched.closed <= 1, where
            assert not gpu._live, where
            assert gpu.used_bytes == 0, where
            not_closed += not watched.closed
            watched.forget()
        benches.append(bench)
        if wire.text != UNINTERRUPTIBLE and bench.held_files():
            gc.collect()
            kept.add(wire.seen[-1][0])
            assert bench.held_files() == [], where
    # Cut short while it let go of a kernel's views: they go with the exception that saw them.
    assert kept <= {"launch"}
    # One call cannot be both never lost and never repeated; closing a context twice may crash a real driver.
    assert not_closed <= 6
    assert_no_module_is_alive(benches)


def test_an_exception_that_is_kept_keeps_no_memory() -> None:
    """As a notebook keeps the last one: its frames have seen the views a kernel was given."""
    bench, kept = Bench("host"), []
    with bench.open() as gpu:
        module = gpu.load("def fails(grid, out):\n    1 / 0\n")
        for kernel_args in (1, 2):  # runs and fails; is refused
            buffer = gpu.alloc(64)
            try:
                gpu.launch(module, "fails", args=[buffer] * kernel_args)
            except SubletError as e:
                kept.append(e)
            gpu.free(buffer)
            assert bench.held_files() == []
    assert len(kept) == 2
