"""Sealed messages: lists of bytes between a worker and the process that calls it, on the socket of their channel.

Rules of this file:
- Packets only: no shared memory and no descriptors. Memory that two processes map can be cut off by one under the other's hands, and
  the one that holds many sessions must not die of it.
- A message is its first packet, which says the size of every part, and as many more as it takes. A first packet where more of another
  message was expected means that the other was given up: it is forgotten.
- What comes is checked before it is kept. `Unreadable`: whoever sent it is not one of us.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sublet.hosting.channel import PACKET_BYTES, SEALED_FIRST, sealed_packet
from sublet.ports.sealed import PART_MOST_BYTES, PARTS_MOST
from sublet.ports.worker import Part

#: A call, its two answers, a question in its middle, its two answers; and what does not fit one packet.
CALL = SEALED_FIRST
DONE, FAILED, ASKED, ANSWERED, UNANSWERED, MORE = range(SEALED_FIRST + 1, SEALED_FIRST + 7)
#: From the worker, and to it.
FROM_WORKER = frozenset({DONE, FAILED, ASKED})
TO_WORKER = frozenset({CALL, ANSWERED, UNANSWERED})
#: The question's number, or of an answer the launches of the call; how many parts.
_INTRO = struct.Struct("<II")
_SIZE = struct.Struct("<Q")
_PIECE = 60 << 10
assert _PIECE + _INTRO.size + PARTS_MOST * _SIZE.size + 64 < PACKET_BYTES


class Unreadable(Exception):
    """What came is no sealed message."""


@dataclass(frozen=True, slots=True)
class Message:
    kind: int
    serial: int
    number: int
    parts: list[memoryview]


def packets(kind: int, serial: int, number: int, parts: Sequence[Part]) -> Iterator[bytes]:
    """What has to be sent, one after the other, with nothing of the same direction between them."""
    views = [memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"") for part in parts]
    if len(views) > PARTS_MOST:
        raise ValueError(f"a message of {len(views)} parts is more than {PARTS_MOST}")
    intro = [_INTRO.pack(number & 0xFFFFFFFF, len(views)), *(_SIZE.pack(view.nbytes) for view in views)]
    pieces: list[bytes | memoryview] = list(intro)
    room = _PIECE
    for view in views:
        at = 0
        while at < view.nbytes:
            piece = view[at : at + room]
            pieces.append(piece)
            at += piece.nbytes
            room -= piece.nbytes
            if room == 0:
                yield sealed_packet(kind, serial, pieces)
                kind, pieces, room = MORE, [], _PIECE
    if pieces:
        yield sealed_packet(kind, serial, pieces)


class Assembly:
    """Messages from their packets."""

    def __init__(self, kinds: frozenset[int], most_bytes: int = PART_MOST_BYTES) -> None:
        self._kinds = kinds
        self._most_bytes = most_bytes
        self._open: Message | None = None
        self._sizes: list[int] = []
        self._filled: list[bytearray] = []

    def take(self, kind: int, serial: int, packet: memoryview) -> Message | None:
        """A message, when this packet was its last."""
        if kind == MORE:
            if self._open is None or self._open.serial != serial:
                if self._kinds is TO_WORKER:
                    return None  # the rest of one that another took the place of
                raise Unreadable("the middle of a message that never began")
        else:
            packet = self._begin(kind, serial, packet)
        return self._fill(packet)

    def _begin(self, kind: int, serial: int, packet: memoryview) -> memoryview:
        if kind not in self._kinds:
            raise Unreadable(f"a message of kind {kind}")
        if packet.nbytes < _INTRO.size:
            raise Unreadable("a message that is too short")
        number, count = _INTRO.unpack_from(packet)
        at = _INTRO.size + count * _SIZE.size
        if count > PARTS_MOST or packet.nbytes < at:
            raise Unreadable(f"a message of {count} parts")
        self._sizes = list(struct.unpack_from(f"<{count}Q", packet, _INTRO.size))
        if sum(self._sizes) > self._most_bytes:
            raise Unreadable(f"a message of {sum(self._sizes)} bytes, of {self._most_bytes} it may have")
        self._open = Message(kind, serial, number, [])
        self._filled = []
        return packet[at:]

    def _fill(self, packet: memoryview) -> Message | None:
        """Memory grows with what came, not with what was promised."""
        assert self._open is not None
        while True:
            if self._filled and len(self._filled[-1]) < self._sizes[len(self._filled) - 1]:
                missing = self._sizes[len(self._filled) - 1] - len(self._filled[-1])
                self._filled[-1] += packet[:missing]
                packet = packet[missing:]
                if len(self._filled[-1]) < self._sizes[len(self._filled) - 1]:
                    return None
            if len(self._filled) == len(self._sizes):
                break
            self._filled.append(bytearray())
        if packet.nbytes:
            raise Unreadable("a message with more bytes than it said")
        done, self._open = self._open, None
        parts, self._filled = self._filled, []
        return Message(done.kind, done.serial, done.number, [memoryview(part) for part in parts])
