"""The Notice bus: every warning that the GPU will go, from any source, as one Notice.

Rules of this file:
- A signal handler sets a flag and writes to a pipe, nothing more: no lock, no log, no thread. It may run between any two bytecodes of the
  main thread, also while that thread holds our own lock.
- Python runs handlers only when the main thread comes back from C. The interpreter's wake-up descriptor is written by the C handler itself,
  so a thread of ours hears a signal that arrives during a long kernel, and its deadline counts from its arrival.
- What signals and sources said stays said: whoever heard it has begun to leave. What a lease says is read from the lease each time,
  because its keeper takes a warning back when the ledger answers again.
- Only the main thread can give handlers and the wake-up descriptor back. What another thread left stays in place, and its pipe open, until
  the main thread comes by: a closed descriptor's number is soon a stranger's, and the interpreter would write into it.
- A signal is somebody else's too: a handler that was there before is called after ours. One that was installed from C is left alone,
  but for SIGTERM: compilers that run inside a process (LLVM's, in OpenCL and others) leave one there that ends it. Theirs is put back.
  The first SIGINT is a Notice, the second is the user's Ctrl-C as it was before.
- A forked child is not the leader. It has none of this: it gets back the handlers that were there before, except that a warning to
  the whole group must not kill it before the leader has decided. So SIGUSR1 and SIGUSR2 are ignored there if they would have killed it,
  and so is the first SIGINT. SIGTERM keeps its old meaning, because that is how a parent ends its children.
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

#: Those entered and not left, oldest first.
_entered: list[Alarms] = []


class Warned(Protocol):
    """What `listen_to` needs of a lease."""

    @property
    def notice(self) -> Notice | None: ...

    def on_notice(self, callback: Callable[[Notice], None]) -> None: ...


class Alarms:
    """`with Alarms(clock, sources, grace_us=…) as alarms:` and then `alarms.notice` once per step."""

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
        self._previous: dict[int, Any] = {}
        self._foreign: dict[int, _Action] = {}
        self._previous_wakeup = -1
        self._interrupts = 0
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failures: dict[str, str] = {}
        self._closed = False
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
    def risks(self) -> tuple[str, ...]:
        """Why a loss is likelier than usual, by sources that can tell. Hints to save sooner; nothing ends for them."""
        return tuple(source.risk for source in self._sources if source.risk)

    @property
    def failures(self) -> dict[str, str]:
        """Sources that broke and are being tried again: name and what went wrong."""
        return dict(self._failures)

    def wait(self, timeout_seconds: float | None = None) -> Notice | None:
        """Until there is a Notice, or the time is over."""
        ends = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        poll = select.poll()
        if not self._closed:
            poll.register(self._woken, select.POLLIN)
        while True:
            nearest = self.notice
            if nearest is not None or self._closed:
                return nearest
            left = None if ends is None else ends - time.monotonic()
            if left is not None and left <= 0:
                return None
            # A lease whose callback was missed is looked at anyway.
            if poll.poll(1000 if left is None else min(1.0, left) * 1000) and self.notice is None:
                self.heard()  # taken back meanwhile

    def fileno(self) -> int:
        """Readable once a Notice came, until `heard()`. For select, poll and event loops."""
        if self._closed:
            raise ValueError("these alarms are closed")
        return self._woken

    def heard(self) -> Notice | None:
        """Empty the pipe behind `fileno()`; the notice as it is now."""
        if not self._closed:
            _empty(self._woken)
        return self.notice

    def on_notice(self, callback: Callable[[Notice], None]) -> None:
        """Called with the nearest warning whenever a new one came, from a thread of sublet's; set a flag there and return."""
        self._callbacks.append(callback)
        nearest = self.notice
        if nearest is not None:
            callback(nearest)

    # who warns

    def raise_notice(self, notice: Notice) -> None:
        """From any thread; not from a signal handler."""
        with self._lock:
            if self._closed:
                return
            merged = merge(self._raised, notice)
            if merged == self._raised:
                return
            self._raised = merged
        self._tell()

    def listen_to(self, lease: Warned) -> None:
        """Its warnings count here, for as long as it has them."""
        itself = weakref.ref(self)

        def told(_: Notice) -> None:
            alarms = itself()
            if alarms is not None and any(lease is one for one in alarms._leases):
                alarms._tell()

        with self._lock:
            self._leases = (*self._leases, lease)
        lease.on_notice(told)

    def forget(self, lease: Warned) -> None:
        """The lease was given back, and its warnings with it."""
        with self._lock:
            self._leases = tuple(one for one in self._leases if one is not lease)

    def _tell(self) -> None:
        nearest = self.notice
        if nearest is None:
            return
        with self._lock:  # a closed descriptor's number may be somebody else's by now
            if self._closed:
                return
            _write(self._wake, b"!")
        for callback in list(self._callbacks):
            with contextlib.suppress(Exception):
                callback(nearest)

    # entering and leaving

    def __enter__(self) -> Alarms:
        if self._closed:
            raise ValueError("these alarms are closed")
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
        """Handlers go back to what they were. Safe to call twice."""
        if self._closed:
            return
        self._stop.set()
        in_main = threading.current_thread() is threading.main_thread()
        if self._previous and in_main:
            self._give_back_signals()
        with self._lock:
            self._closed = True
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
            self._close_pipes(but_heard=not in_main and any(map(self._is_installed, self._previous)))

    def _step_aside(self, other: Alarms) -> None:
        """Entered after this one, and left later: what was there before this one is now what was there before it."""
        for number, before in other._previous.items():
            if before == self._on_signal:
                other._previous[number] = self._previous[number]
                if number in self._foreign:
                    other._foreign[number] = self._foreign[number]
        if other._previous_wakeup >= 0 and other._previous_wakeup == self._heard:
            other._previous_wakeup = self._previous_wakeup

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
            except Exception as e:  # somebody's plug-in: training goes on without it, and it is tried again
                self._failures[source.name] = f"{type(e).__name__}: {e}"
                self._stop.wait(pause)
                pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    # signals

    def _take_signals(self) -> None:
        for number in self._wanted:
            _bury_what_is_closed(number)
            before = signal.getsignal(number)
            if number == signal.SIGINT and before is signal.SIG_IGN:
                continue  # it belongs to another job's terminal
            foreign = _foreign(number, before)
            if foreign is not None:
                if number != signal.SIGTERM:
                    continue
                before, self._foreign[number] = signal.SIG_DFL, foreign
            self._previous[number] = before
            signal.signal(number, self._on_signal)
        if not self._previous:
            return
        self._previous_wakeup = signal.set_wakeup_fd(self._heard, warn_on_full_buffer=False)
        self._start("sublet-alarms", self._relay, self._heard_from)

    def _is_installed(self, number: int) -> bool:
        return bool(signal.getsignal(number) == self._on_signal)

    def _bury(self) -> None:
        """In the main thread, of alarms another thread has closed."""
        self._give_back_signals()
        with self._lock:
            self._close_pipes()

    def _give_back_signals(self) -> None:
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(self._previous_wakeup if current == self._heard else current)
        for number, before in self._previous.items():
            if self._is_installed(number):
                self._put(number, before)

    def _put(self, number: int, before: Any) -> None:
        signal.signal(number, before)
        if number in self._foreign:
            _sigaction(number, self._foreign[number], None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._previous[number]
        if self._closed:  # by another thread, which could not put it back
            if self._is_installed(number):
                self._bury()
                signal.raise_signal(number)
            elif callable(before):  # somebody's who was there later, and calls what was before
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
        if self._signalled is None and not self._closed:
            why = _WHY.get(signal.Signals(number), f"{signal.Signals(number).name}: a warning by signal")
            self._signalled = Notice(
                source="signal", reason=why, deadline_us=self._clock.monotonic_us() + self._grace_us
            )
            _write(self._wake, b"!")

    def _relay(self, heard_from: int) -> None:
        """What the C handler wrote, also while the main thread is busy in C."""
        poll = select.poll()
        poll.register(heard_from, select.POLLIN)
        while not self._closed:
            poll.poll()
            for number in _empty(heard_from):
                if not number & _BY_HANDLER and number and self._previous_wakeup >= 0:
                    _write(self._previous_wakeup, bytes((number,)))
                if number & ~_BY_HANDLER in self._previous:
                    self._flag(number & ~_BY_HANDLER)
            if self._signalled is not None and not self._told_of_signal:
                self._told_of_signal = True
                self._tell()

    # a forked child

    def _be_a_child(self) -> None:
        """Nothing here is the child's. Runs with our signals blocked."""
        self._closed = True
        self._stop = threading.Event()
        self._stop.set()
        self._lock = threading.Lock()
        self._raised = self._signalled = None
        self._leases, self._callbacks, self._threads = (), [], []
        for number, before in self._previous.items():
            if not self._is_installed(number):
                continue
            self._put(number, _in_a_child(number, before))
        if self._previous:
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
    """Ctrl-C goes to the whole group: the leader decides on the first, the user means the second."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt


def _bury_what_is_closed(number: int) -> None:
    """Else it would be what was before us, and would take the signal for its own past."""
    while True:
        owner = getattr(signal.getsignal(number), "__self__", None)
        if not (isinstance(owner, Alarms) and owner._closed and owner._is_installed(number)):
            return
        owner._bury()


#: `struct sigaction`, which begins with the handler.
_Action = ctypes.Array[ctypes.c_void_p]
_C_HANDLERS_OF_NO_CODE = (None, 0, 1)  # by default, and ignored


def _foreign(number: int, before: Any) -> _Action | None:
    """Python knows of no handler, and yet there is one (faulthandler's, or a library's)."""
    if before is not None and before is not signal.SIG_DFL:
        return None
    found: _Action = (ctypes.c_void_p * 32)()
    if not _sigaction(number, None, found) or found[0] in _C_HANDLERS_OF_NO_CODE:
        return None
    return found


def _sigaction(number: int, new: _Action | None, old: _Action | None) -> bool:
    return bool(ctypes.CDLL(None).sigaction(int(number), new, old) == 0)


# --- fork: no signal may arrive between the fork and `_be_a_child` -------------------------------------------

_masks = threading.local()


def _before_fork() -> None:
    ours = {number for alarms in _entered for number in alarms._previous}
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ours) if ours else None


def _after_in_parent() -> None:
    before = getattr(_masks, "before", None)
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_in_child() -> None:
    # Newest first, as they would be left.
    for alarms in reversed(_entered):
        alarms._be_a_child()
    _entered.clear()
    _after_in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


# --- pipes ---------------------------------------------------------------------------------------------------


def _pipe() -> tuple[int, int]:
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    return reading, writing


def _write(fd: int, data: bytes) -> None:
    """A full pipe has its byte; a closed one has nobody."""
    try:
        os.write(fd, data)
    except (OSError, ValueError):
        pass


def _empty(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except (OSError, ValueError):
        return b""
