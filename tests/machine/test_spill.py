"""Bytes that wait: in memory only a little of a message, and never more on disk than the room has."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from sublet.core.errors import TooLarge
from sublet.machine.disk_space import DiskReserve
from sublet.machine.spill import MEMORY_BYTES, STEP_BYTES, SpillRoom

NONE = DiskReserve("1MB")


def _collected(room: SpillRoom, parts: list[bytes]) -> list[memoryview]:
    made = room.collect()
    for part in parts:
        made.begin(len(part))
        for at in range(0, len(part), 70_000):
            made.write(part[at : at + 70_000])
    return made.done()


@pytest.mark.parametrize("size", [0, 1, 1000, MEMORY_BYTES, 3 * MEMORY_BYTES])
def test_parts_come_back_as_they_were(tmp_path: Path, size: int) -> None:
    parts = [b"head", bytes(range(256)) * (size // 256) + b"x" * (size % 256), b"", b"tail"]
    room = SpillRoom(tmp_path, 64 << 20, NONE)
    assert [bytes(part) for part in _collected(room, parts)] == parts
    assert list(tmp_path.iterdir()) == []


def test_a_thousand_parts_below_the_limit_of_one_are_on_disk_too(tmp_path: Path) -> None:
    room = SpillRoom(tmp_path, 256 << 20, NONE)
    found = _collected(room, [b"x" * 100_000] * 1000)
    assert room.used >= 1000 * 100_000 - MEMORY_BYTES
    assert all(bytes(part) == b"x" * 100_000 for part in found)


def test_a_room_that_is_full_refuses_and_has_room_again_when_nobody_reads(tmp_path: Path) -> None:
    room = SpillRoom(tmp_path, 2 * STEP_BYTES, NONE)
    kept = room.put(b"x" * (STEP_BYTES + 1))
    with pytest.raises(TooLarge, match="waiting on its host"):
        room.put(b"x" * STEP_BYTES)
    assert room.used == 2 * STEP_BYTES
    part = kept[5:10]
    del kept
    gc.collect()
    assert room.used == 2 * STEP_BYTES  # somebody reads a part of it
    assert bytes(part) == b"xxxxx"
    del part
    gc.collect()
    assert room.used == 0
    room.put(b"x" * STEP_BYTES)


def test_what_was_given_up_half_way_takes_no_room(tmp_path: Path) -> None:
    room = SpillRoom(tmp_path, 64 << 20, NONE)
    half = room.collect()
    half.begin(4 * MEMORY_BYTES)
    half.write(b"x" * MEMORY_BYTES)
    assert room.used
    del half
    gc.collect()
    assert room.used == 0


def test_the_reserve_of_the_disk_is_left_alone(tmp_path: Path) -> None:
    room = SpillRoom(tmp_path, 64 << 20, DiskReserve("900TB"))
    with pytest.raises(TooLarge, match="are kept for the ledger"):
        room.put(b"x" * 2 * MEMORY_BYTES)
    assert bytes(room.put(b"small")) == b"small"
