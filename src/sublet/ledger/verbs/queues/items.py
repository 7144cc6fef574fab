"""Items: publishing, handing out, completing, giving back (S1, S4, S6).

Rules of this file:
- Completing writes result, state, the consumer's counts, the lease's sign of work and the journal row in one
  transaction.
- Rows are locked in one order: the lease, the consumer, the items by number. A pull skips locked items.
- Whoever pulls next acts on a visibility that ran out. Until then the item's consumer may still complete it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from sublet.core.errors import LeaseLost, NotFound, SubletError
from sublet.core.journal.chain import StrandEnd, consumer_strand
from sublet.core.leasing.lease import LeaseRecord, fence
from sublet.core.progress.effect import said
from sublet.core.queues.items import (
    Ack,
    Back,
    ItemFacts,
    ItemState,
    Nack,
    NewItem,
    QueueTerms,
    Tempo,
    counted,
    decide_loss,
    decide_nack,
    has_it,
    refusal,
    shortened,
    went_back,
)
from sublet.ledger.rows import LEASE_BY_ID, lease_of
from sublet.ledger.tx import Row, Tx, write_main, write_strand
from sublet.ledger.verbs.leasing.credentials import not_opened, proves
from sublet.ledger.verbs.queues.queues import HIDDEN, LEASED, by_id
from sublet.machine.failpoints import failpoint
from sublet.ports.bell import queue_topic
from sublet.ports.items import Delivery, Published
from sublet.ports.ledger import LeaseKey

#: The most lapsed and delayed items one pull brings back; the next pull brings more.
MOST_BROUGHT_BACK = 1000
_KEYS_AT_ONCE = 500

_DONE = (
    "UPDATE item SET state = 'done', result = ?, error = '', done_at = ?, work_us = ? "
    "WHERE id = ? AND queue = ? AND state = 'leased' AND owner = ? AND delivery = ?"
)
_ITEM = "SELECT id, state, delivery, owner, place, failures, losses FROM item WHERE id = ? AND queue = ?"


class _ConsumerRow:
    """A consumer's row, with what it needs of its queue. Made for every verb, so rarely used fields are read
    on demand."""

    __slots__ = ("_row", "batch", "batch_new", "consumer", "end", "name", "paused", "queue", "tenant")

    def __init__(self, consumer: int, row: Row) -> None:
        self.consumer = consumer
        self._row = row
        self.tenant, self.queue, self.name = row[:3]
        self.paused = bool(row[3])
        self.batch, self.batch_new = row[9:11]
        self.end = StrandEnd(row[14], row[15])

    @property
    def concurrency(self) -> int:
        return int(self._row[8])

    @property
    def terms(self) -> QueueTerms:
        _, _, _, _, visibility_us, tries, losses, backoff_us, concurrency, *_ = self._row
        return QueueTerms(
            visibility_us=visibility_us,
            tries=tries,
            losses=losses,
            backoff_us=backoff_us,
            concurrency=concurrency,
        )

    @property
    def tempo(self) -> Tempo:
        return Tempo(*self._row[11:14])

    def tell(self, tx: Tx, kind: str, body: dict[str, object]) -> None:
        self.end = write_strand(
            tx, consumer_strand(self.consumer), self.end, kind, self.tenant, self.name, body
        )

    def keep(self, tx: Tx, **more: int) -> None:
        """Write back where the strand stands, and add to the counts."""
        sets = "".join(f", {column} = {column} + ?" for column in more)
        tx.run(
            f"UPDATE consumer SET strand_seq = ?, strand_hash = ?{sets} WHERE id = ?",
            self.end.seq,
            self.end.hash,
            *more.values(),
            self.consumer,
        )


_CONSUMER_ROW = (
    "SELECT q.tenant, q.id, q.name, q.paused, q.visibility_us, q.tries, q.losses, q.backoff_us, "
    "q.concurrency, "
    "c.batch, c.batch_new, c.tempo_slot, c.tempo_count, c.tempo_before, c.strand_seq, c.strand_hash "
    "FROM consumer c JOIN queue q ON q.id = c.queue WHERE c.id = ?"
)


def _consumer_row(tx: Tx, consumer: int, *, lock: bool) -> _ConsumerRow | NotFound:
    row = tx.locked(_CONSUMER_ROW, consumer, of="c") if lock else tx.row(_CONSUMER_ROW, consumer)
    if row is None:
        return NotFound(
            f"there is no consumer {consumer}", remedy="open the queue again with sublet.queue(...)"
        )
    return _ConsumerRow(consumer, row)


def _item(tx: Tx, queue: int, item: int) -> ItemFacts | None:
    row = tx.locked(_ITEM, item, queue)
    if row is None:
        return None
    return _item_of(row)


def _item_of(row: Sequence[Any]) -> ItemFacts:
    return ItemFacts(
        id=row[0],
        state=ItemState(row[1]),
        delivery=row[2],
        owner=row[3],
        place=row[4],
        failures=row[5],
        losses=row[6],
    )


# --- publishing ---------------------------------------------------------------------------------------------


def publish(tx: Tx, consumer: int, batch: int, drafts: Sequence[NewItem]) -> Published | SubletError:
    consumer_row = _consumer_row(tx, consumer, lock=True)
    if isinstance(consumer_row, NotFound):
        return consumer_row
    if batch <= consumer_row.batch:  # its answer was lost
        new = consumer_row.batch_new if batch == consumer_row.batch else 0
    else:
        now = tx.now
        new = tx.run_many(
            "INSERT INTO item (queue, key, state, priority, visible_at, place, delivery, failures, losses, "
            "owner, published_at, "
            "done_at, work_us, body, result, error) VALUES (?,?,?,?,?,?,0,0,0,0,?,0,0,?,'','') ON CONFLICT "
            "DO NOTHING",
            [
                (
                    consumer_row.queue,
                    draft.key or None,
                    "delayed" if draft.delay_us else "ready",
                    draft.priority,
                    now + draft.delay_us,
                    now + draft.delay_us,
                    now,
                    draft.body,
                )
                for draft in drafts
            ],
        )
        failpoint("after_items_published")
        consumer_row.tell(tx, "items.published", {"count": len(drafts), "new": new})
        tx.run(
            "UPDATE consumer SET strand_seq = ?, strand_hash = ?, batch = ?, batch_new = ?, published = "
            "published + ? WHERE id = ?",
            consumer_row.end.seq,
            consumer_row.end.hash,
            batch,
            new,
            new,
            consumer,
        )
        tx.rings.add(queue_topic(consumer_row.queue))
    known = conflicts(tx, consumer_row.queue, drafts) if new < len(drafts) else ()
    return Published(new=new, duplicates=len(drafts) - new - len(known), conflicts=known)


def conflicts(tx: Tx, queue: int, drafts: Sequence[NewItem]) -> tuple[str, ...]:
    """The keys whose stored body differs from the draft's."""
    keys = sorted({draft.key for draft in drafts if draft.key})
    stored: dict[str, str] = {}
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        some = keys[start : start + _KEYS_AT_ONCE]
        marks = ",".join("?" * len(some))
        stored |= dict(
            tx.rows(
                f"SELECT key, body FROM item WHERE queue = ? AND key IS NOT NULL AND key IN ({marks})",
                queue,
                *some,
            )
        )
    return tuple(
        draft.key for draft in drafts if draft.key and stored.get(draft.key, draft.body) != draft.body
    )


# --- handing out --------------------------------------------------------------------------------------------


def pull(
    tx: Tx, consumer: int, most: int, visibility_us: int, holding: Sequence[int], *, lost: bool = False
) -> list[Delivery] | SubletError:
    """`lost`: the answer to an earlier try was lost."""
    consumer_row = _consumer_row(tx, consumer, lock=False)
    if isinstance(consumer_row, NotFound):
        return consumer_row
    if lost or tx.again:
        _return_unknown(tx, consumer_row, set(holding))
    if consumer_row.paused:
        return []
    if consumer_row.concurrency:
        # Counted under the queue's lock: two that pull at once must not both see the last place free.
        tx.locked("SELECT id FROM queue WHERE id = ?", consumer_row.queue)
    bring_back(tx, consumer_row)
    if consumer_row.concurrency:
        row = tx.row(f"SELECT count(*) FROM item WHERE queue = ? AND {LEASED}", consumer_row.queue)
        most = min(most, consumer_row.concurrency - (row[0] if row else 0))
    if most <= 0:
        return []
    found = tx.free_rows(
        "SELECT id, key, body, delivery + 1, failures, losses, priority, published_at FROM item "
        "WHERE queue = ? AND state = 'ready' ORDER BY priority DESC, place, id LIMIT ?",
        consumer_row.queue,
        most,
    )
    if found:
        until = tx.now + visibility_us
        tx.run_many(
            "UPDATE item SET state = 'leased', owner = ?, delivery = ?, visible_at = ? WHERE id = ?",
            [(consumer, row[3], until, row[0]) for row in found],
        )
    return [Delivery(row[0], row[1] or "", *row[2:]) for row in found]


def bring_back(tx: Tx, consumer_row: _ConsumerRow) -> None:
    """Make ready what was delayed and is due, and what its consumer has let run out."""
    now = tx.now
    due = tx.free_rows(
        "SELECT id, state, delivery, owner, place, failures, losses FROM item WHERE queue = ? AND "
        f"{HIDDEN} AND visible_at <= ? ORDER BY visible_at LIMIT ?",
        consumer_row.queue,
        now,
        MOST_BROUGHT_BACK,
    )
    if not due:
        return
    items = [_item_of(row) for row in due]
    tx.run_many(
        "UPDATE item SET state = 'ready' WHERE id = ?",
        [(item.id,) for item in items if item.state is ItemState.DELAYED],
    )
    _lose(
        tx,
        consumer_row.terms,
        consumer_row.consumer,
        [item for item in items if item.state is ItemState.LEASED],
    )


def _lose(tx: Tx, terms: QueueTerms, teller: int, items: Sequence[ItemFacts]) -> None:
    """Count a loss for each item. Whoever noticed journals which items died of it."""
    now = tx.now
    dead: list[ItemFacts] = []
    rows: list[tuple[object, ...]] = []
    for item in items:
        back = decide_loss(item, terms, now)
        rows.append((back.state.value, back.losses, back.visible_at, back.why, back.why, item.id))
        if back.state is ItemState.DEAD:
            dead.append(item)
    if rows:
        tx.run_many(
            "UPDATE item SET state = ?, losses = ?, visible_at = ?, error = CASE WHEN ? = '' THEN error "
            "ELSE ? END WHERE id = ?",
            rows,
        )
    if dead:
        consumer_row = _consumer_row(tx, teller, lock=True)
        if isinstance(consumer_row, _ConsumerRow):
            consumer_row.tell(tx, "items.dead", {"dead": [[item.id, item.delivery] for item in dead]})
            consumer_row.keep(tx)


def _return_unknown(tx: Tx, consumer_row: _ConsumerRow, known: set[int]) -> None:
    """Return items that were handed out in a lost answer: nobody would work on them for a whole
    visibility."""
    for (item,) in tx.rows(
        f"SELECT id FROM item WHERE queue = ? AND {LEASED} AND owner = ? ORDER BY id",
        consumer_row.queue,
        consumer_row.consumer,
    ):
        if item not in known:
            tx.run(
                "UPDATE item SET state = 'ready' WHERE id = ? AND state = 'leased' AND owner = ?",
                item,
                consumer_row.consumer,
            )


def extend(
    tx: Tx, consumer: int, held: Sequence[tuple[int, int]], visibility_us: int
) -> set[int] | SubletError:
    until = tx.now + visibility_us
    return {
        item
        for item, delivery in sorted(held)
        if not tx.run(
            "UPDATE item SET visible_at = ? WHERE id = ? AND state = 'leased' AND owner = ? AND delivery = ?",
            until,
            item,
            consumer,
            delivery,
        )
    }


# --- ending -------------------------------------------------------------------------------------------------


def told_done(acks: Sequence[Ack], lease: LeaseKey | None) -> dict[str, object]:
    """The journal's record of results: each delivery, and a digest that an edit would not fit."""
    body: dict[str, object] = {"done": [[ack.item, ack.delivery, said("", ack.result)[:16]] for ack in acks]}
    if lease is not None:
        body |= {"lease": lease.lease_id, "epoch": lease.epoch}
    return body


def complete(
    tx: Tx, consumer: int, acks: Sequence[Ack], key: LeaseKey | None
) -> list[SubletError | None] | SubletError:
    lease: LeaseRecord | None = None
    if key is not None:
        row = tx.locked(LEASE_BY_ID, key.lease_id)
        if row is None or not proves(row, key.secret):
            return not_opened(key.lease_id)
        lease = lease_of(row)
    consumer_row = _consumer_row(tx, consumer, lock=True)
    if isinstance(consumer_row, NotFound):
        return consumer_row
    if lease is not None and lease.tenant != consumer_row.tenant:
        return NotFound(f"tenant {lease.tenant} has no queue {consumer_row.name}")
    now = tx.now
    if key is not None and lease is not None:
        why = fence(lease, key.epoch, now)
        if why:
            return LeaseLost(
                f"{why}: no result was stored, the items are available again",
                remedy="nothing to do: another lease works on them",
            )
    ordered = sorted(acks, key=attrgetter("item"))
    values = [
        (ack.result, now, ack.work_us, ack.item, consumer_row.queue, consumer, ack.delivery)
        for ack in ordered
    ]
    done, refused = ordered, []
    answers: dict[int, SubletError | None] = {}
    if not tx.run_all(_DONE, values):
        done = []
        for ack, row in zip(ordered, values, strict=True):
            if tx.run(_DONE, *row):
                done.append(ack)
            else:
                answers[ack.item] = refusal(_item(tx, consumer_row.queue, ack.item), consumer, ack.delivery)
        refused = [ack for ack in ordered if answers.get(ack.item) is not None]
    failpoint("after_items_done")
    if done:
        consumer_row.tell(tx, "items.completed", told_done(done, key))
    if refused:
        consumer_row.tell(tx, "items.refused", {"refused": [[ack.item, ack.delivery] for ack in refused]})
    tempo = counted(consumer_row.tempo, now, len(done))
    tx.run(
        "UPDATE consumer SET strand_seq = ?, strand_hash = ?, completed = completed + ?, stale = stale + "
        "?, work_us = work_us + ?, "
        "tempo_slot = ?, tempo_count = ?, tempo_before = ? WHERE id = ?",
        consumer_row.end.seq,
        consumer_row.end.hash,
        len(done),
        len(refused),
        sum(ack.work_us for ack in done),
        tempo.slot,
        tempo.count,
        tempo.before,
        consumer,
    )
    if key is not None and done:
        tx.run(
            "UPDATE lease SET committed_at = ?, active_at = ? WHERE id = ? AND epoch = ?",
            now,
            now,
            key.lease_id,
            key.epoch,
        )
    return [answers.get(ack.item) for ack in acks]


def give_back(tx: Tx, consumer: int, nacks: Sequence[Nack]) -> list[SubletError | None] | SubletError:
    consumer_row = _consumer_row(tx, consumer, lock=True)
    if isinstance(consumer_row, NotFound):
        return consumer_row
    now = tx.now
    answers: dict[int, SubletError | None] = {}
    failed: list[list[object]] = []
    for nack in sorted(nacks, key=lambda n: n.item):
        item = _item(tx, consumer_row.queue, nack.item)
        if item is None or not has_it(item, consumer, nack.delivery):
            before = tx.again and went_back(
                item, consumer, nack.delivery
            )  # the answer to an earlier try was lost
            answers[nack.item] = None if before else refusal(item, consumer, nack.delivery)
            continue
        back = decide_nack(item, nack, consumer_row.terms, now)
        _put_back(tx, item, nack, back)
        answers[nack.item] = None
        if nack.failed:
            failed.append([item.id, item.delivery, back.state.value])
    if failed:
        consumer_row.tell(tx, "items.failed", {"failed": failed})
        consumer_row.keep(tx, failed=len(failed))
    if any(answer is None for answer in answers.values()):
        tx.rings.add(queue_topic(consumer_row.queue))
    return [answers[nack.item] for nack in nacks]


def _put_back(tx: Tx, item: ItemFacts, nack: Nack, back: Back) -> None:
    error = shortened(nack.error)
    tx.run(
        "UPDATE item SET state = ?, visible_at = ?, place = ?, failures = ?, losses = ?, "
        "error = CASE WHEN ? = '' THEN error ELSE ? END WHERE id = ?",
        back.state.value,
        back.visible_at,
        back.place,
        back.failures,
        back.losses,
        error,
        error,
        item.id,
    )


def end_consumer(tx: Tx, consumer: int) -> int | SubletError:
    consumer_row = _consumer_row(tx, consumer, lock=True)
    if isinstance(consumer_row, NotFound):
        return consumer_row
    rows = tx.free_rows(
        "SELECT id, state, delivery, owner, place, failures, losses FROM item WHERE queue = ? AND "
        f"{LEASED} AND owner = ?",
        consumer_row.queue,
        consumer,
    )
    _lose(tx, consumer_row.terms, consumer, [_item_of(row) for row in rows])
    if rows:
        tx.rings.add(queue_topic(consumer_row.queue))
    return len(rows)


# --- operators ----------------------------------------------------------------------------------------------


def redrive(tx: Tx, queue: int, items: Sequence[int] | None, most: int, actor: str) -> int | SubletError:
    found = by_id(tx, queue)
    if isinstance(found, NotFound):
        return found
    if items is None:
        wanted = [
            row[0]
            for row in tx.free_rows(
                "SELECT id FROM item WHERE queue = ? AND state = 'dead' ORDER BY id LIMIT ?", queue, most
            )
        ]
    else:
        wanted = sorted(set(items))
    moved = (
        tx.run_many(
            "UPDATE item SET state = 'ready', failures = 0, losses = 0, place = ?, visible_at = ? "
            "WHERE id = ? AND queue = ? AND state = 'dead'",
            [(tx.now, tx.now, item, queue) for item in wanted],
        )
        if wanted
        else 0
    )
    if moved:
        write_main(tx, "queue.redriven", found.tenant, found.name, {"items": moved, "by": actor})
        tx.rings.add(queue_topic(queue))
    return moved


def purge(tx: Tx, queue: int, states: Sequence[ItemState], most: int, actor: str) -> int | SubletError:
    found = by_id(tx, queue)
    if isinstance(found, NotFound):
        return found
    gone = 0
    for state in states:
        where = f"state = '{state.value}'"
        if state in (ItemState.DELAYED, ItemState.LEASED):
            where = f"{HIDDEN} AND {where}"
        rows = tx.free_rows(f"SELECT id FROM item WHERE queue = ? AND {where} LIMIT ?", queue, most - gone)
        if rows:
            gone += tx.run_many("DELETE FROM item WHERE id = ?", rows)
        if gone >= most:
            break
    if gone:
        tx.run("UPDATE queue SET purged = purged + ? WHERE id = ?", gone, queue)
        write_main(
            tx,
            "queue.purged",
            found.tenant,
            found.name,
            {"items": gone, "states": [state.value for state in states], "by": actor},
        )
    return gone
