"""Limits of a worker, put in force by control groups and read back.

Rules of this file:
- Nothing is in force because it was written: a limit counts once the kernel shows it.
- cgroup v2 comes first. A controller that v2 does not have may be bound to a v1 hierarchy of its own, as on
  machines that have both; then the worker has a group there too, of the same name.
- v2 gives a group's children no controller while the group itself has processes. At the top of a container a
  service steps aside into a leaf below. systemd puts it there itself (`DelegateSubgroup=`): one that moved by
  itself could not be started again while its workers live. Any other group is left as it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from sublet.core.studio.worker_limits import LimitInForce, Resource, WorkerLimits

#: Where the service's own processes step aside to.
LEAF = "sublet-service"
CONTROLLERS = {Resource.PROCESSES: "pids", Resource.MEMORY: "memory", Resource.CPU: "cpu"}
_V2 = {Resource.PROCESSES: "pids.max", Resource.MEMORY: "memory.max", Resource.CPU: "cpu.weight"}
_V1 = {Resource.PROCESSES: "pids.max", Resource.MEMORY: "memory.limit_in_bytes", Resource.CPU: "cpu.shares"}
#: Memory that went to swap is still a worker's: where swap is counted apart, it gets none.
_V2_SWAP = "memory.swap.max"
_V1_SWAP = "memory.memsw.limit_in_bytes"
_ATTEMPTS = 10


# --- where groups are ---


def _mounts() -> Iterator[tuple[str, Path, set[str]]]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, options, *_ = line.split(" ")
            if kind in ("cgroup", "cgroup2"):
                yield kind, Path(place), set(options.split(","))


@cache
def cgroup_mount() -> Path | None:
    """Where cgroup v2 is mounted: its usual place, or beside v1."""
    return next((place for kind, place, _ in _mounts() if kind == "cgroup2"), None)


@cache
def v1_mount(controller: str) -> Path | None:
    return next(
        (place for kind, place, options in _mounts() if kind == "cgroup" and controller in options), None
    )


def _own(controllers: str) -> str | None:
    """This process's group in the hierarchy of this controller; '' names that of v2."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controllers in names.split(","):
                return path.lstrip("/")
    return None


def v2_base() -> Path | None:
    """The group below which this process makes others: its own, or the one it stepped aside from."""
    mount, own = cgroup_mount(), _own("")
    if mount is None or own is None:
        return None
    place = mount / own
    return place.parent if place.name == LEAF else place


def _v1_base(controller: str) -> Path | None:
    mount, own = v1_mount(controller), _own(controller)
    return None if mount is None or own is None else mount / own


# --- making room for controllers ---


def enabled(base: Path, controllers: Iterable[str]) -> set[str]:
    """Which of these the children of this group have, after each was asked for."""
    wanted = set(controllers)
    for name in sorted(
        wanted & _words(base / "cgroup.controllers") - _words(base / "cgroup.subtree_control")
    ):
        _write(base / "cgroup.subtree_control", f"+{name}")
    return wanted & _words(base / "cgroup.subtree_control")


def step_aside(
    base: Path | None = None,
    controllers: Iterable[str] = tuple(CONTROLLERS.values()),
    top: Path | None = None,
) -> bool:
    """Called by a service before it starts anything: move the processes of its group into a leaf, so that
    their siblings can be limited. Return whether it did. `top` is of this process's container."""
    base, top = base or v2_base(), top or cgroup_mount()
    wanted = set(controllers)
    if base is None or not wanted & _words(base / "cgroup.controllers") - enabled(base, wanted):
        return False
    if base != top or not (base / "cgroup.type").exists():
        return False  # the top of the machine has no type, and needs no room
    leaf = base / LEAF
    with contextlib.suppress(OSError):
        leaf.mkdir(exist_ok=True)
        for _ in range(_ATTEMPTS):  # somebody may fork meanwhile
            pids = (base / "cgroup.procs").read_text().split()
            if not pids:
                break
            for pid in pids:
                _write(leaf / "cgroup.procs", pid)
    return bool(enabled(base, wanted))


def _words(path: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return set(path.read_text().split())
    return set()


def _write(path: Path, text: str) -> bool:
    try:
        path.write_text(text)
    except OSError:
        return False
    return True


# --- limits ---


def put_in_force(group: Path, wanted: WorkerLimits) -> tuple[list[LimitInForce], list[Path]]:
    """Limit this v2 group. Return what the kernel confirms, and the groups beside it that a process must
    join for it."""
    have = enabled(group.parent, (CONTROLLERS[resource] for resource in wanted.wanted()))
    kept, beside = [], []
    for resource, amount in wanted.wanted().items():
        if CONTROLLERS[resource] in have:
            if _v2_holds(group, resource, amount):
                kept.append(LimitInForce(resource=resource, amount=amount))
        elif (made := _v1_group(CONTROLLERS[resource], group.name)) is not None:
            if _v1_holds(made, resource, amount):
                kept.append(LimitInForce(resource=resource, amount=amount))
                beside.append(made)
            else:
                _remove(made)
    return kept, beside


def _v2_holds(group: Path, resource: Resource, amount: int) -> bool:
    if resource is Resource.MEMORY and (group / _V2_SWAP).exists() and not _holds(group / _V2_SWAP, 0):
        return False
    return _holds(group / _V2[resource], amount, _rounded(resource))


def _v1_holds(group: Path, resource: Resource, amount: int) -> bool:
    if resource is Resource.CPU:
        amount = max(2, amount * 1024 // 100)
    rounded = _rounded(resource)
    if not _holds(group / _V1[resource], amount, rounded):
        return False
    swap = group / _V1_SWAP
    return resource is not Resource.MEMORY or not swap.exists() or _holds(swap, amount, rounded)


def _rounded(resource: Resource) -> int:
    """The kernel rounds memory down to whole pages, and nothing else."""
    return os.sysconf("SC_PAGE_SIZE") if resource is Resource.MEMORY else 1


def _holds(knob: Path, amount: int, rounded: int = 1) -> bool:
    """Write a limit and read it back."""
    try:
        knob.write_text(str(amount))
        return amount - rounded < int(knob.read_text()) <= amount
    except (OSError, ValueError):
        return False


def _v1_group(controller: str, name: str) -> Path | None:
    base = _v1_base(controller)
    if base is None:
        return None
    try:
        (base / name).mkdir(exist_ok=True)
    except OSError:
        return None
    return base / name


def groups_beside(name: str) -> list[Path]:
    """The v1 groups of this name, wherever whoever made them was."""
    return [
        Path(folder) / name for mount in v1_mounts() for folder, names, _ in os.walk(mount) if name in names
    ]


def v1_mounts() -> list[Path]:
    mounts = (v1_mount(controller) for controller in CONTROLLERS.values())
    return sorted({place for place in mounts if place is not None})


def _remove(group: Path) -> None:
    with contextlib.suppress(OSError):
        group.rmdir()


def machine_memory() -> int:
    """The memory a percentage is of: the machine's, or what this process's own groups leave of it."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    place, mount = v2_base(), cgroup_mount()
    for above in () if place is None or mount is None else (place, *place.parents):
        found = min(found, _number(above / "memory.max", found))
        if above == mount:
            break
    v1 = _v1_base("memory")
    return found if v1 is None else min(found, _number(v1 / "memory.limit_in_bytes", found))


def _number(path: Path, otherwise: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or 'max'
        return otherwise
