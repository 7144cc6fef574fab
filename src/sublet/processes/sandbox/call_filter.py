"""The filter of a worker's system calls: a classic BPF program that the kernel asks before each of them.

Rules of this file:
- `core.studio.call_policy` says which are refused. Once in force a filter stays for this process and for all
  that it starts.
- Numbers are those of each machine; a call that a machine never had is left out of its table.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from sublet.core.studio.call_policy import (
    NAMESPACE_BITS,
    ONLY_WITH,
    REFUSED,
    REFUSED_NAMESPACES,
    REFUSED_SOCKET_FAMILIES,
    UNKNOWN_TO_IT,
)
from sublet.processes.sandbox import kernel_calls

#: The same on every machine: added after the tables were made one.
_ALIKE = {
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "clone3": 435,
    "mount_setattr": 442,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
}
NUMBERS = {
    "x86_64": _ALIKE
    | {
        "socket": 41,
        "clone": 56,
        "ptrace": 101,
        "syslog": 103,
        "pivot_root": 155,
        "chroot": 161,
        "acct": 163,
        "mount": 165,
        "umount2": 166,
        "swapon": 167,
        "swapoff": 168,
        "reboot": 169,
        "init_module": 175,
        "delete_module": 176,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "perf_event_open": 298,
        "open_by_handle_at": 304,
        "setns": 308,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "kcmp": 312,
        "finit_module": 313,
        "kexec_file_load": 320,
        "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": _ALIKE
    | {
        "umount2": 39,
        "mount": 40,
        "pivot_root": 41,
        "chroot": 51,
        "acct": 89,
        "unshare": 97,
        "kexec_load": 104,
        "init_module": 105,
        "delete_module": 106,
        "syslog": 116,
        "ptrace": 117,
        "reboot": 142,
        "socket": 198,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "clone": 220,
        "swapon": 224,
        "swapoff": 225,
        "perf_event_open": 241,
        "open_by_handle_at": 265,
        "setns": 268,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "kcmp": 272,
        "finit_module": 273,
        "bpf": 280,
        "userfaultfd": 282,
        "kexec_file_load": 294,
    },
}
#: As `struct seccomp_data` and <linux/audit.h> have them.
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
#: Numbers from here on are of x86's third calling convention.
_X32 = 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ANSWER = 0x7FFF0000, 0x00050000
_REFUSED, _UNKNOWN = _ANSWER | errno.EPERM, _ANSWER | errno.ENOSYS
_Line = tuple[int, int, int, int]


class _SeccompProgram(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("lines", ctypes.c_void_p))


def _answer_if(kind: int, value: int, answer: int) -> list[_Line]:
    """Answer if what was loaded is like this, and else go on."""
    return [(kind, 0, 1, value), (_RETURN, 0, 0, answer)]


def _by_argument(number: int, checks: list[_Line]) -> list[_Line]:
    """For this call decide by its first argument, and for others go on."""
    inner = [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT), *checks, (_RETURN, 0, 0, _ALLOW)]
    return [(_IF_EQUAL, 0, len(inner), number), *inner]


def assembled(machine: str) -> bytes:
    """The program for this machine, eight bytes for each line."""
    numbers = NUMBERS[machine]
    lines: list[_Line] = [(_LOAD, 0, 0, _ARCHITECTURE_AT)]
    lines += [(_IF_EQUAL, 1, 0, _ARCHITECTURE[machine]), (_RETURN, 0, 0, _REFUSED)]
    lines += [(_LOAD, 0, 0, _NUMBER_AT)]
    if machine == "x86_64":
        lines += _answer_if(_IF_AT_LEAST, _X32, _REFUSED)
    for name in REFUSED_NAMESPACES:
        lines += _by_argument(numbers[name], _answer_if(_IF_ANY_BIT, NAMESPACE_BITS[name], _REFUSED))
    families = [
        line
        for family in REFUSED_SOCKET_FAMILIES.values()
        for line in _answer_if(_IF_EQUAL, family, _REFUSED)
    ]
    lines += _by_argument(numbers["socket"], families)
    for name, bit in ONLY_WITH.items():
        refused = [*_answer_if(_IF_ANY_BIT, bit, _ALLOW), (_RETURN, 0, 0, _REFUSED)]
        lines += _by_argument(numbers[name], refused)
    for name in (name for group in REFUSED.values() for name in group):
        lines += _answer_if(_IF_EQUAL, numbers[name], _REFUSED)
    for name in UNKNOWN_TO_IT:
        lines += _answer_if(_IF_EQUAL, numbers[name], _UNKNOWN)
    lines += [(_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("<HBBI", *line) for line in lines)


def filter_calls() -> None:
    """Put the filter in force for this thread and what it starts. Raises `OSError` if the kernel does not
    take it, or this machine's numbers are not known."""
    machine = os.uname().machine
    if machine not in NUMBERS or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError(errno.ENOSYS, f"the system calls of {machine} are not known")
    code = assembled(machine)
    held = ctypes.create_string_buffer(code, len(code))
    program = _SeccompProgram(len(code) // 8, ctypes.addressof(held))
    kernel_calls.prctl(kernel_calls.PR_SET_NO_NEW_PRIVS, 1)
    kernel_calls.prctl(
        kernel_calls.PR_SET_SECCOMP, kernel_calls.SECCOMP_MODE_FILTER, ctypes.addressof(program)
    )
