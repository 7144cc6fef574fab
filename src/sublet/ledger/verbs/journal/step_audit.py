"""Reading what a proof rests on: the journal, and the rows of heads, effects and leases, all of one moment.

Rules of this file:
- Rows are read one at a time and given to `core.journal.step_audit`, which decides. Nothing here judges.
- A row that does not become a record is handed over as such: an audit must not stumble over what it is
  looking for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from sublet.core.checkpoints.versions import KeptVersion
from sublet.core.errors import NotFound
from sublet.core.journal.chain import StrandEnd, job_strand
from sublet.core.journal.replay import LeaseRow
from sublet.core.journal.step_audit import HeadRow, Proof, StepAudit
from sublet.core.progress.effect import Effect
from sublet.ledger.rows import (
    EFFECT_COLUMNS,
    HEAD_COLUMNS,
    LEASE_BY_ID,
    effect_of,
    head_of,
    lease_of,
    strand_end_of,
)
from sublet.ledger.tx import Row, Tx
from sublet.ledger.verbs.journal.archive import Archive
from sublet.ledger.verbs.journal.chain import main_end, stored
from sublet.ledger.verbs.journal.pruning import mark_of

_EFFECTS = f"SELECT {EFFECT_COLUMNS} FROM effect WHERE job = ?"


def unprovable(tx: Tx, archive: Archive) -> NotFound | None:
    """Why nothing can be proven: a proof begins at the first row, and a part is not proven by itself."""
    mark = mark_of(tx)
    if not mark.upto or archive:
        return None
    day = datetime.fromtimestamp(mark.before / 1e6, UTC).strftime("%Y-%m-%d")
    return NotFound(
        f"the journal was pruned before {day}: what happened until then is in its archive",
        remedy="give its folder, --archive FOLDER; 'sublet journal verify' verifies what is left without it",
    )


def prove(tx: Tx, jobs: Sequence[str], archive: Archive) -> list[Proof] | NotFound:
    """Prove these jobs, or all. One walk over the journal, and one over each job's own strand and effects."""
    missing = unprovable(tx, archive)
    if missing is not None:
        return missing
    audit = StepAudit(gone_before=mark_of(tx).settled)
    for entry in stored(tx, archive):
        audit.see(entry)
    audit.end_main(main_end(tx))
    heads = {row[0]: row for row in tx.rows(f"SELECT {HEAD_COLUMNS}, strand_anchor FROM head ORDER BY job")}
    for job in jobs:
        if job not in heads and job not in audit.jobs:
            return NotFound(
                f"nothing was committed as {job[:130]}", remedy="'sublet audit' without a name lists what was"
            )
    return [_of_one(tx, audit, job, heads.get(job), archive) for job in jobs or sorted({*heads, *audit.jobs})]


def _of_one(tx: Tx, audit: StepAudit, job: str, head: Row | None, archive: Archive) -> Proof:
    audit.match(
        job,
        stored(tx, archive, strand=job_strand(job)),
        _effects(tx, f"{_EFFECTS} AND completed = 1 ORDER BY version, key", job),
        _effects(tx, f"{_EFFECTS} AND completed <> 1 ORDER BY key", job),
    )
    kept = tx.rows("SELECT version, digest, step, tag FROM kept_version WHERE job = ?", job)
    return audit.prove(
        job,
        None
        if head is None
        else HeadRow(head=head_of(head), end=StrandEnd(head[8], head[9]), anchor=head[12]),
        [KeptVersion(version=r[0], digest=r[1], step=r[2], tag=r[3]) for r in kept],
        [row for row in (lease_row(tx, lease) for lease in audit.wants_leases(job)) if row is not None],
    )


def _effects(tx: Tx, sql: str, job: str) -> Iterator[Effect]:
    return map(effect_of, tx.stream(sql, job))


def lease_row(tx: Tx, lease_id: str) -> LeaseRow | None:
    row = tx.row(LEASE_BY_ID, lease_id)
    if row is None:
        return None
    try:
        lease = lease_of(row)
    except (KeyError, ValueError):
        lease = None
    return LeaseRow(id=lease_id, lease=lease, end=strand_end_of(row), anchor=row[39])


def list_effects(tx: Tx, job: str, after: str, limit: int) -> list[Effect]:
    found = tx.rows(f"{_EFFECTS} AND key > ? ORDER BY key LIMIT ?", job, after, limit)
    return [effect_of(row) for row in found]
