"""What users call: `sublet.block(...)` and `sublet.Durable`: a value that survives its process, and the lease
on where it lies.

Rules of this file:
- It checks the arguments and builds the request. What a block lease means is in `core.leasing.block`, how a
  checkpoint is made in `leases.blocks.block`.
- A checkpoint that cannot be made raises; a value that cannot be read is never made up.
"""

from __future__ import annotations

import os
import warnings
from typing import Any, Generic, TypeVar

from sublet.core.errors import BadInput
from sublet.core.leasing.block import DEFAULT_KEEP_US, BlockRequest, check_locator
from sublet.core.values import parse_duration
from sublet.leases.blocks.block import Block, Checkpointed, attach, grant, seen_dead
from sublet.leases.keepers import block_keeper
from sublet.leases.request import ensure_tenant
from sublet.ports.region import Codec
from sublet.settings import Settings, load_settings
from sublet.wiring import CLOCK, open_ledger, processes, regions

DEFAULT_BLOCKS = 512
DEFAULT_TTL = "1h"

T = TypeVar("T")
Duration = str | int | float


def block(
    blocks: int | None = None,
    ttl: Duration | None = None,
    *,
    keep: Duration | None = None,
    locator: str | None = None,
    tenant: str | None = None,
    settings: Settings | None = None,
) -> Block:
    """A lease on a region of durable storage: `sublet.block(blocks=512, ttl="1h")`, in blocks of 4 KiB.

    It is renewed while this process lives and the block is in use, and released at the end of a `with` block
    or by `.release()`. Its content is kept for `keep` (7 days) after the lease ends. `locator=` attaches an
    old one instead, with its content: after a release, an expiry, or the end of the process that held it.
    Otherwise that is `BlockHeld`.
    """
    settings = settings or load_settings()
    ledger = open_ledger(settings)
    tenant = tenant or settings["tenant"]
    ttl_us = None if ttl is None else parse_duration(ttl, what="ttl")
    keep_us = None if keep is None else parse_duration(keep, what="keep")
    host = processes(settings)
    holder = host.identify(os.getpid())
    assert holder is not None
    if locator is None:
        request = BlockRequest(
            tenant=tenant,
            blocks=DEFAULT_BLOCKS if blocks is None else blocks,
            ttl_us=parse_duration(DEFAULT_TTL) if ttl_us is None else ttl_us,
            keep_us=DEFAULT_KEEP_US if keep_us is None else keep_us,
        )
        ensure_tenant(settings, ledger, tenant)
        made = grant(ledger, regions(settings), CLOCK, request, holder)
    else:
        if blocks is not None:
            raise BadInput("a block keeps the size it was made with: leave out blocks= with locator=")
        made = attach(
            ledger,
            regions(settings),
            CLOCK,
            host,
            locator,
            tenant,
            holder,
            ttl_us=ttl_us,
            keep_us=keep_us,
        )
    block_keeper().keep(made)
    return made


class Durable(Generic[T]):
    """A value on a block lease: `d = sublet.Durable({"epoch": 0}, block); d.value["epoch"] = 1;
    d.checkpoint()`.

    The value is made of numbers, texts, bytes, lists, dicts and tensors, or of whatever the codec takes.
    Whatever ends the process, and wherever in a checkpoint it does, a restore gives the value of the last
    checkpoint that returned, or of the one that was under way.
    """

    def __init__(self, value: T, block: Block, *, codec: Codec | None = None) -> None:
        if not isinstance(block, Block):
            raise BadInput("a Durable needs a block: sublet.Durable(value, sublet.block())")
        from sublet.store.codec import TreeCodec

        self.value: T = value
        self.block = block
        self.note = ""  # '' or what was wrong with the block when the value was restored
        self._codec: Codec = codec or TreeCodec()

    @property
    def locator(self) -> str:
        return self.block.locator

    def checkpoint(self) -> Checkpointed:
        """Make the value durable. Whatever keeps it from being so is raised, and then the checkpoint before
        is untouched."""
        self.block.check()
        return self.block.write(self._codec.encode(self.value), self._codec.id)

    @classmethod
    def restore(
        cls,
        locator: str,
        *,
        codec: Codec | None = None,
        ttl: Duration | None = None,
        keep: Duration | None = None,
        tenant: str | None = None,
        settings: Settings | None = None,
    ) -> Durable[Any]:
        """The value of the last checkpoint, on a new lease of the same block.

        `NothingSaved` when there was no checkpoint yet, `Damaged` when none can be read, `BlockHeld` while
        another process has it.
        """
        from sublet.store.codec import find_codec

        held = block(locator=locator, ttl=ttl, keep=keep, tenant=tenant, settings=settings)
        try:
            found = held.read()
            if codec is not None and codec.id != found.codec:
                raise BadInput(
                    f"block {locator} was written by the codec {found.codec!r}, not by {codec.id!r}",
                    remedy="restore it with the codec it was written with",
                )
            codec = codec or find_codec(found.codec)
            restored = cls(codec.decode(found.payload), held, codec=codec)
        except BaseException:
            held.release()
            raise
        restored.note = found.note
        if found.note:
            warnings.warn(f"block {locator}: {found.note}", RuntimeWarning, stacklevel=2)
        return restored

    def __enter__(self) -> Durable[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.block.release()

    def __repr__(self) -> str:
        return f"<Durable on {self.block!r}>"


# --- removing and sweeping
# -------------------------------------------------------------------------------------------


def remove_block(locator: str, *, settings: Settings | None = None) -> bool:
    """Give up a block's content by its locator, unless a living process holds it. False when it was gone
    already."""
    settings = settings or load_settings()
    ledger, host = open_ledger(settings), processes(settings)
    check_locator(locator)
    tenant = settings["tenant"]
    holder = host.identify(os.getpid())
    assert holder is not None
    row = ledger.look_block(locator, tenant).block
    removed = ledger.remove_block(
        locator, tenant, holder, actor=tenant, dead_epoch=seen_dead(host, row, holder.host)
    )
    regions(settings).remove(locator)
    return removed


def sweep_blocks(*, settings: Settings | None = None) -> tuple[list[str], list[str]]:
    """Remove blocks whose retention is over, and the files of all that were removed. Return the removed
    blocks, and the files that no ledger row knows."""
    settings = settings or load_settings()
    ledger, here = open_ledger(settings), regions(settings)
    swept = ledger.sweep_blocks()
    known = here.known()
    gone = ledger.removed_blocks(known)
    for locator in sorted(gone):
        here.remove(locator)
    rows = {answer.block.id for answer in ledger.blocks(limit=1 << 30)}
    # Another ledger may share this home: what this one never heard of is reported and left alone.
    return swept, [locator for locator in known if locator not in gone and locator not in rows]
