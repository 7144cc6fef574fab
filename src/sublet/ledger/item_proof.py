"""Reading what the proof of a queue rests on: the journal, and the rows of the queue, its clerks, leases and items, all of one moment.

Rules of this file:
- Rows are read one at a time and given to `core.item_proof`, which decides. Nothing here judges.
"""

from __future__ import annotations

from sublet.core.errors import NotFound
from sublet.core.item_proof import ClerkRow, ItemProof, ItemReplay, ItemRow, QueueRow
from sublet.core.journal import StrandEnd
from sublet.ledger.archive import Archive
from sublet.ledger.proof import every_entry, lease_row, unprovable
from sublet.ledger.pruning import mark_of
from sublet.ledger.queues import by_id
from sublet.ledger.tx import Row, Tx

_CLERKS = (
    "SELECT id, host, pid, opened_at, batch_new, published, completed, failed, stale, work_us, "
    "strand_seq, strand_hash, strand_anchor FROM clerk WHERE queue = ? ORDER BY id"
)
_ITEMS = (
    "SELECT id, state, delivery, failures, owner, published_at, done_at, work_us, result, error "
    "FROM item WHERE queue = ? ORDER BY id"
)


def prove_queue(tx: Tx, queue: int, archive: Archive) -> ItemProof | NotFound:
    """One walk over the journal and one over the items."""
    found = unprovable(tx, archive) or by_id(tx, queue)
    if isinstance(found, NotFound):
        return found
    paused = tx.row("SELECT paused FROM queue WHERE id = ?", queue)
    assert paused is not None
    replay = ItemReplay(
        QueueRow(
            id=found.id,
            tenant=found.tenant,
            name=found.name,
            terms=found.terms,
            paused=paused[0],
            created_at=found.created_at,
            purged=found.purged,
        ),
        gone_before=mark_of(tx).settled,
    )
    for entry in every_entry(tx, archive):
        replay.see(entry)
    pool = tx.row("SELECT journal_seq, journal_hash FROM pool WHERE id = 1")
    assert pool is not None
    replay.end_main(StrandEnd(pool[0], pool[1]))
    replay.match(map(ItemRow._make, tx.stream(_ITEMS, queue)))
    clerks = [_clerk_row(row) for row in tx.rows(_CLERKS, queue)]
    leases = [row for row in (lease_row(tx, lease) for lease in replay.wants_leases()) if row is not None]
    return replay.prove(clerks, leases)


def _clerk_row(row: Row) -> ClerkRow:
    return ClerkRow(
        id=row[0],
        host=row[1],
        pid=row[2],
        opened_at=row[3],
        batch_new=row[4],
        published=row[5],
        completed=row[6],
        failed=row[7],
        stale=row[8],
        work_us=row[9],
        end=StrandEnd(row[10], row[11]),
        anchor=row[12],
    )
