"""Where blocks lie: one region of fixed size for each, on storage that survives the loss of power.

Rules of this port:
- A region belongs to one epoch. Taking a block over makes a new region with the content of the old one, so a
  writer that was paused and wakes up writes to something nobody reads any more.
- `write` returns when the slot is durable; it touches no other slot. Failures are `NotDurable`, and then the
  slot may hold anything.
- `read` verifies: what it calls good has the digest it claims.
- The id of a codec is stored with its bytes, and what one codec wrote is never given to another. `decode`
  gets bytes whose digest was verified and still trusts none of them: it raises `Damaged` for what it cannot
  read, checks sizes before it allocates, and runs no code from them (C7).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sublet.core.checkpoints.region import Slot, SlotHeader


class Region(Protocol):
    """An open region of one epoch. Called by the block's holder only."""

    def slots(self) -> tuple[Slot, Slot]:
        """What is in each, verified."""

    def read(self, slot: int) -> tuple[Slot, memoryview]:
        """One slot and its payload, in memory of the caller's own. The payload is empty unless the slot is
        good."""

    def write(self, slot: int, header: SlotHeader, parts: Sequence[memoryview]) -> str:
        """The whole slot, durably; its digest."""

    def close(self) -> None: ...


class Regions(Protocol):
    """All regions of this home."""

    def create(self, block_id: str, epoch: int, blocks: int) -> Region:
        """Called after a grant: a new, empty one, its space taken."""

    def take_over(self, block_id: str, epoch: int, blocks: int, *, empty_ok: bool) -> Region:
        """Called after an attach: a copy of the newest older region for this epoch. `empty_ok`: none may ever
        have been made."""

    def present(self, block_id: str) -> bool:
        """Called before an attach: whether this home has it at all."""

    def inspect(self, block_id: str, blocks: int) -> tuple[Slot, Slot] | None:
        """Called by listings: what is in the newest region, without touching it."""

    def remove(self, block_id: str) -> int:
        """Called when the ledger has given the block up: how many files went."""

    def known(self) -> list[str]:
        """Every block this home has a file of."""


class Codec(Protocol):
    """How the value of a `Durable` becomes bytes and comes back."""

    @property
    def id(self) -> str:
        """1 to 32 plain characters, another one for every incompatible format."""

    def encode(self, value: Any) -> Sequence[memoryview]:
        """Called by `checkpoint()`: the bytes, in parts. They are copied before it returns, so they may be
        the value's own memory."""

    def decode(self, data: memoryview) -> Any:
        """Called by `restore()`: the value. The memory is writable and belongs to it from now on."""
