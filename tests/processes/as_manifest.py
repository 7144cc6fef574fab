"""Run Python as a container of the manifests does: `as_manifest.py script args…`. Its seccomp filter refuses the
calls that make namespaces and mounts, as the runtimes' default profile does without SYS_ADMIN, and it may gain
no privileges. The uid is whoever calls it; see `as_user.py`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

from sublet.processes.sandbox import kernel_calls

#: unshare, mount, umount2, setns, mount_setattr, pivot_root, move_mount, open_tree
_REFUSED = {
    "x86_64": (272, 165, 166, 308, 442, 155, 429, 428),
    "aarch64": (97, 40, 39, 268, 442, 41, 429, 428),
}
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse_namespaces() -> None:
    numbers = _REFUSED[os.uname().machine]
    lines = [(_LOAD, 0, 0, 0)]
    for left, number in zip(range(len(numbers), 0, -1), numbers, strict=True):
        lines.append((_EQUAL, left, 0, number))  # on a match jump over the others and the line that allows
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = _Program(len(lines), ctypes.addressof(code))
    kernel_calls.prctl(kernel_calls.PR_SET_NO_NEW_PRIVS, 1)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the filter was not taken")


def main() -> None:
    refuse_namespaces()
    try:
        kernel_calls.unshare(kernel_calls.CLONE_NEWUSER)
    except PermissionError:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    raise SystemExit("namespaces are not refused here: this test would show nothing")


main()
