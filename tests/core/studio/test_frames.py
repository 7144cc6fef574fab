"""Frames: every cut of a stream reads the same, and nothing hostile is kept or believed."""

from __future__ import annotations

import random

import pytest

from sublet.core.errors import BadInput, TooLarge
from sublet.core.studio import frames
from sublet.core.studio.frames import ASK, BEAT, DONE, HEAD, HEADER, OUT, PART, FrameReader


def some_stream() -> tuple[bytes, list[tuple[int, bytes]]]:
    made = [
        (HEAD, b'{"op":"call"}'),
        (PART, b""),
        (PART, bytes(range(256)) * 40),
        (OUT, "ü".encode()),
        (BEAT, b""),
    ]
    return b"".join(frames.frame(kind, data) for kind, data in made), made


def test_a_stream_reads_the_same_however_it_is_cut() -> None:
    stream, made = some_stream()
    for seed in range(50):
        draw, reader, found, at = random.Random(seed), FrameReader(), [], 0
        while at < len(stream):
            size = draw.choice((1, 2, 15, 16, 17, 100, 5000))
            found += reader.feed(stream[at : at + size])
            at += size
        assert found == made
        assert reader.whole


def test_a_stream_that_ends_in_the_middle_of_a_frame_is_not_whole() -> None:
    stream, _ = some_stream()
    for end in range(1, 30):
        reader = FrameReader()
        reader.feed(stream[:end])
        assert reader.whole == (end == HEADER.size + len(b'{"op":"call"}'))


def test_a_length_over_its_limit_is_refused_before_its_bytes_come() -> None:
    for kind, most in (
        (HEAD, frames.HEAD_MOST_BYTES),
        (PART, 1000),
        (BEAT, 0),
        (OUT, frames.TEXT_MOST_BYTES),
    ):
        reader = FrameReader(part_most=1000)
        with pytest.raises(TooLarge):
            reader.feed(HEADER.pack(kind, most + 1))
        with pytest.raises(BadInput, match="any further"):
            reader.feed(b"")
        assert not reader.whole
        assert FrameReader(part_most=1000).feed(HEADER.pack(kind, most)) == (
            [(BEAT, b"")] if most == 0 else []
        )


def test_all_of_a_message_has_a_limit_too() -> None:
    reader = FrameReader(total_most=100)
    reader.feed(frames.frame(PART, bytes(60)))
    with pytest.raises(TooLarge):
        reader.feed(HEADER.pack(PART, 41))


def test_kinds_that_do_not_belong_there_are_refused() -> None:
    for kind in (0, 3, 9, DONE, 255):
        with pytest.raises(BadInput, match="kind"):
            FrameReader(frames.REQUEST_KINDS).feed(HEADER.pack(kind, 0))


def test_a_message_is_a_head_with_the_number_of_its_parts_and_the_parts() -> None:
    made = frames.message(ASK, {"number": 1, "ask": "save"}, [b"one", memoryview(bytearray(b"two")), b""])
    (kind, head), *parts = FrameReader().feed(b"".join(made))
    assert kind == ASK
    assert frames.read_head(head) == {"number": 1, "ask": "save", "parts": 3}
    assert parts == [(PART, b"one"), (PART, b"two"), (PART, b"")]


@pytest.mark.parametrize("bad", [b"", b"[]", b"1", b"{", b'{"a":', b"\xff", b"[" * 60_000, b'{"a":' * 10_000])
def test_a_head_that_is_no_json_object_is_bad_input(bad: bytes) -> None:
    with pytest.raises(BadInput):
        frames.read_head(bad)


def test_a_head_too_large_is_not_parsed() -> None:
    with pytest.raises(TooLarge):
        frames.read_head(b"{" + b" " * frames.HEAD_MOST_BYTES + b"}")


@pytest.mark.parametrize("bad", [None, True, -1, 1.0, "1", 10**30, [1]])
def test_a_count_is_a_whole_number_in_its_bounds(bad: object) -> None:
    with pytest.raises(BadInput, match="parts"):
        frames.count_of({"parts": bad}, "parts")
    assert frames.count_of({"parts": 0}, "parts") == 0
    assert frames.count_of({}, "parts", default=3) == 3


@pytest.mark.parametrize("bad", ["", "a b", "é", "x" * 65, "a\n", None, 7])
def test_a_call_id_is_plain(bad: object) -> None:
    with pytest.raises(BadInput, match="call"):
        frames.call_id_of({"call": bad})
    assert frames.call_id_of({"call": "aZ_9-"}) == "aZ_9-"


def test_what_is_too_large_is_not_packed_either() -> None:
    with pytest.raises(TooLarge):
        frames.header(HEAD, frames.HEAD_MOST_BYTES + 1)
    with pytest.raises(BadInput):
        frames.packed_head({"a": float("nan")})
    with pytest.raises(BadInput):
        frames.packed_head({"a": b"bytes"})
