"""GpuSession: an open device under a lease.

Rules of this file:
- Everything is checked before the driver is called: that the handle is this session's and still alive, its
  bounds, the leased VRAM, and, before every operation, the lease itself. A refused operation changes nothing
  and leaves the session usable.
- Whatever ends the session (the block's end, an exception, the lease) frees everything in reverse order of
  creation. What the program had not freed itself is counted: it goes into the Receipt.
- Ctrl-C may come at any line. Nothing is freed twice; teardown goes on to its end and can be taken up again
  where it was cut short. What an interrupted `alloc` or `free` lost sight of goes with the context, which is
  always closed.
- After the lease has ended every operation raises `LeaseLost`; only freeing still works.
- A kernel that outlives the watchdog leaves the device in an unknown state: the session is over, and so
  should the process be.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Protocol

from sublet.core.errors import BadInput, DeviceFault, KernelTimeout, OutOfMemory, SubletError
from sublet.core.progress.kernel_arguments import Scalar, launch_shape
from sublet.core.values import format_duration, format_size
from sublet.machine import lease_environment
from sublet.ports.device import Context, RawBuffer, RawModule

DEFAULT_WATCHDOG_US = 600_000_000


class SessionLease(Protocol):
    """What a session needs of a lease."""

    @property
    def id(self) -> str: ...
    def check(self) -> None: ...
    def working(self) -> contextlib.AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class Buffer:
    session: int
    number: int
    size: int

    def __hash__(self) -> int:
        return self.number  # unique, and half the price: every launch looks its handles up


@dataclass(frozen=True, slots=True)
class Module:
    session: int
    number: int

    def __hash__(self) -> int:
        return self.number


@dataclass(slots=True)
class SessionTally:
    """What a session did, for the meter and the Receipt."""

    launches: int = 0
    errors: int = 0
    device_us: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    peak_bytes: int = 0
    left_buffers: int = 0  # what teardown had to free
    left_modules: int = 0
    left_bytes: int = 0
    problems: list[str] = field(default_factory=list)


_numbers = itertools.count(1)


class LocalGpuSession:
    def __init__(
        self,
        context: Context,
        lease: SessionLease,
        quota_bytes: int,
        *,
        device_id: str = "",
        watchdog_us: int = DEFAULT_WATCHDOG_US,
        on_close: Callable[[SessionTally], None] = lambda tally: None,
    ) -> None:
        self._context = context
        self._lease = lease
        self._quota_bytes = quota_bytes
        self._watchdog_us = watchdog_us
        self._on_close = on_close
        self._number = next(_numbers)
        self._live: dict[Buffer | Module, RawBuffer | RawModule] = {}  # in order of creation
        self._used_bytes = 0
        self._over = ""
        self._wedged = ""
        self._let_go = False  # has the context been closed?
        self._interrupt: BaseException | None = None
        self.device_id = device_id
        self.tally = SessionTally()

    # memory

    def alloc(self, size: int) -> Buffer:
        """Zeroed device memory, counted against the leased VRAM."""
        if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
            raise BadInput(f"a buffer's size must be a positive number of bytes, not {size!r}")
        with self._operation():
            if self._used_bytes + size > self._quota_bytes:
                raise OutOfMemory(
                    f"{format_size(size)} more would exceed the leased {format_size(self._quota_bytes)}: "
                    f"{format_size(self._used_bytes) if self._used_bytes else 'nothing'} is in use"
                )
            buffer = Buffer(self._number, next(_numbers), size)
            self._live[buffer] = self._context.alloc(size)
            self._used_bytes += size
            self.tally.peak_bytes = max(self.tally.peak_bytes, self._used_bytes)
            return buffer

    def free(self, buffer: Buffer) -> None:
        raw = self._find(buffer, Buffer)
        # Forgotten before it is freed: a free that failed half-way must not be tried again on memory that is
        # another's by then.
        del self._live[buffer]
        self._used_bytes -= buffer.size
        self._release(partial(self._context.free, raw))

    def write(self, buffer: Buffer, data: bytes | bytearray | memoryview, offset: int = 0) -> None:
        try:
            view = memoryview(data).cast("B")
        except TypeError as e:
            raise BadInput(f"only contiguous bytes can be written: {e}") from e
        with self._operation():
            raw = self._find(buffer, Buffer)
            self._bounded(buffer, offset, view.nbytes)
            if view.nbytes:
                self._context.write(raw, offset, view)
            self.tally.bytes_written += view.nbytes

    def read(self, buffer: Buffer, size: int | None = None, offset: int = 0) -> bytes:
        with self._operation():
            raw = self._find(buffer, Buffer)
            wanted = buffer.size - offset if size is None else size
            self._bounded(buffer, offset, wanted)
            self.tally.bytes_read += wanted
            return self._context.read(raw, offset, wanted) if wanted else b""

    @staticmethod
    def _bounded(buffer: Buffer, offset: int, size: int) -> None:
        if not isinstance(offset, int) or not isinstance(size, int):
            raise BadInput(f"offset and size must be whole numbers, not {offset!r} and {size!r}")
        if offset < 0 or size < 0 or offset + size > buffer.size:
            raise BadInput(f"bytes {offset} to {offset + size} are outside the buffer's {buffer.size}")

    # code

    def load(self, source: str | bytes) -> Module:
        if not isinstance(source, str | bytes):
            raise BadInput(f"a kernel's source must be text or bytes, not {type(source).__name__}")
        with self._operation():
            module = Module(self._number, next(_numbers))
            self._live[module] = self._context.load(source)
            return module

    def unload(self, module: Module) -> None:
        raw = self._find(module, Module)
        del self._live[module]
        self._release(partial(self._context.unload, raw))

    def launch(
        self,
        module: Module,
        kernel: str,
        *,
        grid: tuple[int, ...] | int = (1,),
        block: tuple[int, ...] | int = (1,),
        args: Sequence[Scalar | Buffer] = (),
    ) -> None:
        """`grid` blocks of `block` threads. Numbers are typed: `sublet.u32(n)`."""
        shape, threads = launch_shape(grid, what="grid"), launch_shape(block, what="block")
        if not isinstance(kernel, str):
            raise BadInput(f"a kernel is named by a text, not {type(kernel).__name__}")
        self._ready()
        try:  # `_operation` written out: a generator costs microseconds, and this is the hot path
            code = self._find(module, Module)
            raw_args: list[Scalar | RawBuffer] = []
            for place, arg in enumerate(args):
                if isinstance(arg, Scalar):
                    raw_args.append(arg)
                elif isinstance(arg, Buffer):
                    raw_args.append(self._find(arg, Buffer))
                else:
                    raise BadInput(
                        f"argument {place} of {kernel} is {type(arg).__name__}: "
                        "give it a type, such as sublet.u32(…), "
                        "or a buffer of this session"
                    )
            self._context.launch(code, kernel, shape, threads, raw_args)
        except SubletError:
            self.tally.errors += 1
            raise
        self.tally.launches += 1
        lease_environment.launched()

    def sync(self) -> int:
        """Wait for everything launched, and return the device time it took in microseconds."""
        with self._operation(), self._lease.working():
            try:
                spent = self._context.sync(self._watchdog_us)
            except KernelTimeout:
                self._over = f"a kernel ran longer than {format_duration(self._watchdog_us)}"
                raise
            self.tally.device_us += spent
            return spent

    # life

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def _ready(self) -> None:
        if self._over:
            raise DeviceFault(f"the session is over: {self._over}", remedy="open a new session")
        self._lease.check()

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        self._ready()
        try:
            yield
        except SubletError:
            self.tally.errors += 1
            raise

    def _release(self, release: Callable[[], None]) -> None:
        """Give back what the program frees itself. If that fails, nobody knows whether the device still has
        it, and the Receipt says so."""
        try:
            release()
        except BaseException as e:
            self.tally.errors += isinstance(e, SubletError)
            self._note(e)
            raise

    def _find(self, handle: Buffer | Module, kind: type[Buffer] | type[Module]) -> RawBuffer | RawModule:
        if not isinstance(handle, kind):
            raise BadInput(f"{handle!r} is not a {kind.__name__.lower()}")
        if handle.session != self._number:
            raise BadInput(f"this {kind.__name__.lower()} belongs to another session")
        try:
            return self._live[handle]
        except KeyError:
            gone = "freed" if kind is Buffer else "unloaded"
            raise BadInput(f"this {kind.__name__.lower()} was already {gone}") from None

    def close(self) -> SessionTally:
        """Free everything that is left, newest first, then the device. Safe to call twice, and again if it
        was interrupted."""
        if self._let_go:
            return self.tally
        if self._over != "closed":
            self._wedged, self._over = self._over, "closed"
        while self._live:
            handle, raw = self._live.popitem()
            if isinstance(handle, Buffer):
                self.tally.left_buffers += 1
                self.tally.left_bytes += handle.size
                self._quietly(partial(self._context.free, raw))
            else:
                self.tally.left_modules += 1
                self._quietly(partial(self._context.unload, raw))
        self._used_bytes = 0
        if self._wedged:
            self.tally.problems.append(self._wedged)
        self._let_go = True
        self._quietly(self._context.close)
        self._on_close(self.tally)
        interrupt, self._interrupt = self._interrupt, None  # kept, its traceback would keep what it saw
        if interrupt is not None:
            raise interrupt
        return self.tally

    def _quietly(self, release: Callable[[], None]) -> None:
        """Run one part of a teardown. Whatever it raises, the error is kept and the teardown goes on; a
        Ctrl-C is raised again at the end."""
        try:
            release()
        except Exception as e:
            self._note(e)
        except BaseException as e:
            self._note(e)
            self._interrupt = e

    def _note(self, error: BaseException) -> None:
        self.tally.problems.append(f"{type(error).__name__}: {error}")

    def __enter__(self) -> LocalGpuSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        finally:
            self.close()  # nothing to do, unless a Ctrl-C cut the first one short
