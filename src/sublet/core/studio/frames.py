"""Frames: the bytes-only language between a client, the service, the session host and a worker.

Rules of this file:
- Packing and reading only; no socket, no file, no clock.
- Nothing read here is believed: a length is checked against the limit of its kind before a byte of it is
  kept, and a head is one JSON object of bounded size. Nothing is ever unpickled: parts are bytes, and stay
  so.
- What cannot be read raises `BadInput` or `TooLarge`, and the reader that raised is of no more use: where the
  next frame begins is not known any more.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from sublet.core.errors import BadInput, TooLarge

#: To the session host.
HEAD: Final = 1
PART: Final = 2
#: From it.
OUT: Final = 10
ERR: Final = 11
SHOW: Final = 12
ASK: Final = 13
DONE: Final = 14
FAIL: Final = 15
BEAT: Final = 16
#: What came before the byte it names is not kept any more; the stream goes on there.
GAP: Final = 17

REQUEST_KINDS: Final = frozenset({HEAD, PART})
ANSWER_KINDS: Final = frozenset({PART, OUT, ERR, SHOW, ASK, DONE, FAIL, BEAT, GAP})

#: kind, length
HEADER = struct.Struct("<BxxxxxxxQ")
HEAD_MOST_BYTES = 1 << 16
TEXT_MOST_BYTES = 1 << 22
SHOW_MOST_BYTES = 64 << 20
#: One part, and all parts of one message.
PART_MOST_BYTES = 4 << 30
PARTS_MOST = 4096
_MOST: Mapping[int, int] = {
    HEAD: HEAD_MOST_BYTES,
    PART: PART_MOST_BYTES,
    OUT: TEXT_MOST_BYTES,
    ERR: TEXT_MOST_BYTES,
    SHOW: SHOW_MOST_BYTES,
    ASK: HEAD_MOST_BYTES,
    DONE: HEAD_MOST_BYTES,
    FAIL: HEAD_MOST_BYTES,
    BEAT: 0,
    GAP: HEAD_MOST_BYTES,
}
_CALL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_BROKEN = "this stream of frames cannot be read any further"


# --- packing ---


def header(kind: int, length: int) -> bytes:
    """What goes before a payload that is written apart from it."""
    most = _MOST[kind]
    if length > most:
        raise TooLarge(
            f"a frame of {length} bytes is larger than the {most} its kind may have",
            remedy="send less at once",
        )
    return HEADER.pack(kind, length)


def frame(kind: int, payload: bytes | bytearray | memoryview = b"") -> bytes:
    return b"".join((header(kind, memoryview(payload).nbytes), payload))


def head_frame(kind: int, fields: Mapping[str, Any]) -> bytes:
    """HEAD, ASK, DONE or FAIL."""
    return frame(kind, packed_head(fields))


def message(
    kind: int, fields: Mapping[str, Any], parts: Sequence[bytes | bytearray | memoryview]
) -> list[bytes | memoryview]:
    """A head that says how many parts follow it, and the parts; in pieces, so that no large one is copied."""
    made: list[bytes | memoryview] = [head_frame(kind, {**fields, "parts": len(parts)})]
    for part in parts:
        view = memoryview(part)
        made += (header(PART, view.nbytes), view.cast("B") if view.nbytes else b"")
    return made


def packed_head(fields: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as e:
        raise BadInput(
            f"a head holds something JSON cannot: {e}", remedy="send texts, numbers, lists and dicts"
        ) from e


# --- reading ---


class FrameReader:
    """Reads frames from bytes as they arrive, however they are cut.

    `kinds`: any other is an error. `part_most` and `total_most` bound one part, and everything this reader
    was ever given."""

    def __init__(
        self,
        kinds: Collection[int] = ANSWER_KINDS | REQUEST_KINDS,
        *,
        part_most: int = PART_MOST_BYTES,
        total_most: int | None = None,
    ) -> None:
        self._most = {kind: _MOST[kind] for kind in kinds}
        if PART in self._most:
            self._most[PART] = min(part_most, PART_MOST_BYTES)
        self._left = total_most
        self._unread = bytearray()
        self._kind = 0
        self._length = -1  # of the frame whose header was read; -1: none
        self._broken = False

    @property
    def whole(self) -> bool:
        """Whether the stream may end here."""
        return not self._unread and self._length < 0 and not self._broken

    def feed(self, data: bytes | bytearray | memoryview) -> list[tuple[int, bytes]]:
        """The frames that are complete now, in order."""
        if self._broken:
            raise BadInput(_BROKEN, remedy="connect again")
        made: list[tuple[int, bytes]] = []
        self._unread += data
        at, size = 0, len(self._unread)
        try:
            while True:
                if self._length < 0:
                    if size - at < HEADER.size:
                        break
                    self._begin(*HEADER.unpack_from(self._unread, at))
                    at += HEADER.size
                if size - at < self._length:
                    break
                with memoryview(self._unread) as view:
                    made.append((self._kind, bytes(view[at : at + self._length])))
                at += self._length
                self._length = -1
        except BadInput:
            self._broken = True
            self._unread.clear()
            raise
        del self._unread[:at]
        return made

    def _begin(self, kind: int, length: int) -> None:
        most = self._most.get(kind)
        if most is None:
            raise BadInput(
                f"a frame of kind {kind} does not belong here",
                remedy="use one version of sublet on both sides",
            )
        if length > most:
            raise TooLarge(
                f"a frame of {length} bytes is larger than the {most} its kind may have",
                remedy="send less at once",
            )
        if self._left is not None:
            self._left -= length
            if self._left < 0:
                raise TooLarge("more bytes than one message may have", remedy="send less at once")
        self._kind, self._length = kind, length


def read_head(data: bytes | bytearray | memoryview, most: int = HEAD_MOST_BYTES) -> dict[str, Any]:
    """The JSON object of a HEAD, ASK, DONE or FAIL."""
    if memoryview(data).nbytes > most:
        raise TooLarge(
            f"a head of {memoryview(data).nbytes} bytes is larger than {most}", remedy="send less at once"
        )
    try:
        found = json.loads(bytes(data))
    except (ValueError, RecursionError) as e:
        raise BadInput("a head is not JSON", remedy="use one version of sublet on both sides") from e
    if not isinstance(found, dict):
        raise BadInput("a head is not a JSON object", remedy="use one version of sublet on both sides")
    return found


def text_of(head: Mapping[str, Any], name: str, *, most: int = 256, default: str | None = None) -> str:
    """A text field of a head. Without a default it must be there."""
    value = head.get(name, default)
    if not isinstance(value, str) or len(value) > most:
        raise BadInput(
            f"{name} must be a text of at most {most} characters", remedy="correct the head and send again"
        )
    return value


def count_of(
    head: Mapping[str, Any], name: str, *, most: int = PARTS_MOST, default: int | None = None
) -> int:
    """A whole number from 0 of a head. Without a default it must be there."""
    value = head.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise BadInput(
            f"{name} must be a whole number from 0 to {most}", remedy="correct the head and send again"
        )
    return value


def flag_of(head: Mapping[str, Any], name: str, *, default: bool | None = None) -> bool:
    value = head.get(name, default)
    if not isinstance(value, bool):
        raise BadInput(f"{name} must be true or false", remedy="correct the head and send again")
    return value


def call_id_of(head: Mapping[str, Any], name: str = "call") -> str:
    """Chosen by the client, so that a call it is not sure about is not run twice."""
    value = text_of(head, name, most=64)
    if _CALL_ID.fullmatch(value) is None:
        raise BadInput(
            f"{name} must be 1 to 64 letters, digits, - or _", remedy="correct the head and send again"
        )
    return value


def total(parts: Iterable[bytes | bytearray | memoryview]) -> int:
    return sum(memoryview(part).nbytes for part in parts)
