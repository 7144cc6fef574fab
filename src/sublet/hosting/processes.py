"""Processes of this host: identity, a descriptor that tells of their end, and the ladder that ends them.

Rules of this file:
- A process is a pid *and* its start tick; a recycled pid is somebody else and is never signalled.
- Death is seen by pidfd, never assumed after a signal was sent.
- Descendants are stopped before they are killed, so that none can fork while the tree is being walked. A child that
  daemonised away before the walk is beyond this containment; the Receipt names the containment so nobody believes more.
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

from sublet.core.lease import Holder
from sublet.failpoints import failpoint
from sublet.ports.processes import Receipt

#: A killed process with gigabytes resident needs a moment to give them back; one stuck in the kernel never does.
KILL_WAIT_US = 5_000_000
CONTAINMENT = "descendants"


@dataclass(frozen=True, slots=True)
class Stat:
    pid: int
    state: str
    parent: int
    started: int


def read_stat(pid: int) -> Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold spaces and parentheses; what follows the last one is plain.
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(pid, fields[0], int(fields[1]), int(fields[19]))


def all_stats() -> dict[int, Stat]:
    found: dict[int, Stat] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = read_stat(int(name))
            if stat is not None:
                found[stat.pid] = stat
    return found


def descendants(root: int, stats: dict[int, Stat]) -> list[Stat]:
    children: dict[int, list[Stat]] = {}
    for stat in stats.values():
        children.setdefault(stat.parent, []).append(stat)
    found: list[Stat] = []
    pending = [root]
    while pending:
        for child in children.get(pending.pop(), []):
            if child.pid != os.getpid():  # a warden the holder itself started is nobody's to end
                found.append(child)
                pending.append(child.pid)
    return found


def _open(pid: int, started: int) -> int | None:
    """A pidfd of exactly this process, or None when it is gone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    stat = read_stat(pid)
    if stat is None or stat.started != started:
        os.close(fd)
        return None
    return fd


def _ended(fd: int, wait_us: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0, wait_us) / 1000))


class HostProcesses:
    """Implements `ports.processes.Processes`."""

    def __init__(self, host: str) -> None:
        self._host = host

    def identify(self, pid: int) -> Holder | None:
        stat = read_stat(pid)
        return Holder(host=self._host, pid=pid, started=stat.started) if stat else None

    def watch(self, holder: Holder) -> int | None:
        fd = _open(holder.pid, holder.started)
        if fd is not None and _ended(fd, 0):  # a zombie nobody has waited for
            os.close(fd)
            return None
        return fd

    def end(self, holder: Holder, term_wait_us: int) -> Receipt:
        begun = time.monotonic_ns()

        def receipt(proven: bool, ladder: str, pids: Iterable[int], detail: str = "") -> Receipt:
            return Receipt(
                proven=proven,
                ladder=ladder,
                containment=CONTAINMENT,
                pids=tuple(sorted(pids)),
                duration_us=(time.monotonic_ns() - begun) // 1000,
                detail=detail,
            )

        if holder.pid <= 1 or holder.pid == os.getpid():
            return receipt(False, "unproven", (), f"pid {holder.pid} is not one a warden may end")
        leader = _open(holder.pid, holder.started)
        if leader is None:
            return receipt(True, "gone", ())
        watched = {holder.pid: leader}
        ladder = "term"
        try:
            for child in descendants(holder.pid, all_stats()):
                fd = _open(child.pid, child.started)
                if fd is not None:
                    watched[child.pid] = fd
            # The leader first: it may be saving, and its children are what it saves from.
            signal.pidfd_send_signal(leader, signal.SIGTERM)
            gone = _ended(leader, term_wait_us)
            if not gone or not all(_ended(fd, 0) for fd in watched.values()):
                ladder = "kill"
                self._freeze(holder.pid, watched)
                for fd in watched.values():
                    with contextlib.suppress(ProcessLookupError):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
            failpoint("teardown_after_kill")
            give_up = time.monotonic_ns() // 1000 + KILL_WAIT_US
            alive = [
                pid for pid, fd in watched.items() if not _ended(fd, give_up - time.monotonic_ns() // 1000)
            ]
            if alive:
                return receipt(
                    False, "unproven", watched, f"pids {alive} outlived SIGKILL by {KILL_WAIT_US // 1000} ms"
                )
            return receipt(True, ladder, watched)
        except PermissionError:
            return receipt(
                False, "unproven", watched, f"not permitted to end pid {holder.pid}; run the warden as root"
            )
        except ProcessLookupError:
            return receipt(True, "gone", watched)
        finally:
            for fd in watched.values():
                os.close(fd)

    @staticmethod
    def _freeze(root: int, watched: dict[int, int]) -> None:
        """Stop the tree until a walk finds nobody new."""
        for _ in range(100):
            fresh = [c for c in descendants(root, all_stats()) if c.pid not in watched]
            for fd in watched.values():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGSTOP)
            if not fresh:
                return
            for child in fresh:
                opened = _open(child.pid, child.started)
                if opened is not None:
                    watched[child.pid] = opened
