"""Block leases: the right to write to a fixed region of durable storage, and what becomes of its content
afterwards.

Rules of this file:
- A block outlives its holders. It is *held* under a lease, then *kept* for a while so that it can be attached
  again, then *gone*. Every grant and every attach has a higher epoch, and only the newest epoch may write.
- Time decides liveness, the epoch decides safety: `fence` asks both, before a slot is written and again when
  it is recorded.
- Somebody else's block is attached only when its lease is over or its holder is gone; who says "gone" names
  the epoch it saw, so that an old look never takes a block from a new holder.
- A block has no tie to a GPU lease: its ttl and its retention are its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from sublet.core.errors import BadInput, InvariantBroken, NotFound
from sublet.core.leasing.lease import MAX_TTL_US, MIN_TTL_US, EndReason, Holder
from sublet.core.values import DAY_US, MAX_DURATION_US, format_duration

BLOCK_BYTES = 4096
MIN_BLOCKS = 2  # one for each of the two slots
MAX_BLOCKS = 1 << 22  # 16 GiB: a larger state belongs into the checkpoint store
DEFAULT_KEEP_US = 7 * DAY_US
#: The ledger was put back from a backup: what is on the disk is newer than what it remembers.
UNKNOWN_SEQUENCE = -1

_LOCATOR = re.compile(r"B[0-9a-f]{20}", re.ASCII)


def check_locator(text: str) -> str:
    """A locator becomes part of a file name, so it can be nothing but one of ours."""
    if not isinstance(text, str) or not _LOCATOR.fullmatch(text):
        shown = repr(text)
        raise BadInput(
            f"{shown if len(shown) <= 60 else shown[:57] + '...'} is not a locator of a block",
            remedy="use block.locator as it was given: B and twenty digits; 'sublet block ls' lists them",
        )
    return text


def unknown_block(locator: str) -> NotFound:
    """The same words for a block that is not there, that was removed, and that is somebody else's (T1)."""
    return NotFound(f"there is no block {locator[:40]}", remedy="'sublet block ls' lists them")


class BlockState(Enum):
    HELD = "held"
    KEPT = "kept"
    GONE = "gone"


class BlockEvent(Enum):
    RENEW = "renew"
    END = "end"
    ATTACH = "attach"
    REMOVE = "remove"


TRANSITIONS: dict[tuple[BlockState, BlockEvent], BlockState] = {
    (BlockState.HELD, BlockEvent.RENEW): BlockState.HELD,
    (BlockState.HELD, BlockEvent.END): BlockState.KEPT,
    (BlockState.KEPT, BlockEvent.ATTACH): BlockState.HELD,
    (BlockState.KEPT, BlockEvent.REMOVE): BlockState.GONE,
}


def after(state: BlockState, event: BlockEvent) -> BlockState:
    try:
        return TRANSITIONS[(state, event)]
    except KeyError:
        raise InvariantBroken(f"a block that is {state.value} cannot {event.value}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRequest:
    """What somebody asks for. Checked here, so every surface refuses the same things with the same words."""

    tenant: str
    blocks: int
    ttl_us: int
    keep_us: int = DEFAULT_KEEP_US

    def __post_init__(self) -> None:
        if isinstance(self.blocks, bool) or not isinstance(self.blocks, int):
            raise BadInput(f"blocks {self.blocks!r} must be a whole number of 4 KiB blocks")
        if not MIN_BLOCKS <= self.blocks <= MAX_BLOCKS:
            raise BadInput(
                f"blocks {self.blocks if abs(self.blocks) < 1 << 64 else 'of that number'} is out of "
                "range: use "
                f"{MIN_BLOCKS} to {MAX_BLOCKS} blocks of 4 KiB"
            )
        check_times(self.ttl_us, self.keep_us)


def check_times(ttl_us: int | None, keep_us: int | None) -> None:
    if ttl_us is not None and not MIN_TTL_US <= ttl_us <= MAX_TTL_US:
        raise BadInput(
            f"ttl {format_duration(ttl_us)} is out of range: use {format_duration(MIN_TTL_US)} to "
            f"{format_duration(MAX_TTL_US)}; a block is renewed while its process lives, so 1h is enough"
        )
    if keep_us is not None and not 0 <= keep_us <= MAX_DURATION_US:
        raise BadInput("keep must be between 0 and a year: how long the content outlives its lease")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLease:
    """One row of truth: who may write to which region until when, and which checkpoint counts."""

    id: str
    tenant: str
    blocks: int
    ttl_us: int
    keep_us: int
    holder: Holder
    state: BlockState
    epoch: int
    created_at: int
    granted_at: int  # to the present holder, or to the last one
    expires_at: int
    ended_at: int = 0
    removed_at: int = 0
    reason: EndReason | None = None
    detail: str = ""
    sequence: int = 0  # of the checkpoint that counts; 0: none yet
    digest: str = ""
    bytes: int = 0
    recorded_at: int = 0

    @property
    def size_bytes(self) -> int:
        return self.blocks * BLOCK_BYTES

    def state_at(self, now: int) -> BlockState:
        """What it is by the clock: an expiry is written down when somebody next touches the block."""
        return BlockState.KEPT if self.state is BlockState.HELD and now >= self.expires_at else self.state

    @property
    def kept_until(self) -> int:
        """When a sweep may remove its content, unless it is attached before."""
        return (self.ended_at or self.expires_at) + self.keep_us


def fence(block: BlockLease, epoch: int, now: int) -> str:
    """'' when a write of this epoch counts now, else why it does not."""
    if block.epoch != epoch or epoch <= 0:
        return f"epoch {epoch} is not the block's epoch {block.epoch}: somebody attached it since"
    if block.state is BlockState.HELD:
        return "" if now < block.expires_at else "its lease expired"
    return f"its lease ended ({block.reason.value if block.reason else block.state.value})"


def renewed_until(block: BlockLease, now: int) -> int:
    """For a block that `fence` lets through: an expiry moves only forwards (L4)."""
    return max(block.expires_at, now + block.ttl_us)


@dataclass(frozen=True, slots=True)
class Over:
    """The lease that stood in the way is over, and why. None: none stood in the way."""

    reason: EndReason | None
    detail: str


@dataclass(frozen=True, slots=True)
class StillHeld:
    reason: str


def overdue(block: BlockLease, now: int) -> bool:
    return block.state is BlockState.HELD and now >= block.expires_at


def may_take(block: BlockLease, now: int, who: Holder, dead_epoch: int) -> Over | StillHeld:
    """Whether somebody may attach or remove it now. `dead_epoch` is the epoch whose holder the caller saw to
    be gone."""
    if block.state is BlockState.GONE:
        raise InvariantBroken("a block that is gone is nobody's to take")
    if block.state is BlockState.KEPT:
        return Over(None, f"its lease ended before ({block.reason.value if block.reason else 'unknown'})")
    if overdue(block, now):
        return Over(EndReason.EXPIRED, "its ttl ran out")
    if dead_epoch and dead_epoch == block.epoch:
        return Over(EndReason.HOLDER_LOST, f"process {block.holder.pid} on {block.holder.host} is gone")
    if who.pid and who == block.holder:
        return Over(EndReason.RELEASED, "the same process attached it again")
    return StillHeld(
        f"block {block.id} is held by {_shown(block.holder)} for another "
        f"{format_duration(block.expires_at - now)}, "
        "unless it is renewed"
    )


def _shown(holder: Holder) -> str:
    return f"process {holder.pid} on {holder.host}" if holder.pid else f"somebody on {holder.host}"


def retention_over(block: BlockLease, now: int) -> bool:
    """A sweep holding the row's lock may remove its content."""
    return block.state_at(now) is BlockState.KEPT and now >= block.kept_until


def over_limit(used_blocks: int, wanted: int, most: int) -> str:
    """'' or why the tenant may not have so many more."""
    if most and used_blocks + wanted > most:
        return f"the tenant has {used_blocks} of {most} blocks and asks for {wanted} more"
    return ""
