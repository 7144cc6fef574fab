"""One leased kernel, as the Jupyter server keeps it: its process, the lease it asks for, and how it came to an end.

Rules of this file:
- The kernel is contained from its first instruction, and asks for its GPU when its first cell is run: a notebook that is only open, and
  a kernel that was restarted because nobody used it, hold nothing.
- Its supervisor is the lease's holder and ends the kernel at every deadline, with nobody's help. The server is never the holder.
- One thread per kernel does everything that may block: asking, waiting, giving back. The server's event loop only looks.
- A cell that runs is work. Between cells the lease is idle: who waits may have it, and its ttl runs out.
- What the kernel says and hears goes through one socket it was handed; a kernel that closed it is on its way out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sublet.borrowing import GpuRequest
from sublet.core.admission import Wait
from sublet.core.errors import BadInput, SubletError
from sublet.core.lease import EndReason, Holder, Request
from sublet.core.notice import Notice
from sublet.core.values import parse_duration
from sublet.notebook import kernel_words
from sublet.ports.command import Command, Left
from sublet.ports.worker import Call, Part, Screen, Sink
from sublet.running import DEFAULT_GRACE
from sublet.runs import RunFolder
from sublet.runtime.alarms import Alarms
from sublet.runtime.holding import EXPLAIN_PATIENCE_US, WATCHDOG_US, Lease
from sublet.settings import Settings
from sublet.wiring import CLOCK, ensure_warden, notice_sources, open_ledger, opening_of

#: Behind the socket and the pipe: how often the kernel is looked at anyway.
LOOK_MS = 1000
#: The same warning with a deadline this near is the same deadline, read again.
AGAIN_US = 500_000


class NotWanted(Exception):
    """The cell that waited was interrupted, or its kernel is gone."""


class _Holder:
    """Implements `ports.worker.Worker` for a kernel that runs already: the lease is handed to it, it is not begun by it."""

    here = True
    host_lost = ""

    def __init__(self, command: Command) -> None:
        self._command = command
        self.environment: dict[str, str] = {}
        self._armed = False

    @property
    def holder(self) -> Holder:
        return self._command.holder

    @property
    def containment(self) -> str:
        return self._command.containment

    @property
    def launches(self) -> int:
        return 0  # it is not called

    @property
    def ending(self) -> str:
        return self._command.ending

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)

    def arm(self, stop_us: int, kill_us: int, *, confirm: bool = False) -> None:
        self._armed = True
        self._command.arm(stop_us, kill_us, confirm=confirm)

    def warn(self) -> None:
        self._command.warn()

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise BadInput("a kernel is not called; its cells run")

    def call_many(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[tuple[bool, Any]]:
        raise BadInput("a kernel is not called; its cells run")

    def call_shown(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        screen: Screen,
        answer: Callable[[Any], Any],
    ) -> Any:
        raise BadInput("a kernel is not called; its cells run")

    def call_sealed(self, target: str, parts: Sequence[Part], sink: Sink) -> tuple[bool, list[memoryview]]:
        raise BadInput("a kernel is not called; its cells run")

    def interrupt(self) -> None:
        raise BadInput("a kernel is not called; its cells run")

    def end(self, why: str) -> None:
        if self._armed:  # one that was refused a lease goes on without
            self._command.end(why)


class _Machine:
    """Warnings that are not of a lease: the cloud, the scheduler, a time limit. Watched once per server, for all its kernels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alarms: Alarms | None = None
        self._kernels: set[KernelLease] = set()

    def tell(self, kernel: KernelLease, settings: Settings) -> None:
        with self._lock:
            self._kernels.add(kernel)
            if self._alarms is not None:
                return
            grace_us = parse_duration(DEFAULT_GRACE)
            # No signals: those sent to the server are the server's.
            self._alarms = Alarms(
                CLOCK, notice_sources(settings, grace_us=grace_us), grace_us=grace_us, signals=()
            )
        self._alarms.__enter__()
        self._alarms.on_notice(self._heard)

    def forget(self, kernel: KernelLease) -> None:
        with self._lock:
            self._kernels.discard(kernel)

    def notice(self) -> Notice | None:
        return self._alarms.notice if self._alarms is not None else None

    def _heard(self, notice: Notice) -> None:
        with self._lock:
            kernels = list(self._kernels)
        for kernel in kernels:
            kernel.warn(notice)


machine = _Machine()


class KernelLease:
    def __init__(
        self,
        name: str,
        settings: Settings,
        request: Request,
        folder: RunFolder,
        command: Command,
        pid: int,
        link: socket.socket,
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        self._name = name  # as the server's log calls it
        self._settings = settings
        self._request = request
        self._folder = folder
        self._command = command
        self._pid = pid
        self._pid_fd = os.pidfd_open(pid)
        self._link = link
        self._log = log
        self._lease: Lease | None = None
        self._granted: dict[str, Any] = {}  # what the kernel was told of its lease
        self._wanted = 0  # the number of the request a cell waits for
        self._told: Notice | None = None
        self._busy = False
        self._asked = False  # to end it
        self._expected = False  # that it ends by itself
        self._left: Left | None = None
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = select.poll()
        for fd in (link.fileno(), command.fileno(), self._woken):
            self._poller.register(fd, select.POLLIN)
        self._gone = threading.Event()
        self._closing = threading.Lock()
        self.words = ""  # for the next kernel: why this one is no more, when nobody asked for that
        self._thread = threading.Thread(target=self._serve, name="sublet-kernel", daemon=True)

    # what the server asks; none of it blocks but `end`

    def begin(self, environment: Mapping[str, str]) -> None:
        """The kernel runs, without a lease."""
        self._command.begin("", 0, environment)
        self._thread.start()

    @property
    def exit_code(self) -> int | None:
        """None while anything of it is left, its lease included."""
        if not self._gone.is_set():
            return None
        return self._left.code if self._left is not None and self._left.code is not None else 1

    def signal(self, number: int) -> None:
        """To the kernel and the processes it started in its own group, as an interrupt from a terminal would."""
        with self._closing, contextlib.suppress(ProcessLookupError):
            if not self._gone.is_set():
                signal.pidfd_send_signal(self._pid_fd, 0)  # its number may be somebody else's by now
                os.killpg(self._pid, number)

    def expect_end(self) -> None:
        """Somebody asked the kernel to leave: that it does is nothing to explain."""
        self._expected = True

    def end(self, seconds: float) -> None:
        """Give the GPU back and end everything of the kernel. Returns when that is done, or took too long."""
        self._asked = self._expected = True
        with self._closing:
            if not self._gone.is_set():
                os.write(self._wake, b"!")
        self._gone.wait(seconds)

    # the kernel's own thread

    def _serve(self) -> None:
        try:
            self._warm_up()
            while self._left is None and not self._asked:
                self._hear(LOOK_MS)
                if self._wanted and self._left is None and not self._asked:
                    self._answer(self._wanted)
        finally:
            self._finish()

    def _warm_up(self) -> None:
        """The first cell then finds the ledger open and a warden on its way. What does not work now is told where it is needed."""
        try:
            machine.tell(self, self._settings)
            open_ledger(self._settings)
            ensure_warden(self._settings, wait=False)
        except (SubletError, OSError) as e:
            self._log.warning("kernel %s: %s", self._name, e)

    def _hear(self, pause_ms: int) -> None:
        for fd, _ in self._poller.poll(pause_ms):
            if fd == self._woken:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 64)
            elif fd == self._link.fileno():
                self._read()
        self._left = self._left or self._command.left()

    def _read(self) -> None:
        try:
            message = self._link.recv(kernel_words.MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._poller.unregister(self._link.fileno())
            self._work(False)  # on its way out; or a cell closed it, and nobody will ever say that it works
            return
        said = json.loads(message)
        if "busy" in said:
            self._work(bool(said["busy"]))
        if "want" in said:
            self._wanted = int(said["want"])
        if said.get("leave") == self._wanted:
            self._wanted = 0

    def _say(self, **said: Any) -> None:
        with contextlib.suppress(OSError):
            self._link.send(json.dumps(said).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _work(self, busy: bool) -> None:
        if busy == self._busy:
            return
        self._busy = busy
        if self._lease is not None:
            if busy:
                self._lease._work_began()
            else:
                self._lease._work_ended()

    # the lease

    def _answer(self, number: int) -> None:
        try:
            if self._lease is None:
                self._take(number)
            self._wanted = 0
            self._say(granted=number, **self._granted)
        except NotWanted:
            pass
        except SubletError as e:
            self._refuse(number, e)
        except Exception as e:  # a kernel that waits must be told, whatever it is
            self._log.exception("a leased kernel's GPU could not be asked for")
            self._refuse(number, SubletError(f"{type(e).__name__}: {e}"))

    def _refuse(self, number: int, error: SubletError) -> None:
        self._wanted = 0
        self._log.warning("no GPU for kernel %s: %s", self._name, error.message)
        self._say(refused=number, code=error.code, message=error.message, remedy=error.remedy)

    def _take(self, number: int) -> None:
        def still_wanted() -> None:
            self._hear(0)
            if self._wanted != number or self._left is not None or self._asked:
                raise NotWanted

        def on_wait(wait: Wait) -> None:
            self._say(waiting=number, position=wait.position, eta_us=wait.eta_us, reason=wait.reason)

        holder = _Holder(self._command)
        asked = GpuRequest(
            self._settings,
            self._request,
            holder="worker",
            on_wait=on_wait,
            on_offer=None,
            start=lambda: holder,
            environment=self._move_in,
            still_wanted=still_wanted,
        )
        lease = asked._keep()
        try:
            openings = [
                asdict(opening_of(self._settings, lease, i, WATCHDOG_US)) for i in range(len(lease.devices))
            ]
        except BaseException:
            lease.release()
            raise
        if self._busy:
            lease._work_began()
        self._lease = lease
        lease.on_notice(self.warn)
        said = machine.notice()
        if said is not None:
            self.warn(said)
        self._log.info("kernel %s holds lease %s on %s", self._name, lease.id, ", ".join(lease.devices))
        self._granted = {
            "environment": holder.environment,
            "openings": openings,
            "tier": self._request.tier.value,
        }

    def _move_in(self, lease: Lease, _: object) -> Mapping[str, str]:
        self._folder.withdraw_notice()
        self._folder.write_key(lease.key, self._command.holder.pid, self._command.holder.started)
        return {}

    def warn(self, notice: Notice) -> None:
        """Called from a thread of the keeper's, or of who watches the machine."""
        if self._lease is None:
            return  # it will be told when it has something to lose
        told, self._told = self._told, notice
        if told and told.reason == notice.reason and abs(told.deadline_us - notice.deadline_us) < AGAIN_US:
            return
        # The keeper takes back what it said when there is work, or when the ledger answers again.
        final = notice.source != "keeper"
        now = CLOCK.monotonic_us()
        if final:
            self._command.warn()
            with contextlib.suppress(OSError):
                self._folder.write_notice(notice, now, CLOCK.wall_us())
        self._say(notice=notice.reason, deadline_us=notice.deadline_us, final=final)
        self._log.warning(
            "kernel %s: %s",
            self._name,
            kernel_words.ending(notice.reason, notice.seconds_left(now), final=final),
        )

    # the end

    def _finish(self) -> None:
        with contextlib.ExitStack() as last:
            # Backwards, and each whatever became of the one before it.
            last.callback(self._close)
            last.callback(shutil.rmtree, self._folder.path, ignore_errors=True)
            last.callback(self._end_command)
            last.callback(self._give_back)
            last.callback(machine.forget, self)
            if not self._expected:
                self.words = self._why(self._left)
                if self.words:
                    self._log.warning("kernel %s: %s", self._name, self.words)

    def _give_back(self) -> None:
        if self._lease is not None:
            with contextlib.suppress(SubletError):
                self._lease.release()

    def _end_command(self) -> None:
        self._command.end("the kernel is not wanted any more")
        self._left = self._left or self._command.left()

    def _close(self) -> None:
        with self._closing:
            self._gone.set()
            self._link.close()
            for fd in (self._woken, self._wake, self._pid_fd):
                os.close(fd)

    def _why(self, left: Left | None) -> str:
        lease, code = self._lease, left.code if left is not None else None
        if lease is not None:
            with contextlib.suppress(SubletError):
                row = open_ledger(self._settings).look(lease.id, patience_us=EXPLAIN_PATIENCE_US).lease
                if row.reason is not None and row.reason not in (EndReason.RELEASED, EndReason.HOLDER_LOST):
                    return kernel_words.restarted(f"{row.reason.value}: {row.detail}")
            if lease.seconds_left <= 0:
                idle = "it was not renewed in time" if self._busy else "idle: no cell was run for its ttl"
                return kernel_words.restarted(idle)
        return "" if code == 0 else kernel_words.crashed(code, leased=lease is not None)
