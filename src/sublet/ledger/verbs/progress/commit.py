"""Heads and effects: the one commit point (S1-S5).

Rules of this file:
- A commit locks the lease row first and reads the clock after it: no commit of an old epoch is ever
  serialised after the grant of a newer one.
- Everything a step makes true is written in this one transaction, or nothing is.
- Repeating a commit whose answer was lost finds its own effect and answers `Committed` again.
"""

from __future__ import annotations

from sublet.core.errors import InvariantBroken, NotFound, SubletError
from sublet.core.journal.chain import StrandEnd, job_strand
from sublet.core.leasing.lease import LeaseRecord, fence
from sublet.core.progress.effect import (
    AlreadyCommitted,
    Commit,
    Committed,
    Done,
    Effect,
    Head,
    Reserved,
    decide_commit,
    decide_joining,
    decide_reserve,
    said,
)
from sublet.ledger.rows import EFFECT_COLUMNS, HEAD_COLUMNS, LEASE_BY_ID, effect_of, head_of, lease_of
from sublet.ledger.tx import Row, Tx, write_main, write_strand
from sublet.ledger.verbs.leasing.credentials import not_opened, proves
from sublet.ledger.verbs.progress import storage_quota
from sublet.machine.failpoints import failpoint
from sublet.ports.ledger import LeaseKey


def load_head(tx: Tx, job: str) -> Head | None:
    row = tx.row(f"SELECT {HEAD_COLUMNS} FROM head WHERE job = ?", job)
    return head_of(row) if row else None


def load_heads(tx: Tx, tenant: str) -> list[Head]:
    where, params = ("WHERE tenant = ?", [tenant]) if tenant else ("", [])
    return [head_of(row) for row in tx.rows(f"SELECT {HEAD_COLUMNS} FROM head {where} ORDER BY job", *params)]


def load_effect(tx: Tx, key: str) -> Effect | None:
    row = tx.row(f"SELECT {EFFECT_COLUMNS} FROM effect WHERE key = ?", key)
    return effect_of(row) if row else None


def _holder_of(tx: Tx, key: LeaseKey) -> LeaseRecord | SubletError:
    row = tx.locked(LEASE_BY_ID, key.lease_id)
    if row is None or not proves(row, key.secret):
        return not_opened(key.lease_id)
    return lease_of(row)


def effect_owner_alive(tx: Tx, effect: Effect | None, now: int) -> bool:
    """May the effect's owner still commit? Asked of its row, not of its process."""
    if effect is None or effect.completed:
        return False
    row = tx.row(LEASE_BY_ID, effect.owner)
    return row is not None and not fence(lease_of(row), effect.epoch, now)


def _of_another_tenant(tx: Tx, effect: Effect | None, lease: LeaseRecord) -> bool:
    """The lease that reserved an effect says whose it is (T1)."""
    if effect is None or effect.owner == lease.id:
        return False
    row = tx.row("SELECT tenant FROM lease WHERE id = ?", effect.owner)
    return row is not None and row[0] != lease.tenant


def _refuse(
    tx: Tx, kind: str, lease: LeaseRecord, subject: str, epoch: int, error: SubletError
) -> SubletError:
    write_main(tx, kind, lease.tenant, subject, {"code": error.code, "reason": error.message, "epoch": epoch})
    return error


def _same(
    tx: Tx, kind: str, lease: LeaseRecord, subject: str, epoch: int, found: AlreadyCommitted
) -> AlreadyCommitted:
    """Answer that it was done before, and journal that, so that it can be counted."""
    write_main(tx, kind, lease.tenant, subject, {"epoch": epoch, "lease": lease.id, "version": found.version})
    return found


def reserve(
    tx: Tx, key: LeaseKey, effect_key: str, job: str, fingerprint: str
) -> Reserved | AlreadyCommitted | SubletError:
    _ = tx.pool
    lease = _holder_of(tx, key)
    if isinstance(lease, SubletError):
        return lease
    effect = load_effect(tx, effect_key)
    if _of_another_tenant(tx, effect, lease):
        return NotFound(f"tenant {lease.tenant} has no effect {effect_key}")
    decision = decide_reserve(
        lease, key.epoch, effect, effect_owner_alive(tx, effect, tx.now), fingerprint, tx.now
    )
    if isinstance(decision, SubletError):
        return _refuse(tx, "effect.refused", lease, effect_key, key.epoch, decision)
    if isinstance(decision, AlreadyCommitted):
        return _same(tx, "effect.duplicate", lease, effect_key, key.epoch, decision)
    tx.run(
        f"INSERT INTO effect ({EFFECT_COLUMNS}) VALUES (?,?,?,?,?,0,'',0) "
        "ON CONFLICT (key) DO UPDATE SET owner = excluded.owner, epoch = excluded.epoch WHERE "
        "effect.completed = 0",
        effect_key,
        fingerprint,
        job,
        lease.id,
        key.epoch,
    )
    write_main(
        tx,
        "effect.reserved",
        lease.tenant,
        effect_key,
        {
            "epoch": key.epoch,
            "lease": lease.id,
            "job": job,
            "fingerprint": fingerprint,
            "taken_over": decision.taken_over,
        },
    )
    return decision


def _told(step: Commit, lease: LeaseRecord, version: int) -> dict[str, object]:
    body: dict[str, object] = {
        "first": step.begins,
        "step": step.step,
        "version": version,
        "digest": step.digest,
        "fingerprint": step.fingerprint,
        "said": said(step.fingerprint, step.outcome),
        "cursor": said("", step.cursor),
        "epoch": lease.epoch,
        "lease": lease.id,
    }
    if step.effects:
        body["effects"] = {done.key: said(done.fingerprint, done.outcome) for done in step.effects}
    return body


def _join(tx: Tx, lease: LeaseRecord, key: LeaseKey, step: Commit, now: int) -> SubletError | None:
    """Whether all effects may be completed with the commit."""
    for done in step.effects:
        effect = load_effect(tx, done.key)
        if _of_another_tenant(tx, effect, lease):
            return NotFound(f"tenant {lease.tenant} has no effect {done.key}")
        refusal = decide_joining(lease, key.epoch, done, effect, effect_owner_alive(tx, effect, now), now)
        if refusal is not None:
            return refusal
    return None


def _complete(tx: Tx, lease: LeaseRecord, key: LeaseKey, job: str, done: Done, version: int) -> None:
    tx.run(
        f"INSERT INTO effect ({EFFECT_COLUMNS}) VALUES (?,?,?,?,?,1,?,?) ON CONFLICT (key) DO UPDATE SET "
        "owner = excluded.owner, epoch = excluded.epoch, completed = 1, outcome = excluded.outcome, "
        "version = excluded.version",
        done.key,
        done.fingerprint,
        job,
        lease.id,
        key.epoch,
        done.outcome,
        version,
    )


def _move_head(tx: Tx, row: Row | None, lease: LeaseRecord, step: Commit, version: int) -> None:
    """The head and its journal row. The first commit of a job also starts its strand in the main one."""
    if row is None:
        anchor = write_main(tx, "job.started", lease.tenant, step.job, {"lease": lease.id})
        tx.run(
            f"INSERT INTO head ({HEAD_COLUMNS}, strand_anchor) VALUES (?,?,0,0,'','',0,0,0,?,0,0,?)",
            step.job,
            lease.tenant,
            anchor,
            anchor,
        )
        end = StrandEnd(0, anchor)
    else:
        end = StrandEnd(row[8], row[9])
    end = write_strand(
        tx,
        job_strand(step.job),
        end,
        "step.committed",
        lease.tenant,
        step.key,
        _told(step, lease, version),
    )
    moved = tx.run(
        "UPDATE head SET version = ?, step = ?, digest = ?, cursor_text = ?, epoch = ?, committed_at = ?, "
        "strand_seq = ?, strand_hash = ? WHERE job = ? AND version = ?",
        version,
        step.step,
        step.digest,
        step.cursor,
        lease.epoch,
        tx.now,
        end.seq,
        end.hash,
        step.job,
        step.expected_version,
    )
    if moved != 1:
        raise InvariantBroken(f"the head of {step.job} moved under its own lock")


def commit(tx: Tx, key: LeaseKey, step: Commit) -> Committed | AlreadyCommitted | SubletError:
    _ = tx.pool
    lease = _holder_of(tx, key)
    failpoint("after_lock")
    if isinstance(lease, SubletError):
        return lease
    row = tx.locked(f"SELECT {HEAD_COLUMNS} FROM head WHERE job = ?", step.job)
    now = tx.now
    head = head_of(row) if row else Head(job=step.job, tenant=lease.tenant)
    effect = load_effect(tx, step.key)
    if head.tenant != lease.tenant or _of_another_tenant(tx, effect, lease):
        return NotFound(f"tenant {lease.tenant} has no job {step.job} with the key {step.key}")
    if (
        effect is not None
        and effect.completed
        and (effect.owner, effect.epoch, effect.fingerprint, effect.version)
        == (lease.id, key.epoch, step.fingerprint, step.expected_version + 1)
    ):
        return Committed(effect.version)
    decision = decide_commit(lease, key.epoch, head, effect, effect_owner_alive(tx, effect, now), step, now)
    failpoint("after_fence_check")
    if isinstance(decision, AlreadyCommitted):
        return _same(tx, "step.duplicate", lease, step.key, key.epoch, decision)
    if isinstance(decision, Committed):
        decision = (
            _join(tx, lease, key, step, now) or storage_quota.refusal(tx, lease.tenant, step) or decision
        )
    if isinstance(decision, SubletError):
        return _refuse(tx, "step.refused", lease, step.key, key.epoch, decision)
    _move_head(tx, row, lease, step, decision.version)
    storage_quota.charge(tx, step.job, decision.version, step)
    failpoint("after_cas")
    own = Done(key=step.key, fingerprint=step.fingerprint, outcome=step.outcome)
    for done in (own, *step.effects):
        _complete(tx, lease, key, step.job, done, decision.version)
    failpoint("after_effect")
    tx.run(
        "UPDATE lease SET committed_at = ?, active_at = ? WHERE id = ? AND epoch = ?",
        now,
        now,
        lease.id,
        key.epoch,
    )
    return decision
