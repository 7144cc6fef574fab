"""Sealed messages: lists of bytes between a worker and the process that calls it, on the socket of their
channel.

Rules of this file:
- Packets only: no shared memory and no descriptors. A process can truncate memory that another has mapped,
  and the process that holds many sessions must not die of it.
- A message is its first packet, which gives the size of every part, and as many more as it takes. A first
  packet in the middle of a message means that the earlier one was given up: it is dropped.
- What arrives is checked before it is kept. `UnreadableMessage`: the sender does not speak the protocol.
- With a room, large messages wait on disk. One that the room cannot take is read to its end and dropped, and
  says why: the sender was not at fault.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sublet.core.errors import TooLarge
from sublet.core.studio.frames import PART_MOST_BYTES, PARTS_MOST
from sublet.machine.spill import CollectedParts, SpillRoom
from sublet.ports.worker import Part
from sublet.processes.channel.channel import PACKET_BYTES, SEALED_FIRST, sealed_packet

#: A call, its two answers, a question in its middle, its two answers; and what does not fit one packet.
CALL = SEALED_FIRST
DONE, FAILED, ASKED, ANSWERED, UNANSWERED, MORE = range(SEALED_FIRST + 1, SEALED_FIRST + 7)
#: From the worker, and to it.
FROM_WORKER = frozenset({DONE, FAILED, ASKED})
TO_WORKER = frozenset({CALL, ANSWERED, UNANSWERED})
#: The question's number, or for an answer the launches of the call; then how many parts.
_INTRO = struct.Struct("<II")
_SIZE = struct.Struct("<Q")
_PIECE = 60 << 10
assert _PIECE + _INTRO.size + PARTS_MOST * _SIZE.size + 64 < PACKET_BYTES


class UnreadableMessage(Exception):
    """What arrived is not a sealed message."""


@dataclass(frozen=True, slots=True)
class SealedMessage:
    kind: int
    serial: int
    number: int
    parts: list[memoryview]
    dropped: TooLarge | None = None  # why it has no parts


def packets(kind: int, serial: int, number: int, parts: Sequence[Part]) -> Iterator[bytes]:
    """Yield the packets to send, in order, with nothing else of the same direction between them."""
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
    """Assembles messages from their packets."""

    def __init__(
        self, kinds: frozenset[int], most_bytes: int = PART_MOST_BYTES, room: SpillRoom | None = None
    ) -> None:
        self._kinds = kinds
        self._room = room
        self._most_bytes = most_bytes
        self._open: SealedMessage | None = None
        self._sizes: list[int] = []
        self._parts: _InMemory | CollectedParts = _InMemory()
        self._dropped: TooLarge | None = None
        self._begun = 0  # parts
        self._missing = 0  # of the last of them

    def take(self, kind: int, serial: int, packet: memoryview) -> SealedMessage | None:
        """Take a packet; return the message when it was the last one."""
        if kind == MORE:
            if self._open is None or self._open.serial != serial:
                if self._kinds is TO_WORKER:
                    return None  # the rest of one that another took the place of
                raise UnreadableMessage("the middle of a message that never began")
        else:
            packet = self._begin(kind, serial, packet)
        return self._fill(packet)

    def _begin(self, kind: int, serial: int, packet: memoryview) -> memoryview:
        if kind not in self._kinds:
            raise UnreadableMessage(f"a message of kind {kind}")
        if packet.nbytes < _INTRO.size:
            raise UnreadableMessage("a message that is too short")
        number, count = _INTRO.unpack_from(packet)
        at = _INTRO.size + count * _SIZE.size
        if count > PARTS_MOST or packet.nbytes < at:
            raise UnreadableMessage(f"a message of {count} parts")
        self._sizes = list(struct.unpack_from(f"<{count}Q", packet, _INTRO.size))
        if sum(self._sizes) > self._most_bytes:
            raise UnreadableMessage(
                f"a message of {sum(self._sizes)} bytes, of {self._most_bytes} it may have"
            )
        self._open = SealedMessage(kind, serial, number, [])
        self._parts = _InMemory() if self._room is None else self._room.collect()
        self._dropped, self._begun, self._missing = None, 0, 0
        return packet[at:]

    def _fill(self, packet: memoryview) -> SealedMessage | None:
        """Store parts' bytes. What is taken grows with what arrived, not with what was announced."""
        assert self._open is not None
        while True:
            if self._missing:
                piece, packet = packet[: self._missing], packet[self._missing :]
                self._missing -= piece.nbytes
                self._keep(piece)
                if self._missing:
                    return None
            if self._begun == len(self._sizes):
                break
            self._missing = self._sizes[self._begun]
            self._begun += 1
            self._begin_part(self._missing)
        if packet.nbytes:
            raise UnreadableMessage("a message with more bytes than it said")
        done, self._open = self._open, None
        kept, self._parts = self._parts, _InMemory()
        parts = kept.done() if self._dropped is None else []
        return SealedMessage(done.kind, done.serial, done.number, parts, self._dropped)

    def _begin_part(self, size: int) -> None:
        if self._dropped is None:
            try:
                self._parts.begin(size)
            except TooLarge as e:
                self._drop(e)

    def _keep(self, piece: memoryview) -> None:
        if self._dropped is None:
            try:
                self._parts.write(piece)
            except TooLarge as e:
                self._drop(e)

    def _drop(self, why: TooLarge) -> None:
        self._dropped = why
        self._parts = _InMemory()


class _InMemory:
    """Collects parts as `CollectedParts` does, in memory."""

    def __init__(self) -> None:
        self._parts: list[bytearray] = []

    def begin(self, size: int) -> None:
        self._parts.append(bytearray())

    def write(self, piece: memoryview) -> None:
        self._parts[-1] += piece

    def done(self) -> list[memoryview]:
        return [memoryview(part) for part in self._parts]
