"""Sealed messages as they are put together again, in memory and in a room on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from sublet.core.errors import TooLarge
from sublet.machine.disk_space import DiskReserve
from sublet.machine.spill import SpillRoom
from sublet.processes.channel.channel import read_sealed_packet
from sublet.processes.channel.sealed_channel import ASKED, DONE, FROM_WORKER, Assembly, SealedMessage, packets

PARTS = [b"", b"head", b"x" * 5_000_000, b"", b"y" * 100_000, b"z" * 2_000_000, b""]


def _put_together(assembly: Assembly, kind: int, parts: list[bytes]) -> SealedMessage:
    made = None
    for packet in packets(kind, 7, 3, parts):
        assert made is None
        found = read_sealed_packet(packet)
        assert found is not None
        made = assembly.take(*found)
    assert made is not None
    return made


@pytest.mark.parametrize("roomy", [False, True], ids=["memory", "room"])
def test_a_message_is_put_together_as_it_was(tmp_path: Path, roomy: bool) -> None:
    room = SpillRoom(tmp_path, 64 << 20, DiskReserve("1MB")) if roomy else None
    assembly = Assembly(FROM_WORKER, room=room)
    for _ in range(2):
        found = _put_together(assembly, DONE, PARTS)
        assert (found.kind, found.serial, found.number) == (DONE, 7, 3)
        assert [bytes(part) for part in found.parts] == PARTS
    assert _put_together(assembly, DONE, []).parts == []
    if room is not None:
        assert room.used > 0


def test_a_message_without_room_is_read_to_its_end_and_says_why(tmp_path: Path) -> None:
    assembly = Assembly(FROM_WORKER, room=SpillRoom(tmp_path, 1 << 20, DiskReserve("1MB")))
    found = _put_together(assembly, ASKED, PARTS)
    assert isinstance(found.dropped, TooLarge)
    assert found.parts == []
    after = _put_together(assembly, DONE, [b"small"])
    assert after.dropped is None
    assert [bytes(part) for part in after.parts] == [b"small"]
