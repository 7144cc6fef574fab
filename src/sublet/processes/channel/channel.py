"""A channel: values between two processes, small ones inline, large ones through blocks.

Rules of this file:
- One message is one packet of a Unix socket. It carries parts (a pickle and its buffers), what became of
  blocks, and a serial number: an answer has that of its call, so that one nobody waited for is never taken
  for another's.
- A peer that went away is `ChannelClosed`; nothing else is assumed about it.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sublet.processes.channel.blocks import Borrower, Lender

#: A packet must fit the socket's buffer; above this a copy through shared memory is faster anyway.
INLINE_BYTES = 32 << 10
INLINE_PARTS = 1000
PACKET_BYTES = 128 << 10
_ONE_FD = socket.CMSG_SPACE(4)
# Plain numbers: an enum's `|` costs as much as the system call.
_QUIETLY = int(socket.MSG_NOSIGNAL)
_CLOSED_ON_EXEC = int(socket.MSG_CMSG_CLOEXEC)
_CUT_SHORT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
#: kind, inline parts, unused blocks, dropped blocks, serial, block (0: inline), the block's size if it is new
_HEADER = struct.Struct("<BxHHHIIQ")
_NUMBER = struct.Struct("<I")
#: Kinds from here on are packets of sealed messages: see `processes/channel/sealed_channel.py`.
SEALED_FIRST = 32


#: An answer to a small call comes sooner than a sleeping core wakes up.
_SPIN_NS = 60_000


def look_briefly(poller: select.poll) -> None:
    """Poll without sleeping until something can be read, or until it is not worth staying awake for."""
    give_up = time.monotonic_ns() + _SPIN_NS
    while not poller.poll(0) and time.monotonic_ns() < give_up:
        os.sched_yield()  # the other side may be waiting for this very core


def sealed_packet(kind: int, serial: int, pieces: Sequence[bytes | memoryview]) -> bytes:
    return b"".join((_HEADER.pack(kind, 0, 0, 0, serial, 0, 0), *pieces))


def read_sealed_packet(packet: bytes) -> tuple[int, int, memoryview] | None:
    """Return kind, serial and content; None when it is not a sealed packet."""
    if len(packet) < _HEADER.size or packet[0] < SEALED_FIRST:
        return None
    kind, _, _, _, serial, _, _ = _HEADER.unpack_from(packet)
    return kind, serial, memoryview(packet)[_HEADER.size :]


class ChannelClosed(Exception):
    """The other process is gone."""


class Channel:
    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._lent = Lender()
        self._borrowed = Borrower()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: int, parts: Sequence[memoryview], serial: int = 0) -> None:
        number = size = 0
        ancillary: list[tuple[int, int, bytes]] = []
        if sum(part.nbytes for part in parts) > INLINE_BYTES or len(parts) > INLINE_PARTS:
            block, fresh = self._lent.lend(parts)
            number = block.number
            if fresh:
                size = block.size
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [block.fd]).tobytes())]
            parts = ()
        unused, self._borrowed.unused = self._borrowed.unused, []
        dropped, self._lent.dropped = self._lent.dropped, []
        numbers = (*unused, *dropped, *(part.nbytes for part in parts))
        # In one piece: the kernel takes about a thousand, and there may be more parts than that.
        packet = b"".join(
            (
                _HEADER.pack(kind, len(parts), len(unused), len(dropped), serial, number, size),
                struct.pack(f"<{len(numbers)}I", *numbers),
                *parts,
            )
        )
        try:
            self.socket.sendmsg([packet], ancillary, _QUIETLY)
        except (BrokenPipeError, ConnectionResetError) as e:
            raise ChannelClosed from e

    def send_packet(self, packet: bytes, flags: int = 0) -> None:
        """Send one packet of a sealed message."""
        try:
            self.socket.send(packet, _QUIETLY | flags)
        except (BrokenPipeError, ConnectionResetError) as e:
            raise ChannelClosed from e

    def receive_packet(self) -> bytes:
        """Receive one packet from a worker that is not trusted: no memory of it is mapped, and descriptors it
        sends are closed."""
        try:
            packet, _, flags, _ = self.socket.recvmsg(PACKET_BYTES, 0, _CLOSED_ON_EXEC)
        except ConnectionResetError as e:
            raise ChannelClosed from e
        if not packet:
            raise ChannelClosed
        return b"" if flags & int(socket.MSG_TRUNC) else packet

    def receive(self) -> tuple[int, int, list[memoryview]]:
        """Wait for a message: kind, serial and parts. The parts are writable and belong to the receiver."""
        try:
            packet, ancillary, flags, _ = self.socket.recvmsg(PACKET_BYTES, _ONE_FD, _CLOSED_ON_EXEC)
        except ConnectionResetError as e:
            raise ChannelClosed from e
        if len(packet) < _HEADER.size or flags & _CUT_SHORT:
            raise ChannelClosed
        kind, inline, unused, dropped, serial, number, size = _HEADER.unpack_from(packet)
        at = _HEADER.size
        if kind >= SEALED_FIRST:
            return kind, serial, [memoryview(packet)[at:]]
        if inline == 1 and not unused and not dropped:
            return kind, serial, [memoryview(bytearray(packet))[at + _NUMBER.size :]]  # most messages
        numbers = struct.unpack_from(f"<{unused + dropped + inline}I", packet, at)
        at += _NUMBER.size * len(numbers)
        if unused:
            self._lent.returned(numbers[:unused])
        if dropped:
            self._borrowed.drop(numbers[unused : unused + dropped])
        if size:
            fds = array.array("i", ancillary[0][2][: _NUMBER.size])
            self._borrowed.receive(number, fds[0], size)
        if number:
            views = self._borrowed.borrow(number)
        else:
            # Copied, because what is made from them may be written to.
            views = []
            for length in numbers[unused + dropped :]:
                views.append(memoryview(bytearray(packet[at : at + length])))
                at += length
        return kind, serial, views

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()
        self._lent.close()
        self._borrowed.close()


@contextlib.contextmanager
def reachable(folder: Path, name: str) -> Iterator[str]:
    """Yield a path of the file that is short enough for a socket's address, however deep the folder lies."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_with_fds(sock: socket.socket, message: bytes, fds: list[int]) -> None:
    sock.sendmsg(
        [message],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())] if fds else [],
        _QUIETLY,
    )


def receive_with_fds(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Receive a message and its descriptors; an empty message when the other side is gone."""
    try:
        message, ancillary, flags, _ = sock.recvmsg(4096, socket.CMSG_SPACE(4 * 16), _CLOSED_ON_EXEC)
    except ConnectionResetError:
        return b"", []
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    found = list(fds)
    if flags & _CUT_SHORT:
        for fd in found:
            os.close(fd)
        return b"", []
    return message, found
