"""The supervisor: one process per leased worker, which ends it at the deadline whatever else has failed.

Rules of this file:
- It is outside what it contains, has one thread, and touches nothing of the user's: what the worker does
  cannot stop it.
- Its own death is the last resort: a kernel timer kills it just after the deadline, and everything inside
  dies with it.
- It ends the worker when told, at the deadline, and when the process that asked for it is gone.
- It needs nobody to do so: no ledger, no warden, no zygote.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sublet.core.studio.network_policy import GUARDED_WORDS, OPEN_WORDS, NetworkPolicy, closed_ports
from sublet.core.studio.own_uid import IsolationRefusal, not_prepared
from sublet.core.studio.worker_limits import DEFAULT_LIMITS, WorkerLimits, in_words
from sublet.machine.process_log import ProcessLog
from sublet.processes.channel.channel import pair, receive_with_fds, send_with_fds
from sublet.processes.ladder import end_children, ended, read_stat
from sublet.processes.sandbox import containment, kernel_calls, network_guard, tenant_sandbox
from sublet.processes.sandbox.containment import Group
from sublet.processes.supervisor import report

#: Time after the deadline, when the grace is over, for a last line in a log.
TERM_WAIT_US = 30_000
KILL_WAIT_US = 5_000_000
#: The supervisor acts a moment after the deadline, when the ledger agrees that the lease is over; the
#: kernel's timer ends it a little later. That gives a healthy one time to finish and report, and a stuck one
#: no more. The slice is not granted again before the warden has seen everything gone.
LATE_US = 10_000
BACKSTOP_US = 250_000
#: How long a slow disk may take to store the report, once everything is gone and nothing is left to guard.
TELL_US = 700_000
#: Time to enter a sandbox, which takes a few dozen system calls.
ENTER_SECONDS = 20.0
#: A lease may be longer than poll() can wait.
POLL_MOST_MS = 3_600_000
_SCM_CREDENTIALS = 2
_CREDENTIALS = struct.Struct("iII")
#: As wait() gives it.
STATUS = struct.Struct("<i")

Serve = Callable[[list[int]], NoReturn]


@dataclass(slots=True)
class SupervisedProcess:
    """The worker or command, and what contains it."""

    pid: int
    fd: int  # its pidfd
    first: int  # this process's child: the worker, or the first process of its namespace
    first_fd: int
    link: socket.socket
    group: Group | None
    containment: str
    told_fd: int = -1  # a lingering first process says here how the leader ended

    @property
    def ends_as_one(self) -> bool:
        """Whether the kernel ends everything inside together with its first process."""
        return containment.PID_NAMESPACE in self.containment


def _now_us() -> int:
    return time.monotonic_ns() // 1000


# --- making a contained worker ---


def contain(
    serve: Serve,
    *,
    lingers: bool = False,
    sandboxed: bool = False,
    limits: WorkerLimits = DEFAULT_LIMITS,
    supervisors_own: Sequence[socket.socket] = (),
) -> SupervisedProcess:
    """Fork the worker into the best containment there is, where it waits until it is given its descriptors.

    When it ends, the kernel ends whatever it started at once. With `lingers`, the first process of its
    namespace stays until nobody is left or it is killed, so that the others can be asked to leave first. With
    `sandboxed`, the worker enters a tenant's sandbox before it is handed out, and has the rights to do so
    until then. `supervisors_own` sockets are closed in what is forked: whoever speaks to a supervisor that
    was killed is told so at once, also while its processes are still dying.
    """
    kernel_calls.prctl(kernel_calls.PR_SET_CHILD_SUBREAPER, 1)
    used = []
    own = read_stat(os.getpid())
    group = Group.make(containment.group_name(own.pid, own.started), limits) if own else None
    if group is not None:
        used.append(containment.CGROUP)
    namespaces = containment.namespaces_work()
    here, there = pair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    supervisor = os.getpid()
    told_read = told_write = -1
    if namespaces:
        containment.enter_new_namespaces()
        used.append(containment.PID_NAMESPACE)
        if lingers:
            told_read, told_write = os.pipe2(os.O_CLOEXEC)
    if not used:
        used.append(containment.SUBREAPER)
    if group is not None and not sandboxed:  # what a sandbox makes up for is said when it was entered
        used += [limit.words for limit in group.limits]
    first = os.fork()
    if first == 0:
        for own_socket in supervisors_own:
            own_socket.close()
        _run_contained(supervisor, group, namespaces, here, there, serve, told_write, sandboxed)
    there.close()
    if told_write >= 0:
        os.close(told_write)
    first_fd = os.pidfd_open(first)
    try:
        pid = _hear_pid(here)
    except OSError:
        if group is not None:
            group.kill()
            group.emptied(KILL_WAIT_US)
            group.remove()
        raise
    return SupervisedProcess(
        pid, os.pidfd_open(pid), first, first_fd, here, group, ", ".join(used), told_read
    )


def _run_contained(
    supervisor: int,
    group: Group | None,
    namespaces: bool,
    here: socket.socket,
    there: socket.socket,
    serve: Serve,
    told: int,
    sandboxed: bool,
) -> NoReturn:
    # Inside a new namespace the parent is 0; the pipe below shows whether it lives.
    kernel_calls.die_with_parent(0 if namespaces else supervisor)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    here.close()
    if group is not None:
        group.join()
    if namespaces:
        containment.own_proc()
        kernel_calls.prctl(kernel_calls.PR_SET_NO_NEW_PRIVS, 1)
        if os.getuid() != 0 and not sandboxed:
            kernel_calls.drop_capabilities()
        worker = os.fork()
        if worker != 0:
            there.close()
            if os.getuid() != 0:
                kernel_calls.drop_capabilities()
            _first_of_namespace(worker, told)
        kernel_calls.die_with_parent(1)
    else:
        kernel_calls.prctl(kernel_calls.PR_SET_NO_NEW_PRIVS, 1)
    there.send(b"here")
    message, fds = receive_with_fds(there)
    if not message:
        os._exit(0)
    if sandboxed:
        spec = tenant_sandbox.SandboxSpec.read(json.loads(message))
        try:
            reached, kept = tenant_sandbox.enter(spec, namespaces=namespaces)
        except tenant_sandbox.NotEntered as e:
            there.send(_refusal(e.refusal))
            os._exit(1)
        kernel_calls.die_with_parent(1 if namespaces else supervisor)  # a change of rights takes it back
        there.send(json.dumps({"reached": reached, "rlimits": kept}).encode())
    there.close()
    serve(fds)


def _refusal(refusal: IsolationRefusal) -> bytes:
    return json.dumps({"refused": refusal.reason, "remedy": refusal.remedy}).encode()


def _first_of_namespace(worker: int, told: int) -> NoReturn:
    """Reap orphans, and end with the worker, which ends the whole namespace. One that lingers reports how the
    worker ended, and ends when nobody is left."""
    os.closerange(0, told if told >= 0 else 1024)
    os.closerange(told + 1, 1024)
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            os._exit(0)
        if pid == worker and told >= 0:
            os.write(told, STATUS.pack(status))
            os.close(told)
        elif pid == worker:
            if os.WIFSIGNALED(status):
                os._exit(128 + os.WTERMSIG(status))
            os._exit(os.WEXITSTATUS(status))


def _hear_pid(link: socket.socket) -> int:
    """Receive the worker's pid, which the kernel translates into this namespace."""
    _, ancillary, _, _ = link.recvmsg(16, socket.CMSG_SPACE(_CREDENTIALS.size))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == _SCM_CREDENTIALS:
            return int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0])
    raise OSError("the worker ended before it began")


# --- supervising it ---


class Supervisor:
    def __init__(
        self, supervised: SupervisedProcess, control: socket.socket, client_pid: int, folder: Path
    ) -> None:
        self._supervised = supervised
        self._folder = folder
        own = read_stat(os.getpid())
        self.started = own.started if own else 0
        self._control = control
        self._switch = kernel_calls.DeadMansSwitch()
        self._deadline_us: int | None = None
        self._told = ""  # to end, by a signal
        self._client_fd: int | None = None
        with contextlib.suppress(OSError):
            self._client_fd = os.pidfd_open(client_pid)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> NoReturn:
        signal.signal(signal.SIGTERM, self._on_term)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        why = "the process that asked for it is gone" if self._client_fd is None else self._watch()
        self._end(why)

    def _on_term(self, *_: Any) -> None:
        self._told = "its lease is over"

    def _watch(self) -> str:
        """Wait until something ends the worker, and return what."""
        assert self._client_fd is not None
        poller = select.poll()
        for fd in (self._control.fileno(), self._client_fd, self._supervised.first_fd, self._wake_read):
            poller.register(fd, select.POLLIN)
        while True:
            if self._told:
                return self._told
            pause = None
            if self._deadline_us is not None:
                now = _now_us()
                act_at = self._deadline_us + LATE_US
                if now >= act_at:
                    return "its lease ran out"
                pause = min(POLL_MOST_MS, (act_at - now + 999) // 1000)
            for fd, _ in poller.poll(pause):
                if fd == self._supervised.first_fd:
                    return ""
                if fd == self._client_fd:
                    return "the process that asked for it is gone"
                if fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 64)
                elif fd == self._control.fileno():
                    message, _ = receive_with_fds(self._control)
                    if not message:
                        return "the process that asked for it let go"
                    told = self._obey(json.loads(message))
                    if told:
                        return told

    def _obey(self, order: dict[str, Any]) -> str:
        if "deadline_us" in order:
            leased = self._deadline_us is not None
            self._deadline_us = int(order["deadline_us"])
            if not leased:
                self._account(ended=False)
            self._switch.arm(self._deadline_us + BACKSTOP_US)
        if order.get("interrupt"):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._supervised.fd, signal.SIGINT)
        if order.get("answer"):
            self._say({"obeyed": True})
        return str(order.get("end", ""))

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _end(self, why: str) -> NoReturn:
        begun = _now_us()
        ladder = "gone"
        supervised = self._supervised
        if why:
            ladder = "term"
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(supervised.fd, signal.SIGTERM)
            if not ended(supervised.fd, TERM_WAIT_US):
                leaving = read_stat(supervised.pid)
                ladder = "term" if leaving is not None and leaving.exiting else "kill"
        # Also when the worker left by itself: what it started goes with it.
        status, survivors = kill_all(supervised)
        if not survivors:
            self._switch.arm(_now_us() + TELL_US)
        self._account(ended=True, ladder=ladder, survivors=survivors, duration_us=_now_us() - begun)
        self._say({"ended": why, "status": status})
        os._exit(0)

    def _account(self, **facts: Any) -> None:
        if self._deadline_us is None:
            return  # it never had a lease: nobody will come and ask
        facts["containment"] = self._supervised.containment
        facts["pids"] = sorted({os.getpid(), self._supervised.first, self._supervised.pid})
        report.keep(self._folder, os.getpid(), self.started, facts)


def kill_all(supervised: SupervisedProcess) -> tuple[int | None, list[int]]:
    """Kill everything in the containment and wait until it is gone: how the first process ended, and the pids
    of survivors."""
    if supervised.group is not None:
        supervised.group.kill()
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(supervised.first_fd, signal.SIGKILL)
    gone = ended(supervised.first_fd, KILL_WAIT_US)
    status = _status_of(supervised.first) if gone else None
    # The first process of a namespace is gone only when all of them are; without one they have to be looked
    # for.
    contained = supervised.ends_as_one and gone
    survivors = [] if contained else end_children(KILL_WAIT_US)
    if supervised.group is not None:
        if not supervised.group.emptied(KILL_WAIT_US):
            survivors += supervised.group.pids()
        supervised.group.remove()
    return status, survivors


def _status_of(pid: int) -> int | None:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


# --- a spare, and what makes it somebody's ---


def spare(
    assignments: socket.socket,
    folder: Path,
    serve: Callable[[int, int, int, int, int], NoReturn],
    limits: WorkerLimits,
    home: Path | None = None,
) -> NoReturn:
    """Runs in a fork of the zygote: make a worker, wait until somebody wants it, supervise it. `home` is
    SUBLET_HOME, for a tenant's worker."""

    def serve_fds(fds: list[int]) -> NoReturn:
        serve(*fds)

    supervised = contain(serve_fds, sandboxed=home is not None, limits=limits, supervisors_own=[assignments])
    # A zygote that is gone already is noticed below, where the worker is ended.
    with contextlib.suppress(OSError):
        assignments.send(json.dumps({"ready": supervised.containment}).encode())
    poller = select.poll()
    for waited in (assignments.fileno(), supervised.first_fd):
        poller.register(waited, select.POLLIN)
    poller.poll()
    # A worker that died while it waited is not handed out: whoever asked is given another.
    message, fds = (b"", []) if ended(supervised.first_fd, 0) else receive_with_fds(assignments)
    if not message:
        if supervised.group is not None:
            supervised.group.kill()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(supervised.first_fd, signal.SIGKILL)
        ended(supervised.first_fd, KILL_WAIT_US)
        if supervised.group is not None:
            supervised.group.emptied(KILL_WAIT_US)
            supervised.group.remove()
        os._exit(0)
    assignments.close()
    order = json.loads(message)
    control = socket.socket(fileno=fds[0])
    supervisor = Supervisor(supervised, control, order["client_pid"], folder)
    scratch = ""
    if home is None:
        send_with_fds(supervised.link, b"begin", fds[1:])
    else:
        try:
            scratch = _begin_sandboxed(
                supervised, home, order["sandbox"], supervisor.started, fds[1:], limits
            )
        except tenant_sandbox.NotEntered as e:
            kill_all(supervised)
            control.send(_refusal(e.refusal))
            os._exit(0)
    for fd in fds[1:]:
        os.close(fd)
    supervised.link.close()
    control.send(
        json.dumps(
            {
                "pid": os.getpid(),
                "started": supervisor.started,
                "worker_pid": supervised.pid,
                "containment": supervised.containment,
                "scratch": scratch,
            }
        ).encode()
    )
    supervisor.run()


def _guarded(supervised: SupervisedProcess, order: dict[str, Any]) -> list[str]:
    """Guard the network of a worker that has the host's, if that is wanted and can be; in words what it
    has."""
    policy = NetworkPolicy(order["network"])
    if policy is NetworkPolicy.NONE:
        return []
    if policy is NetworkPolicy.GUARDED and supervised.group is not None:
        own = tenant_sandbox.uid_of(order["number"]) if os.getuid() == 0 else None
        try:
            network_guard.guard_network(
                supervised.group.path, closed_ports(network_guard.listening_ports(), own)
            )
            return [GUARDED_WORDS]
        except OSError as e:
            ProcessLog("network-guard")(f"a worker's network is open: {e}")
    return [OPEN_WORDS]


def _begin_sandboxed(
    supervised: SupervisedProcess,
    home: Path,
    order: dict[str, Any],
    started: int,
    fds: list[int],
    limits: WorkerLimits,
) -> str:
    """Give the worker its sandbox and its descriptors, and return its scratch folder. What the sandbox
    reached becomes part of the containment. Raises `NotEntered` when the tenant must not run here."""
    namespaces = containment.PID_NAMESPACE in supervised.containment
    root = tenant_sandbox.scratch_root(home, namespaces)
    try:
        scratch = tenant_sandbox.make_scratch(root, os.getpid(), started)
    except OSError as e:
        raise tenant_sandbox.NotEntered(not_prepared(e.strerror or "its folder is somebody else's")) from e
    network = _guarded(supervised, order)
    kept = () if supervised.group is None else supervised.group.limits
    by_group = {limit.resource for limit in kept}
    terms = {
        **order,
        "home": str(home),
        "scratch": str(scratch),
        "shared_memory_bytes": limits.memory_bytes // 2,
        "rlimits": {r.value: amount for r, amount in limits.wanted().items() if r not in by_group},
    }
    send_with_fds(supervised.link, json.dumps(terms).encode(), fds)
    supervised.link.settimeout(ENTER_SECONDS)
    try:
        reached = supervised.link.recv(1 << 16)
    except OSError:
        reached = b""
    if not reached:  # nobody's yet: whoever asked is told by our end
        kill_all(supervised)
        raise OSError("the worker could not enter its sandbox")
    answer = json.loads(reached)
    if "refused" in answer:
        raise tenant_sandbox.NotEntered(IsolationRefusal(reason=answer["refused"], remedy=answer["remedy"]))
    kept += tuple(tenant_sandbox.rlimits_of(answer["rlimits"]))
    said = [supervised.containment, *answer["reached"], *network, *in_words(limits, kept)]
    supervised.containment = ", ".join(said)
    return str(scratch)
