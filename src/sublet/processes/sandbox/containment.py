"""Containment: everything a lease's worker starts stays inside, and dies together.

Rules of this file:
- Everything that is available is used together, the best first: a cgroup (killed as one), a PID namespace
  (dies with its first process), and under both a subreaper, so that daemonised children stay below the
  supervisor. What was used is named in the Receipt.
- A cgroup is named after its supervisor, pid and start tick. A warden that never saw it made finds it by that
  name.
- A PID namespace is used only with a /proc of its own: without one, code that looks itself up there reads
  about a stranger.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sublet.core.studio.worker_limits import DEFAULT_LIMITS, LimitInForce, WorkerLimits
from sublet.processes.sandbox import kernel_calls, limits
from sublet.processes.sandbox.limits import cgroup_mount

CGROUP = "cgroup"
PID_NAMESPACE = "pid namespace"
SUBREAPER = "subreaper"
#: Threads count too, and a training with many data loaders on a large machine has thousands of them.
COMMAND_LIMITS = WorkerLimits(processes=32_768)


#: How often a group is tried to be removed, a millisecond apart. v1 counts a zombie until somebody has reaped
#: it, v2 does not.
_LOOKS, _ZOMBIE_LOOKS = 20, 250


# --- cgroup ---


def group_name(pid: int, started: int) -> str:
    return f"sublet-{pid}-{started}"


@dataclass(frozen=True, slots=True)
class Group:
    path: Path
    limits: tuple[LimitInForce, ...] = ()  # those the kernel confirmed
    beside: tuple[Path, ...] = ()  # in v1 hierarchies, for limits that v2 does not have here

    @classmethod
    def make(cls, name: str, wanted: WorkerLimits = DEFAULT_LIMITS) -> Group | None:
        """Make a group below this process's own, where a user may make one if anywhere."""
        base = limits.v2_base()
        if base is None:
            return None
        path = base / name
        try:
            path.mkdir()
            if not (path / "cgroup.kill").exists():
                path.rmdir()
                return None
        except OSError:
            return None
        in_force, beside = limits.put_in_force(path, wanted)
        return cls(path, tuple(in_force), tuple(beside))

    @classmethod
    def find(cls, name: str) -> Group | None:
        mount = cgroup_mount()
        if mount is None:
            return None
        for folder, names, _ in os.walk(mount):
            if name in names:
                return cls(Path(folder) / name)
        return None

    @classmethod
    def all(cls) -> list[tuple[int, int, Group]]:
        """Every group there is, with the pid and start tick of its supervisor. One of v1 whose v2 group is
        gone is among them."""
        found: dict[str, tuple[int, int, Group]] = {}
        for mount in (cgroup_mount(), *limits.v1_mounts()):
            for folder, names, _ in os.walk(mount) if mount is not None else ():
                for name in names:
                    prefix, _, rest = name.partition("-")
                    pid, _, started = rest.partition("-")
                    if prefix == "sublet" and pid.isdigit() and started.isdigit():
                        found.setdefault(name, (int(pid), int(started), cls(Path(folder) / name)))
        return list(found.values())

    def join(self) -> None:
        for path in (self.path, *self.beside):
            (path / "cgroup.procs").write_text("0")

    def pids(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]
        return []

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            (self.path / "cgroup.kill").write_text("1")

    def emptied(self, wait_us: int) -> bool:
        """Wait until no process is left, zombies aside."""
        give_up = time.monotonic_ns() // 1000 + wait_us
        while True:
            try:
                if "populated 0" in (self.path / "cgroup.events").read_text():
                    return True
            except OSError:
                return True  # removed
            if time.monotonic_ns() // 1000 >= give_up:
                return False
            time.sleep(0.0005)

    def remove(self) -> None:
        """Remove it and those beside it. One that must stay for a moment keeps the v2 group, by which a
        warden's sweep finds both."""
        beside = self.beside or limits.groups_beside(self.path.name)
        removed = [_is_removed(path, _ZOMBIE_LOOKS) for path in beside]
        if all(removed):
            _is_removed(self.path, _LOOKS)


def _is_removed(path: Path, looks: int) -> bool:
    for _ in range(looks):
        try:
            path.rmdir()
            return True
        except FileNotFoundError:
            return True
        except OSError:  # the last zombie is being reaped
            time.sleep(0.001)
    return False


# --- PID namespace ---


def enter_new_namespaces() -> None:
    """Called by a supervisor: its next child is the first process of a new PID namespace."""
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        kernel_calls.unshare(kernel_calls.CLONE_NEWPID)
        return
    kernel_calls.unshare(kernel_calls.CLONE_NEWUSER | kernel_calls.CLONE_NEWPID)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    # Becoming root of a namespace hid this process from its own user's /proc, where the warden looks.
    kernel_calls.prctl(kernel_calls.PR_SET_DUMPABLE, 1)


def own_proc() -> None:
    """Called by the first process of the namespace: mount a /proc that shows this namespace, and only inside
    it."""
    kernel_calls.unshare(kernel_calls.CLONE_NEWNS)
    kernel_calls.mount("none", "/", "none", kernel_calls.MS_REC | kernel_calls.MS_PRIVATE)
    kernel_calls.mount(
        "proc", "/proc", "proc", kernel_calls.MS_NOSUID | kernel_calls.MS_NODEV | kernel_calls.MS_NOEXEC
    )


@cache
def namespaces_work() -> bool:
    """Try it once, in a child: what a container or a security module forbids cannot be read anywhere."""
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(OSError):
            enter_new_namespaces()
            first = os.fork()
            if first == 0:
                own = 1
                with contextlib.suppress(OSError):
                    own_proc()
                    own = 0 if os.path.exists("/proc/1/stat") else 1
                os._exit(own)
            code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@cache
def contained() -> bool:
    """Whether this process is in the PID namespace of a leased worker or command, where pids mean nothing
    outside."""
    try:
        first = Path("/proc/1/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(part.startswith(b"sublet.processes.") for part in first)


def available() -> list[str]:
    """What would contain a worker started now; tried, not guessed."""
    found = []
    group = Group.make(f"sublet-trial-{os.getpid()}")
    if group is not None:
        group.remove()
        found.append(CGROUP)
    if namespaces_work():
        found.append(PID_NAMESPACE)
    return found or [SUBREAPER]
