"""The tenant sandbox: how workers of tenants are kept apart on a host that is not theirs.

Rules of this file:
- A sandboxed worker sees nothing of who started it. Its environment is made from a short list; the folders of
  the ledger and of the sockets look empty to it; the system and the service's account are read-only, and of
  the account only what Python is imported from is visible.
- It writes to its scratch folder, to a /tmp inside that, and to a /dev/shm of its own. The folder is the
  session's and goes when the worker is gone.
- Where the service is root, every tenant is a user of its own, with no other groups and no way back. What it
  needs and could not reach by its rights alone (Python in a closed home) is bound into its view.
- It does without the system calls that `core.studio.call_policy` names, as soon as it is the tenant's.
- Its network is guarded on its cgroup, by its supervisor, or its own (see `core.studio.network_policy`).
- What the kernel refuses is left out and not claimed: the worker's containment names in words what was
  reached. A user of its own is no such thing: where the service is root, a worker that cannot have one is
  refused (I1).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import shutil
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublet.core.errors import BadInput
from sublet.core.studio.isolation import FILTERED, HIDDEN_HOME, OWN_IPC, OWN_UID, READ_ONLY, SAME_UID, SCOPED
from sublet.core.studio.network_policy import NONE_WORDS, NetworkPolicy, not_cut_off
from sublet.core.studio.own_uid import IsolationRefusal, not_allowed, not_mapped, not_prepared, not_readable
from sublet.core.studio.worker_limits import Enforcer, LimitInForce, Resource
from sublet.machine.process_log import ProcessLog
from sublet.processes.ladder import read_stat
from sublet.processes.sandbox import kernel_calls
from sublet.processes.sandbox.call_filter import filter_calls
from sublet.processes.sandbox.network_guard import enter_empty_network

#: A tenant's uid is one of these plus its number: far above people's, or below the system's where a container
#: has few.
UID_BASE = 700_000
UID_BASE_SMALL, UID_SMALL_MOST = 20_000, 40_000
NUMBER_MOST = 1 << 20
OPEN_FILES_MOST = 65_536
#: Of 1000. The service and the session host have 0.
OOM_SCORE = "500"
#: RLIMIT_DATA counts what a process can write in memory; address space that a GPU driver only reserves is not
#: in it. RLIMIT_NPROC counts the processes of one user, in its user namespace if it has one.
_RLIMITS = {Resource.PROCESSES: resource.RLIMIT_NPROC, Resource.MEMORY: resource.RLIMIT_DATA}
#: Variables that tell a program only about locale, time zone and where programs are.
ENVIRONMENT = ("PATH", "LANG", "TZ")
ENVIRONMENT_PREFIXES = ("LC_",)
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Directories under /run that stay visible, because name resolution and the GPU driver need them.
_VISIBLE_IN_RUN = (
    "/run/systemd/resolve",
    "/run/resolvconf",
    "/run/NetworkManager",
    "/run/nvidia-persistenced",
)
SCRATCH = "scratch"
_TEMPORARY = "tmp"
#: An order to a zygote is one packet.
_PATHS_MOST_BYTES = 2500


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSandbox:
    """The tenant a worker is made for. `number` is the tenant's and never changes. `hide` lists folders
    outside SUBLET_HOME that its code must not see, such as a ledger's. `file_bytes` is the most that one file
    of it may have; 0 for no limit."""

    number: int
    hide: tuple[str, ...] = ()
    file_bytes: int = 0
    network: NetworkPolicy = NetworkPolicy.GUARDED

    def __post_init__(self) -> None:
        if not 0 <= self.number < NUMBER_MOST:
            raise BadInput(f"a tenant's number is from 0 to {NUMBER_MOST - 1}, not {self.number}")
        if sum(len(os.fsencode(path)) for path in self.hide) > _PATHS_MOST_BYTES:
            raise BadInput(
                "the paths to be hidden are too long", remedy="hide a folder that they have in common"
            )


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Keep the variables that a stranger may know."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in ENVIRONMENT or name.startswith(ENVIRONMENT_PREFIXES)
    }
    return {"PATH": DEFAULT_PATH, **kept}


def zygote_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The zygote's environment, which every fork shows in /proc for ever, so it must be clean from the
    start."""
    made = clean_environment(environment)
    places = environment.get("PYTHONPATH", "")
    package = Path(__file__).parents[3]
    if any(
        place and os.path.realpath(place) == os.path.realpath(package) for place in places.split(os.pathsep)
    ):
        made["PYTHONPATH"] = places  # without it there is no sublet to import, or another
    return made


# --- the scratch folder ---


def scratch_root(home: Path, namespaces: bool) -> Path:
    """Return the folder of the scratch folders. Where a mount namespace cannot hide the home, it lies outside
    the home, which is then closed."""
    return home / SCRATCH if namespaces else Path("/var/tmp") / f"sublet-{os.getuid()}-{os.stat(home).st_ino}"


def make_scratch(root: Path, pid: int, started: int) -> Path:
    """Make a worker's folder, named after its supervisor so that anybody can see whether it is still in
    use."""
    root.mkdir(mode=0o711, exist_ok=True)
    owner = root.lstat()
    if owner.st_uid != os.getuid() or not stat.S_ISDIR(owner.st_mode):
        raise PermissionError(f"{root} is somebody else's")
    made = root / f"{pid}-{started}"
    made.mkdir(mode=0o700)
    (made / _TEMPORARY).mkdir(mode=0o700)
    return made


def remove_left_scratch(root: Path) -> list[str]:
    """Remove every folder whose supervisor is gone, and return which."""
    removed = []
    for place in root.iterdir() if root.is_dir() and not root.is_symlink() else ():
        pid, _, started = place.name.partition("-")
        if not (pid.isdigit() and started.isdigit()):
            continue
        lives = read_stat(int(pid))
        if lives is None or lives.state == "Z" or lives.started != int(started):
            _remove(place)
            removed.append(place.name)
    return removed


def _remove(place: Path) -> None:
    """Remove a folder, including parts its tenant made inaccessible. Links are not followed."""
    assert shutil.rmtree.avoids_symlink_attacks
    shutil.rmtree(place, ignore_errors=True)
    if not place.exists():
        return
    for folder, names, _, fd in os.fwalk(place, topdown=True, follow_symlinks=False):
        for name in names:
            with contextlib.suppress(OSError):
                if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    os.chmod(name, 0o700, dir_fd=fd)
        del folder
    shutil.rmtree(place, ignore_errors=True)


# --- what a worker does before it is anybody's ---


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """One worker's sandbox, as its supervisor describes it."""

    number: int
    home: str
    hide: tuple[str, ...]
    scratch: str
    shared_memory_bytes: int = 0  # of its /dev/shm; 0: the kernel's default
    rlimits: tuple[tuple[str, int], ...] = ()  # limits that no group of its own keeps
    file_bytes: int = 0
    network: NetworkPolicy = NetworkPolicy.GUARDED

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> SandboxSpec:
        return cls(
            number=int(fields["number"]),
            home=str(fields["home"]),
            hide=tuple(map(str, fields["hide"])),
            scratch=str(fields["scratch"]),
            shared_memory_bytes=int(fields["shared_memory_bytes"]),
            rlimits=tuple((str(name), int(amount)) for name, amount in fields["rlimits"].items()),
            file_bytes=int(fields["file_bytes"]),
            network=NetworkPolicy(fields["network"]),
        )


def uid_of(number: int) -> int | None:
    """The tenant's own uid, if this kernel has it."""
    for base, most in ((UID_BASE, NUMBER_MOST), (UID_BASE_SMALL, UID_SMALL_MOST)):
        if number < most and _is_mapped(base + number, "uid") and _is_mapped(base + number, "gid"):
            return base + number
    return None


def _is_mapped(number: int, kind: str) -> bool:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/self/{kind}_map").read_text().splitlines():
            first, _, count = map(int, line.split())
            if first <= number < first + count:
                return True
    return False


class NotEntered(Exception):
    """The worker must not begin."""

    def __init__(self, refusal: IsolationRefusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


def enter(spec: SandboxSpec, *, namespaces: bool) -> tuple[list[str], dict[str, int]]:
    """Enter the sandbox. Runs in the contained process, before any code of the tenant's; returns what was
    reached and which rlimits are in force, or raises `NotEntered`."""
    try:
        return _enter(spec, namespaces)
    except OSError as e:
        raise NotEntered(not_prepared(e.strerror or type(e).__name__)) from e


def _enter(spec: SandboxSpec, namespaces: bool) -> tuple[list[str], dict[str, int]]:
    reached: list[str] = []
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    most_files = min(most_files, OPEN_FILES_MOST) if most_files != resource.RLIM_INFINITY else OPEN_FILES_MOST
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    if spec.file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (spec.file_bytes, spec.file_bytes))
    _rather_than_the_service()
    uid = own_uid(spec.number) if os.getuid() == 0 else None
    if uid is not None:
        _give_scratch(spec, uid)
    if namespaces:
        reached += _mount_view(spec, uid)
        with contextlib.suppress(OSError):  # segments and queues of System V have no file to be hidden
            kernel_calls.unshare(kernel_calls.CLONE_NEWIPC)
            reached.append(OWN_IPC)
    if spec.network is NetworkPolicy.NONE:
        try:
            enter_empty_network()
        except OSError as e:
            raise NotEntered(not_cut_off(str(e.strerror))) from e
        reached.append(NONE_WORDS)
    if uid is not None:
        become(uid, [*needed(), spec.scratch])
    reached.append(SAME_UID if uid is None else OWN_UID)
    kernel_calls.drop_capabilities()
    with contextlib.suppress(OSError):  # sockets without a file are not hidden by any cover
        kernel_calls.scope_sockets_and_signals()
        reached.append(SCOPED)
    try:  # nothing above could be done after it
        filter_calls()
        reached.append(FILTERED)
    except OSError as e:
        ProcessLog("tenant-sandbox")(f"its system calls are not filtered: {e}")
    os.umask(0o077)
    os.chdir(spec.scratch)
    return reached, _limit_each(spec.rlimits)


def _rather_than_the_service() -> None:
    """When the whole machine is out of memory, the kernel ends a worker first. Said with CAP_SYS_RESOURCE,
    while the service's rights are still there, it is the least that the worker can ask for itself."""
    try:
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    except OSError as e:
        ProcessLog("tenant-sandbox")(f"oom_score_adj was not raised: {e}")


def _limit_each(wanted: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Set what a process can be limited to alone, and return what the kernel confirms."""
    kept = {}
    for name, amount in wanted:
        kind = _RLIMITS.get(Resource(name))
        if kind is None:
            continue
        _, hard = resource.getrlimit(kind)
        least = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(kind, (least, least))
        if resource.getrlimit(kind) == (least, least):
            kept[name] = least
    return kept


def rlimits_of(kept: Mapping[str, int]) -> list[LimitInForce]:
    return [
        LimitInForce(resource=Resource(name), amount=amount, by=Enforcer.RLIMIT)
        for name, amount in kept.items()
    ]


def own_uid(number: int) -> int:
    uid = uid_of(number)
    if uid is None:
        raise NotEntered(not_mapped(number))
    return uid


def _give_scratch(spec: SandboxSpec, uid: int) -> None:
    try:
        for place in (spec.scratch, os.path.join(spec.scratch, _TEMPORARY)):
            os.chown(place, uid, -1)
    except OSError as e:
        raise NotEntered(not_allowed(str(e.strerror))) from e


def become(uid: int, places: Iterable[str]) -> None:
    """Become this user for good, or raise `NotEntered`. `places` are what it must be able to read."""
    for place in places:
        if not _reaches(place, uid):
            raise NotEntered(not_readable(uid, place))  # it would find no Python
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as e:
        raise NotEntered(not_allowed(str(e.strerror))) from e
    if {*os.getresuid(), *os.getresgid()} != {uid}:
        raise NotEntered(not_allowed("it was made only in part"))
    # A change of uid makes a process undumpable; it may read about itself again.
    kernel_calls.prctl(kernel_calls.PR_SET_DUMPABLE, 1)


def needed() -> list[str]:
    """Where Python and what it imports lie."""
    places = [
        sys.base_prefix,
        sys.prefix,
        str(Path(__file__).parents[3]),
        os.path.dirname(os.path.realpath(sys.executable)),
    ]
    places += [place for place in sys.path if place and place != "/" and os.path.isdir(place)]
    return list(dict.fromkeys(os.path.abspath(place) for place in places))


def _mount_view(spec: SandboxSpec, uid: int | None) -> list[str]:
    """Mount what the worker sees. Either everything that hides the home is in place, or it is not claimed."""
    shown = [*needed(), *(place for place in _VISIBLE_IN_RUN if os.path.isdir(place))]
    held = {place: _held(place) for place in shown}
    scratch, temporary = _held(spec.scratch), _held(os.path.join(spec.scratch, _TEMPORARY))
    covers = covered(spec, shown, uid, home=_account_home())
    reached: list[str] = []
    os.umask(0o022)
    try:
        with contextlib.suppress(OSError):
            kernel_calls.set_read_only("/", True, and_below=True)
            kernel_calls.set_read_only("/proc", False)
            reached.append(READ_ONLY)
        for place in ("/tmp", "/var/tmp"):
            if os.path.isdir(place) and not os.path.islink(place):
                _bind(temporary, place, writable=True)
        empty = []
        for place in ("/dev/shm", *covers):
            if os.path.isdir(place):
                options = "mode=0755"
                if place == "/dev/shm":
                    most = f",size={spec.shared_memory_bytes}" if spec.shared_memory_bytes else ""
                    options = f"mode=1777{most}"
                kernel_calls.mount(
                    "tmpfs", place, "tmpfs", kernel_calls.MS_NOSUID | kernel_calls.MS_NODEV, options
                )
                empty.append(place)
        for place, fd in sorted(held.items()):  # outer ones first
            for path in {place, os.path.realpath(place)}:
                if fd >= 0 and not os.path.exists(path):
                    os.makedirs(path, mode=0o755)
                    _bind(fd, path, writable=False)
        if not os.path.exists(spec.scratch):
            os.makedirs(spec.scratch, mode=0o755)
        _bind(scratch, spec.scratch, writable=True)
        for place in empty:
            if place != "/dev/shm":
                kernel_calls.set_read_only(place, True)
        reached.insert(0, HIDDEN_HOME)
    except OSError as e:
        ProcessLog("tenant-sandbox")(str(e))
    finally:
        for fd in (scratch, temporary, *held.values()):
            if fd >= 0:
                os.close(fd)
    return reached


def covered(spec: SandboxSpec, shown: Iterable[str], uid: int | None, *, home: str) -> list[str]:
    """The folders to cover with empty ones, outer ones first: what lies inside one needs no cover of its
    own."""
    wanted = {os.path.realpath(place) for place in (spec.home, *spec.hide, home, "/run")}
    if uid is not None:
        wanted |= {closed for place in shown for closed in _closed_above(os.path.realpath(place), uid)}
    found: list[str] = []
    for place in sorted(wanted - {"/"}):
        if not any(Path(place).is_relative_to(outer) for outer in found):
            found.append(place)
    return found


def _account_home() -> str:
    """The service account's home, where its keys and settings lie."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"


def _closed_above(place: str, uid: int) -> list[str]:
    """The folders above it that a user without any other right cannot enter."""
    return [str(above) for above in Path(place).parents if not _passes(str(above), uid)]


def _passes(folder: str, uid: int) -> bool:
    try:
        found = os.stat(folder)
    except OSError:
        return False
    return bool(found.st_mode & (stat.S_IXUSR if found.st_uid == uid else stat.S_IXOTH))


def _reaches(place: str, uid: int) -> bool:
    """Whether the user can read what lies there."""
    real = os.path.realpath(place)
    if not os.path.exists(real):
        return True
    if _closed_above(place, uid) or _closed_above(real, uid) or not _passes(real, uid):
        return False
    found = os.stat(real)
    return bool(found.st_mode & (stat.S_IRUSR if found.st_uid == uid else stat.S_IROTH))


def _held(place: str) -> int:
    """Open it, so that it can be bound again after it was covered."""
    with contextlib.suppress(OSError):
        return os.open(place, os.O_PATH | os.O_CLOEXEC)
    return -1


def _bind(fd: int, target: str, *, writable: bool) -> None:
    kernel_calls.mount(f"/proc/self/fd/{fd}", target, "none", kernel_calls.MS_BIND | kernel_calls.MS_REC)
    with contextlib.suppress(OSError):
        kernel_calls.set_read_only(target, not writable)


def terms_of(scratch: str, environment: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The `os.environ` of a tenant's code: the short list, its lease's variables, and its folders."""
    return {
        **zygote_environment(own),  # for the processes it starts
        **environment,
        "HOME": scratch,
        "TMPDIR": os.path.join(scratch, _TEMPORARY),
        "USER": "tenant",
        "LOGNAME": "tenant",
    }
