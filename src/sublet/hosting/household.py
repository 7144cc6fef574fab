"""A household: how workers of tenants live on a host that is not theirs.

Rules of this file:
- A worker of a household sees nothing of who started it: its environment is made from a short list, the folder of the ledger and of the
  sockets is empty in its eyes, the system is read-only, and so is everything of the account the service runs under, but what Python is
  imported from.
- It writes to its scratch folder, to a /tmp that lies in there, and to a /dev/shm of its own. The folder is the session's: it goes when
  the worker is gone.
- Where the service is root, every tenant is a user of its own, with no other groups and no way back. What it needs and could not reach
  by its rights alone (Python in a closed home) is shown to it.
- Whatever the kernel refuses is left out and not claimed: what was reached is told in words, and they are the worker's containment.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import shutil
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublet.core.errors import BadInput
from sublet.hosting import linux
from sublet.hosting.processes import read_stat

HIDDEN_HOME = "hidden home"
READ_ONLY = "read-only system"
SCOPED = "own sockets"
OWN_UID = "own uid"
SAME_UID = "same uid"
#: A tenant's uid is one of these plus its number: far above those of people, or, where a container has few, below those of the system.
UID_BASE = 700_000
UID_BASE_SMALL, UID_SMALL_MOST = 20_000, 40_000
NUMBER_MOST = 1 << 20
OPEN_FILES_MOST = 65_536
#: What tells a program nothing but how to write a text and where programs are.
ENVIRONMENT = ("PATH", "LANG", "TZ")
ENVIRONMENT_PREFIXES = ("LC_",)
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Of what lies in /run, which is full of sockets of other services: names are looked up with these.
_OF_RUN = ("/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager", "/run/nvidia-persistenced")
SCRATCH = "scratch"
_TEMPORARY = "tmp"
#: An order to a zygote is one packet.
_PATHS_MOST_BYTES = 2500


@dataclass(frozen=True, slots=True, kw_only=True)
class Household:
    """Whose worker it is to be. `number`: the tenant's, the same for ever. `hide`: folders beside SUBLET_HOME that its code must not
    see, such as that of a ledger which lies elsewhere."""

    number: int
    hide: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.number < NUMBER_MOST:
            raise BadInput(f"a tenant's number is from 0 to {NUMBER_MOST - 1}, not {self.number}")
        if sum(len(os.fsencode(path)) for path in self.hide) > _PATHS_MOST_BYTES:
            raise BadInput(
                "the paths to be hidden are too long", remedy="hide a folder that they have in common"
            )


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Of all that a service knows: what a stranger may know too."""
    kept = {
        name: value
        for name, value in environment.items()
        if name in ENVIRONMENT or name.startswith(ENVIRONMENT_PREFIXES)
    }
    return {"PATH": DEFAULT_PATH, **kept}


def zygote_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A fork shows its first process's environment for ever, in /proc: it must be clean from the start."""
    made = clean_environment(environment)
    places = environment.get("PYTHONPATH", "")
    package = Path(__file__).parents[2]
    if any(
        place and os.path.realpath(place) == os.path.realpath(package) for place in places.split(os.pathsep)
    ):
        made["PYTHONPATH"] = places  # without it there is no sublet to import, or another
    return made


# --- the scratch folder --------------------------------------------------------------------------------------


def scratch_root(home: Path, namespaces: bool) -> Path:
    """Where a mount namespace cannot hide the home from its tenants, their folders lie elsewhere, and the home is closed."""
    return home / SCRATCH if namespaces else Path("/var/tmp") / f"sublet-{os.getuid()}-{os.stat(home).st_ino}"


def make_scratch(root: Path, pid: int, started: int) -> Path:
    """Named after the supervisor, so that anybody can see whether it is still somebody's."""
    root.mkdir(mode=0o711, exist_ok=True)
    owner = root.lstat()
    if owner.st_uid != os.getuid() or not stat.S_ISDIR(owner.st_mode):
        raise PermissionError(f"{root} is somebody else's")
    made = root / f"{pid}-{started}"
    made.mkdir(mode=0o700)
    (made / _TEMPORARY).mkdir(mode=0o700)
    return made


def remove_left_scratch(root: Path) -> list[str]:
    """Every folder whose supervisor is gone; which."""
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
    """Also what its tenant closed to itself. Links are not followed."""
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


# --- what a worker does before it is anybody's ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """One worker's place, as its supervisor describes it."""

    number: int
    home: str
    hide: tuple[str, ...]
    scratch: str

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> House:
        return cls(
            number=int(fields["number"]),
            home=str(fields["home"]),
            hide=tuple(map(str, fields["hide"])),
            scratch=str(fields["scratch"]),
        )


def uid_of(number: int) -> int | None:
    """The tenant's own, if this kernel has it."""
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


def settle(house: House, *, namespaces: bool) -> list[str]:
    """Runs in the contained process, before any code of the tenant's. What was reached."""
    reached: list[str] = []
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    most_files = min(most_files, OPEN_FILES_MOST) if most_files != resource.RLIM_INFINITY else OPEN_FILES_MOST
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    uid = uid_of(house.number) if os.getuid() == 0 else None
    if uid is not None:
        _own_scratch(house, uid)
    if namespaces:
        reached += _furnish(house, uid)
    if uid is not None and _become(uid, house):
        reached.append(OWN_UID)
    else:
        _own_scratch(house, os.getuid())
        reached.append(SAME_UID)
    linux.drop_capabilities()
    with contextlib.suppress(OSError):  # sockets without a file are not hidden by any cover
        linux.scope_sockets_and_signals()
        reached.append(SCOPED)
    os.umask(0o077)
    os.chdir(house.scratch)
    return reached


def _own_scratch(house: House, uid: int) -> None:
    for place in (house.scratch, os.path.join(house.scratch, _TEMPORARY)):
        os.chown(place, uid, -1)


def _become(uid: int, house: House) -> bool:
    if not all(_reaches(place, uid) for place in (*needed(), house.scratch)):
        return False  # it would find no Python
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as e:
        print(f"household: {e}", file=sys.stderr, flush=True)
        return False
    # What a change of rights closes: a process may read about itself.
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
    return True


def needed() -> list[str]:
    """Where Python and what is imported lie."""
    places = [
        sys.base_prefix,
        sys.prefix,
        str(Path(__file__).parents[2]),
        os.path.dirname(os.path.realpath(sys.executable)),
    ]
    places += [place for place in sys.path if place and place != "/" and os.path.isdir(place)]
    return list(dict.fromkeys(os.path.abspath(place) for place in places))


def _furnish(house: House, uid: int | None) -> list[str]:
    """The mounts. Either all of what hides the home is there, or it is not claimed."""
    shown = [*needed(), *(place for place in _OF_RUN if os.path.isdir(place))]
    held = {place: _held(place) for place in shown}
    scratch, temporary = _held(house.scratch), _held(os.path.join(house.scratch, _TEMPORARY))
    covers = covered(house, shown, uid, home=_account_home())
    reached: list[str] = []
    os.umask(0o022)
    try:
        with contextlib.suppress(OSError):
            linux.set_read_only("/", True, and_below=True)
            linux.set_read_only("/proc", False)
            reached.append(READ_ONLY)
        for place in ("/tmp", "/var/tmp"):
            if os.path.isdir(place) and not os.path.islink(place):
                _bind(temporary, place, writable=True)
        empty = []
        for place in ("/dev/shm", *covers):
            if os.path.isdir(place):
                mode = "1777" if place == "/dev/shm" else "0755"
                linux.mount("tmpfs", place, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, f"mode={mode}")
                empty.append(place)
        for place, fd in sorted(held.items()):  # outer ones first
            for path in {place, os.path.realpath(place)}:
                if fd >= 0 and not os.path.exists(path):
                    os.makedirs(path, mode=0o755)
                    _bind(fd, path, writable=False)
        if not os.path.exists(house.scratch):
            os.makedirs(house.scratch, mode=0o755)
        _bind(scratch, house.scratch, writable=True)
        for place in empty:
            if place != "/dev/shm":
                linux.set_read_only(place, True)
        reached.insert(0, HIDDEN_HOME)
    except OSError as e:
        print(f"household: {e}", file=sys.stderr, flush=True)
    finally:
        for fd in (scratch, temporary, *held.values()):
            if fd >= 0:
                os.close(fd)
    return reached


def covered(house: House, shown: Iterable[str], uid: int | None, *, home: str) -> list[str]:
    """The folders that are to be empty, outer ones first: what lies in one needs no cover of its own."""
    wanted = {os.path.realpath(place) for place in (house.home, *house.hide, home, "/run")}
    if uid is not None:
        wanted |= {closed for place in shown for closed in _closed_above(os.path.realpath(place), uid)}
    found: list[str] = []
    for place in sorted(wanted - {"/"}):
        if not any(Path(place).is_relative_to(outer) for outer in found):
            found.append(place)
    return found


def _account_home() -> str:
    """Keys and settings of the account lie there."""
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/"


def _closed_above(place: str, uid: int) -> list[str]:
    """The folders above it that a user without any other right cannot pass."""
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
    """A hold on it that a cover does not take away."""
    with contextlib.suppress(OSError):
        return os.open(place, os.O_PATH | os.O_CLOEXEC)
    return -1


def _bind(fd: int, target: str, *, writable: bool) -> None:
    linux.mount(f"/proc/self/fd/{fd}", target, "none", linux.MS_BIND | linux.MS_REC)
    with contextlib.suppress(OSError):
        linux.set_read_only(target, not writable)


def terms_of(scratch: str, environment: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """What a tenant's code finds in `os.environ`: the short list, what belongs to its lease, and its folders."""
    return {
        **zygote_environment(own),  # for the processes it starts
        **environment,
        "HOME": scratch,
        "TMPDIR": os.path.join(scratch, _TEMPORARY),
        "USER": "tenant",
        "LOGNAME": "tenant",
    }


def in_words(contained: str, reached: Sequence[str]) -> str:
    return ", ".join([contained, *reached])
