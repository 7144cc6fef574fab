"""Frames however they are cut, beats and gaps between them; lines and events."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.client.stream import CallReader, StreamMessage, events, lines
from sublet.core.errors import BadInput
from sublet.core.studio import frames

BEAT = frames.frame(frames.BEAT)


def a_call() -> tuple[bytes, list[tuple[int, bytes, tuple[bytes, ...]]]]:
    """Every kind a call may say, and what should be read of it."""
    pieces = [
        frames.frame(frames.OUT, b"out"),
        frames.frame(frames.ERR, "ü".encode()),
        frames.frame(frames.SHOW, b"{}"),
        b"".join(frames.message(frames.ASK, {"number": 1}, [b"", b"question"])),
        frames.frame(frames.OUT, b""),
        b"".join(frames.message(frames.DONE, {"ok": True}, [b"a" * 1000, b"", b"b"])),
    ]
    wanted = [
        (frames.OUT, b"out", ()),
        (frames.ERR, "ü".encode(), ()),
        (frames.SHOW, b"{}", ()),
        (frames.ASK, b'{"number":1,"parts":2}', (b"", b"question")),
        (frames.OUT, b"", ()),
        (frames.DONE, b'{"ok":true,"parts":3}', (b"a" * 1000, b"", b"b")),
    ]
    return b"".join(pieces), wanted


def taken(message: StreamMessage) -> tuple[int, bytes, tuple[bytes, ...]]:
    return message.kind, message.data, tuple(bytes(part) for part in message.parts)


def all_of(reader: CallReader) -> list[tuple[int, bytes, tuple[bytes, ...]]]:
    found = []
    while (message := reader.next()) is not None:
        found.append(taken(message))
    return found


def boundaries(stream: bytes) -> list[int]:
    """Where a frame begins: a beat may come there."""
    found, at = [0], 0
    while at < len(stream):
        at += frames.HEADER.size + frames.HEADER.unpack_from(stream, at)[1]
        found.append(at)
    return found


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), max_size=40))
def test_frames_come_whole_however_they_are_cut(sizes: list[int]) -> None:
    stream, wanted = a_call()
    reader, found, at = CallReader(), [], 0
    for size in [*sizes, len(stream)]:
        reader.feed(stream[at : at + size])
        at = min(len(stream), at + size)
        found += all_of(reader)
    assert found == wanted
    assert reader.after == len(stream)


@settings(deadline=None)
@given(st.data())
def test_cut_off_anywhere_and_taken_up_nothing_is_lost_or_said_twice(data: Any) -> None:
    """As the session host does it: from the byte asked for, with a beat wherever a frame begins."""
    stream, wanted = a_call()
    starts = set(boundaries(stream))
    reader, found = CallReader(), []
    for _ in range(60):
        reader.connected()
        at = reader.after
        assert at in starts, "a connection begins with a whole frame"
        sent = bytearray()
        for place in range(at, len(stream)):
            if place in starts and data.draw(st.booleans()):
                sent += BEAT
            sent += stream[place : place + 1]
        cut = data.draw(st.integers(0, len(sent)))
        reader.feed(bytes(sent[:cut]))
        found += all_of(reader)
        if reader.after == len(stream):
            break
    else:
        reader.connected()
        reader.feed(stream[reader.after :])
        found += all_of(reader)
    assert found == wanted


def test_a_beat_means_that_the_call_is_known_and_a_failure_does_not() -> None:
    reader = CallReader()
    reader.feed(frames.head_frame(frames.FAIL, {"code": "disconnected"}))
    failed = reader.next()
    assert failed is not None
    assert not reader.began
    reader.take_back(failed)
    assert reader.after == 0
    reader.feed(BEAT)
    assert reader.next() is None
    assert reader.began
    assert reader.after == 0


def test_a_gap_goes_on_where_something_is_kept() -> None:
    reader = CallReader()
    reader.feed(frames.frame(frames.OUT, b"x"))
    assert len(all_of(reader)) == 1
    reader.connected()
    reader.feed(frames.HEADER.pack(frames.GAP, 12) + b'{"to": 1000}' + frames.frame(frames.OUT, b"y"))
    assert [kind for kind, _, _ in all_of(reader)] == [frames.GAP, frames.OUT]
    assert reader.after == 1000 + frames.HEADER.size + 1


@pytest.mark.parametrize(
    "stream",
    [
        frames.HEADER.pack(99, 0),
        frames.HEADER.pack(frames.HEAD, 2) + b"{}",
        frames.HEADER.pack(frames.DONE, 1 << 40),
        frames.HEADER.pack(frames.OUT, 1 << 30),
        frames.frame(frames.PART, b"of nothing"),
        frames.head_frame(frames.DONE, {"ok": True, "parts": 1}) + frames.frame(frames.OUT, b"x"),
        frames.frame(frames.DONE, b"no json"),
        frames.head_frame(frames.DONE, {"ok": True, "parts": -1}),
        frames.head_frame(frames.DONE, {"ok": True, "parts": 1 << 20}),
    ],
)
def test_what_cannot_be_read_is_an_error_and_no_promise_is_believed(stream: bytes) -> None:
    reader = CallReader()
    reader.feed(stream)
    with pytest.raises(BadInput):
        all_of(reader)


class Said:
    """A response that says this, some bytes at a time."""

    def __init__(self, data: bytes, size: int) -> None:
        self._file, self._size = io.BytesIO(data), size

    def read1(self, most: int) -> bytes:
        return self._file.read(min(most, self._size))


@settings(deadline=None)
@given(st.integers(1, 50))
def test_lines(size: int) -> None:
    data = b'{"kind":"text","text":"a"}\r\n\n{"kind":"done"}\n{"cut'
    assert list(lines(Said(data, size))) == [b'{"kind":"text","text":"a"}', b"", b'{"kind":"done"}']  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.integers(1, 50))
def test_events(size: int) -> None:
    body = {"id": 7, "at": 1.5, "kind": "lease.granted", "tenant": "ann", "subject": "L1", "body": {"x": 1}}
    data = (
        f": beat\n\nid: 7\nevent: lease\ndata: {json.dumps(body)}\n\nid: 8\nevent: lease\ndata: {{".encode()
    )
    (event,) = events(Said(data, size))  # type: ignore[arg-type]
    assert (event.id, event.noun, event.kind, event.tenant, event.subject) == (
        7,
        "lease",
        "lease.granted",
        "ann",
        "L1",
    )
    assert event.body == {"x": 1}
