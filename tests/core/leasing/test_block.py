"""Block leases by their rules alone, and the bytes of a slot before any disk is involved."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sublet.core.checkpoints.region import (
    DIGEST_AT,
    HEADER_BYTES,
    Bad,
    Empty,
    Good,
    SlotHeader,
    blocks_for,
    capacity_bytes,
    check_codec,
    pack_header,
    pick,
    read_header,
    slot_at,
    slot_bytes,
)
from sublet.core.errors import BadInput, Damaged, InvariantBroken, NothingSaved
from sublet.core.leasing.block import (
    DEFAULT_KEEP_US,
    MAX_BLOCKS,
    TRANSITIONS,
    UNKNOWN_SEQUENCE,
    BlockEvent,
    BlockLease,
    BlockRequest,
    BlockState,
    Over,
    StillHeld,
    after,
    check_locator,
    fence,
    may_take,
    over_limit,
    renewed_until,
    retention_over,
)
from sublet.core.leasing.lease import EndReason, Holder

ID = "B" + "0123456789" * 2
ME, OTHER = Holder(host="a", pid=7, started=70), Holder(host="a", pid=8, started=80)
HELD = BlockLease(
    id=ID, tenant="ada", blocks=8, ttl_us=100, keep_us=1000, holder=OTHER, state=BlockState.HELD, epoch=5,
    created_at=0, granted_at=0, expires_at=100,
)  # fmt: skip
KEPT = replace(HELD, state=BlockState.KEPT, ended_at=50, reason=EndReason.RELEASED)
GONE = replace(KEPT, state=BlockState.GONE)


def test_only_the_transitions_of_the_table() -> None:
    for state in BlockState:
        for event in BlockEvent:
            if (state, event) in TRANSITIONS:
                assert after(state, event) is TRANSITIONS[state, event]
            else:
                with pytest.raises(InvariantBroken):
                    after(state, event)
    assert not any(state is BlockState.GONE for state, _ in TRANSITIONS), "what is gone stays gone"


def test_who_may_write_when() -> None:
    assert fence(HELD, 5, 99) == ""
    assert "expired" in fence(HELD, 5, 100)
    for epoch in (4, 6, 0, -5):
        assert "epoch" in fence(HELD, epoch, 50)
    assert "released" in fence(KEPT, 5, 10)
    assert fence(GONE, 5, 10)
    assert fence(replace(HELD, epoch=0), 0, 10), "an epoch of none is nobody's"


def test_an_expiry_moves_only_forwards() -> None:
    assert renewed_until(HELD, 50) == 150
    assert renewed_until(replace(HELD, expires_at=500), 50) == 500


def test_who_may_take_a_block() -> None:
    assert may_take(KEPT, 60, ME, 0) == Over(None, "its lease ended before (released)")
    expired = may_take(HELD, 100, ME, 0)
    assert isinstance(expired, Over)
    assert expired.reason is EndReason.EXPIRED
    dead = may_take(HELD, 50, ME, 5)
    assert isinstance(dead, Over)
    assert dead.reason is EndReason.HOLDER_LOST
    assert "process 8 on a is gone" in dead.detail
    again = may_take(HELD, 50, OTHER, 0)
    assert isinstance(again, Over)
    assert again.reason is EndReason.RELEASED
    for who, dead_epoch in (
        (ME, 0),
        (ME, 4),
        (ME, 6),
        (replace(OTHER, started=81), 0),
        (replace(OTHER, host="b"), 0),
    ):
        refused = may_take(HELD, 99, who, dead_epoch)
        assert isinstance(refused, StillHeld)
        assert "process 8 on a" in refused.reason
    by_name = replace(HELD, holder=Holder(host="a"))
    assert isinstance(may_take(by_name, 50, Holder(host="a"), 0), StillHeld), "a name is not an identity"
    with pytest.raises(InvariantBroken):
        may_take(GONE, 60, ME, 0)


def test_retention() -> None:
    assert not retention_over(HELD, 99)
    assert not retention_over(HELD, 1099), "an expiry nobody wrote down counts from when it happened"
    assert retention_over(HELD, 1100)
    assert not retention_over(KEPT, 1049)
    assert retention_over(KEPT, 1050)
    assert not retention_over(GONE, 10**9)
    assert HELD.state_at(99) is BlockState.HELD
    assert HELD.state_at(100) is BlockState.KEPT
    assert GONE.state_at(100) is BlockState.GONE


def test_requests_are_checked() -> None:
    good = BlockRequest(tenant="t", blocks=2, ttl_us=10**6)
    assert good.keep_us == DEFAULT_KEEP_US
    assert DEFAULT_KEEP_US == 7 * 24 * 3600 * 10**6
    for change in (
        {"blocks": 1}, {"blocks": 0}, {"blocks": -2}, {"blocks": MAX_BLOCKS + 1}, {"blocks": 10**5000},
        {"blocks": True}, {"blocks": 2.0}, {"blocks": "512"}, {"ttl_us": 0}, {"ttl_us": 10**15}, {"keep_us": -1},
        {"keep_us": 10**15},
    ):  # fmt: skip
        with pytest.raises(BadInput):
            replace(good, **change)
    replace(good, blocks=MAX_BLOCKS, keep_us=0)
    assert over_limit(10, 5, 14)
    assert not over_limit(10, 5, 15)
    assert not over_limit(10, 5, 0)


def traversals(count: int = 500) -> list[str]:
    """What an attacker puts where a locator belongs."""
    seeds = [
        "", ".", "..", "/", "../ledger.db", "../../etc/passwd", "/etc/passwd", f"{ID}/../x", f"../{ID}", f"{ID}/", f"{ID}\0",
        f"{ID}\n", f"\n{ID}", f"{ID}.1", f"./{ID}", ID.lower(), ID[:-1], ID + "0", "B" + "g" * 20, "B" + "٣" * 20, f"{ID}%00",
        "%2e%2e%2f", "..\\..\\x", "B" + "A" * 20, "~/.ssh/id", "file:///etc/passwd", "\u2025/", "B" + "0" * 10_000, "$(id)",
        "draft-" + ID + ".1-" + "0" * 16, " " + ID, ID + " ",
    ]  # fmt: skip
    rng = random.Random(9)
    while len(seeds) < count:
        text = list(rng.choice(seeds[1:32]))
        for _ in range(rng.randint(1, 4)):
            text.insert(
                rng.randint(0, len(text)),
                rng.choice(["../", "/", "..", "\0", "%2f", "\\", "\n", ".", "é", "\u202e"]),
            )
        seeds.append("".join(text))
    return seeds


def test_nothing_but_a_locator_is_a_locator() -> None:
    """Threat 9."""
    assert check_locator(ID) == ID
    for text in traversals():
        with pytest.raises(BadInput):
            check_locator(text)
    for other in (None, 5, ID.encode(), [ID]):
        with pytest.raises(BadInput):
            check_locator(other)  # type: ignore[arg-type]


# --- slots ---------------------------------------------------------------------------------------------------

HEADER = SlotHeader(block_id=ID, sequence=3, epoch=5, length=100, codec="tree-1")


def stored(header: SlotHeader, digest: bytes = b"d" * 32) -> bytes:
    return (pack_header(header) + digest).ljust(HEADER_BYTES, b"\0")


def test_layout() -> None:
    assert (slot_bytes(512), slot_at(512, 0), slot_at(512, 1)) == (1 << 20, 0, 1 << 20)
    assert slot_at(7, 1) + slot_bytes(7) <= 7 * 4096, "an odd block stays unused"
    for size in (0, 1, 3584, 3585, 100_000):
        blocks = blocks_for(size)
        assert capacity_bytes(blocks) >= size
        assert blocks == 2 or capacity_bytes(blocks - 2) < size


def test_a_header_comes_back() -> None:
    assert read_header(stored(HEADER), ID, 8) == (HEADER, b"d" * 32)
    assert read_header(bytes(HEADER_BYTES), ID, 8) == Empty()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "shorter"),
        (stored(HEADER)[:-1], "shorter"),
        (b"X" + stored(HEADER)[1:], "begin"),
        (stored(HEADER)[:8] + b"\2" + stored(HEADER)[9:], "format 2"),
        (stored(HEADER)[:12] + b"\1" + stored(HEADER)[13:], "nothing belongs"),
        (stored(HEADER)[:-1] + b"\1", "nothing belongs"),
        (stored(replace(HEADER, sequence=0)), "sequence"),
        (stored(replace(HEADER, epoch=0)), "epoch"),
        (stored(replace(HEADER, sequence=1 << 63)), "sequence"),
        (stored(replace(HEADER, length=capacity_bytes(8) + 1)), "claims"),
        (stored(replace(HEADER, length=(1 << 64) - 1)), "claims"),
        (stored(replace(HEADER, block_id="B" + "f" * 20)), "another block"),
        (stored(HEADER)[:DIGEST_AT - 3] + b"\xff" + stored(HEADER)[DIGEST_AT - 2 :], "not text"),
    ],
)  # fmt: skip
def test_a_header_that_is_none(data: bytes, why: str) -> None:
    """C7: refused by its numbers, before anything of that size is asked for."""
    found = read_header(data, ID, 8)
    assert isinstance(found, Bad)
    assert why in found.reason


def test_codec_names() -> None:
    assert check_codec("x" * 32)
    for name in ("", "x" * 33, "é", "a\n", "a\0", None):
        with pytest.raises(BadInput):
            check_codec(name)  # type: ignore[arg-type]


def good(sequence: int, epoch: int = 5, digest: str = "") -> Good:
    return Good(replace(HEADER, sequence=sequence, epoch=epoch), digest or f"digest-{sequence}")


BAD, EMPTY = Bad("its digest does not match its bytes"), Empty()


def test_the_recorded_slot_is_the_value() -> None:
    """C6: what was recorded counts; what was not recorded did not happen, newer or torn."""
    for other in (EMPTY, BAD, good(2), good(4)):
        for slots in ((good(3), other), (other, good(3))):
            picked = pick(slots, 3, "digest-3")
            assert (picked.slot, picked.good.header.sequence, picked.note) == (slots.index(good(3)), 3, "")


def test_empty_is_not_damaged() -> None:
    for slots in ((EMPTY, EMPTY), (EMPTY, BAD), (BAD, EMPTY), (good(1), EMPTY), (BAD, BAD)):
        with pytest.raises(NothingSaved):
            pick(slots, 0, "")
    with pytest.raises(NothingSaved):
        pick((EMPTY, EMPTY), UNKNOWN_SEQUENCE, "")


def test_both_bad_names_both() -> None:
    with pytest.raises(Damaged, match="first: its digest does not match its bytes; second: torn"):
        pick((BAD, Bad("torn")), 3, "digest-3")
    with pytest.raises(Damaged, match="it is empty"):
        pick((EMPTY, EMPTY), 3, "digest-3")
    with pytest.raises(Damaged):
        pick((BAD, EMPTY), UNKNOWN_SEQUENCE, "")


def test_one_bad_gives_the_other_with_a_note() -> None:
    picked = pick((BAD, good(2)), 3, "digest-3")
    assert (picked.slot, picked.good.header.sequence) == (1, 2)
    assert "checkpoint 3 was recorded and cannot be read (its digest does not match its bytes)" in picked.note
    assert "this is checkpoint 2" in picked.note
    # The same number under another digest is not what was recorded.
    assert pick((good(3, digest="x"), good(2)), 3, "digest-3").note


def test_without_the_ledger_the_highest_epoch_and_sequence() -> None:
    assert pick((good(9, epoch=5), good(2, epoch=6)), UNKNOWN_SEQUENCE, "").slot == 1
    assert pick((good(9), good(8)), UNKNOWN_SEQUENCE, "digest-8").slot == 0
    assert pick((good(8), good(9)), UNKNOWN_SEQUENCE, "").note == ""
