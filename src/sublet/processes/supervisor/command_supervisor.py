"""The supervisor of a command: what `sublet run` starts, and what holds the lease for it.

Rules of this file:
- It is outside what it contains, has one thread, and ends the command at every deadline it was told. It needs
  nobody for that: the run that started it may be stopped or killed, and the ledger may be gone.
- Told to drain, it signals the command's main process first. The others get their TERM when that has left, or
  shortly before the deadline: a data loader that dies first takes the emergency save with it.
- The command is not told twice. A repeated notice may only bring the deadline nearer.
- When the command is gone the supervisor stays until it is let go: the lease is given back before its holder
  ends, or it would look lost.
- When the run is gone, or stopped renewing, it drains by itself and writes the files that the run no longer
  can.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import select
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from sublet.core.notice import Notice
from sublet.core.runs.exits import NOT_EXECUTABLE_CODE, NOT_FOUND_CODE, Outcome, exit_code
from sublet.machine import lease_environment
from sublet.machine.run_folder import RunFolder
from sublet.processes.channel.channel import receive_with_fds, send_with_fds
from sublet.processes.ladder import descendants, ended, read_stat
from sublet.processes.sandbox import kernel_calls
from sublet.processes.sandbox.containment import COMMAND_LIMITS
from sublet.processes.supervisor import report
from sublet.processes.supervisor.supervisor import (
    BACKSTOP_US,
    KILL_WAIT_US,
    LATE_US,
    POLL_MOST_MS,
    STATUS,
    TELL_US,
    TERM_WAIT_US,
    SupervisedProcess,
    contain,
    kill_all,
)

#: How long processes that outlive the main one have to leave after they were asked to.
LEFTOVERS_WAIT_US = 1_000_000
#: How long before the deadline the rest of the group is told, or in its last quarter if that is less.
GROUP_BEFORE_US = 2_000_000
STATUS_WAIT_US = 1_000_000
#: Without a namespace this process's death sets free what the command has started, and no zygote looks for
#: those. On a crowded machine a supervisor that is merely slow is worth more alive than punctual.
BACKSTOP_ALONE_US = 2_000_000
_ENDED_BY_LEASE = "its lease ran out"
_NOT_RENEWED = "its lease was not renewed in time"


def _now_us() -> int:
    return time.monotonic_ns() // 1000


# --- inside: becoming the command ---


def become(fds: list[int]) -> NoReturn:
    """Replace this process by the command, in its containment. It inherits nothing of ours but what it is
    meant to."""
    with os.fdopen(fds[0], "rb") as file:
        terms = json.loads(file.read())
    os.setsid()  # a terminal's keys are for the run, which makes one Notice of them
    # The command must not ignore what Python, a background shell or the run ignores. SIGHUP stays as nohup
    # left it.
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGHUP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name, fd in zip(terms["links"], fds[1:], strict=True):
        os.set_inheritable(fd, True)
        terms["environment"][name] = str(fd)
    try:
        if terms["folder"] is not None:
            os.chdir(terms["folder"])
        os.execve(terms["executable"], terms["command"], terms["environment"])
    except OSError as e:
        code = NOT_FOUND_CODE if e.errno == errno.ENOENT else NOT_EXECUTABLE_CODE
        os.write(2, f"sublet: {terms['command'][0]} cannot be run: {e.strerror}\n".encode())
        os._exit(code)


# --- outside ---


class CommandSupervisor:
    def __init__(
        self,
        supervised: SupervisedProcess,
        control: socket.socket,
        client_pid: int,
        accounts_folder: Path,
        run: RunFolder,
        grace_us: int,
    ) -> None:
        self._supervised = supervised
        self._control = control
        self._accounts = accounts_folder
        self._run = run
        self._grace_us = grace_us
        own = read_stat(os.getpid())
        self.started = own.started if own else 0
        self._switch = kernel_calls.DeadMansSwitch()
        self._begun = False
        self._begun_at = 0.0
        self._stop_us: int | None = None  # no renewal by then: drain
        self._kill_us: int | None = None  # the lease's end
        self._drain_us: int | None = None
        self._drain_why = ""
        self._group_us: int | None = None  # when the rest of the group hears of it
        self._status: int | None = None
        self._told = ""
        self._let_go = False  # its lease has been given back
        self._client_fd: int | None = None
        with contextlib.suppress(OSError):
            self._client_fd = os.pidfd_open(client_pid)
        self._orphaned = self._client_fd is None
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> NoReturn:
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        why = "the run that asked for it is gone" if self._orphaned else self._watch()
        self._end(why)
        self._wait_to_be_let_go()
        if self._orphaned:
            self._write_for_the_run()
        os._exit(0)

    def _on_term(self, *_: Any) -> None:
        self._told = "its lease is over"

    # watching

    def _watch(self) -> str:
        """Wait until the command has left ('') or must be ended, and return why."""
        poller = select.poll()
        for fd in (self._control.fileno(), self._supervised.fd, self._wake_read):
            poller.register(fd, select.POLLIN)
        assert self._client_fd is not None
        poller.register(self._client_fd, select.POLLIN)
        while True:
            if self._told:
                return self._told
            now = _now_us()
            why, wake_at = self._due(now)
            if why:
                return why
            pause = None if wake_at is None else min(POLL_MOST_MS, max(0, (wake_at - now + 999) // 1000))
            for fd, _ in poller.poll(pause):
                if fd == self._supervised.fd:
                    return ""
                if fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 64)
                    self._reap()
                elif fd == self._client_fd:
                    poller.unregister(fd)
                    self._orphaned = True
                elif fd == self._control.fileno():
                    message, fds = receive_with_fds(self._control)
                    if not message:
                        poller.unregister(fd)
                        self._orphaned = True
                    else:
                        told = self._obey(json.loads(message), fds)
                        if told:
                            return told
            if self._orphaned and self._drain_us is None:
                if not self._begun:
                    return "the run that asked for it is gone"
                self._drain_alone(
                    "the run that looks after it was killed: its lease is not renewed any more",
                    _now_us() + self._grace_us,
                )

    def _due(self, now: int) -> tuple[str, int | None]:
        """Return why it must end now ('' if it need not), and when to look again."""
        if self._kill_us is not None and now >= self._kill_us + LATE_US:
            return _ENDED_BY_LEASE, None
        if self._drain_us is not None and now >= self._drain_us:
            return self._drain_why or "its grace is over", None
        times = [] if self._kill_us is None else [self._kill_us + LATE_US]
        if self._begun and self._drain_us is None and self._stop_us is not None:
            if now >= self._stop_us and self._kill_us is not None:
                self._drain_alone(_NOT_RENEWED, self._kill_us)
            else:
                times.append(self._stop_us)
        if self._drain_us is not None:
            times.append(self._drain_us)
        if self._group_us is not None:
            if now >= self._group_us:
                self._group_us = None
                self._signal_rest(signal.SIGTERM)
            else:
                times.append(self._group_us)
        return "", min(times, default=None)

    def _obey(self, order: dict[str, Any], fds: list[int]) -> str:
        if "kill_us" in order:
            leased = self._kill_us is not None
            self._stop_us, self._kill_us = int(order["stop_us"]), int(order["kill_us"])
            if not leased:
                self._account(ended=False)
            self._switch.arm(self._backstop_us(self._kill_us))
        if order.get("begin"):
            self._begin(fds)
        if "drain_us" in order:
            self._drain(int(order["drain_us"]))
        if order.get("answer"):
            self._say({"obeyed": True})
        self._let_go = "end" in order
        return str(order.get("end", ""))

    def _begin(self, fds: list[int]) -> None:
        self._begun, self._begun_at = True, time.time()
        send_with_fds(self._supervised.link, b"begin", fds)
        for fd in fds:
            os.close(fd)
        self._supervised.link.close()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # a reader of the command's output must not wait for ours
            os.dup2(nowhere, fd)
        os.close(nowhere)

    # draining

    def _drain(self, deadline_us: int) -> None:
        now = _now_us()
        first = self._drain_us is None
        self._drain_us = deadline_us if self._drain_us is None else min(self._drain_us, deadline_us)
        left_us = max(0, self._drain_us - now)
        if first or self._group_us is not None:
            self._group_us = self._drain_us - min(GROUP_BEFORE_US, left_us // 4)
        if first:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._supervised.fd, signal.SIGTERM)
                signal.pidfd_send_signal(
                    self._supervised.fd, signal.SIGCONT
                )  # one that was stopped hears it too

    def _drain_alone(self, why: str, deadline_us: int) -> None:
        deadline_us = deadline_us if self._kill_us is None else min(deadline_us, self._kill_us)
        self._drain_why = why
        with contextlib.suppress(OSError):
            self._run.write_notice(
                Notice(source="supervisor", reason=why, deadline_us=deadline_us),
                _now_us(),
                time.time_ns() // 1000,
            )
        self._drain(deadline_us)

    def _rest(self) -> list[int]:
        """Return pidfds of everything inside except its first process and the command's main one. The caller
        closes them."""
        found = []
        for stat in descendants(os.getpid()):
            if stat.pid in (self._supervised.first, self._supervised.pid) or stat.state == "Z":
                continue
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(stat.pid)
                again = read_stat(stat.pid)
                if again is not None and again.started == stat.started:
                    found.append(fd)
                else:
                    os.close(fd)
        return found

    def _signal_rest(self, number: signal.Signals) -> None:
        for fd in self._rest():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, number)
            os.close(fd)

    # ending

    def _backstop_us(self, deadline_us: int) -> int:
        """The time at which the kernel ends this process if it has not left by then."""
        return deadline_us + (BACKSTOP_US if self._supervised.ends_as_one else BACKSTOP_ALONE_US)

    def _reap(self) -> None:
        """Reap orphans, which become our children where there is no namespace, and keep the leader's
        status."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self._supervised.pid:
                    self._status = os.waitstatus_to_exitcode(status)

    def _end(self, why: str) -> None:
        begun = _now_us()
        supervised = self._supervised
        if self._kill_us is not None and not supervised.ends_as_one:
            # The supervisor is healthy: killed now, it would leave the rest running.
            self._switch.arm(max(begun + 2 * KILL_WAIT_US, self._backstop_us(self._kill_us)))
        ladder = "gone" if self._drain_us is None else "term"
        left = not why
        if why:
            # A command that was told and had its grace is killed. One that was not has a moment for a last
            # line in a log.
            if self._drain_us is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(supervised.fd, signal.SIGTERM)
                left = ended(supervised.fd, TERM_WAIT_US)
            else:
                left = ended(supervised.fd, 0)
            ladder = "term" if left else "kill"
        if left and not self._leave_together():
            ladder = "kill"
        if left:
            self._learn_status()
        _, survivors = kill_all(supervised)
        if not survivors and self._kill_us is not None:
            self._switch.arm(max(_now_us() + TELL_US, self._backstop_us(self._kill_us)))
        self._account(ended=True, ladder=ladder, survivors=survivors, duration_us=_now_us() - begun)
        self._say(
            {
                "left": True,
                "why": (why or self._drain_why)[:500],
                "status": self._status,
                "killed": not left,
                "lease_over": why == _ENDED_BY_LEASE
                or self._drain_why == _NOT_RENEWED
                or (self._kill_us is not None and _now_us() >= self._kill_us),
            }
        )

    def _leave_together(self) -> bool:
        """Ask what the command left behind to leave, and return whether it did in time."""
        rest = self._rest()
        give_up = _now_us() + LEFTOVERS_WAIT_US
        for deadline in (self._kill_us, self._drain_us):
            if deadline is not None:
                give_up = min(give_up, deadline)
        for fd in rest:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGTERM)
        gone = [ended(fd, max(0, give_up - _now_us())) for fd in rest]
        for fd in rest:
            os.close(fd)
        return all(gone)

    def _learn_status(self) -> None:
        if self._status is not None:
            return
        told = self._supervised.told_fd
        if told < 0:
            self._reap()
        elif select.select([told], [], [], STATUS_WAIT_US / 1e6)[0]:
            packed = os.read(told, STATUS.size)
            if len(packed) == STATUS.size:
                self._status = os.waitstatus_to_exitcode(STATUS.unpack(packed)[0])

    def _wait_to_be_let_go(self) -> None:
        poller = select.poll()
        poller.register(self._control.fileno(), select.POLLIN)
        if self._client_fd is not None:
            poller.register(self._client_fd, select.POLLIN)
        while not (self._orphaned or self._told or self._let_go):
            now = _now_us()
            if self._kill_us is None or now >= self._kill_us + LATE_US:
                return
            for fd, _ in poller.poll(min(POLL_MOST_MS, (self._kill_us + LATE_US - now + 999) // 1000)):
                if fd == self._client_fd:
                    self._orphaned = True
                else:
                    message, _ = receive_with_fds(self._control)
                    if not message:
                        self._orphaned = True
                    else:
                        order = json.loads(message)
                        self._obey({k: v for k, v in order.items() if k in ("stop_us", "kill_us", "end")}, [])

    # saying

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _account(self, **facts: Any) -> None:
        if self._kill_us is None:
            return  # it never had a lease: nobody will come and ask
        facts["containment"] = self._supervised.containment
        facts["pids"] = sorted({os.getpid(), self._supervised.first, self._supervised.pid})
        report.keep(self._accounts, os.getpid(), self.started, facts)

    def _write_for_the_run(self) -> None:
        """Write `exit.json`, which is always promised, in place of a run that was killed."""
        with contextlib.suppress(OSError, ValueError):
            if self._run.exit():
                return
            with open(self._run.path / lease_environment.PAGE_FILE, "r+b") as file:
                page = mmap.mmap(file.fileno(), lease_environment.PAGE_BYTES)
                working_on, committed = lease_environment.read_steps(page)
                unfinished = lease_environment.read_unfinished(page)
            known = self._run.facts()
            own = self._status if self._status is None or self._status >= 0 else 128 - self._status
            done = self._begun and own == 0 and not unfinished
            outcome = Outcome.DONE if done else Outcome.LOST
            self._run.leave(
                outcome=outcome.value,
                exit_code=exit_code(outcome, own),
                reason="the run's own process was killed; its command "
                + ("exited with 0" if done else "was told to leave and has ended"),
                own_code=own,
                committed_step=max(committed, known.get("committed_step", 0)),
                step=max(working_on, known.get("step", 0)),
                restarts=known.get("restarts", 0),
                preemptions=known.get("preemptions", 0),
                lease=known.get("lease", ""),
                epoch=known.get("epoch", 0),
                wasted_steps=known.get("wasted_steps", 0) + max(0, working_on - committed),
                started_at=known.get("started_at", 0),
                ended_at=time.time(),
                run=self._run.id,
            )
            self._run.record(state="ended")


def main() -> int:
    control_fd, client_pid, accounts_folder, run_folder, grace_us = sys.argv[1:6]
    os.set_inheritable(int(control_fd), False)
    control = socket.socket(fileno=int(control_fd))
    run = RunFolder(Path(run_folder))
    try:
        supervised = contain(become, lingers=True, limits=COMMAND_LIMITS)
        supervisor = CommandSupervisor(
            supervised, control, int(client_pid), Path(accounts_folder), run, int(grace_us)
        )
        hello = {
            "pid": os.getpid(),
            "started": supervisor.started,
            "command_pid": supervised.pid,
            "containment": supervised.containment,
        }
        control.send(json.dumps(hello).encode())
        supervisor.serve()
    except BaseException:
        # The terminal is the user's; a traceback belongs into a file.
        with contextlib.suppress(OSError):
            (run.path / "supervisor.err").write_text(traceback.format_exc())
        raise SystemExit(1) from None


if __name__ == "__main__":
    sys.exit(main())
