"""The bytes of a block: two slots, what a slot's header says, and which of the two is the value.

Rules of this file:
- A region is cut in two halves. A checkpoint is written whole into the slot that is *not* the good one, so
  whatever happens to that write, the good one is untouched.
- One digest covers header and payload. A slot is empty (never written), good, or bad; there is nothing in
  between, and a header is believed only after its numbers were found to fit the slot (C7).
- Which good slot counts is what the ledger recorded. Without that (a ledger put back from a backup) it is the
  highest epoch and sequence.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from sublet.core.errors import BadInput, Damaged, NothingSaved
from sublet.core.leasing.block import BLOCK_BYTES, UNKNOWN_SEQUENCE

MAGIC = b"SUBLETB\n"
FORMAT = 1
HEADER_BYTES = 512
DIGEST_BYTES = 32
SLOTS = 2
MAX_CODEC = 32
#: magic, format, reserved, sequence, epoch, payload length, block id, codec id; then the digest.
_HEADER = struct.Struct(f"<8sIIQQQ32s{MAX_CODEC}s")
DIGEST_AT = _HEADER.size
_MOST = (1 << 63) - 1


def slot_bytes(blocks: int) -> int:
    return blocks // SLOTS * BLOCK_BYTES


def slot_at(blocks: int, slot: int) -> int:
    return slot * slot_bytes(blocks)


def capacity_bytes(blocks: int) -> int:
    """The longest payload that fits."""
    return slot_bytes(blocks) - HEADER_BYTES


def blocks_for(payload_bytes: int) -> int:
    """The smallest region such a payload fits in."""
    return SLOTS * -(-(HEADER_BYTES + payload_bytes) // BLOCK_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotHeader:
    block_id: str
    sequence: int
    epoch: int
    length: int
    codec: str


def check_codec(name: str) -> str:
    if (
        not isinstance(name, str)
        or not name.isascii()
        or not name.isprintable()
        or not 1 <= len(name) <= MAX_CODEC
    ):
        raise BadInput(f"a codec's id is 1 to {MAX_CODEC} plain characters, not {str(name)[:60]!r}")
    return name


def pack_header(header: SlotHeader) -> bytes:
    """The part of the header that the digest covers. The digest follows it, and zeros fill the rest."""
    return _HEADER.pack(
        MAGIC,
        FORMAT,
        0,
        header.sequence,
        header.epoch,
        header.length,
        header.block_id.encode("ascii"),
        header.codec.encode("ascii"),
    )


@dataclass(frozen=True, slots=True)
class Empty:
    """Never written."""


@dataclass(frozen=True, slots=True)
class Bad:
    reason: str


def read_header(data: bytes, block_id: str, blocks: int) -> tuple[SlotHeader, bytes] | Empty | Bad:
    """The header and the digest it claims. Nothing in it may be used before that digest has been checked."""
    if len(data) < HEADER_BYTES:
        return Bad("the region is shorter than it was made")
    if not any(data[:HEADER_BYTES]):
        return Empty()
    magic, form, reserved, sequence, epoch, length, owner, codec = _HEADER.unpack_from(data)
    if magic != MAGIC:
        return Bad("it does not begin like a slot")
    if form != FORMAT:
        return Bad(f"it has format {form}, this version knows {FORMAT}")
    if any(data[DIGEST_AT + DIGEST_BYTES : HEADER_BYTES]) or reserved:
        return Bad("its header has something where nothing belongs")
    if not (1 <= sequence <= _MOST and 1 <= epoch <= _MOST):
        return Bad("its sequence or epoch is none")
    if length > capacity_bytes(blocks):
        return Bad(f"it claims {length} bytes, a slot holds {capacity_bytes(blocks)}")
    try:
        name, by = codec.rstrip(b"\0").decode("ascii"), owner.rstrip(b"\0").decode("ascii")
    except UnicodeDecodeError:
        return Bad("its names are not text")
    if by != block_id:
        return Bad("it belongs to another block")
    header = SlotHeader(block_id=by, sequence=sequence, epoch=epoch, length=length, codec=name)
    return header, bytes(data[DIGEST_AT : DIGEST_AT + DIGEST_BYTES])


@dataclass(frozen=True, slots=True)
class Good:
    """Its digest is right."""

    header: SlotHeader
    digest: str


Slot = Good | Empty | Bad


@dataclass(frozen=True, slots=True)
class Picked:
    slot: int
    good: Good
    note: str  # '' or what is wrong although there is a value


def pick(slots: tuple[Slot, Slot], sequence: int, digest: str) -> Picked:
    """The slot that is the block's value. `sequence` and `digest` are what the ledger recorded.

    A slot that was written but never recorded is a checkpoint that did not happen, and is passed over.
    """
    if sequence == 0:
        raise NothingSaved("nothing was checkpointed to this block yet, so there is nothing to restore")
    good = [(n, s) for n, s in enumerate(slots) if isinstance(s, Good)]
    if not good:
        if sequence == UNKNOWN_SEQUENCE and not any(isinstance(s, Bad) for s in slots):
            raise NothingSaved("nothing was checkpointed to this block yet, so there is nothing to restore")
        raise Damaged(
            f"both slots of the block are bad; first: {_why(slots[0])}; second: {_why(slots[1])}",
            remedy="restore an older copy of SUBLET_HOME/blocks, or attach the block and checkpoint a new "
            "value",
        )
    for number, slot in good:
        if sequence != UNKNOWN_SEQUENCE and (slot.header.sequence, slot.digest) == (sequence, digest):
            return Picked(number, slot, "")
    number, slot = max(good, key=lambda item: (item[1].header.epoch, item[1].header.sequence))
    if sequence == UNKNOWN_SEQUENCE:
        return Picked(number, slot, "")
    return Picked(
        number,
        slot,
        f"checkpoint {sequence} was recorded and cannot be read ({_why(slots[1 - number])}); "
        f"this is checkpoint {slot.header.sequence}",
    )


def _why(slot: Slot) -> str:
    if isinstance(slot, Bad):
        return slot.reason
    return "it is empty" if isinstance(slot, Empty) else f"it holds checkpoint {slot.header.sequence}"
