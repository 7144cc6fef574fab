"""One leased kernel, as the Jupyter server keeps it: its process, its lease, and how it ended.

Rules of this file:
- The kernel is contained from its first instruction, and requests its GPU when its first cell runs: a
  notebook that is only open, and a kernel that was restarted for lack of use, hold nothing.
- Its supervisor is the lease's holder and ends the kernel at every deadline by itself. The server is never
  the holder.
- One thread per kernel does everything that may block: requesting, waiting, releasing. The server's event
  loop only looks.
- A running cell is work. Between cells the lease is idle: a waiter may take it, and its ttl runs out.
- The kernel communicates through one socket it was handed; a kernel that closed it is exiting.
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
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sublet.core.errors import SubletError
from sublet.core.leasing.lease import EndReason, Holder, Request
from sublet.core.notice import DEFAULT_GRACE, Notice
from sublet.core.scheduling.admission import Wait
from sublet.core.values import parse_duration
from sublet.leases.lease import EXPLAIN_PATIENCE_US, WATCHDOG_US, Lease
from sublet.leases.request import GpuRequest
from sublet.leases.sessions import opening_of
from sublet.leases.warden.warden_process import ensure_warden
from sublet.machine.run_folder import RunFolder
from sublet.notebook.kernel import messages
from sublet.notice_bus.bus import NoticeBus
from sublet.ports.worker import Command, CommandExit
from sublet.settings import Settings
from sublet.wiring import CLOCK, notice_sources, open_ledger

#: How often the kernel is looked at even when the socket and the pipe are silent.
LOOK_MS = 1000
#: The same warning with a deadline this near is the same deadline, read again.
AGAIN_US = 500_000


class CellGaveUp(Exception):
    """The waiting cell was interrupted, or its kernel is gone."""


class _KernelWorker:
    """Implements `ports.worker.LeaseHolder` for a kernel that runs already, so `begin` starts nothing."""

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
    def ending(self) -> str:
        return self._command.ending

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)

    def arm(self, stop_us: int, kill_us: int, *, confirm: bool = False) -> None:
        self._armed = True
        self._command.arm(stop_us, kill_us, confirm=confirm)

    def warn(self) -> None:
        self._command.warn()

    def end(self, why: str) -> None:
        if self._armed:  # one that was refused a lease goes on without
            self._command.end(why)


class _MachineNotices:
    """Notices that concern the machine, not a lease (cloud, scheduler, time limit), watched once for all
    kernels of a server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notice_bus: NoticeBus | None = None
        self._kernels: set[KernelLease] = set()

    def tell(self, kernel: KernelLease, settings: Settings) -> None:
        with self._lock:
            self._kernels.add(kernel)
            if self._notice_bus is not None:
                return
            grace_us = parse_duration(DEFAULT_GRACE)
            # No signals: those sent to the server are the server's.
            self._notice_bus = NoticeBus(
                CLOCK, notice_sources(settings, grace_us=grace_us), grace_us=grace_us, signals=()
            )
        self._notice_bus.__enter__()
        self._notice_bus.on_notice(self._heard)

    def forget(self, kernel: KernelLease) -> None:
        with self._lock:
            self._kernels.discard(kernel)

    def notice(self) -> Notice | None:
        return self._notice_bus.notice if self._notice_bus is not None else None

    def _heard(self, notice: Notice) -> None:
        with self._lock:
            kernels = list(self._kernels)
        for kernel in kernels:
            kernel.warn(notice)


machine = _MachineNotices()


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
        self._left: CommandExit | None = None
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller = select.poll()
        for fd in (link.fileno(), command.fileno(), self._woken):
            self._poller.register(fd, select.POLLIN)
        self._gone = threading.Event()
        self._closing = threading.Lock()
        self.words = ""  # for the next kernel: why this one ended, when nobody asked for that
        self._thread = threading.Thread(target=self._serve, name="sublet-kernel", daemon=True)

    # what the server asks; none of it blocks but `end`

    def begin(self, environment: Mapping[str, str]) -> None:
        """Starts the kernel's command, without a lease."""
        self._command.begin("", 0, environment)
        self._thread.start()

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while its process or its lease is left."""
        if not self._gone.is_set():
            return None
        return self._left.code if self._left is not None and self._left.code is not None else 1

    def signal(self, number: int) -> None:
        """Signals the kernel's process group, as an interrupt from a terminal would."""
        with self._closing, contextlib.suppress(ProcessLookupError):
            if not self._gone.is_set():
                signal.pidfd_send_signal(self._pid_fd, 0)  # its number may be somebody else's by now
                os.killpg(self._pid, number)

    def expect_end(self) -> None:
        """Called when somebody asked the kernel to exit, so that its end needs no explanation."""
        self._expected = True

    def end(self, seconds: float) -> None:
        """Releases the GPU and ends everything of the kernel. Returns when that is done, or after so many
        seconds."""
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
        """Opens the ledger and starts a warden ahead of the first cell. A failure is reported when a cell
        needs them."""
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
            message = self._link.recv(messages.MESSAGE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._poller.unregister(self._link.fileno())
            self._work(False)  # the kernel is exiting, or a cell closed the socket: no work can be reported
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
                self._lease.begin_work()
            else:
                self._lease.end_work()

    # the lease

    def _answer(self, number: int) -> None:
        try:
            if self._lease is None:
                self._take(number)
            self._wanted = 0
            self._say(granted=number, **self._granted)
        except CellGaveUp:
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
                raise CellGaveUp

        def on_wait(wait: Wait) -> None:
            self._say(waiting=number, position=wait.position, eta_us=wait.eta_us, reason=wait.reason)

        holder = _KernelWorker(self._command)
        asked = GpuRequest(
            self._settings,
            self._request,
            holder="worker",
            on_wait=on_wait,
            on_offer=None,
            start=lambda: holder,
            environment=self._set_up_environment,
            still_wanted=still_wanted,
        )
        lease = asked.hold()
        try:
            openings = [
                asdict(opening_of(self._settings, lease, i, WATCHDOG_US)) for i in range(len(lease.devices))
            ]
        except BaseException:
            lease.release()
            raise
        if self._busy:
            lease.begin_work()
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

    def _set_up_environment(self, lease: Lease, _: object) -> Mapping[str, str]:
        self._folder.withdraw_notice()
        self._folder.write_key(lease.key, self._command.holder.pid, self._command.holder.started)
        return {}

    def warn(self, notice: Notice) -> None:
        """Called from a thread of the keeper or of the notice bus."""
        if self._lease is None:
            return  # it will be told when it has something to lose
        told, self._told = self._told, notice
        if told and told.reason == notice.reason and abs(told.deadline_us - notice.deadline_us) < AGAIN_US:
            return
        # The keeper withdraws its warning when there is work, or when the ledger answers again.
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
            messages.ending(notice.reason, notice.seconds_left(now), final=final),
        )

    # the end

    def _finish(self) -> None:
        with contextlib.ExitStack() as last:
            # In reverse order, each step even if the one before it failed.
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

    def _why(self, left: CommandExit | None) -> str:
        lease, code = self._lease, left.code if left is not None else None
        if lease is not None:
            with contextlib.suppress(SubletError):
                row = open_ledger(self._settings).look(lease.id, patience_us=EXPLAIN_PATIENCE_US).lease
                if row.reason is not None and row.reason not in (EndReason.RELEASED, EndReason.HOLDER_LOST):
                    return messages.restarted(f"{row.reason.value}: {row.detail}")
            if lease.seconds_left <= 0:
                idle = "it was not renewed in time" if self._busy else "idle: no cell was run for its ttl"
                return messages.restarted(idle)
        return "" if code == 0 else messages.crashed(code, leased=lease is not None)
