"""Processes of this host: identity, a descriptor that tells of their end, and the ladder that ends them.

Rules of this file:
- A process is a pid *and* its start tick; a recycled pid is somebody else and is never signalled.
- Death is seen by pidfd, never assumed after a signal was sent.
- Descendants are stopped before they are killed, so that none can fork while the tree is being walked. A
  leased worker's are contained (`sandbox/containment.py`); a plain process's child that daemonised unseen
  cannot be found, and the Receipt says so.
- Every process of the machine is read at once by one thread for all who ask: a thousand leases may end in the
  same moment.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sublet.core.leasing.lease import Holder
from sublet.machine import lease_environment
from sublet.machine.failpoints import failpoint
from sublet.machine.single_flight import SharedLook
from sublet.ports.processes import Receipt
from sublet.processes.sandbox.containment import CGROUP, PID_NAMESPACE, Group, contained, group_name
from sublet.processes.supervisor import report

#: A killed process with gigabytes resident needs a moment to give them back; one stuck in the kernel never
#: does.
KILL_WAIT_US = 5_000_000
CONTAINMENT = "descendants"
_PF_EXITING = 0x4
#: One line has fifty numbers and a name of at most 64 bytes.
_STAT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Stat:
    pid: int
    state: str
    parent: int
    started: int
    exiting: bool  # on its way out by itself; gigabytes take a while to give back


def read_stat(pid: int) -> Stat | None:
    """Read a process's stat by plain system calls: every teardown reads all of them, and a text file takes
    three times as long."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(fd, _STAT_BYTES)
    except OSError:  # it ended in between
        return None
    finally:
        os.close(fd)
    # The command name may hold spaces and parentheses; what follows the last one is plain.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(pid, fields[0].decode(), int(fields[1]), int(fields[19]), bool(int(fields[6]) & _PF_EXITING))


def _lives(holder: Holder) -> bool:
    stat = read_stat(holder.pid)
    return stat is not None and stat.started == holder.started


@dataclass(frozen=True, slots=True)
class _Table:
    """Every process of this machine, as one walk over /proc found them. Shared, and never changed."""

    stats: dict[int, Stat]
    children: dict[int, list[Stat]]


def _walk() -> _Table:
    stats: dict[int, Stat] = {}
    children: dict[int, list[Stat]] = {}
    for name in os.listdir("/proc"):
        stat = read_stat(int(name)) if name.isdigit() else None
        if stat is not None:
            stats[stat.pid] = stat
            children.setdefault(stat.parent, []).append(stat)
    return _Table(stats, children)


#: There is one process table, and one walk over it at a time.
_everybody = SharedLook(_walk)


def children_of(parent: int) -> list[Stat]:
    return list(_everybody().children.get(parent, ()))


def descendants(root: int) -> list[Stat]:
    return _below(root, _everybody())


def _below(root: int, table: _Table) -> list[Stat]:
    found: list[Stat] = []
    pending = [root]
    while pending:
        for child in table.children.get(pending.pop(), ()):
            if child.pid != os.getpid():  # a warden the holder itself started is nobody's to end
                found.append(child)
                pending.append(child.pid)
    return found


def _open(pid: int, started: int) -> int | None:
    """Open a pidfd of exactly this process, or None when it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    stat = read_stat(pid)
    if stat is None or stat.started != started:
        os.close(fd)
        return None
    return fd


def ended(fd: int, wait_us: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0, wait_us) / 1000))


def _freeze(root: int, watched: dict[int, int]) -> None:
    """Stop the tree until a walk finds no new process, so that none can fork away from the kill that
    follows."""
    for _ in range(100):
        fresh = [c for c in descendants(root) if c.pid not in watched]
        for fd in watched.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGSTOP)
        if not fresh:
            return
        for child in fresh:
            _watch_too(watched, child.pid, child.started)


def _watch_too(watched: dict[int, int], pid: int, started: int) -> None:
    if pid not in watched:
        fd = _open(pid, started)
        if fd is not None:
            watched[pid] = fd


def _other_namespace(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino != os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return False


def end_children(wait_us: int) -> list[int]:
    """Kill and reap everything below this process, adopted orphans included; return the pids that
    survived."""
    give_up = time.monotonic_ns() // 1000 + wait_us
    while True:
        watched: dict[int, int] = {}
        _freeze(os.getpid(), watched)
        for fd in watched.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        if time.monotonic_ns() // 1000 >= give_up:
            return sorted(watched)
        time.sleep(0.001)


class HostProcesses:
    """Implements `ports.processes.Processes`."""

    def __init__(self, host: str, reports: Path | None = None) -> None:
        self._host = host
        self._reports = reports  # the folder in which supervisors leave theirs

    def identify(self, pid: int) -> Holder | None:
        outside = lease_environment.run_holder() if contained() else None
        if outside is not None:  # known there by its supervisor, which lives exactly as long
            return Holder(host=self._host, pid=outside[0], started=outside[1])
        stat = read_stat(pid)
        return Holder(host=self._host, pid=pid, started=stat.started) if stat else None

    def watch(self, holder: Holder) -> int | None:
        if contained():
            return os.eventfd(0)  # out of sight is not dead
        fd = _open(holder.pid, holder.started)
        if fd is not None and ended(fd, 0):  # a zombie nobody has waited for
            os.close(fd)
            return None
        return fd

    def trees(self, holders: Iterable[Holder]) -> dict[Holder, tuple[Holder, ...]]:
        living = [holder for holder in holders if _lives(holder)]
        found: dict[Holder, tuple[Holder, ...]] = {}
        if not living:  # a walk over the whole host: not for nobody
            return found
        table = _everybody()
        for holder in living:
            stat = table.stats.get(holder.pid)
            if stat is not None and stat.started == holder.started:
                below = _below(holder.pid, table)
                found[holder] = (
                    holder,
                    *(Holder(host=self._host, pid=s.pid, started=s.started) for s in below),
                )
        return found

    def sweep(self) -> list[int]:
        swept = []
        for pid, started, group in Group.all():
            stat = read_stat(pid)
            if stat is None or stat.started != started or stat.state == "Z":
                swept += group.pids()
                group.kill()
                if group.emptied(KILL_WAIT_US):
                    group.remove()
        return swept

    def end(self, holder: Holder, term_wait_us: int, also: Iterable[Holder] = ()) -> Receipt:
        begun = time.monotonic_ns()
        group = Group.find(group_name(holder.pid, holder.started))
        found = {CGROUP} if group is not None else set()

        def receipt(proven: bool, ladder: str, pids: Iterable[int], detail: str = "") -> Receipt:
            account = (
                report.read(self._reports, holder.pid, holder.started) if self._reports is not None else {}
            )
            if account.get("ended") and proven and ladder != "kill":
                ladder = str(account["ladder"])  # the supervisor was quicker, and knows which rung it took
            return Receipt(
                proven=proven,
                ladder=ladder,
                containment=account.get("containment") or ", ".join(sorted(found)) or CONTAINMENT,
                pids=tuple(sorted({*pids, *account.get("pids", ())})),
                duration_us=(time.monotonic_ns() - begun) // 1000,
                detail=detail,
            )

        if holder.pid <= 1 or holder.pid == os.getpid():
            return receipt(False, "unproven", (), f"pid {holder.pid} is not one a warden may end")
        watched: dict[int, int] = {}
        try:
            leader = _open(holder.pid, holder.started)
            if leader is not None:
                watched[holder.pid] = leader
                for child in descendants(holder.pid):
                    _watch_too(watched, child.pid, child.started)
                    if _other_namespace(child.pid):
                        found.add(PID_NAMESPACE)
            for orphan in also:  # seen below the holder while it lived
                _watch_too(watched, orphan.pid, orphan.started)
            ladder = self._ladder(holder.pid, leader, watched, term_wait_us)
            if group is not None:
                group.kill()
            failpoint("teardown_after_kill")
            give_up = time.monotonic_ns() // 1000 + KILL_WAIT_US
            alive = [
                pid for pid, fd in watched.items() if not ended(fd, give_up - time.monotonic_ns() // 1000)
            ]
            if group is not None:
                if not group.emptied(give_up - time.monotonic_ns() // 1000):
                    alive += group.pids()
                group.remove()
            if alive:
                return receipt(
                    False, "unproven", watched, f"pids {alive} outlived SIGKILL by {KILL_WAIT_US // 1000} ms"
                )
            return receipt(True, ladder, watched)
        except PermissionError:
            return receipt(
                False, "unproven", watched, f"not permitted to end pid {holder.pid}; run the warden as root"
            )
        finally:
            for fd in watched.values():
                os.close(fd)

    def forget(self, holder: Holder) -> None:
        if self._reports is not None:
            report.remove(self._reports, holder.pid, holder.started)

    @staticmethod
    def _ladder(root: int, leader: int | None, watched: dict[int, int], term_wait_us: int) -> str:
        """Send TERM to the leader, then KILL to everything; return the rung it took."""
        ladder = "gone"
        if leader is not None and not ended(leader, 0):
            ladder = "term"
            # The leader first: it may be saving, and its children are what it saves from.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(leader, signal.SIGTERM)
            ended(leader, term_wait_us)
        if not all(ended(fd, 0) for fd in watched.values()):
            ladder = "kill"
            _freeze(root, watched)
            for fd in watched.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
        return ladder
