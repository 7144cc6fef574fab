"""The few kernel calls that Python does not have: prctl, namespaces, mounts, capabilities, and a timer that
kills.

Rules of this file: one thin function per call, an OSError for every failure, no decisions.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_AT_FDCWD, _AT_RECURSIVE, _SYS_MOUNT_SETATTR, _MOUNT_ATTR_RDONLY = -100, 0x8000, 442, 1
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_RESTRICT = 444, 446
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
_CLOCK_BOOTTIME = 7
_SIGEV_SIGNAL = 0
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int, address: int = 0) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(address), 0, 0), "prctl")


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL when the parent ends, or end now if it has ended already."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    _check(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            kind.encode(),
            ctypes.c_ulong(flags),
            options.encode() or None,
        ),
        f"mount {target}",
    )


def set_read_only(target: str, read_only: bool, *, and_below: bool = False) -> None:
    """Make what is mounted there read-only, in this mount namespace only."""
    attributes = (ctypes.c_uint64 * 4)(
        _MOUNT_ATTR_RDONLY if read_only else 0, 0 if read_only else _MOUNT_ATTR_RDONLY, 0, 0
    )
    _check(
        _libc.syscall(
            _SYS_MOUNT_SETATTR,
            _AT_FDCWD,
            os.fsencode(target),
            _AT_RECURSIVE if and_below else 0,
            attributes,
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        ),
        f"mount_setattr {target}",
    )


def drop_capabilities() -> None:
    """Drop the capabilities of a process that became root of its own user namespace and has set it up."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    number = _SYS_CAPSET.get(os.uname().machine)
    if number is not None:
        _check(_libc.syscall(number, header, nothing), "capset")


def scope_sockets_and_signals() -> None:
    """Restrict this thread and what it starts to their own abstract sockets and processes. Linux 6.12."""
    ruleset = (ctypes.c_uint64 * 3)(0, 0, _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS)
    fd = _libc.syscall(_SYS_LANDLOCK_CREATE, ruleset, ctypes.c_size_t(ctypes.sizeof(ruleset)), 0)
    _check(0 if fd >= 0 else -1, "landlock_create_ruleset")
    try:
        _check(_libc.syscall(_SYS_LANDLOCK_RESTRICT, fd, 0), "landlock_restrict_self")
    finally:
        os.close(fd)


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("pad", ctypes.c_byte * 48),
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class DeadMansSwitch:
    """A kernel timer that kills this process at a deadline, whatever the process is doing by then. It runs on
    the boot clock: a machine that slept past the deadline must not wake up an expired tenant."""

    def __init__(self) -> None:
        self._timer = ctypes.c_void_p()
        event = _SigEvent(None, signal.SIGKILL, _SIGEV_SIGNAL)
        _check(
            _libc.timer_create(_CLOCK_BOOTTIME, ctypes.byref(event), ctypes.byref(self._timer)),
            "timer_create",
        )

    def arm(self, monotonic_us: int) -> None:
        """A deadline that has passed fires at once. Arming anew replaces the old deadline."""
        left_ns = max(1000, monotonic_us * 1000 - time.monotonic_ns())
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(left_ns // 1_000_000_000, left_ns % 1_000_000_000))
        _check(_libc.timer_settime(self._timer, 0, ctypes.byref(spec), None), "timer_settime")
