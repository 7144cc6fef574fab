"""What tenants' checkpoints take, counted where heads move (T2).

Rules of this file:
- A job's charge is in its head's row, which whoever moves or trims the head has locked; a tenant's charge is
  their sum. Commits of different jobs therefore do not wait for each other, except those of a tenant with a
  storage quota, which take the pool's lock.
- `core.checkpoints.storage_quota` decides what to charge.
"""

from __future__ import annotations

from sublet.core.checkpoints.storage_quota import Stored, over_storage, staying
from sublet.core.checkpoints.versions import Adoption
from sublet.core.errors import QuotaReached
from sublet.core.progress.effect import Commit
from sublet.ledger.rows import LEASE_BY_ID
from sublet.ledger.tx import Tx
from sublet.ledger.verbs.leasing.slices import load_tenant


def stored_bytes(tx: Tx, tenant: str) -> int:
    row = tx.row("SELECT coalesce(sum(stored_bytes), 0) FROM head WHERE tenant = ?", tenant)
    return int(row[0]) if row else 0


def refusal(tx: Tx, tenant: str, step: Commit) -> QuotaReached | None:
    """Called under the pool's lock, before the head moves."""
    if not step.new_bytes:
        return None
    known = load_tenant(tx, tenant)
    if known is None or not known.max_storage_bytes:
        return None
    return over_storage(known, stored_bytes(tx, tenant), step.new_bytes)


def charge(tx: Tx, job: str, version: int, saved: Commit | Adoption) -> None:
    """Charge the version the head has moved to."""
    if not saved.whole_bytes:
        return
    tx.run(
        "INSERT INTO stored_version (job, version, charged_bytes, whole_bytes) VALUES (?,?,?,?) "
        "ON CONFLICT (job, version) DO NOTHING",
        job,
        version,
        saved.new_bytes,
        saved.whole_bytes,
    )
    tx.run("UPDATE head SET stored_bytes = stored_bytes + ? WHERE job = ?", saved.new_bytes, job)


def trim(tx: Tx, job: str) -> None:
    """Give back what removed versions were charged for, unless another version still needs it."""
    rows = [
        Stored(version=r[0], charged_bytes=r[1], whole_bytes=r[2])
        for r in tx.rows("SELECT version, charged_bytes, whole_bytes FROM stored_version WHERE job = ?", job)
    ]
    if not rows:
        return
    head = tx.row("SELECT floor FROM head WHERE job = ?", job)
    kept = {r[0] for r in tx.rows("SELECT version FROM kept_version WHERE job = ?", job)}
    left = {row.version: row for row in staying(rows, head[0] if head else 0, kept)}
    for row in rows:
        now = left.get(row.version)
        if now is None:
            tx.run("DELETE FROM stored_version WHERE job = ? AND version = ?", job, row.version)
        elif now != row:
            tx.run(
                "UPDATE stored_version SET charged_bytes = ? WHERE job = ? AND version = ?",
                now.charged_bytes,
                job,
                row.version,
            )
    total = sum(row.charged_bytes for row in left.values())
    tx.run("UPDATE head SET stored_bytes = ? WHERE job = ?", total, job)


def begin_limiting(tx: Tx, tenant: str) -> None:
    """Called when a tenant gets a quota. Commits take no pool lock, so its leases are locked here: a commit
    locks its lease before it reads the quota, and none slips through."""
    for (lease_id,) in tx.rows(
        "SELECT id FROM lease WHERE settled_at = 0 AND tenant = ? ORDER BY id", tenant
    ):
        tx.locked(LEASE_BY_ID, lease_id)
