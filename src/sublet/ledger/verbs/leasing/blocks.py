"""Block leases: grant, attach, renew, check, record, release, remove, sweep.

Rules of this file:
- The pool is locked first, the block's row after it, and the clock is read after both. Rules live in
  `core.leasing.block`.
- Every row goes to the main strand: a block is renewed twice an hour and removed some day, so a strand of its
  own would have to outlive it.
- An expiry is written down by whoever touches the block next. Until then the clock alone says so, which is
  enough to fence.
- A checkpoint counts from the moment it is recorded here (C6): what lies in a slot and is not recorded did
  not happen.
"""

from __future__ import annotations

import hmac

from sublet.core.errors import BlockHeld, Fenced, LeaseLost, QuotaReached, Stale, SubletError
from sublet.core.leasing.block import (
    UNKNOWN_SEQUENCE,
    BlockEvent,
    BlockLease,
    BlockRequest,
    BlockState,
    Over,
    StillHeld,
    after,
    fence,
    may_take,
    over_limit,
    overdue,
    renewed_until,
    retention_over,
    unknown_block,
)
from sublet.core.leasing.lease import EndReason, Holder
from sublet.ledger.tx import Row, Tx, write_main
from sublet.ledger.verbs.journal.refusals import write_refusal
from sublet.ledger.verbs.leasing.credentials import secret_hash
from sublet.ledger.verbs.leasing.slices import load_tenant, unknown_tenant
from sublet.ports.ledger import BlockAnswer, BlockRecord, LeaseKey

_COLUMNS = (
    "id, tenant, blocks, ttl_us, keep_us, host, pid, pid_started, secret_hash, state, epoch, created_at, "
    "granted_at, "
    "expires_at, ended_at, removed_at, reason, detail, sequence, digest, bytes, recorded_at, secret_before"
)
_SELECT = f"SELECT {_COLUMNS} FROM block"
_BY_ID = f"{_SELECT} WHERE id = ?"


def _block_of(r: Row) -> BlockLease:
    return BlockLease(
        id=r[0],
        tenant=r[1],
        blocks=r[2],
        ttl_us=r[3],
        keep_us=r[4],
        holder=Holder(host=r[5], pid=r[6], started=r[7]),
        state=BlockState(r[9]),
        epoch=r[10],
        created_at=r[11],
        granted_at=r[12],
        expires_at=r[13],
        ended_at=r[14],
        removed_at=r[15],
        reason=EndReason(r[16]) if r[16] else None,
        detail=r[17],
        sequence=r[18],
        digest=r[19],
        bytes=r[20],
        recorded_at=r[21],
    )


def _proves(row: Row, secret: str) -> bool:
    return hmac.compare_digest(str(row[8]), secret_hash(secret))


def _proved(row: Row, secret: str) -> bool:
    """Whether the secret is that of the holder before this one."""
    return bool(row[22]) and hmac.compare_digest(str(row[22]), secret_hash(secret))


def _answer(tx: Tx, block_id: str) -> BlockAnswer:
    row = tx.row(_BY_ID, block_id)
    assert row is not None
    return BlockAnswer(block=_block_of(row), at=tx.now)


# --- getting one --------------------------------------------------------------------------------------------


def grant(
    tx: Tx, block_id: str, secret: str, request: BlockRequest, holder: Holder
) -> BlockAnswer | SubletError:
    pool = tx.pool
    known = tx.locked(_BY_ID, block_id)
    if known is not None:
        # The first call's answer was lost on the way: this is how its caller finds out what it was (S5).
        if not _proves(known, secret):
            return unknown_block(block_id)
        return BlockAnswer(block=_block_of(known), at=tx.now)
    if load_tenant(tx, request.tenant) is None:
        return unknown_tenant(request.tenant)
    used = tx.row(
        "SELECT coalesce(sum(blocks), 0) FROM block WHERE tenant = ? AND state <> 'gone'", request.tenant
    )
    refusal = over_limit(int(used[0]) if used else 0, request.blocks, pool.policy.tenant_blocks_max)
    if refusal:
        write_refusal(tx, "block.refused", request.tenant, block_id, QuotaReached.code, refusal)
        return QuotaReached(refusal, remedy="remove blocks that are not needed: 'sublet block ls' and 'rm'")
    now, epoch = tx.now, pool.next_epoch()
    values: tuple[object, ...] = (
        block_id,
        request.tenant,
        request.blocks,
        request.ttl_us,
        request.keep_us,
        holder.host,
        holder.pid,
        holder.started,
        secret_hash(secret),
        BlockState.HELD.value,
        epoch,
        now,
        now,
        now + request.ttl_us,
        0,
        0,
        "",
        "",
        0,
        "",
        0,
        0,
        "",
    )
    tx.run(f"INSERT INTO block ({_COLUMNS}) VALUES ({','.join('?' * len(values))})", *values)
    write_main(
        tx,
        "block.granted",
        request.tenant,
        block_id,
        {
            "epoch": epoch,
            "blocks": request.blocks,
            "ttl_us": request.ttl_us,
            "keep_us": request.keep_us,
            "expires_at": now + request.ttl_us,
            "host": holder.host,
            "pid": holder.pid,
        },
    )
    return _answer(tx, block_id)


def attach(
    tx: Tx,
    block_id: str,
    secret: str,
    tenant: str,
    holder: Holder,
    ttl_us: int | None,
    keep_us: int | None,
    dead_epoch: int,
) -> BlockAnswer | SubletError:
    pool = tx.pool
    row = _found(tx, block_id, tenant)
    if row is None:
        return unknown_block(block_id)
    block = _block_of(row)
    if _proves(row, secret):
        # Our own attach of a moment ago, whose answer was lost (S5). A secret is used for one grant only.
        return BlockAnswer(block=block, at=tx.now)
    free = may_take(block, tx.now, holder, dead_epoch)
    if isinstance(free, StillHeld):
        write_main(tx, "block.attach_refused", block.tenant, block.id, {"reason": free.reason})
        return BlockHeld(free.reason)
    _end(tx, block, free)
    now, epoch = tx.now, pool.next_epoch()
    ttl_us = block.ttl_us if ttl_us is None else ttl_us
    keep_us = block.keep_us if keep_us is None else keep_us
    tx.run(
        "UPDATE block SET state = ?, epoch = ?, secret_before = secret_hash, secret_hash = ?, host = ?, "
        "pid = ?, pid_started = ?, ttl_us = ?, keep_us = ?, "
        "granted_at = ?, expires_at = ?, ended_at = 0, reason = '', detail = '' WHERE id = ?",
        after(BlockState.KEPT, BlockEvent.ATTACH).value,
        epoch,
        secret_hash(secret),
        holder.host,
        holder.pid,
        holder.started,
        ttl_us,
        keep_us,
        now,
        now + ttl_us,
        block.id,
    )
    write_main(
        tx,
        "block.attached",
        block.tenant,
        block.id,
        {
            "epoch": epoch,
            "from_epoch": block.epoch,
            "because": free.detail,
            "ttl_us": ttl_us,
            "keep_us": keep_us,
            "expires_at": now + ttl_us,
            "host": holder.host,
            "pid": holder.pid,
        },
    )
    return _answer(tx, block.id)


def _found(tx: Tx, block_id: str, tenant: str) -> Row | None:
    """The row, locked, for its tenant. Removed is as good as never there."""
    row = tx.locked(_BY_ID, block_id)
    return row if row is not None and row[1] == tenant and row[9] != BlockState.GONE.value else None


def _end(tx: Tx, block: BlockLease, over: Over) -> None:
    """Write down that the lease is over, unless that was done before."""
    if over.reason is None:
        return
    # An expiry happened when it happened; its retention counts from then.
    ended_at = min(tx.now, block.expires_at)
    tx.run(
        "UPDATE block SET state = ?, ended_at = ?, reason = ?, detail = ? WHERE id = ? AND epoch = ?",
        after(block.state, BlockEvent.END).value,
        ended_at,
        over.reason.value,
        over.detail,
        block.id,
        block.epoch,
    )
    write_main(
        tx,
        "block.ended",
        block.tenant,
        block.id,
        {"epoch": block.epoch, "reason": over.reason.value, "detail": over.detail, "ended_at": ended_at},
    )


# --- holding one --------------------------------------------------------------------------------------------


def _held(tx: Tx, key: LeaseKey, doing: str) -> BlockLease | SubletError:
    """The block, for whoever holds it now; else why not, which is journalled for a known holder."""
    _ = tx.pool
    row = tx.locked(_BY_ID, key.lease_id)
    if row is None or not (_proves(row, key.secret) or _proved(row, key.secret)):
        return LeaseLost(
            f"there is no block {key.lease_id[:40]} that this secret opens; somebody may have attached it "
            "since",
            remedy="attach it again with sublet.block(locator=...); what was checkpointed is kept",
        )
    block = _block_of(row)
    refusal = fence(block, key.epoch, tx.now)
    if not refusal:
        return block
    if overdue(block, tx.now) and block.epoch == key.epoch:
        _end(tx, block, Over(EndReason.EXPIRED, "its ttl ran out"))
    write_main(tx, f"block.{doing}_refused", block.tenant, block.id, {"epoch": key.epoch, "reason": refusal})
    words = f"block {block.id} was not {_DONE[doing]}: {refusal}"
    remedy = f"attach it again: sublet.block(locator={block.id!r}); the last checkpoint is kept"
    return Fenced(words) if block.epoch != key.epoch else LeaseLost(words, remedy=remedy)


_DONE = {"renew": "renewed", "write": "written", "record": "checkpointed"}


def renew(tx: Tx, key: LeaseKey) -> BlockAnswer | SubletError:
    block = _held(tx, key, "renew")
    if isinstance(block, SubletError):
        return block
    expires_at = renewed_until(block, tx.now)
    tx.run("UPDATE block SET expires_at = ? WHERE id = ? AND epoch = ?", expires_at, block.id, block.epoch)
    write_main(tx, "block.renewed", block.tenant, block.id, {"epoch": block.epoch, "expires_at": expires_at})
    return _answer(tx, block.id)


def check(tx: Tx, key: LeaseKey) -> BlockAnswer | SubletError:
    block = _held(tx, key, "write")
    return block if isinstance(block, SubletError) else BlockAnswer(block=block, at=tx.now)


def record(tx: Tx, key: LeaseKey, done: BlockRecord) -> BlockAnswer | SubletError:
    _ = tx.pool
    row = tx.locked(_BY_ID, key.lease_id)
    if row is not None and _proves(row, key.secret):
        known = _block_of(row)
        if (known.epoch, known.sequence, known.digest) == (key.epoch, done.sequence, done.digest):
            return BlockAnswer(block=known, at=tx.now)  # recorded before, and the answer was lost (S5)
    block = _held(tx, key, "record")
    if isinstance(block, SubletError):
        return block
    if done.sequence <= block.sequence:
        return Stale(f"block {block.id} is at checkpoint {block.sequence}, not before {done.sequence}")
    tx.run(
        "UPDATE block SET sequence = ?, digest = ?, bytes = ?, recorded_at = ? WHERE id = ? AND epoch = ?",
        done.sequence,
        done.digest,
        done.bytes,
        tx.now,
        block.id,
        block.epoch,
    )
    write_main(
        tx,
        "block.checkpointed",
        block.tenant,
        block.id,
        {"epoch": block.epoch, "sequence": done.sequence, "digest": done.digest, "bytes": done.bytes},
    )
    return _answer(tx, block.id)


# --- letting go ---------------------------------------------------------------------------------------------


def release(tx: Tx, block_id: str, secret: str) -> bool | SubletError:
    _ = tx.pool
    row = tx.locked(_BY_ID, block_id)
    if row is None or not _proves(row, secret):
        return unknown_block(block_id)
    block = _block_of(row)
    if block.state is not BlockState.HELD:
        return False
    if overdue(block, tx.now):
        _end(tx, block, Over(EndReason.EXPIRED, "released after it was over"))
    else:
        _end(tx, block, Over(EndReason.RELEASED, "released by its holder"))
    return True


def remove(
    tx: Tx, block_id: str, tenant: str, holder: Holder, secret: str, dead_epoch: int, actor: str
) -> bool | SubletError:
    _ = tx.pool
    row = tx.locked(_BY_ID, block_id)
    if row is None or row[1] != tenant:
        return unknown_block(block_id)
    block = _block_of(row)
    if block.state is BlockState.GONE:
        return False
    over = may_take(block, tx.now, holder, dead_epoch)
    if isinstance(over, StillHeld):
        if not _proves(row, secret):
            write_main(tx, "block.remove_refused", block.tenant, block.id, {"reason": over.reason})
            return BlockHeld(over.reason)
        over = Over(EndReason.RELEASED, "discarded by its holder")
    _end(tx, block, over)
    _remove(tx, block, f"removed by {actor}")
    return True


def _remove(tx: Tx, block: BlockLease, why: str) -> None:
    tx.run(
        "UPDATE block SET state = ?, removed_at = ?, detail = ? WHERE id = ?",
        after(BlockState.KEPT, BlockEvent.REMOVE).value,
        tx.now,
        why,
        block.id,
    )
    write_main(tx, "block.removed", block.tenant, block.id, {"epoch": block.epoch, "why": why})


def sweep(tx: Tx) -> list[str]:
    """Write down what expired, and give up what was kept long enough. The files are the hosts' to delete
    afterwards."""
    _ = tx.pool
    swept: list[str] = []
    over = "SELECT id FROM block WHERE state = 'kept' OR (state = 'held' AND expires_at <= ?) ORDER BY id"
    for (block_id,) in tx.rows(over, tx.now):
        row = tx.locked(_BY_ID, block_id)
        assert row is not None
        block = _block_of(row)
        if overdue(block, tx.now):
            _end(tx, block, Over(EndReason.EXPIRED, "its ttl ran out"))
        if retention_over(block, tx.now):
            _remove(tx, block, "its retention was over")
            swept.append(block.id)
    return swept


def end_all(tx: Tx, why: str) -> int:
    """After a backup was put back: nobody who held one before may write, and which checkpoint counts is on
    the disk."""
    held = [_block_of(r) for r in tx.rows(f"{_SELECT} WHERE state = 'held' ORDER BY id")]
    for block in held:
        _end(tx, block, Over(EndReason.REVOKED, why))
    tx.run("UPDATE block SET sequence = ? WHERE state <> 'gone'", UNKNOWN_SEQUENCE)
    return len(held)


# --- looking ------------------------------------------------------------------------------------------------


def look(tx: Tx, block_id: str, tenant: str) -> BlockAnswer | SubletError:
    row = tx.row(_BY_ID, block_id)
    if row is None or row[1] != tenant or row[9] == BlockState.GONE.value:
        return unknown_block(block_id)
    return BlockAnswer(block=_block_of(row), at=tx.now)


def list_blocks(tx: Tx, *, tenant: str, gone: bool, limit: int) -> list[BlockAnswer]:
    where, params = ["state = 'gone'" if gone else "state <> 'gone'"], []
    if tenant:
        where.append("tenant = ?")
        params.append(tenant)
    found = tx.rows(
        f"{_SELECT} WHERE {' AND '.join(where)} ORDER BY created_at DESC, id LIMIT ?", *params, limit
    )
    return [BlockAnswer(block=_block_of(r), at=tx.now) for r in found]


def removed(tx: Tx, block_ids: list[str]) -> set[str]:
    """Which of these were removed."""
    return {
        block_id
        for block_id in block_ids
        if tx.row("SELECT 1 FROM block WHERE id = ? AND state = 'gone'", block_id) is not None
    }
