"""Reads what proves a queue: the journal, and the rows of the queue, its consumers, leases and items.

Rules of this file:
- Rows are read one at a time and given to `core.queues.item_audit`, which decides. Nothing here judges.
"""

from __future__ import annotations

from sublet.core.errors import NotFound
from sublet.core.journal.chain import StrandEnd
from sublet.core.queues.item_audit import ConsumerRow, ItemAudit, ItemProof, ItemRow, QueueRow
from sublet.ledger.tx import Row, Tx
from sublet.ledger.verbs.journal.archive import Archive
from sublet.ledger.verbs.journal.chain import main_end, stored
from sublet.ledger.verbs.journal.pruning import mark_of
from sublet.ledger.verbs.journal.step_audit import lease_row, unprovable
from sublet.ledger.verbs.queues.queues import by_id

_CONSUMERS = (
    "SELECT id, host, pid, opened_at, batch_new, published, completed, failed, stale, work_us, "
    "strand_seq, strand_hash, strand_anchor FROM consumer WHERE queue = ? ORDER BY id"
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
    audit = ItemAudit(
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
    for entry in stored(tx, archive):
        audit.see(entry)
    audit.end_main(main_end(tx))
    audit.match(ItemRow(*row) for row in tx.stream(_ITEMS, queue))
    consumers = [_consumer_row(row) for row in tx.rows(_CONSUMERS, queue)]
    leases = [row for row in (lease_row(tx, lease) for lease in audit.wants_leases()) if row is not None]
    return audit.prove(consumers, leases)


def _consumer_row(row: Row) -> ConsumerRow:
    return ConsumerRow(
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
