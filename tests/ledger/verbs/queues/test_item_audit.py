"""A proof of a queue from its rows (S1, S4, S6, S7), on both engines: an honest queue is proven, and what was done cannot be edited unseen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sublet.core.errors import NotFound, StaleDelivery
from sublet.core.leasing.lease import Holder
from sublet.core.queues.item_audit import UNPROVEN, UNPROVEN_UNTIL_DONE
from sublet.core.queues.items import Ack, ItemState, Nack, NewItem, QueueTerms
from sublet.ports.items import Delivery
from sublet.ports.ledger import LeaseKey
from tests.ledger.rig import SECOND, Rig

VISIBILITY = 10 * SECOND


def ack(given: Delivery, result: object = "ok") -> Ack:
    return Ack(item=given.item, delivery=given.delivery, result=json.dumps(result), work_us=1000 + given.item)


def complete(pool: Rig, consumer: int, *given: Delivery, lease: LeaseKey | None = None) -> list[Any]:
    acks = [ack(one, {"of": one.item}) for one in given]
    return pool.ledger.complete(consumer, acks, lease=lease)


def fail(pool: Rig, consumer: int, *given: Delivery) -> None:
    nacks = [
        Nack(item=one.item, delivery=one.delivery, failed=True, error="ZeroDivisionError: no", delay_us=0)
        for one in given
    ]
    assert pool.ledger.give_back(consumer, nacks) == [None] * len(nacks)


class Told:
    """A queue with everything that can happen to one: two consumers, a lease, failures, a death of each kind, a redrive, purges, a late result."""

    def __init__(self, pool: Rig) -> None:
        self.rig = pool
        ledger = pool.ledger
        pool.device()
        pool.tenant()
        self.queue = ledger.open_queue(
            "ada", "images", QueueTerms(tries=2, losses=2, visibility_us=VISIBILITY)
        ).id
        self.other = ledger.open_queue("ada", "other", None).id
        self.first = ledger.open_consumer(self.queue, Holder(host="node-a", pid=11))
        self.second = ledger.open_consumer(self.queue, Holder(host="node-b", pid=22))
        stranger = ledger.open_consumer(self.other, Holder(host="node-a", pid=33))
        ledger.publish(stranger, 1, [NewItem(body='"not of this queue"')])
        drafts = [NewItem(body=json.dumps(n), key=f"k{n}") for n in range(12)]
        ledger.publish(self.first, 1, drafts[:8])
        pool.advance(SECOND)
        ledger.publish(self.second, 1, [*drafts[6:], NewItem(body='"late"', delay_us=3600 * SECOND)])
        answer = pool.ask(10, job="infer")
        self.lease = answer
        taken = ledger.pull(self.first, 3, VISIBILITY)  # done under a lease
        assert complete(pool, self.first, *taken, lease=pool.key(answer)) == [None] * 3
        poison, shy = ledger.pull(self.first, 2, VISIBILITY)
        fail(pool, self.first, poison, shy)
        poison, shy = self._again(poison, shy)
        fail(pool, self.first, poison)  # and dies of it
        complete(pool, self.first, shy)
        self.poison, self.shy = poison.item, shy.item
        (lost,) = ledger.pull(
            self.first, 1, VISIBILITY
        )  # loses its worker twice and dies, the first one's result is late
        pool.advance(VISIBILITY + SECOND)
        (again,) = [g for g in ledger.pull(self.second, 9, VISIBILITY) if g.item == lost.item]
        assert isinstance(complete(pool, self.first, lost)[0], StaleDelivery)
        pool.advance(VISIBILITY + SECOND)
        given = ledger.pull(self.second, 2, VISIBILITY)
        assert lost.item not in [one.item for one in given]
        self.lost = again.item
        complete(pool, self.second, given[0])
        self.held = given[1].item
        self.done = taken[0].item

    def _again(self, *wanted: Delivery) -> tuple[Delivery, ...]:
        """Those that failed went to the end: take everything, keep these, give the others back untouched."""
        found = {one.item: one for one in self.rig.ledger.pull(self.first, 20, VISIBILITY)}
        mine = tuple(found.pop(one.item) for one in wanted)
        back = [Nack(item=one.item, delivery=one.delivery, failed=False) for one in found.values()]
        self.rig.ledger.give_back(self.first, back)
        return mine

    def flaws(self) -> list[str]:
        proof = self.rig.ledger.prove_queue(self.queue)
        return [f"{f.row}: {f.rule} {f.what}" for f in proof.flaws]


@pytest.fixture
def told(rig: Rig) -> Told:
    return Told(rig)


def test_an_honest_queue_is_proven(told: Told) -> None:
    proof = told.rig.ledger.prove_queue(told.queue)
    assert proof.flaws == ()
    assert (proof.queue, proof.tenant, proof.published, proof.consumers, proof.leases) == (
        "images",
        "ada",
        13,
        2,
        1,
    )
    assert (proof.completed, proof.done, proof.dead, proof.waiting) == (5, 5, 2, 6)
    assert (proof.failed, proof.refused, proof.redriven, proof.purged) == (3, 1, 0, 0)
    assert told.rig.ledger.prove_queue(told.other).flaws == ()
    assert told.rig.ledger.held_by(told.queue) == {told.second: 1}
    with pytest.raises(NotFound):
        told.rig.ledger.prove_queue(99)
    assert told.rig.faults() == []


def test_redriving_and_purging_are_part_of_the_story(told: Told) -> None:
    ledger = told.rig.ledger
    assert ledger.redrive(told.queue, [told.poison], most=10, actor="t") == 1
    assert told.flaws() == []
    (given,) = [g for g in ledger.pull(told.first, 20, VISIBILITY) if g.item == told.poison]
    fail(told.rig, told.first, given)
    assert ledger.item(told.queue, told.poison).failures == 1
    assert told.flaws() == []
    assert ledger.purge(told.queue, [ItemState.DEAD], most=10, actor="t") == 1
    assert told.flaws() == []
    assert ledger.purge(told.queue, [ItemState.DONE], most=2, actor="t") == 2
    assert told.flaws() == []
    assert ledger.purge(told.queue, list(ItemState), most=100, actor="t") == 10
    ledger.pause_queue(told.queue, paused=True, actor="t")
    ledger.open_queue("ada", "images", QueueTerms(tries=7))
    proof = ledger.prove_queue(told.queue)
    assert (proof.flaws, proof.published, proof.purged, proof.done, proof.completed) == ((), 13, 13, 0, 5)


def test_more_gone_than_was_purged_is_named(told: Told) -> None:
    ledger, sql = told.rig.ledger, told.rig.sql
    assert ledger.purge(told.queue, [ItemState.DONE], most=2, actor="t") == 2
    sql("DELETE FROM item WHERE id = ?", told.shy)
    assert told.flaws() == [
        "queue images: S1 13 items were published; 10 are there and 2 were purged",
        "queue images: S1 3 completed items are not there any more; 2 of them were purged",
    ]


def _columns(pool: Rig, table: str) -> list[str]:
    if pool.engine == "sqlite":
        return [r[1] for r in pool.sql(f"PRAGMA table_info({table})")]
    found = pool.sql(
        "SELECT column_name FROM information_schema.columns WHERE table_name = ? AND table_schema = ? ORDER BY ordinal_position",
        table,
        pool.schema.name,
    )
    return [r[0] for r in found]


def _edits(column: str, value: Any) -> Iterator[Any]:
    """What somebody might write there by hand."""
    if column == "state":
        waiting = value in ("ready", "delayed", "leased")  # which of these is not journalled
        yield from (
            s for s in ("ready", "done", "dead", "nothing") if s != value and not (waiting and s == "ready")
        )
    elif isinstance(value, int):
        yield value + 1
        if value > 0:
            yield value - 1
    elif isinstance(value, str):
        yield value + "x"
        if value:
            yield ""


def _unseen(told: Told, table: str, where: str, columns: list[str]) -> list[str]:
    """Each of these columns of these rows, one at a time: those that nobody noticed."""
    pool, unseen = told.rig, []
    every = _columns(pool, table)
    for row in pool.sql(f"SELECT * FROM {table} WHERE {where} ORDER BY id"):
        values = dict(zip(every, row, strict=True))
        for column in columns:
            for other in _edits(column, values[column]):
                if column == "id":
                    other = 10_000 + values["id"]
                pool.sql(f"UPDATE {table} SET {column} = ? WHERE id = ?", other, values["id"])
                if not told.flaws():
                    unseen.append(f"{table} {values['id']} {column}: {values[column]!r} became {other!r}")
                at = other if column == "id" else values["id"]
                pool.sql(f"UPDATE {table} SET {column} = ? WHERE id = ?", values[column], at)
    assert told.flaws() == []
    return unseen


def test_no_column_of_an_item_that_is_done_can_be_edited_unseen(told: Told) -> None:
    columns = _columns(told.rig, "item")
    assert set(UNPROVEN["item"]) | set(UNPROVEN_UNTIL_DONE) <= set(columns)
    proven = [c for c in columns if c not in UNPROVEN["item"]]
    assert _unseen(told, "item", f"queue = {told.queue} AND state = 'done'", proven) == []


def test_nor_what_the_journal_knows_of_the_others(told: Told) -> None:
    columns = _columns(told.rig, "item")
    without = {*UNPROVEN["item"], *UNPROVEN_UNTIL_DONE}
    proven = ["state", *(c for c in columns if c not in without)]
    assert _unseen(told, "item", f"queue = {told.queue} AND state <> 'done'", proven) == []
    assert _unseen(told, "item", f"id IN ({told.poison}, {told.lost})", ["delivery"]) == []  # the dead


@pytest.mark.parametrize("table", ["queue", "consumer"])
def test_no_column_of_the_queue_and_its_consumers_can_be_edited_unseen(told: Told, table: str) -> None:
    columns = _columns(told.rig, table)
    assert set(UNPROVEN[table]) <= set(columns)
    proven = [c for c in columns if c not in UNPROVEN[table] and (table, c) != ("queue", "id")]
    where = f"id = {told.queue}" if table == "queue" else f"queue = {told.queue}"
    assert _unseen(told, table, where, proven) == []


def test_no_row_can_be_taken_away_or_made_up(told: Told) -> None:
    pool = told.rig
    for table in ("item", "consumer"):
        columns = _columns(pool, table)
        listed, marks = ", ".join(columns), ", ".join("?" * len(columns))
        for row in pool.sql(f"SELECT * FROM {table} WHERE queue = ?", told.queue):
            pool.sql(f"DELETE FROM {table} WHERE id = ?", row[0])
            assert told.flaws(), f"{table} {row[0]} was taken away"
            pool.sql(f"INSERT INTO {table} ({listed}) VALUES ({marks})", *row)
            copy = {**dict(zip(columns, row, strict=True)), "id": 7777}
            if table == "item":
                copy["key"] = None
            pool.sql(f"INSERT INTO {table} ({listed}) VALUES ({marks})", *copy.values())
            assert told.flaws(), f"{table} {row[0]} was made twice"
            pool.sql(f"DELETE FROM {table} WHERE id = 7777")
    assert told.flaws() == []


def test_no_row_of_the_journal_can_be_edited_or_taken_away_unseen(told: Told) -> None:
    pool = told.rig
    strands = ("main", f"consumer:{told.first}", f"consumer:{told.second}")
    columns = _columns(pool, "journal")
    met: set[tuple[str, str]] = set()
    for row in pool.sql("SELECT * FROM journal ORDER BY id"):
        values = dict(zip(columns, row, strict=True))
        if values["strand"] not in strands:
            continue
        for column in [c for c in columns if c != "id" and (values["kind"], c) not in met]:
            met.add((values["kind"], column))
            other = values[column] + (1 if isinstance(values[column], int) else "x")
            pool.sql(f"UPDATE journal SET {column} = ? WHERE id = ?", other, values["id"])
            assert told.flaws(), f"{column} of {values['kind']}"
            pool.sql(f"UPDATE journal SET {column} = ? WHERE id = ?", values[column], values["id"])
        pool.sql("DELETE FROM journal WHERE id = ?", values["id"])
        assert told.flaws(), f"{values['kind']} was taken away"
        listed, marks = ", ".join(columns), ", ".join("?" * len(columns))
        pool.sql(f"INSERT INTO journal ({listed}) VALUES ({marks})", *row)
    assert told.flaws() == []


@pytest.mark.parametrize(("table", "column"), [(t, c) for t, columns in UNPROVEN.items() for c in columns])
def test_a_column_said_to_be_unproven_really_is(told: Told, table: str, column: str) -> None:
    """The list must not grow old: what can be checked does not belong on it."""
    number = told.done if table == "item" else told.first
    ((value,),) = told.rig.sql(f"SELECT {column} FROM {table} WHERE id = ?", number)
    other = value + (1 if isinstance(value, int) else "x")
    told.rig.sql(f"UPDATE {table} SET {column} = ? WHERE id = ?", other, number)
    assert told.flaws() == []


@pytest.mark.parametrize("column", list(UNPROVEN_UNTIL_DONE))
def test_a_column_said_to_be_unproven_until_it_is_done_really_is(told: Told, column: str) -> None:
    ((value,),) = told.rig.sql(f"SELECT {column} FROM item WHERE id = ?", told.held)
    other = {"id": 9999, "state": "ready"}.get(column) or value + (1 if isinstance(value, int) else "x")
    told.rig.sql(f"UPDATE item SET {column} = ? WHERE id = ?", other, told.held)
    assert told.flaws() == []


def test_each_flaw_names_its_row_and_what_is_wrong(told: Told) -> None:
    sql, name = told.rig.sql, f"item {told.done}"
    ((result, done_at),) = sql("SELECT result, done_at FROM item WHERE id = ?", told.done)
    sql("UPDATE item SET result = '\"better\"' WHERE id = ?", told.done)
    assert told.flaws() == [f"{name}: S4 its result is not the one that was completed"]
    sql("UPDATE item SET result = ?, delivery = 2 WHERE id = ?", result, told.done)
    assert told.flaws() == [f"{name}: S4 delivery is 2, the journal says 1"]
    sql("UPDATE item SET delivery = 1, state = 'ready', result = '' WHERE id = ?", told.done)
    found = told.flaws()
    assert f"{name}: S6 it was completed (delivery 1, consumer {told.first}), and its row says ready" in found
    assert f"{name}: S1 done_at is {done_at}, the journal says 0" in found
    proof = told.rig.ledger.prove_queue(told.queue)
    assert "backup" in proof.flaws[0].remedy
    sql("DELETE FROM item WHERE id = ?", told.done)
    assert f"{name}: S1 it was completed, and its row is missing" in told.flaws()


def test_a_lease_that_did_both_steps_and_items_is_proven(told: Told) -> None:
    """What a job's proof says of a lease counts the items that were completed under it."""
    pool = told.rig
    pool.commit(told.lease, 1, job="infer")
    pool.advance(SECOND)
    given = pool.ledger.pull(told.first, 1, VISIBILITY)
    assert complete(pool, told.first, *given, lease=pool.key(told.lease)) == [None]
    (proof,) = pool.ledger.prove("infer")
    assert proof.flaws == ()
    assert told.flaws() == []
    pool.sql("UPDATE lease SET committed_at = committed_at + 1 WHERE id = ?", told.lease.lease.id)
    assert pool.ledger.prove("infer")[0].flaws != ()
    assert told.flaws() != []
