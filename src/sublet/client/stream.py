"""Reading streams: the frames of a call, the events of the studio.

Rules of this file:
- A reader always knows the byte or event it has reached, and continues after it when it was cut off. What was
  taken counts once, also when an interrupt falls in the middle: every step of a reader is one assignment.
- A beat belongs to the connection, not to the call: it shows only that the other end is alive.
- No input is trusted: sizes are bounded by kind, and what cannot be parsed ends the reading.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sublet.client.http import cuts
from sublet.core.errors import BadInput, SubletError
from sublet.core.studio import frames

_CHUNK = 1 << 18
#: Consumed bytes are dropped when there are this many.
_LET_GO = 1 << 20
#: One line of events.
LINE_MOST_BYTES = 64 << 20
_WITH_PARTS = frozenset({frames.ASK, frames.DONE})


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """One frame, with the parts that belong to it."""

    kind: int
    data: bytes
    parts: tuple[bytearray, ...] = ()

    def head(self) -> dict[str, Any]:
        return frames.read_head(self.data)


class _State(NamedTuple):
    base: int  # the byte of the call's frames at which `unread` begins
    unread: bytearray
    at: int  # how far in it was read
    owner: tuple[int, bytes] | None = None  # the head whose parts are coming
    missing: int = 0
    parts: tuple[bytearray, ...] = ()


class CallReader:
    """The frames of one call, over any number of connections."""

    def __init__(self) -> None:
        self._state = _State(0, bytearray(), 0)
        self.began = False  # a frame of the call itself came: the studio knows it

    @property
    def after(self) -> int:
        """How many bytes of the call's frames were taken."""
        return self._state.base + self._state.at

    def connected(self) -> None:
        """A new connection begins with the frame that was not whole."""
        state = self._state
        self._state = state._replace(base=state.base + state.at, unread=bytearray(), at=0)

    def feed(self, data: bytes) -> None:
        self._state.unread.extend(data)

    def take_back(self, message: StreamMessage) -> None:
        """Uncount the last frame: it came from a server on the way, and is none of the call's bytes."""
        self._state = self._state._replace(base=self._state.base - frames.HEADER.size - len(message.data))

    def next(self) -> StreamMessage | None:
        """Return the next whole frame, or None."""
        while True:
            state = self._state
            unread, at = state.unread, state.at
            left = len(unread) - at
            if left < frames.HEADER.size:
                return None
            kind, length = frames.HEADER.unpack_from(unread, at)
            _check(kind, length)
            if left < frames.HEADER.size + length:
                return None
            begin, end = at + frames.HEADER.size, at + frames.HEADER.size + length
            self.began = self.began or kind != frames.FAIL
            if kind in _UNCOUNTED:
                self._state = self._uncounted(state, kind, bytes(unread[begin:end]), end)
                if kind != frames.BEAT:
                    return StreamMessage(kind, bytes(unread[begin:end]))
                continue
            if kind == frames.PART:
                if state.missing < 1 or state.owner is None:
                    raise _unreadable("a part that belongs to nothing")
                with memoryview(unread) as view:
                    parts = (*state.parts, bytearray(view[begin:end]))
                state = state._replace(missing=state.missing - 1, parts=parts)
            elif state.missing:
                raise _unreadable("a part was expected")
            else:
                data = bytes(unread[begin:end])
                missing = 0
                if kind in _WITH_PARTS:
                    missing = frames.count_of(frames.read_head(data), "parts", default=0)
                state = state._replace(owner=(kind, data), missing=missing, parts=())
            whole = not state.missing
            owner, found = state.owner, state.parts
            if whole:
                state = state._replace(owner=None, parts=())
            self._state = _moved(state, end)
            if whole:
                assert owner is not None
                return StreamMessage(owner[0], owner[1], found)

    @staticmethod
    def _uncounted(state: _State, kind: int, data: bytes, end: int) -> _State:
        if kind == frames.BEAT:
            return _moved(state._replace(base=state.base - frames.HEADER.size), end)
        # What was in between is not kept any more: go on where it is.
        to = frames.count_of(frames.read_head(data), "to", most=1 << 62)
        return _State(to, state.unread[end:], 0)


def _moved(state: _State, end: int) -> _State:
    if end == len(state.unread) or end > _LET_GO:
        return state._replace(base=state.base + end, unread=state.unread[end:], at=0)
    return state._replace(at=end)


#: Frames of the connection, which the call's bytes do not count.
_UNCOUNTED = frozenset({frames.BEAT, frames.GAP})
_KINDS = frames.ANSWER_KINDS


def _check(kind: int, length: int) -> None:
    if kind not in _KINDS:
        raise _unreadable(f"a frame of kind {kind}")
    frames.header(kind, length)  # raises when it is longer than its kind may be


def _unreadable(what: str) -> SubletError:
    return BadInput(
        f"what the studio sends cannot be read: {what}", remedy="use one version of sublet on both sides"
    )


def chunk(response: http.client.HTTPResponse) -> bytes:
    """Read what has come, at least one byte; b"" at the end."""
    with cuts():
        return response.read1(_CHUNK)


# --- lines
# ---------------------------------------------------------------------------------------------------


def lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield lines without their line ends. A last line without one was cut off, and is dropped."""
    rest = bytearray()
    while data := chunk(response):
        *whole, last = (bytes(rest) + data).split(b"\n")
        rest = bytearray(last)
        if len(rest) > LINE_MOST_BYTES:
            raise _unreadable("a line without an end")
        yield from (line.removesuffix(b"\r") for line in whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class StudioEvent:
    """One row of the journal, as the studio's live stream tells it."""

    id: int
    noun: str  # lease, session, device, tenant, queue, …
    kind: str
    tenant: str
    subject: str
    at: float  # seconds since 1970
    body: Mapping[str, Any] = field(default_factory=dict)


def events(response: http.client.HTTPResponse) -> Iterator[StudioEvent]:
    """Of a stream of server-sent events. Comments are beats."""
    fields: dict[str, list[str]] = {}
    for line in lines(response):
        if not line:
            if fields.get("data"):
                yield _event(fields)
            fields = {}
            continue
        name, _, value = line.decode("utf-8", "replace").partition(":")
        if name:
            fields.setdefault(name, []).append(value.removeprefix(" "))


def _event(fields: Mapping[str, list[str]]) -> StudioEvent:
    said = _object("\n".join(fields["data"]).encode())
    number = fields.get("id", ["0"])[-1]
    return StudioEvent(
        id=int(number) if number.isdigit() else int(said.get("id") or 0),
        noun=fields.get("event", ["message"])[-1],
        kind=str(said.get("kind", "")),
        tenant=str(said.get("tenant", "")),
        subject=str(said.get("subject", "")),
        at=float(said.get("at") or 0.0),
        body=said["body"] if isinstance(said.get("body"), dict) else {},
    )


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise _unreadable("a line that is not JSON") from None
    if not isinstance(found, dict):
        raise _unreadable("a line that is not a JSON object")
    return found
