"""The Notice bus: every warning that the GPU will go, from any source, as one Notice.

Rules of this file:
- A signal handler sets a flag and writes to a pipe, nothing more: no lock, no log, no thread. It may run
  between any two bytecodes of the main thread, also while that thread holds our own lock.
- Python runs handlers only when the main thread comes back from C. The interpreter's wake-up descriptor is
  written by the C handler itself, so a thread of ours hears a signal that arrives during a long kernel, and
  its deadline counts from its arrival.
- A warning of a signal or a source stays: whoever heard it has begun to leave. A lease's warning is read from
  the lease each time, because its keeper withdraws it when the ledger answers again.
- Only the main thread can restore handlers and the wake-up descriptor. What another thread left stays in
  place, with its pipe open, until the main thread does so: a closed descriptor's number is soon reused, and
  the interpreter would write into it.
- Others may handle the same signal: a handler that was there before is called after ours. One that was
  installed from C is left alone, but for SIGTERM: compilers that run inside a process (LLVM's, in OpenCL and
  others) leave one there that ends it. That handler is put back. The first SIGINT is a Notice, the second is
  the user's Ctrl-C as it was before.
- A forked child is not the leader. It has none of this: it gets back the handlers that were there before,
  except that a warning to the whole group must not kill it before the leader has decided. So SIGUSR1 and
  SIGUSR2 are ignored there if they would have killed it, and so is the first SIGINT. SIGTERM keeps its old
  meaning, because that is how a parent ends its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, Protocol

from sublet.core.notice import Notice, merge
from sublet.ports.clock import Clock
from sublet.ports.notices import NoticeSource

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_WHY = {
    signal.SIGTERM: "SIGTERM: this process is asked to end",
    signal.SIGINT: "SIGINT: this process is asked to end; once more interrupts it",
}
#: Set in a byte of the pipe that our handler wrote, to tell it from the interpreter's.
_BY_HANDLER = 0x80
_STOP = b"\x00"
#: A watcher that failed is started again, at intervals up to this.
LONGEST_PAUSE_SECONDS = 60.0
LEAVE_SECONDS = 1.0

#: Buses that were entered and not left, oldest first.
_entered: list[NoticeBus] = []


class Warned(Protocol):
    """What `listen_to` needs of a lease."""

    @property
    def notice(self) -> Notice | None: ...

    def on_notice(self, callback: Callable[[Notice], None]) -> None: ...


class NoticeBus:
    """`with NoticeBus(clock, sources, grace_us=…) as bus:` and then `bus.notice` once per step."""

    def __init__(
        self,
        clock: Clock,
        sources: Iterable[NoticeSource] = (),
        *,
        grace_us: int,
        signals: Iterable[signal.Signals] = SIGNALS,
    ) -> None:
        self._clock = clock
        self._sources = tuple(sources)
        self._grace_us = grace_us
        self._wanted = tuple(signals)
        self._lock = threading.Lock()
        self._raised: Notice | None = None  # by sources and by anybody
        self._signalled: Notice | None = None
        self._leases: tuple[Warned, ...] = ()
        self._callbacks: list[Callable[[Notice], None]] = []
        self._told_of_signal = False
        self.previous: dict[int, Any] = {}
        self.foreign: dict[int, _Action] = {}
        self.previous_wakeup = -1
        self._interrupts = 0
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failures: dict[str, str] = {}
        self.closed = False
        self._woken, self._wake = _pipe()
        self._heard_from, self._heard = _pipe()

    # what the loop asks

    @property
    def notice(self) -> Notice | None:
        """The nearest warning, or None. Reads attributes only: ask as often as you like."""
        nearest = self._raised
        if self._signalled is not None:
            nearest = merge(nearest, self._signalled)
        for lease in self._leases:
            said = lease.notice
            if said is not None:
                nearest = merge(nearest, said)
        return nearest

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the nearest deadline; None while nobody has warned."""
        nearest = self.notice
        return None if nearest is None else nearest.seconds_left(self._clock.monotonic_us())

    @property
    def risks(self) -> tuple[str, ...]:
        """Why a loss is likelier than usual, from sources that can tell. A risk is a hint to save sooner;
        nothing ends because of it."""
        return tuple(source.risk for source in self._sources if source.risk)

    @property
    def failures(self) -> dict[str, str]:
        """Sources that broke and are being retried: their names and what went wrong."""
        return dict(self._failures)

    def wait(self, timeout_seconds: float | None = None) -> Notice | None:
        """Wait until there is a Notice, or the time is over."""
        ends = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        poll = select.poll()
        if not self.closed:
            poll.register(self._woken, select.POLLIN)
        while True:
            nearest = self.notice
            if nearest is not None or self.closed:
                return nearest
            left = None if ends is None else ends - time.monotonic()
            if left is not None and left <= 0:
                return None
            # A lease whose callback was missed is looked at anyway.
            if poll.poll(1000 if left is None else min(1.0, left) * 1000) and self.notice is None:
                self.heard()  # taken back meanwhile

    def fileno(self) -> int:
        """Readable once a Notice came, until `heard()`. For select, poll and event loops."""
        if self.closed:
            raise ValueError("this notice bus is closed")
        return self._woken

    def heard(self) -> Notice | None:
        """Empty the pipe behind `fileno()`, and return the notice as it is now."""
        if not self.closed:
            _empty(self._woken)
        return self.notice

    def on_notice(self, callback: Callable[[Notice], None]) -> None:
        """Call back with the nearest warning whenever a new one comes, from a thread of sublet's; set a flag
        there and return."""
        self._callbacks.append(callback)
        nearest = self.notice
        if nearest is not None:
            callback(nearest)

    # who warns

    def raise_notice(self, notice: Notice) -> None:
        """Raise a notice, from any thread but not from a signal handler."""
        with self._lock:
            if self.closed:
                return
            merged = merge(self._raised, notice)
            if merged == self._raised:
                return
            self._raised = merged
        self.tell()

    def listen_to(self, lease: Warned) -> None:
        """Count the lease's warnings here, for as long as it has them."""
        itself = weakref.ref(self)

        def told(_: Notice) -> None:
            bus = itself()
            if bus is not None and bus.listens_to(lease):
                bus.tell()

        with self._lock:
            self._leases = (*self._leases, lease)
        lease.on_notice(told)

    def forget(self, lease: Warned) -> None:
        """Stop listening to a lease that was given back."""
        with self._lock:
            self._leases = tuple(one for one in self._leases if one is not lease)

    def listens_to(self, lease: Warned) -> bool:
        return any(lease is one for one in self._leases)

    def tell(self) -> None:
        nearest = self.notice
        if nearest is None:
            return
        with self._lock:  # a closed descriptor's number may be somebody else's by now
            if self.closed:
                return
            _write(self._wake, b"!")
        for callback in list(self._callbacks):
            with contextlib.suppress(Exception):
                callback(nearest)

    # entering and leaving

    def __enter__(self) -> NoticeBus:
        if self.closed:
            raise ValueError("this notice bus is closed")
        if threading.current_thread() is threading.main_thread():
            self._take_signals()
        _entered.append(self)
        for source in self._sources:
            self._start(f"sublet-notices-{source.name}", self._watch, source)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Restore the handlers. Safe to call twice."""
        if self.closed:
            return
        self._stop.set()
        in_main = threading.current_thread() is threading.main_thread()
        if self.previous and in_main:
            self._give_back_signals()
        with self._lock:
            self.closed = True
        with contextlib.suppress(ValueError):
            _entered.remove(self)
        for other in _entered:
            self._step_aside(other)
        _write(self._heard, _STOP)
        ends = time.monotonic() + LEAVE_SECONDS
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, ends - time.monotonic()))
        with self._lock:
            self._close_pipes(but_heard=not in_main and any(map(self.is_installed, self.previous)))

    def _step_aside(self, other: NoticeBus) -> None:
        """Leave before a bus that was entered later: what that one restores is now what this one would have
        restored."""
        for number, before in other.previous.items():
            if before == self._on_signal:
                other.previous[number] = self.previous[number]
                if number in self.foreign:
                    other.foreign[number] = self.foreign[number]
        if other.previous_wakeup >= 0 and other.previous_wakeup == self._heard:
            other.previous_wakeup = self.previous_wakeup

    def _close_pipes(self, *, but_heard: bool = False) -> None:
        fds = [self._woken, self._wake]
        self._woken = self._wake = -1
        if not but_heard:
            fds += [self._heard_from, self._heard]
            self._heard_from = self._heard = -1
        for fd in fds:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _start(self, name: str, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch(self, source: NoticeSource) -> None:
        pause = 1.0
        while not self._stop.is_set():
            try:
                source.watch(self.raise_notice, self._stop)
                return
            except Exception as e:  # a plug-in may raise anything: it is tried again
                self._failures[source.name] = f"{type(e).__name__}: {e}"
                self._stop.wait(pause)
                pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    # signals

    def _take_signals(self) -> None:
        for number in self._wanted:
            _restore_closed(number)
            before = signal.getsignal(number)
            if number == signal.SIGINT and before is signal.SIG_IGN:
                continue  # it belongs to another job's terminal
            foreign = _foreign(number, before)
            if foreign is not None:
                if number != signal.SIGTERM:
                    continue
                before, self.foreign[number] = signal.SIG_DFL, foreign
            self.previous[number] = before
            signal.signal(number, self._on_signal)
        if not self.previous:
            return
        self.previous_wakeup = signal.set_wakeup_fd(self._heard, warn_on_full_buffer=False)
        self._start("sublet-notices", self._relay, self._heard_from)

    def is_installed(self, number: int) -> bool:
        return bool(signal.getsignal(number) == self._on_signal)

    def restore_handlers(self) -> None:
        """Finish, in the main thread, the buses that another thread has closed."""
        self._give_back_signals()
        with self._lock:
            self._close_pipes()

    def _give_back_signals(self) -> None:
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(self.previous_wakeup if current == self._heard else current)
        for number, before in self.previous.items():
            if self.is_installed(number):
                self._put(number, before)

    def _put(self, number: int, before: Any) -> None:
        signal.signal(number, before)
        if number in self.foreign:
            _sigaction(number, self.foreign[number], None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self.previous[number]
        if self.closed:  # closed by another thread, which could not restore it
            if self.is_installed(number):
                self.restore_handlers()
                signal.raise_signal(number)
            elif callable(before):  # a handler installed after ours called us
                before(number, frame)
            elif before is signal.SIG_DFL:
                signal.signal(number, before)
                signal.raise_signal(number)
            return
        self._flag(number)
        _write(self._heard, bytes((number | _BY_HANDLER,)))
        if number == signal.SIGINT and before in (signal.default_int_handler, signal.SIG_DFL):
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
        elif callable(before):
            before(number, frame)

    def _flag(self, number: int) -> None:
        if self._signalled is None and not self.closed:
            why = _WHY.get(signal.Signals(number), f"{signal.Signals(number).name}: a warning by signal")
            self._signalled = Notice(
                source="signal", reason=why, deadline_us=self._clock.monotonic_us() + self._grace_us
            )
            _write(self._wake, b"!")

    def _relay(self, heard_from: int) -> None:
        """Relay what the C handler wrote, also while the main thread is busy in C."""
        poll = select.poll()
        poll.register(heard_from, select.POLLIN)
        while not self.closed:
            poll.poll()
            for number in _empty(heard_from):
                if not number & _BY_HANDLER and number and self.previous_wakeup >= 0:
                    _write(self.previous_wakeup, bytes((number,)))
                if number & ~_BY_HANDLER in self.previous:
                    self._flag(number & ~_BY_HANDLER)
            if self._signalled is not None and not self._told_of_signal:
                self._told_of_signal = True
                self.tell()

    # a forked child

    def become_child(self) -> None:
        """Restore everything in a forked child, to which nothing here belongs. Runs with our signals
        blocked."""
        self.closed = True
        self._stop = threading.Event()
        self._stop.set()
        self._lock = threading.Lock()
        self._raised = self._signalled = None
        self._leases, self._callbacks, self._threads = (), [], []
        for number, before in self.previous.items():
            if not self.is_installed(number):
                continue
            self._put(number, _in_a_child(number, before))
        if self.previous:
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, self._heard):
                signal.set_wakeup_fd(current)
        self._close_pipes()


def _in_a_child(number: int, before: Any) -> Any:
    if number in (signal.SIGUSR1, signal.SIGUSR2) and before is signal.SIG_DFL:
        return signal.SIG_IGN
    if number == signal.SIGINT and before in (signal.default_int_handler, signal.SIG_DFL):
        return _FirstOneIgnored()
    return before


class _FirstOneIgnored:
    """Ignores the first Ctrl-C, which goes to the whole group and on which the leader decides; the user means
    the second."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt


def _restore_closed(number: int) -> None:
    """Finish closed buses first: else their handler would be the previous one that we save and restore."""
    while True:
        owner = getattr(signal.getsignal(number), "__self__", None)
        if not (isinstance(owner, NoticeBus) and owner.closed and owner.is_installed(number)):
            return
        owner.restore_handlers()


#: `struct sigaction`, which begins with the handler.
_Action = ctypes.Array[ctypes.c_void_p]
_C_HANDLERS_OF_NO_CODE = (None, 0, 1)  # by default, and ignored


def _foreign(number: int, before: Any) -> _Action | None:
    """Whether there is a handler that Python does not know of (faulthandler's, or a library's)."""
    if before is not None and before is not signal.SIG_DFL:
        return None
    found: _Action = (ctypes.c_void_p * 32)()
    if not _sigaction(number, None, found) or found[0] in _C_HANDLERS_OF_NO_CODE:
        return None
    return found


def _sigaction(number: int, new: _Action | None, old: _Action | None) -> bool:
    return bool(ctypes.CDLL(None).sigaction(int(number), new, old) == 0)


# --- fork: no signal may arrive between the fork and `become_child` ---

_masks = threading.local()


def _before_fork() -> None:
    ours = {number for bus in _entered for number in bus.previous}
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ours) if ours else None


def _after_in_parent() -> None:
    before = getattr(_masks, "before", None)
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_in_child() -> None:
    # Newest first, as they would be left.
    for bus in reversed(_entered):
        bus.become_child()
    _entered.clear()
    _after_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


# --- pipes ---


def _pipe() -> tuple[int, int]:
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    return reading, writing


def _write(fd: int, data: bytes) -> None:
    """Ignore a full pipe (a wake-up is already pending) and a closed one (nobody is listening)."""
    try:
        os.write(fd, data)
    except (OSError, ValueError):
        pass


def _empty(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except (OSError, ValueError):
        return b""
