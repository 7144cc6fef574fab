"""The guard of a worker's network: BPF programs on its cgroup that say no to some addresses and ports.

Rules of this file:
- `core.studio.network_policy` says which. Nothing of the host's own network is changed, and the guard goes
  with the group.
- A connection that is refused is refused at once (EPERM). The packets are looked at too: not every protocol
  asks before it sends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from sublet.core.studio.network_policy import DNS_PORT, LOOPBACK_V4, LOOPBACK_V6, METADATA_V4, METADATA_V6
from sublet.processes.sandbox import bpf, kernel_calls
from sublet.processes.sandbox.bpf import BpfProgram

#: As `struct bpf_sock_addr` and `struct __sk_buff` have them.
_ADDR_V4, _ADDR_V6, _PORT = 4, 8, 24
_PROTOCOL, _INTERFACE = 16, 40
_LOOPBACK_INTERFACE = 1
_IP, _IPV6 = socket.htons(0x0800), socket.htons(0x86DD)
_LISTENING = "0A"
#: As `struct ifreq` has them.
_INTERFACE_FLAGS = struct.Struct("16sh14x")
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1
_REFUSE, _PASS = "refuse", "pass"


def guard_network(group: Path, ports: Sequence[int]) -> None:
    """Close these ports of this host, and the metadata addresses, to whoever is in the cgroup. Raises
    `OSError` if the kernel does not let this process do it."""
    programs = [
        (_of_packets(ports), bpf.CGROUP_SKB, bpf.EGRESS),
        *((_of_addresses_v4(ports), bpf.CGROUP_SOCK_ADDR, place) for place in (bpf.CONNECT_V4, bpf.SEND_V4)),
        *((_of_addresses_v6(ports), bpf.CGROUP_SOCK_ADDR, place) for place in (bpf.CONNECT_V6, bpf.SEND_V6)),
    ]
    fd = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for program, kind, place in programs:
            loaded = bpf.load_program(program, kind, place)
            try:
                bpf.attach_to_group(loaded, fd, place)
            finally:
                os.close(loaded)
    finally:
        os.close(fd)


def listening_ports() -> list[tuple[int, int]]:
    """(port, uid) of every TCP port that somebody of this host listens on."""
    found = []
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING:
                found.append((int(fields[1].rpartition(":")[2], 16), int(fields[7])))
    return found


def enter_empty_network() -> None:
    """Move this process to a network of its own that has only its loopback."""
    kernel_calls.unshare(kernel_calls.CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        found = fcntl.ioctl(sock, _GET_FLAGS, _INTERFACE_FLAGS.pack(b"lo", 0))
        flags = _INTERFACE_FLAGS.unpack(found)[1]
        fcntl.ioctl(sock, _SET_FLAGS, _INTERFACE_FLAGS.pack(b"lo", flags | _UP))


def _word(data: bytes) -> int:
    """As it is loaded from memory."""
    return int(struct.unpack("<I", data)[0])


def _refuse_v4(program: BpfProgram, address: int, scratch: int, *, unless_dns: str) -> None:
    """Go to `unless_dns` when the register has a metadata address."""
    for network in METADATA_V4:
        program.copy(scratch, address)
        program.mask(scratch, _word(network.netmask.packed))
        program.jump_if(scratch, _word(network.network_address.packed), unless_dns)


def _refuse_ports(program: BpfProgram, port: int, ports: Sequence[int]) -> None:
    for number in ports:
        program.jump_if(port, socket.htons(number), _REFUSE)


def _ends(program: BpfProgram, port: int) -> None:
    """What follows the rules: the label for metadata addresses, and the verdicts."""
    program.jump(_PASS)
    program.label("metadata")
    program.jump_unless(port, socket.htons(DNS_PORT), _REFUSE)
    program.label(_PASS)
    program.end(1)
    program.label(_REFUSE)
    program.end(0)


def _of_addresses_v4(ports: Sequence[int]) -> BpfProgram:
    program = BpfProgram()
    program.load(7, 1, _ADDR_V4, 4)
    program.load(8, 1, _PORT, 4)
    program.mask(8, 0xFFFF)
    _refuse_v4(program, 7, 2, unless_dns="metadata")
    program.mask(7, _word(LOOPBACK_V4.netmask.packed))
    program.jump_unless(7, _word(LOOPBACK_V4.network_address.packed), _PASS)
    _refuse_ports(program, 8, ports)
    _ends(program, 8)
    return program


def _of_addresses_v6(ports: Sequence[int]) -> BpfProgram:
    program = BpfProgram()
    program.load(8, 1, _PORT, 4)
    program.mask(8, 0xFFFF)
    for number in range(4):
        program.load(2 + number, 1, _ADDR_V6 + 4 * number, 4)
    _refuse_v6(program, unless_dns="metadata")
    # ::ffff:a.b.c.d is the IPv4 address.
    program.jump_unless(2, 0, _PASS)
    program.jump_unless(3, 0, _PASS)
    program.jump_unless(4, _word(b"\0\0\xff\xff"), "not mapped")
    program.copy(7, 5)
    _refuse_v4(program, 7, 2, unless_dns="metadata")
    program.mask(7, _word(LOOPBACK_V4.netmask.packed))
    program.jump_if(7, _word(LOOPBACK_V4.network_address.packed), "here")
    program.jump(_PASS)
    program.label("not mapped")
    program.jump_unless(4, 0, _PASS)
    program.jump_unless(5, _word(LOOPBACK_V6.network_address.packed[12:]), _PASS)
    program.label("here")
    _refuse_ports(program, 8, ports)
    _ends(program, 8)
    return program


def _refuse_v6(program: BpfProgram, *, unless_dns: str) -> None:
    """The address is in registers 2 to 5."""
    for place, network in enumerate(METADATA_V6):
        after = f"not metadata {place}"
        for number in range(4):
            mask = _word(network.netmask.packed[4 * number : 4 * number + 4])
            if not mask:
                continue
            program.copy(9, 2 + number)
            program.mask(9, mask)
            wanted = _word(network.network_address.packed[4 * number : 4 * number + 4])
            program.jump_unless(9, wanted, after)
        program.jump(unless_dns)
        program.label(after)


def _of_packets(ports: Sequence[int]) -> BpfProgram:
    program = BpfProgram()
    program.copy(6, 1)
    program.load(9, 6, _INTERFACE, 4)
    program.load(7, 6, _PROTOCOL, 4)
    program.jump_if(7, _IP, "v4")
    program.jump_if(7, _IPV6, "v6")
    program.jump(_PASS)

    program.label("v4")
    program.load_packet(6, 0, -8, 1)
    program.load(8, bpf.FRAME, -8, 1)
    program.mask(8, 0xF)
    program.shift_left(8, 2)  # the header's length
    program.add(8, 2)
    program.load_packet(6, -8, -8, 2)
    program.jump_unless(0, 0, "v4 no port")
    program.load(8, bpf.FRAME, -8, 2)
    program.jump("v4 address")
    program.label("v4 no port")
    program.set(8, 0)
    program.label("v4 address")
    program.load_packet(6, 16, -8, 4)
    program.load(7, bpf.FRAME, -8, 4)
    _refuse_v4(program, 7, 2, unless_dns="metadata")
    program.load_packet(6, 9, -8, 1)
    program.jump("here")

    program.label("v6")
    program.load_packet(6, 42, -8, 2)
    program.jump_unless(0, 0, "v6 no port")
    program.load(8, bpf.FRAME, -8, 2)
    program.jump("v6 address")
    program.label("v6 no port")
    program.set(8, 0)
    program.label("v6 address")
    program.load_packet(6, 24, -24, 16)
    for number in range(4):
        program.load(2 + number, bpf.FRAME, -24 + 4 * number, 4)
    program.copy(7, 9)
    _refuse_v6(program, unless_dns="metadata")
    program.copy(9, 7)
    program.load_packet(6, 6, -8, 1)

    program.label("here")
    program.load(7, bpf.FRAME, -8, 1)
    program.jump_unless(9, _LOOPBACK_INTERFACE, _PASS)
    program.jump_unless(7, socket.IPPROTO_TCP, _PASS)
    _refuse_ports(program, 8, ports)
    _ends(program, 8)
    return program
