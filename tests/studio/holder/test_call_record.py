"""What a call said, for who comes back: nothing twice, nothing lost, nothing kept for ever."""

from __future__ import annotations

import threading
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.studio import frames
from sublet.studio.holder import call_record as recording
from sublet.studio.holder.call_record import CallRecord


def _all(record: CallRecord, after: int = 0) -> bytes:
    found, at = b"", after
    while not record.ended_at(at):
        pieces, reached = record.read(at, 0.01)
        if not pieces:
            break
        found += b"".join(bytes(p) for p in pieces)
        record.was_read(reached)
        at = reached
    return found


def _said(record: CallRecord, lines: list[bytes]) -> bytes:
    for line in lines:
        record.text(frames.OUT, line)
    record.say(frames.DONE, b'{"ok":true,"parts":1}', [b"answer"], last=True)
    return _all(record)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=20), st.data())
def test_a_reader_that_was_cut_anywhere_gets_the_rest_and_nothing_twice(
    lines: list[bytes], data: st.DataObject
) -> None:
    record = CallRecord("c")
    whole = _said(record, lines)
    at = data.draw(st.integers(0, len(whole)))
    assert whole[:at] + _all(record, at) == whole
    heard = frames.FrameReader(frames.ANSWER_KINDS).feed(whole)
    assert [d for k, d in heard if k == frames.OUT] == lines
    assert heard[-1] == (frames.PART, b"answer")


def test_who_attaches_while_it_runs_hears_the_rest_as_it_comes() -> None:
    record = CallRecord("c")
    record.text(frames.OUT, b"before")
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append(b"".join(_follow(record))))
    reader.start()
    time.sleep(0.05)
    record.text(frames.OUT, b"after")
    record.say(frames.DONE, b"{}", last=True)
    reader.join(60)
    assert [d for _, d in frames.FrameReader().feed(heard[0])] == [b"before", b"after", b"{}"]


def _follow(record: CallRecord) -> list[bytes]:
    found, at = [], 0
    while not record.ended_at(at):
        pieces, at = record.read(at, 1.0)
        found += [bytes(p) for p in pieces]
        record.was_read(at)
    return found


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "KEPT_BYTES", 1000)
    monkeypatch.setattr(recording, "BEHIND_BYTES", 300)
    monkeypatch.setattr(recording, "BLOCK_BYTES", 100)
    monkeypatch.setattr(recording, "BLOCK_OVERHEAD", 0)


def test_what_nobody_read_is_never_dropped(small: None) -> None:
    record = CallRecord("c")
    writer = threading.Thread(
        target=lambda: [record.text(frames.OUT, b"x" * 100) for _ in range(30)], daemon=True
    )
    writer.start()
    writer.join(0.3)
    assert writer.is_alive()  # it waits for a reader
    assert record.gap(0) == 0
    pieces, reached = record.read(0, 1.0)
    record.was_read(reached)
    heard = frames.FrameReader().feed(b"".join(bytes(p) for p in pieces))
    assert len(heard) == 8  # of 116 bytes each
    rest = []
    while writer.is_alive() or record.read(reached, 0.01)[0] != []:
        pieces, reached = record.read(reached, 0.5)
        rest += frames.FrameReader().feed(b"".join(bytes(p) for p in pieces))
        record.was_read(reached)
    assert len(heard) + len(rest) == 30


def test_frames_without_a_byte_in_them_count_too(small: None) -> None:
    record = CallRecord("c")
    writer = threading.Thread(
        target=lambda: [record.text(frames.SHOW, b"") for _ in range(10_000)], daemon=True
    )
    writer.start()
    writer.join(1.0)
    assert writer.is_alive()  # it waits for a reader
    record.give_up()
    writer.join(60)


def test_a_full_record_takes_about_as_much_memory_as_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "KEPT_BYTES", 1 << 20)
    record = CallRecord("c")
    tracemalloc.start()
    try:
        for _ in range((1 << 20) // frames.HEADER.size - 4096):
            record.text(frames.SHOW, b"")
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 2 * record._end


def test_a_frame_larger_than_what_is_kept_comes_when_all_before_it_was_read(small: None) -> None:
    record = CallRecord("c")
    record.text(frames.OUT, b"before")
    writer = threading.Thread(target=lambda: record.text(frames.SHOW, b"x" * 5000), daemon=True)
    writer.start()
    writer.join(0.3)
    assert writer.is_alive()
    heard = _all(record)  # some of it, or the whole of it already
    writer.join(60)
    assert not writer.is_alive()
    record.say(frames.DONE, b"{}", last=True)
    heard += _all(record, len(heard))
    assert [d for _, d in frames.FrameReader().feed(heard)] == [b"before", b"x" * 5000, b"{}"]


def test_questions_that_were_read_leave_like_text(small: None) -> None:
    record = CallRecord("c")
    for _ in range(50):
        record.say(frames.ASK, b"{}", [b"x" * 200])
        _all(record)
    assert sum(block.end - block.begin for block in record._kept) < 2000


def test_a_reader_too_far_behind_is_told_where_to_go_on(small: None) -> None:
    record = CallRecord("c")
    at = 0
    for _ in range(40):
        record.text(frames.OUT, b"x" * 100)
        _, at = record.read(at, 0.1)
        record.was_read(at)
    begin = record.gap(0)
    assert 0 < begin <= at - 300  # what was sent last may not have arrived
    assert record.gap(begin) == 0
    record.say(frames.DONE, b"{}", last=True)
    assert frames.FrameReader().feed(_all(record, begin))[-1][0] == frames.DONE


def test_a_session_that_is_over_waits_for_nobody(small: None) -> None:
    record = CallRecord("c")
    writer = threading.Thread(
        target=lambda: [record.text(frames.OUT, b"x" * 100) for _ in range(30)], daemon=True
    )
    writer.start()
    writer.join(0.1)
    record.give_up()
    writer.join(60)
    assert not writer.is_alive()


def test_an_answer_is_kept_until_it_was_read_and_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    record = CallRecord("c")
    record.say(frames.DONE, b"{}", last=True)
    later = time.monotonic() + recording.ANSWER_SECONDS + 1
    assert not record.forget_old(later)
    _all(record)
    assert not record.forget_old(time.monotonic())
    assert record.forget_old(later)


def test_who_talks_too_much_is_slowed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "BYTES_PER_SECOND", 1000)
    monkeypatch.setattr(recording, "BURST_BYTES", 116)
    record = CallRecord("c")
    record._credit = 116.0
    slept: list[float] = []
    monkeypatch.setattr(recording.time, "sleep", slept.append)
    record.text(frames.OUT, b"x" * 100)
    assert slept == []
    record.text(frames.OUT, b"x" * 500)
    assert slept
    assert 0.4 < slept[0] <= 0.516
