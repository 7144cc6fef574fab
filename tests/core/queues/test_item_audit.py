"""Stories of queues that no honest ledger tells, each chained correctly: the rules alone must see what is wrong (S1, S4, S6)."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import pytest

from sublet.core.journal.chain import GENESIS, MAIN, Entry, StrandEnd, body_text, entry_hash
from sublet.core.progress.effect import said
from sublet.core.queues.item_audit import MOST_FLAWS, ConsumerRow, ItemAudit, ItemProof, ItemRow, QueueRow
from sublet.core.queues.items import QueueTerms


class Forger:
    """Writes journal rows with good hashes, whatever they say, and keeps the consumers' counts as they do."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.ends: dict[str, StrandEnd] = {MAIN: StrandEnd(0, GENESIS)}
        self.anchors: dict[int, str] = {}
        self.items: dict[int, ItemRow] = {}
        self.counts: dict[int, dict[str, int]] = {}
        self.purged = 0
        terms = {"visibility_us": 60_000_000, "tries": 5, "losses": 20, "backoff_us": 1_000_000}
        self.write(MAIN, "queue.made", concurrency=0, **terms)
        for consumer in (1, 2):
            self.anchors[consumer] = self.write(
                MAIN, "consumer.opened", consumer=consumer, host="h", pid=consumer
            )
            self.ends[f"consumer:{consumer}"] = StrandEnd(0, self.anchors[consumer])
            names = ("published", "completed", "failed", "stale", "work_us", "batch_new")
            self.counts[consumer] = dict.fromkeys(names, 0)

    def write(self, strand: str, kind: str, **body: Any) -> str:
        end, text = self.ends[strand], body_text(body)
        at = len(self.entries) + 1
        digest = entry_hash(end.hash, strand, end.seq + 1, at, kind, "ada", "q", text)
        self.entries.append(Entry(strand, end.seq + 1, at, kind, "ada", "q", text, digest))
        self.ends[strand] = StrandEnd(end.seq + 1, digest)
        return digest

    def publish(self, *items: int, new: int | None = None) -> None:
        self.write("consumer:1", "items.published", count=len(items), new=len(items) if new is None else new)
        self.counts[1]["published"] += len(items) if new is None else new
        self.counts[1]["batch_new"] = len(items) if new is None else new
        for item in items:
            self.items[item] = ItemRow(item, "ready", 0, 0, 0, len(self.entries), 0, 0, "", "")

    def complete(
        self, consumer: int, *done: tuple[int, int], result: str = '"ok"', store: bool = True
    ) -> None:
        told = [[item, delivery, said("", result)[:16]] for item, delivery in done]
        self.write(f"consumer:{consumer}", "items.completed", done=told)
        self.counts[consumer]["completed"] += len(done)
        for item, delivery in done if store else ():
            self.counts[consumer]["work_us"] += 5
            self.items[item] = self.items[item]._replace(
                state="done",
                delivery=delivery,
                owner=consumer,
                done_at=len(self.entries),
                work_us=5,
                result=result,
            )

    def fail(self, consumer: int, item: int, delivery: int, state: str = "ready") -> None:
        self.write(f"consumer:{consumer}", "items.failed", failed=[[item, delivery, state]])
        self.counts[consumer]["failed"] += 1
        row = self.items[item]
        self.items[item] = row._replace(state=state, delivery=delivery, failures=row.failures + 1)

    def purge(self, *items: int, states: tuple[str, ...]) -> None:
        self.write(MAIN, "queue.purged", items=len(items), states=list(states), by="t")
        self.purged += len(items)
        for item in items:
            del self.items[item]

    def proof(self) -> ItemProof:
        replay = ItemAudit(
            QueueRow(
                id=1, tenant="ada", name="q", terms=QueueTerms(), paused=0, created_at=1, purged=self.purged
            )
        )
        for entry in self.entries:
            replay.see(entry)
        replay.end_main(self.ends[MAIN])
        replay.match(self.items[item] for item in sorted(self.items))
        consumers = [
            ConsumerRow(
                id=consumer,
                host="h",
                pid=consumer,
                opened_at=consumer + 1,
                end=self.ends[f"consumer:{consumer}"],
                anchor=self.anchors[consumer],
                **self.counts[consumer],
            )
            for consumer in (1, 2)
        ]
        return replay.prove(consumers, [])

    def flaws(self) -> list[str]:
        return [f"{f.row}: {f.rule} {f.what}" for f in self.proof().flaws]


@pytest.fixture
def told() -> Forger:
    forger = Forger()
    forger.publish(1, 2, 3, 4)
    forger.complete(1, (1, 1))
    return forger


def test_an_honest_story_is_proven(told: Forger) -> None:
    told.fail(2, 2, 1)
    told.complete(2, (2, 2), (3, 1))
    told.purge(4, states=("ready", "delayed"))
    proof = told.proof()
    assert proof.flaws == ()
    assert (proof.published, proof.completed, proof.done, proof.purged, proof.failed) == (4, 3, 3, 1, 1)


def test_an_item_completed_twice_is_named(told: Forger) -> None:
    told.complete(2, (1, 2), store=False)
    assert told.flaws() == [
        "item 1: S4 it was completed twice: delivery 1, consumer 1, and delivery 2, consumer 2"
    ]
    again = Forger()
    again.publish(1)
    again.complete(1, (1, 1))
    again.complete(1, (1, 1), store=False)  # the very same
    assert (
        "item 1: S4 it was completed twice: delivery 1, consumer 1, and delivery 1, consumer 1"
        in again.flaws()
    )


def test_also_when_its_row_was_purged(told: Forger) -> None:
    told.complete(2, (1, 2), store=False)
    told.purge(1, states=("done",))
    assert [f for f in told.flaws() if f.startswith("item 1: S4")]


def test_a_completed_delivery_is_the_last(told: Forger) -> None:
    told.fail(1, 2, 2)
    told.complete(2, (2, 1))
    assert told.flaws() == [
        "item 2: S6 it was completed (delivery 1, consumer 2), and also ended otherwise (delivery 2, consumer 1)"
    ]


def test_a_delivery_ends_once(told: Forger) -> None:
    told.fail(1, 2, 1)
    told.complete(1, (2, 1))
    assert told.flaws() == [
        "item 2: S6 it was completed (delivery 1, consumer 1), and also ended otherwise (delivery 1, consumer 1)"
    ]
    told.fail(1, 3, 1)
    told.fail(2, 3, 1)
    assert "item 3: S6 delivery 1 of it ended twice" in told.flaws()


def test_rows_that_the_journal_does_not_know(told: Forger) -> None:
    told.items[2] = told.items[1]._replace(id=2)
    assert told.flaws() == [
        "item 2: S1 it is done, and no consumer completed it",
    ]
    told.items[2] = told.items[3]._replace(id=2, state="dead")
    assert "item 2: S1 it is dead, and nothing in the journal let it die" in told.flaws()


def test_whose_it_was_and_what_it_died_of(told: Forger) -> None:
    """Named at the item, also where a sum that does not add up would show it too."""
    told.items[1] = told.items[1]._replace(owner=2)
    assert "item 1: S4 owner is 2, the journal says 1" in told.flaws()
    told.fail(1, 2, 1)
    told.items[2] = told.items[2]._replace(state="dead")
    assert "item 2: S1 it is dead, and nothing in the journal let it die" in told.flaws()


def test_what_was_published_adds_up(told: Forger) -> None:
    del told.items[4]
    assert told.flaws() == ["queue q: S1 4 items were published; 3 are there and 0 were purged"]


def test_what_died_adds_up(told: Forger) -> None:
    told.fail(1, 2, 1, state="dead")
    assert told.flaws() == []
    told.items[2] = told.items[2]._replace(state="ready")  # nobody redrove it
    assert told.flaws() == ["queue q: S1 1 dead items are not there any more; 0 of them were purged"]
    told.write(MAIN, "queue.redriven", items=1, by="t")
    assert told.flaws() == []


def test_a_purge_of_several_states_leaves_room_for_no_more_than_it_took(told: Forger) -> None:
    told.purge(1, 2, states=("done", "ready"))
    assert told.flaws() == []
    told.complete(1, (3, 1))
    told.complete(1, (4, 1))
    del told.items[3], told.items[4]
    assert "queue q: S1 3 completed items are not there any more; 0 to 2 of them were purged" in told.flaws()


@pytest.mark.parametrize(
    "body",
    [
        {"done": 7},
        {"done": [7]},
        {"done": [[1, 1]]},
        {"done": [[1, 1, "no digest"]]},
        {"done": [[-1, 1, "00"]]},
        {"done": [["1", 1, "00"]]},
        {"done": [[1 << 70, 1, "00"]]},
        {"done": [[1, 1, "f" * 17]]},
        {"done": [], "lease": 7},
        {},
    ],
)
def test_a_row_that_cannot_be_read_proves_nothing(told: Forger, body: dict[str, Any]) -> None:
    told.write("consumer:1", "items.completed", **body)
    assert any(flaw.startswith("journal consumer:1 #3: S7") for flaw in told.flaws())


def test_kinds_that_no_consumer_writes_and_leases_that_nobody_held(told: Forger) -> None:
    told.write("consumer:1", "items.invented")
    told.write("consumer:2", "items.completed", done=[], lease="L", epoch=3)
    assert told.flaws() == [
        "journal consumer:1 #3: S7 a consumer's strand has no rows of the kind 'items.invented'",
        "journal consumer:2 #1: S2 lease L, which committed it, was never granted, or was over",
    ]


def test_a_ruined_queue_does_not_fill_the_memory(told: Forger) -> None:
    told.publish(*range(10, 10 + 2 * MOST_FLAWS))
    for item in range(10, 10 + 2 * MOST_FLAWS):
        told.items[item] = told.items[item]._replace(state="done")
    proof = told.proof()
    assert len(proof.flaws) == MOST_FLAWS
    assert proof.more_flaws >= MOST_FLAWS


def test_memory_is_bounded_by_the_number_of_items_whatever_is_in_them() -> None:
    count, batch, result = 10_000, 50, "r" * 2000

    def entries() -> Any:
        told = Forger()
        told.write("consumer:1", "items.published", count=count, new=count)
        for first in range(1, count + 1, batch):
            yield from told.entries
            told.entries.clear()
            done = [[item, 1, said("", result)[:16]] for item in range(first, first + batch)]
            told.write("consumer:1", "items.completed", done=done)
        yield from told.entries

    def rows() -> Any:
        return (ItemRow(n, "done", 1, 0, 1, 4, 1, 0, "".join([result]), "") for n in range(1, count + 1))

    replay = ItemAudit(
        QueueRow(id=1, tenant="ada", name="q", terms=QueueTerms(), paused=0, created_at=1, purged=0)
    )
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for entry in entries():
            replay.see(entry)
        replay.match(rows())
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert (replay._told_done, replay._flaws.kept) == (count, [])
    assert peak / count < 110, f"{peak / count:.0f} bytes an item"
