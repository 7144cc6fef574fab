"""Small BPF programs: an assembler with labels, and the calls that put them in force.

Rules of this file: no decisions; an OSError for every refusal of the kernel. Little-endian machines only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

_SYS_BPF = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _PROG_ATTACH = 5, 8
_ALLOW_MULTI = 2

#: Program types and where they are attached.
CGROUP_SKB, CGROUP_SOCK_ADDR = 8, 18
EGRESS = 1
CONNECT_V4, CONNECT_V6, SEND_V4, SEND_V6 = 10, 11, 14, 15
_SKB_LOAD_BYTES = 26

_BYTES_TO_LOAD = {1: 0x71, 2: 0x69, 4: 0x61}
FRAME = 10  # the register with the stack's end


class BpfProgram:
    """Instructions in order. A jump names a label that may come later."""

    def __init__(self) -> None:
        self._made: list[tuple[int, int, int, int, int]] = []
        self._labels: dict[str, int] = {}
        self._jumps: dict[int, str] = {}

    def label(self, name: str) -> None:
        self._labels[name] = len(self._made)

    def set(self, register: int, value: int) -> None:
        self._made.append((0xB7, register, 0, 0, value))

    def copy(self, to: int, source: int) -> None:
        self._made.append((0xBF, to, source, 0, 0))

    def add(self, register: int, value: int) -> None:
        self._made.append((0x07, register, 0, 0, value))

    def add_register(self, to: int, source: int) -> None:
        self._made.append((0x0F, to, source, 0, 0))

    def mask(self, register: int, bits: int) -> None:
        """The lower 32 bits of it and these."""
        self._made.append((0x54, register, 0, 0, bits))

    def shift_left(self, register: int, bits: int) -> None:
        self._made.append((0x67, register, 0, 0, bits))

    def load(self, to: int, source: int, offset: int, size: int) -> None:
        self._made.append((_BYTES_TO_LOAD[size], to, source, offset, 0))

    def jump_if(self, register: int, value: int, label: str) -> None:
        """If its lower 32 bits are this value."""
        self._jump(0x16, register, value, label)

    def jump_unless(self, register: int, value: int, label: str) -> None:
        self._jump(0x56, register, value, label)

    def jump(self, label: str) -> None:
        self._jump(0x05, 0, 0, label)

    def load_packet(self, packet: int, offset: int, to: int, size: int) -> None:
        """Copy bytes of the packet to the stack; afterwards register 0 is 0 if they are there. `offset` may
        be a register given as -number."""
        self.copy(1, packet)
        if offset < 0:
            self.copy(2, -offset)
        else:
            self.set(2, offset)
        self.copy(3, FRAME)
        self.add(3, to)
        self.set(4, size)
        self._made.append((0x85, 0, 0, 0, _SKB_LOAD_BYTES))

    def end(self, verdict: int) -> None:
        self.set(0, verdict)
        self._made.append((0x95, 0, 0, 0, 0))

    def _jump(self, code: int, register: int, value: int, label: str) -> None:
        self._jumps[len(self._made)] = label
        self._made.append((code, register, 0, 0, value))

    def assembled(self) -> bytes:
        made = []
        for at, (code, to, source, offset, value) in enumerate(self._made):
            if at in self._jumps:
                offset = self._labels[self._jumps[at]] - at - 1
            made.append(struct.pack("<BBhI", code, source << 4 | to, offset, value & 0xFFFFFFFF))
        return b"".join(made)


def _bpf(command: int, fields: bytes) -> int:
    number = _SYS_BPF.get(os.uname().machine)
    if number is None or sys.byteorder != "little":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    libc = ctypes.CDLL(None, use_errno=True)
    held = ctypes.create_string_buffer(fields, len(fields))
    result = int(libc.syscall(number, command, held, len(fields)))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"bpf: {os.strerror(ctypes.get_errno())}")
    return result


def load_program(program: BpfProgram, kind: int, place: int) -> int:
    """Returns its descriptor."""
    code = program.assembled()
    held = ctypes.create_string_buffer(code, len(code))
    license_name = ctypes.create_string_buffer(b"Apache-2.0")
    fields = struct.pack(
        "<IIQQIIQII16sII",
        kind,
        len(code) // 8,
        ctypes.addressof(held),
        ctypes.addressof(license_name),
        0,
        0,
        0,
        0,
        0,
        b"",
        0,
        place,
    )
    return _bpf(_PROG_LOAD, fields)


def attach_to_group(program: int, group: int, place: int) -> None:
    """In force as long as the group exists, for all that is in it or below."""
    _bpf(_PROG_ATTACH, struct.pack("<IIIIII", group, program, place, _ALLOW_MULTI, 0, 0))
