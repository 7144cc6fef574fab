"""Queues and consumers: their rows, their counts, and looking at items.

Rules of this file:
- Each consumer counts in its own row; the counts are added up when somebody asks.
- Counting or listing items of one state uses an index, and never reads the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from sublet.core.errors import NotFound
from sublet.core.leasing.lease import Holder
from sublet.core.queues.items import ItemState, QueueTerms, Tempo, per_second
from sublet.ledger.tx import Row, Tx, write_main
from sublet.ports.bell import queue_topic
from sublet.ports.items import ConsumerRecord, ItemRecord, QueueRecord, QueueStats

QUEUE_COLUMNS = (
    "id, tenant, name, paused, visibility_us, tries, losses, backoff_us, concurrency, created_at, purged"
)
CONSUMER_COLUMNS = (
    "id, queue, host, pid, pid_started, pid_space, opened_at, published, completed, failed, stale, work_us, "
    "tempo_slot, tempo_count, tempo_before"
)
ITEM_COLUMNS = (
    "id, key, state, priority, visible_at, place, delivery, failures, losses, owner, body, result, error, "
    "published_at, done_at, work_us"
)
_KEYS_AT_ONCE = 500
#: Delayed and leased items share one index. The planner uses it when a statement names both states.
HIDDEN = "state IN ('delayed', 'leased')"
LEASED = f"{HIDDEN} AND state = 'leased'"


def queue_of(row: Row) -> QueueRecord:
    return QueueRecord(
        id=row[0],
        tenant=row[1],
        name=row[2],
        paused=bool(row[3]),
        terms=QueueTerms(
            visibility_us=row[4], tries=row[5], losses=row[6], backoff_us=row[7], concurrency=row[8]
        ),
        created_at=row[9],
        purged=row[10],
    )


def consumer_of(row: Row) -> ConsumerRecord:
    return ConsumerRecord(
        id=row[0],
        queue=row[1],
        host=row[2],
        pid=row[3],
        started=row[4],
        pid_space=row[5],
        opened_at=row[6],
        published=row[7],
        completed=row[8],
        failed=row[9],
        stale=row[10],
        work_us=row[11],
        tempo=Tempo(*row[12:15]),
    )


def item_of(row: Row) -> ItemRecord:
    return ItemRecord(row[0], row[1] or "", ItemState(row[2]), *row[3:])


# --- queues -------------------------------------------------------------------------------------------------


def open_queue(tx: Tx, tenant: str, name: str, terms: QueueTerms | None) -> QueueRecord:
    found = _find(tx, tenant, name)
    if found is not None and terms in (None, found.terms):
        return found
    _ = tx.pool  # locked, so that two processes do not both create it
    found = _find(tx, tenant, name)
    wanted = terms or (found.terms if found else QueueTerms())
    values = (wanted.visibility_us, wanted.tries, wanted.losses, wanted.backoff_us, wanted.concurrency)
    if found is None:
        tx.run(
            "INSERT INTO queue (tenant, name, paused, visibility_us, tries, losses, backoff_us, "
            "concurrency, created_at, purged) "
            "VALUES (?,?,0,?,?,?,?,?,?,0)",
            tenant,
            name,
            *values,
            tx.now,
        )
    elif wanted != found.terms:
        tx.run(
            "UPDATE queue SET visibility_us = ?, tries = ?, losses = ?, backoff_us = ?, concurrency = ? "
            "WHERE id = ?",
            *values,
            found.id,
        )
    else:
        return found
    kind = "queue.made" if found is None else "queue.set"
    told = dict(zip(("visibility_us", "tries", "losses", "backoff_us", "concurrency"), values, strict=True))
    write_main(tx, kind, tenant, name, dict(told))
    made = _find(tx, tenant, name)
    assert made is not None
    return made


def _find(tx: Tx, tenant: str, name: str) -> QueueRecord | None:
    row = tx.row(f"SELECT {QUEUE_COLUMNS} FROM queue WHERE tenant = ? AND name = ?", tenant, name)
    return queue_of(row) if row else None


def get_queue(tx: Tx, tenant: str, name: str) -> QueueRecord | NotFound:
    found = _find(tx, tenant, name)
    if found is not None:
        return found
    known = [queue.name for queue in list_queues(tx, tenant)]
    known.sort(
        key=lambda other: -SequenceMatcher(None, name, other).ratio()
    )  # the one that was meant is first
    shown = ", ".join(known[:10]) + (" …" if len(known) > 10 else "")
    return NotFound(
        f"tenant {tenant} has no queue {name[:80]}",
        remedy=f"there are: {shown}"
        if known
        else f"publish to it first: 'sublet queue publish {name[:80]} …'",
    )


def list_queues(tx: Tx, tenant: str) -> list[QueueRecord]:
    return [
        queue_of(row)
        for row in tx.rows(f"SELECT {QUEUE_COLUMNS} FROM queue WHERE tenant = ? ORDER BY name", tenant)
    ]


def by_id(tx: Tx, queue: int) -> QueueRecord | NotFound:
    row = tx.row(f"SELECT {QUEUE_COLUMNS} FROM queue WHERE id = ?", queue)
    return queue_of(row) if row else NotFound(f"there is no queue number {queue}")


def pause_queue(tx: Tx, queue: int, paused: bool, actor: str) -> NotFound | None:
    found = by_id(tx, queue)
    if isinstance(found, NotFound):
        return found
    if found.paused != paused:
        tx.run("UPDATE queue SET paused = ? WHERE id = ?", int(paused), queue)
        write_main(tx, "queue.paused" if paused else "queue.resumed", found.tenant, found.name, {"by": actor})
        tx.rings.add(queue_topic(queue))
    return None


def stats(tx: Tx, queue: int) -> QueueStats | NotFound:
    found = by_id(tx, queue)
    if isinstance(found, NotFound):
        return found

    def count(where: str) -> int:
        row = tx.row(f"SELECT count(*) FROM item WHERE queue = ? AND {where}", queue)
        return int(row[0]) if row else 0

    oldest = tx.row("SELECT min(place) FROM item WHERE queue = ? AND state = 'ready'", queue)
    told = consumers(tx, queue)
    return QueueStats(
        at=tx.now,
        ready=count("state = 'ready'"),
        delayed=count(f"{HIDDEN} AND state = 'delayed'"),
        leased=count(LEASED),
        done=count("state = 'done'"),
        dead=count("state = 'dead'"),
        oldest_at=(oldest[0] or 0) if oldest else 0,
        published=sum(c.published for c in told),
        completed=sum(c.completed for c in told),
        failed=sum(c.failed for c in told),
        stale=sum(c.stale for c in told),
        purged=found.purged,
        work_us=sum(c.work_us for c in told),
        rate=sum(per_second(c.tempo, tx.now) for c in told),
        workers=len(consumers_at_work(tx, queue)),
    )


# --- consumers ----------------------------------------------------------------------------------------------


def open_consumer(tx: Tx, queue: int, holder: Holder, pid_space: int) -> int | NotFound:
    _ = tx.pool
    found = by_id(tx, queue)
    if isinstance(found, NotFound):
        return found
    row = tx.row(
        "INSERT INTO consumer (queue, host, pid, pid_started, pid_space, opened_at, batch, batch_new, "
        "published, completed, failed, stale, "
        "work_us, tempo_slot, tempo_count, tempo_before, strand_seq, strand_hash, strand_anchor) "
        "VALUES (?,?,?,?,?,?,0,0,0,0,0,0,0,0,0,0,0,'','') RETURNING id",
        queue,
        holder.host,
        holder.pid,
        holder.started,
        pid_space,
        tx.now,
    )
    assert row is not None
    anchor = write_main(
        tx,
        "consumer.opened",
        found.tenant,
        found.name,
        {"consumer": row[0], "host": holder.host, "pid": holder.pid},
    )
    tx.run("UPDATE consumer SET strand_hash = ?, strand_anchor = ? WHERE id = ?", anchor, anchor, row[0])
    return int(row[0])


def consumers(tx: Tx, queue: int) -> list[ConsumerRecord]:
    return [
        consumer_of(row)
        for row in tx.rows(f"SELECT {CONSUMER_COLUMNS} FROM consumer WHERE queue = ? ORDER BY id", queue)
    ]


def consumers_at_work(tx: Tx, queue: int) -> list[ConsumerRecord]:
    return [
        consumer_of(row)
        for row in tx.rows(
            f"SELECT {CONSUMER_COLUMNS} FROM consumer "
            f"WHERE id IN (SELECT owner FROM item WHERE queue = ? AND {LEASED}) ORDER BY id",
            queue,
        )
    ]


def held_by(tx: Tx, queue: int) -> dict[int, int]:
    return dict(
        tx.rows(f"SELECT owner, count(*) FROM item WHERE queue = ? AND {LEASED} GROUP BY owner", queue)
    )


# --- looking at items ---------------------------------------------------------------------------------------

#: Where a listing starts, and in which order it goes, is given by the index of the state.
_LISTED = {
    ItemState.READY: "state = 'ready' AND id > ? ORDER BY priority DESC, place, id",
    ItemState.DELAYED: f"{HIDDEN} AND state = 'delayed' AND id > ? ORDER BY visible_at, id",
    ItemState.LEASED: f"{LEASED} AND id > ? ORDER BY visible_at, id",
    ItemState.DONE: "state = 'done' AND id > ? ORDER BY id",
    ItemState.DEAD: "state = 'dead' AND id > ? ORDER BY id",
}


def list_items(tx: Tx, queue: int, state: ItemState, after: int, limit: int) -> list[ItemRecord]:
    return [
        item_of(row)
        for row in tx.rows(
            f"SELECT {ITEM_COLUMNS} FROM item WHERE queue = ? AND {_LISTED[state]} LIMIT ?",
            queue,
            after,
            limit,
        )
    ]


def get_item(tx: Tx, queue: int, item: int) -> ItemRecord | NotFound:
    row = tx.row(f"SELECT {ITEM_COLUMNS} FROM item WHERE id = ? AND queue = ?", item, queue)
    if row is None:
        return NotFound(
            f"the queue has no item {item}", remedy="'sublet queue peek QUEUE' shows some that it has"
        )
    return item_of(row)


def by_key(tx: Tx, queue: int, keys: Sequence[str]) -> list[ItemRecord]:
    found: list[ItemRecord] = []
    for start in range(0, len(keys), _KEYS_AT_ONCE):
        some = keys[start : start + _KEYS_AT_ONCE]
        rows = tx.rows(
            f"SELECT {ITEM_COLUMNS} FROM item WHERE queue = ? AND key IS NOT NULL AND key IN "
            f"({','.join('?' * len(some))})",
            queue,
            *some,
        )
        found += [item_of(row) for row in rows]
    return found
