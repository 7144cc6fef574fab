"""A block lease in the hands of its holder: checked, written, recorded, renewed while its process lives.

Rules of this file:
- A checkpoint is: ask the ledger (which slot counts, and may this process write), write the other slot
  durably, record it in the ledger. Only the last makes it count (C6), and it is refused when the lease ended
  meanwhile. Nothing else writes to a region.
- Fail closed: a `Block` that cannot show it is held is not held (L7), and stops before the ledger would end
  it (L6).
- A block belongs to the process that took it. A forked child has a copy of the object, not the lease.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType

from sublet.core.checkpoints.region import Picked, SlotHeader, capacity_bytes, check_codec, pick
from sublet.core.errors import Disconnected, LeaseLost, NotFound, Stale, SubletError
from sublet.core.leasing.block import (
    BLOCK_BYTES,
    UNKNOWN_SEQUENCE,
    BlockLease,
    BlockRequest,
    BlockState,
    check_locator,
)
from sublet.core.leasing.lease import Holder
from sublet.core.leasing.renewal import local_deadline
from sublet.ports.clock import Clock
from sublet.ports.ledger import BlockAnswer, BlockRecord, LeaseKey, Ledger
from sublet.ports.processes import Processes
from sublet.ports.region import Region, Regions

#: Leaving must not hang: a lease that cannot be given back runs out by itself.
RELEASE_PATIENCE_US = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpointed:
    """What `checkpoint()` returns: it is durable, and a restore gives it back."""

    sequence: int
    epoch: int
    digest: str
    bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointedValue:
    """The value's bytes as they were checkpointed."""

    done: Checkpointed
    codec: str
    payload: memoryview
    note: str  # '' or what is wrong with the block although there is a value


class Block:
    """What `sublet.block(...)` gives: a lease on a region of `blocks` blocks of 4 KiB."""

    def __init__(
        self,
        ledger: Ledger,
        regions: Regions,
        clock: Clock,
        secret: str,
        answer: BlockAnswer,
        sent_at: int,
        region: Region,
    ) -> None:
        self._ledger = ledger
        self._regions = regions
        self._clock = clock
        self._secret = secret
        self._pid = os.getpid()
        self._writing = threading.Lock()
        self._row = answer.block
        self._sent_at = sent_at
        self._deadline_us = local_deadline(sent_at, answer.block.ttl_us)
        self._over = ""  # why, once it is over
        self._region = region
        self._good = -1  # the slot that must not be written to; -1: not looked yet
        self._tried = (-1, -1)  # sequence and slot of the last write, recorded or not
        self._highest = 0
        self._on_release: list[Callable[[], None]] = []

    # what it is

    @property
    def locator(self) -> str:
        """The block's name: keep it to come back with `sublet.block(locator=...)` or
        `sublet.Durable.restore(...)`."""
        return self._row.id

    @property
    def epoch(self) -> int:
        return self._row.epoch

    @property
    def tenant(self) -> str:
        return self._row.tenant

    @property
    def blocks(self) -> int:
        return self._row.blocks

    @property
    def size_bytes(self) -> int:
        """The region's size. A value is written twice over time, so it can be a little less than half of
        it."""
        return self._row.blocks * BLOCK_BYTES

    @property
    def capacity_bytes(self) -> int:
        """The most bytes one checkpoint may take."""
        return capacity_bytes(self._row.blocks)

    @property
    def ttl_us(self) -> int:
        return self._row.ttl_us

    @property
    def expires_at(self) -> datetime:
        """When the ledger ends it unless it is renewed."""
        return _instant(self._row.ended_at or self._row.expires_at)

    @property
    def kept_until(self) -> datetime:
        """When its content may be swept, if nobody attaches it before."""
        return _instant(self._row.kept_until)

    @property
    def key(self) -> LeaseKey:
        """What fenced writes carry. Keep it inside the process: the secret is the right to write."""
        return LeaseKey(self._row.id, self._row.epoch, self._secret)

    @property
    def status(self) -> str:
        """'held' or 'ended', as far as this process can be sure."""
        return "ended" if self._why_over() else "held"

    def __repr__(self) -> str:
        return f"<Block {self.locator} {self.status} epoch={self.epoch} blocks={self.blocks}>"

    def _why_over(self) -> str:
        if self._over:
            return self._over
        if self._pid != os.getpid():
            return "it belongs to the parent process"
        return "it was not renewed in time" if self._clock.monotonic_us() >= self._deadline_us else ""

    def check(self) -> None:
        """Raise `LeaseLost` unless this process may write to it now."""
        why = self._why_over()
        if why:
            raise LeaseLost(
                f"the lease on block {self.locator} has ended: {why}",
                remedy=f"attach it again: sublet.block(locator={self.locator!r}); the last checkpoint is "
                "kept",
            )

    # the value in it

    def write(self, parts: Sequence[memoryview], codec: str) -> Checkpointed:
        """Write one checkpoint, durable when it returns. When it raises, the one before is still there."""
        check_codec(codec)
        self.check()  # before the lock, which a forked child may find held for ever
        with self._writing:
            self.check()
            # The ledger knows what counts, also after a record whose answer was lost (S5).
            row = self._asked()
            good = self._good_slot(row)
            length = sum(part.nbytes for part in parts)
            self._highest = max(self._highest, row.sequence) + 1
            header = SlotHeader(
                block_id=row.id, sequence=self._highest, epoch=row.epoch, length=length, codec=codec
            )
            slot = 1 - good if good >= 0 else 0
            self._tried = (header.sequence, slot)
            digest = self._region.write(slot, header, parts)
            self._record(BlockRecord(sequence=header.sequence, digest=digest, bytes=length))
            self._good = slot
            return Checkpointed(sequence=header.sequence, epoch=row.epoch, digest=digest, bytes=length)

    def _asked(self) -> BlockLease:
        """Return what the ledger says now; raises unless a write would count."""
        with self._noticing():
            return self._ledger.check_block(self.key).block

    def _record(self, done: BlockRecord) -> None:
        with self._noticing():
            self._row = self._ledger.record_block(self.key, done).block

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        """Note the loss when the ledger says that the lease is lost."""
        try:
            yield
        except (LeaseLost, Stale) as lost:
            self._over = self._over or lost.message
            raise

    def _good_slot(self, row: BlockLease) -> int:
        """The slot that must not be overwritten; -1 when none holds anything that counts."""
        if self._good < 0 and row.sequence:
            slots = self._region.slots()
            with contextlib.suppress(SubletError):
                self._picked(pick(slots, row.sequence, row.digest))
        if row.sequence > 0 and row.sequence == self._tried[0]:
            self._good = self._tried[1]
        return self._good

    def _picked(self, picked: Picked) -> None:
        self._good = picked.slot
        self._highest = max(self._highest, picked.good.header.sequence)

    def read(self) -> CheckpointedValue:
        """Return the last checkpoint. `NothingSaved` if there is none, `Damaged` if it cannot be read."""
        self.check()
        with self._writing:
            row = self._asked()
            read = [self._region.read(0), self._region.read(1)]
            picked = pick((read[0][0], read[1][0]), row.sequence, row.digest)
            self._picked(picked)
        header = picked.good.header
        done = Checkpointed(
            sequence=header.sequence, epoch=header.epoch, digest=picked.good.digest, bytes=header.length
        )
        return CheckpointedValue(done, header.codec, read[picked.slot][1], picked.note)

    # how it ends

    def renew(self) -> None:
        """Extend the lease by its ttl now, or raise. This happens by itself while the process lives."""
        self.check()
        self.extend(None)

    def extend(self, patience_us: int | None) -> None:
        """The renewal itself, waiting for the ledger no longer than told."""
        sent_at = self._clock.monotonic_us()
        with self._noticing():
            answer = self._ledger.renew_block(self.key, patience_us=patience_us)
        self._row, self._sent_at = answer.block, sent_at
        self._deadline_us = local_deadline(sent_at, answer.block.ttl_us)

    def on_release(self, callback: Callable[[], None]) -> None:
        """Called when the lease ends by this process's own doing, once."""
        self._on_release.append(callback)

    @property
    def is_over(self) -> bool:
        return bool(self._over)

    @property
    def sent_at(self) -> int:
        """When its last renewal was requested, on this process's clock."""
        return self._sent_at

    def release(self) -> None:
        """End the lease. The content is kept, and whoever attaches the locator next has it. Safe to call any
        number of times."""
        if not self._leave("released"):
            return
        with contextlib.suppress(Disconnected, NotFound):  # it runs out by itself, or was over already
            self._ledger.release_block(self.locator, self._secret, patience_us=RELEASE_PATIENCE_US)

    def discard(self) -> None:
        """End the lease and give up the content."""
        self.check()
        self._asked()
        # By the secret alone: another handle of this process may hold it by now.
        holder = Holder(host=self._row.holder.host)
        self._ledger.remove_block(self.locator, self.tenant, holder, actor="its holder", secret=self._secret)
        self._leave("discarded")
        self._regions.remove(self.locator)

    def _leave(self, why: str) -> bool:
        if self._pid != os.getpid():
            return False
        with self._writing:  # a checkpoint that is under way is finished first
            if self._over in ("released", "discarded"):
                return False
            self._over = why
            self._region.close()
        for callback in self._on_release:
            callback()
        return True

    def __enter__(self) -> Block:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _instant(us: int) -> datetime:
    return datetime.fromtimestamp(us / 1e6, UTC)


# --- getting one
# ---------------------------------------------------------------------------------------------


def new_locator() -> str:
    return "B" + secrets.token_hex(10)


def grant(ledger: Ledger, regions: Regions, clock: Clock, request: BlockRequest, holder: Holder) -> Block:
    locator, secret = new_locator(), secrets.token_urlsafe(24)
    sent_at = clock.monotonic_us()
    answer = ledger.grant_block(locator, secret, request, holder)
    try:
        region = regions.create(locator, answer.block.epoch, request.blocks)
    except BaseException:
        with contextlib.suppress(SubletError):
            ledger.remove_block(locator, request.tenant, holder, actor="a failed grant", secret=secret)
        with contextlib.suppress(OSError):
            regions.remove(locator)
        raise
    return Block(ledger, regions, clock, secret, answer, sent_at, region)


def attach(
    ledger: Ledger,
    regions: Regions,
    clock: Clock,
    processes: Processes,
    locator: str,
    tenant: str,
    holder: Holder,
    *,
    ttl_us: int | None = None,
    keep_us: int | None = None,
) -> Block:
    """Take over a block by its locator: released, expired, or of a process that is gone. Otherwise
    `BlockHeld`."""
    check_locator(locator)
    row = ledger.look_block(locator, tenant).block
    if row.sequence and not regions.present(locator):
        # Before it is taken from anybody: the region may lie on another host.
        raise NotFound(
            f"block {locator} lies in another SUBLET_HOME; it was last held on {row.holder.host}",
            remedy=f"attach it on {row.holder.host}, with the SUBLET_HOME it was made in",
        )
    secret = secrets.token_urlsafe(24)
    sent_at = clock.monotonic_us()
    answer = ledger.attach_block(
        locator,
        secret,
        tenant,
        holder,
        ttl_us=ttl_us,
        keep_us=keep_us,
        dead_epoch=seen_dead(processes, row, holder.host),
    )
    try:
        never_written = answer.block.sequence in (0, UNKNOWN_SEQUENCE)
        region = regions.take_over(locator, answer.block.epoch, answer.block.blocks, empty_ok=never_written)
    except BaseException:
        # The older region is untouched; let the next one try.
        with contextlib.suppress(SubletError):
            ledger.release_block(locator, secret)
        raise
    return Block(ledger, regions, clock, secret, answer, sent_at, region)


def seen_dead(processes: Processes, row: BlockLease, host: str) -> int:
    """The block's epoch if its holder was a process of this host that has ended, else 0."""
    if row.state is not BlockState.HELD or not row.holder.pid or row.holder.host != host:
        return 0
    watched = processes.watch(row.holder)
    if watched is None:
        return row.epoch
    os.close(watched)
    return 0
