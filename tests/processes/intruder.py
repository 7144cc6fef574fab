"""Everything a tenant's code may try against its neighbours and its host. Runs inside a session; says what it
got hold of.

In a file without pytest: workers import it. `look` returns what went wrong, in words: an empty list is what
it should be.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
CLONE_NEWUSER, CLONE_NEWNS, MNT_DETACH = 0x10000000, 0x00020000, 2


def look(facts: dict[str, Any]) -> list[str]:
    """`facts`: home, secret (in the caller's environment and in files), files, folders, sockets, pids."""
    got: list[str] = []
    for attempt in (
        _environments,
        _files,
        _folders,
        _roots,
        _uncovered,
        _sockets,
        _processes,
        _rights,
        _writes,
        _descriptors,
    ):
        with contextlib.suppress(Exception):
            attempt(facts, got.append)
    return got


def _environments(facts: dict[str, Any], got: Callable[[str], None]) -> None:
    if facts["secret"] in str(dict(os.environ)):
        got("the caller's secret in os.environ")
    for path in (
        glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline") + ["/proc/self/environ"]
    ):
        with contextlib.suppress(OSError):
            if facts["secret"].encode() in Path(path).read_bytes():
                got(f"the caller's secret in {path}")
    unknown = set(os.environ) - set(facts["variables"])
    if unknown:
        got(f"variables {sorted(unknown)}")


def _files(facts: dict[str, Any], got: Callable[[str], None]) -> None:
    for path in facts["files"]:
        for tried in (path, f"/proc/self/root{path}", f"/proc/1/root{path}", f"/proc/1/cwd{path}"):
            with contextlib.suppress(OSError):
                Path(tried).read_bytes()
                got(f"read {tried}")


def _folders(facts: dict[str, Any], got: Callable[[str], None]) -> None:
    for path in facts["folders"]:
        with contextlib.suppress(OSError):
            if os.listdir(path):
                got(f"listed {path}: {os.listdir(path)}")
        with contextlib.suppress(OSError):
            Path(path, "planted").write_text("x")
            got(f"wrote into {path}")


def _roots(facts: dict[str, Any], got: Callable[[str], None]) -> None:
    with contextlib.suppress(OSError):
        os.setuid(0)
        got("became root")
    with contextlib.suppress(OSError):
        os.chroot("/tmp")
        got("changed its root")
    if _libc.setns(os.open("/proc/1/ns/mnt", os.O_RDONLY), 0) == 0:
        got("entered a mount namespace")


def _in_child(attempt: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 0
        with contextlib.suppress(BaseException):
            code = 7 if attempt() else 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def _uncovered(facts: dict[str, Any], got: Callable[[str], None]) -> None:
    """With the rights of a new user namespace: take the covers off."""

    def attempt() -> bool:
        if _libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
            return False
        for place in (facts["home"], *facts["covers"]):
            while _libc.umount2(place.encode(), MNT_DETACH) == 0:
                pass
        for place in facts["covers"]:
            _libc.mount(b"none", place.encode(), b"none", ctypes.c_ulong(32 | 4096), None)  # writable again
        return any(os.path.exists(path) for path in facts["files"])

    if _in_child(attempt):
        got("took the cover off")

    def remove_cover() -> bool:
        return (
            _libc.umount2(facts["home"].encode(), MNT_DETACH) == 0 or _libc.umount2(b"/tmp", MNT_DETACH) == 0
        )

    if _in_child(remove_cover):
        got("unmounted")


def _sockets(facts: dict[str, Any], got: Callable[[str], None]) -> None:
    for path in [*facts["sockets"], *glob.glob(f"{facts['home']}/run/*")]:
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sock:
                sock.connect(path)
                got(f"connected to {path}")
    for name in facts["abstract"]:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.connect("\0" + name)
            got(f"connected to @{name}")


def _processes(facts: dict[str, Any], got: Callable[[str], None]) -> None:
    for pid in facts["pids"]:
        with contextlib.suppress(OSError):
            os.kill(pid, 0)
            got(f"may signal {pid}")
        if os.path.exists(f"/proc/{pid}"):
            got(f"sees {pid}")
        if (
            _libc.ptrace(PTRACE_ATTACH, pid, None, None) == 0
            or _libc.ptrace(PTRACE_SEIZE, pid, None, None) == 0
        ):
            got(f"traces {pid}")
        with contextlib.suppress(OSError):
            os.pidfd_open(pid)
            got(f"holds {pid}")


def _rights(facts: dict[str, Any], got: Callable[[str], None]) -> None:
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        if int(status[name], 16):
            got(f"{name} {status[name]}")
    if status["NoNewPrivs"].strip() != "1":
        got("may gain rights")
    if facts["own_uid"] and (
        os.getuid() != facts["own_uid"] or os.getresgid() != (facts["own_uid"],) * 3 or os.getgroups()
    ):
        got(f"runs as {os.getresuid()} {os.getresgid()} {os.getgroups()}")
    if resource.getrlimit(resource.RLIMIT_CORE) != (0, 0):
        got("may dump its memory")


def _writes(facts: dict[str, Any], got: Callable[[str], None]) -> None:
    import sublet

    package = os.path.dirname(sublet.__file__)
    for path in (
        f"{facts['anybodys']}/planted",
        f"{package}/planted.py",
        f"{package}/__init__.py",
        f"{sys.prefix}/planted",
        "/etc/planted",
        "/planted",
        "/sys/fs/cgroup/cgroup.procs",
        *glob.glob("/sys/fs/cgroup/**/cgroup.procs", recursive=True)[:5],
    ):
        with contextlib.suppress(OSError), open(path, "a") as file:
            if path.endswith("cgroup.procs"):
                file.write("0")
                file.flush()
            got(f"may write {path}")


def _descriptors(facts: dict[str, Any], got: Callable[[str], None]) -> None:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(facts["home"]) and facts["scratch"] not in target:
                got(f"has {target}")


def allowed(scratch: str) -> list[str]:
    """What a tenant must be able to do all the same; what it could not."""
    failed = []
    for place in (scratch, os.environ["HOME"], os.environ["TMPDIR"], "/tmp", "/dev/shm", os.getcwd()):
        try:
            Path(place, "mine").write_text("x")
        except OSError as e:
            failed.append(f"{place}: {e}")
    try:
        import subprocess
        import tempfile

        with tempfile.TemporaryFile() as file:
            file.write(b"x")
        said = subprocess.run(
            [sys.executable, "-c", "import numpy, sublet, sqlite3, ssl; print(sublet.__file__)"],
            capture_output=True,
            text=True,
        )
        import sublet

        if said.stdout.strip() != sublet.__file__:
            failed.append(f"{said.stdout} {said.stderr}")
        pid = os.fork()
        if pid == 0:
            signal.pause()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except Exception as e:
        failed.append(f"{type(e).__name__}: {e}")
    return failed
