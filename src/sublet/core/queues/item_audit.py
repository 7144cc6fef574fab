"""Proving from the ledger alone that each item of a queue was done exactly once (S1, S4, S6, S7).

Rules of this file:
- It knows nothing of how an item is completed. The journal tells what the consumers did, and the rows of the
  queue, its consumers and its items must be exactly what that story ends with. Each difference is named.
- Journal rows come in stored order and item rows by number, one at a time. A few numbers of each delivery
  that ended are kept until its row comes: memory grows by less than 100 bytes an item, whatever is in it.
- Handing out is not journalled, because losing it only hands an item out again. What only a hand-out changes
  is no part of the proof.
"""

from __future__ import annotations

import json
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from sublet.core.journal.chain import MAIN, Chain, Entry, StrandEnd, consumer_strand
from sublet.core.journal.replay import (
    Flaw,
    FlawList,
    JournalReplay,
    LeaseRow,
    ReadAhead,
    RowBody,
    UnreadableRow,
    chain_flaws,
    differences,
    row_name,
)
from sublet.core.progress.effect import said
from sublet.core.queues.items import ItemState, QueueTerms

#: Columns an audit cannot check, each with the reason.
UNPROVEN: dict[str, dict[str, str]] = {
    "queue": {},
    "consumer": {
        "pid_started": "which process others look for; nothing was done with it",
        "pid_space": "where the pid means something",
        "batch": "the publisher's own count of its batches, which may leave numbers out",
        "tempo_slot": "for the rate",
        "tempo_count": "for the rate",
        "tempo_before": "for the rate",
    },
    "item": {
        "body": "what was published is not journalled, only how many",
        "key": "what was published is not journalled, only how many",
        "priority": "for the order",
        "place": "for the order",
        "visible_at": "for the order",
        "losses": "lost workers are not journalled until an item dies of them",
    },
}
#: The same for an item that is not done: neither handing out nor the text of an error is journalled.
UNPROVEN_UNTIL_DONE: dict[str, str] = {
    "id": "nothing was done with it yet, so no row of the journal names it",
    "state": "whether it is ready, delayed or with somebody; that it is neither done nor dead is proven",
    "owner": "who has it now",
    "delivery": "how often it was handed out; at least as often as the journal knows, and if dead, as often",
    "error": "why it failed is kept with the item only",
}

#: The most faults that are kept; the others are counted.
MOST_FLAWS = 1000
_TERMS = ("visibility_us", "tries", "losses", "backoff_us", "concurrency")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    id: int
    tenant: str
    name: str
    terms: QueueTerms
    paused: int
    created_at: int
    purged: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerRow:
    id: int
    host: str
    pid: int
    opened_at: int
    batch_new: int
    published: int
    completed: int
    failed: int
    stale: int
    work_us: int
    end: StrandEnd
    anchor: str


class ItemRow(NamedTuple):
    id: int
    state: str
    delivery: int
    failures: int
    owner: int
    published_at: int
    done_at: int
    work_us: int
    result: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemProof:
    """What the ledger shows of one queue. Proven when there is no flaw."""

    queue: str
    tenant: str
    published: int = 0
    completed: int = 0  # items, by the journal
    done: int = 0  # rows
    waiting: int = 0  # rows that are ready, delayed or with somebody
    dead: int = 0
    purged: int = 0
    failed: int = 0  # deliveries
    refused: int = 0  # late results
    redriven: int = 0
    consumers: int = 0
    leases: int = 0
    rows: int = 0  # of its consumers' strands
    began_at: int = 0
    completed_at: int = 0  # the last one
    flaws: tuple[Flaw, ...] = ()
    more_flaws: int = 0  # that were not kept

    @property
    def proven(self) -> bool:
        return not self.flaws


# --- what the journal tells ---------------------------------------------------------------------------------


class _How(IntEnum):
    """How a delivery ended."""

    COMPLETED = 0
    FAILED = 1
    DIED = 2  # failed once too often
    LOST = 3  # lost its worker once too often


class _End(NamedTuple):
    """One delivery that ended, as the journal tells it."""

    item: int
    delivery: int
    how: int
    consumer: int
    at: int
    digest: int

    def words(self) -> str:
        return f"delivery {self.delivery}, consumer {self.consumer}"


#: Big-endian, so that the packed ones sort as their numbers do.
_PACKED = struct.Struct(">QIBIQQ")


@dataclass(slots=True)
class _Consumer:
    """One consumer, as the journal has told it so far."""

    chain: Chain
    anchor: str
    host: str
    pid: int
    opened_at: int
    batch_new: int = 0
    published: int = 0
    completed: int = 0
    failed: int = 0
    stale: int = 0
    work_us: int = 0  # of the rows it completed
    rows: int = 0


class ItemAudit:
    """Takes every journal row, then the item rows; then gives the proof."""

    def __init__(self, queue: QueueRow, *, gone_before: int = 0) -> None:
        self._queue = queue
        self._name = f"queue {queue.name}"
        self._replay = JournalReplay({}, gone_before=gone_before)
        self._flaws = FlawList(MOST_FLAWS)
        self._consumers: dict[str, _Consumer] = {}
        self._leases: set[str] = set()
        self._ends: list[bytes] = []
        self._published_at = array("q")
        self._terms: tuple[object, ...] | None = None
        self._made_at = 0
        self._paused = 0
        self._purged: dict[frozenset[str], int] = {}
        self._redriven = 0
        self._completed_at = 0
        self._counts = dict.fromkeys((state.value for state in ItemState), 0)
        self._missing: list[int] = []  # completed and without a row; the first of them
        self._missing_done = 0
        self._told_done = 0
        self._told_dead = 0

    # the journal

    def see(self, entry: Entry) -> None:
        body = RowBody(entry)
        self._replay.see(entry, body)
        consumer = self._consumers.get(entry.strand)
        try:
            if consumer is not None:
                self._see_consumer(consumer, entry, body)
            elif entry.strand == MAIN and (entry.tenant, entry.subject) == (
                self._queue.tenant,
                self._queue.name,
            ):
                self._see_main(entry, body)
        except UnreadableRow as e:
            self._flaws.blame(row_name(entry), "S7", str(e))

    def end_main(self, end: StrandEnd) -> None:
        self._replay.end_main(end)

    def _see_main(self, entry: Entry, body: RowBody) -> None:
        if entry.kind not in _QUEUE_KINDS:
            return  # a lease or a job of the same name
        if entry.kind in ("queue.made", "queue.set"):
            if (self._terms is None) != (entry.kind == "queue.made"):
                self._flaws.blame(
                    row_name(entry), "S7", "the queue was made twice, or set before it was made"
                )
            self._terms = tuple(body.number(name) for name in _TERMS)
            self._made_at = self._made_at or entry.at
        elif entry.kind in ("queue.paused", "queue.resumed"):
            self._paused = int(entry.kind == "queue.paused")
        elif entry.kind == "queue.redriven":
            self._redriven += body.number("items")
        elif entry.kind == "queue.purged":
            states = body.get("states")
            if not isinstance(states, list):
                raise UnreadableRow("it does not say which states were purged")
            key = frozenset(map(str, states))
            self._purged[key] = self._purged.get(key, 0) + body.number("items")
        else:
            number = body.number("consumer")
            strand = consumer_strand(number)
            if strand in self._consumers:
                self._flaws.blame(row_name(entry), "S7", f"consumer {number} was opened twice")
            self._consumers[strand] = _Consumer(
                Chain(strand, entry.hash), entry.hash, body.text("host"), body.number("pid"), entry.at
            )

    def _see_consumer(self, consumer: _Consumer, entry: Entry, body: RowBody) -> None:
        self._flaws.add(chain_flaws(consumer.chain.add(entry)))
        consumer.rows += 1
        if (entry.tenant, entry.subject) != (self._queue.tenant, self._queue.name):
            self._flaws.blame(row_name(entry), "T1", f"it speaks of queue {entry.subject[:80]!r}")
        if entry.kind == "items.published":
            count, new = body.number("count"), body.number("new")
            if not 0 <= new <= count:
                raise UnreadableRow(f"{new} of {count} items cannot be new")
            consumer.published += new
            consumer.batch_new = new
            self._published_at.append(entry.at)
        elif entry.kind == "items.completed":
            self._fenced(entry, body)
            for item, delivery, digest in _triples(body.get("done")):
                self._keep(item, delivery, _How.COMPLETED, entry, _digest(digest))
                consumer.completed += 1
            self._completed_at = max(self._completed_at, entry.at)
        elif entry.kind == "items.failed":
            for item, delivery, state in _triples(body.get("failed")):
                self._keep(item, delivery, _How.DIED if state == "dead" else _How.FAILED, entry)
                consumer.failed += 1
        elif entry.kind == "items.dead":
            for item, delivery in _tuples(body.get("dead"), 2):
                self._keep(item, delivery, _How.LOST, entry)
        elif entry.kind == "items.refused":
            consumer.stale += sum(1 for _ in _tuples(body.get("refused"), 2))
        else:
            raise UnreadableRow(f"a consumer's strand has no rows of the kind {entry.kind[:40]!r}")

    def _fenced(self, entry: Entry, body: RowBody) -> None:
        if body.get("lease") is None:
            return
        lease = body.text("lease")
        self._leases.add(lease)
        for rule, what in self._replay.unfenced(lease, body.number("epoch"), entry.at):
            self._flaws.blame(row_name(entry), rule, what)

    def _keep(self, item: Any, delivery: Any, how: _How, entry: Entry, digest: int = 0) -> None:
        try:
            number = int(entry.strand.removeprefix("consumer:"))
            self._ends.append(_PACKED.pack(item, delivery, how, number, entry.at, digest))
        except struct.error:
            raise UnreadableRow(f"{item!r:.40}, {delivery!r:.40} is not an item's delivery") from None

    # the rows

    def match(self, rows: Iterable[ItemRow]) -> None:
        """Every row of the queue, by rising number."""
        self._ends.sort()
        self._published_at = array("q", sorted(self._published_at))
        ends = ReadAhead((_End(*found) for found in map(_PACKED.unpack, self._ends)), lambda end: end.item)
        for row in rows:
            while (number := ends.next_number) is not None and number < row.id:
                self._without_row(number, ends.of(number))
            self._with_row(row, ends.of(row.id))
        while (number := ends.next_number) is not None:
            self._without_row(number, ends.of(number))
        self._ends.clear()

    def _told(self, item: int, ends: Sequence[_End]) -> _End | None:
        """The delivery that completed it, if any. Each delivery ends once, and a completed one is the last
        (S6)."""
        done = [end for end in ends if end.how == _How.COMPLETED]
        self._told_dead += sum(end.how in (_How.DIED, _How.LOST) for end in ends)
        if not done:
            before = 0
            for end in ends:
                if end.delivery <= before:
                    self._flaws.blame(f"item {item}", "S6", f"delivery {end.delivery} of it ended twice")
                before = end.delivery
            return None
        self._told_done += 1
        if len(done) > 1:
            how = f"it was completed twice: {done[0].words()}, and {done[1].words()}"
            self._flaws.blame(f"item {item}", "S4", how)
        elif ends[-1] is not done[0] or len({end.delivery for end in ends}) != len(ends):
            other = next(end for end in reversed(ends) if end is not done[0])
            what = f"it was completed ({done[0].words()}), and also ended otherwise ({other.words()})"
            self._flaws.blame(f"item {item}", "S6", what)
        return done[0]

    def _without_row(self, item: int, ends: list[_End]) -> None:
        if self._told(item, ends) is not None:
            self._missing_done += 1
            if len(self._missing) < MOST_FLAWS:
                self._missing.append(item)

    def _with_row(self, row: ItemRow, ends: list[_End]) -> None:
        name = f"item {row.id}"
        done = self._told(row.id, ends)
        if row.state not in self._counts:
            self._flaws.blame(name, "S1", f"no item is {row.state[:40]!r}")
            return
        self._counts[row.state] += 1
        at = bisect_left(self._published_at, row.published_at)
        if at == len(self._published_at) or self._published_at[at] != row.published_at:
            self._flaws.blame(name, "S1", "nothing was published at the moment its row says")
        failed = sum(end.how in (_How.FAILED, _How.DIED) for end in ends)
        if row.failures != failed and not (self._redriven and 0 <= row.failures < failed):
            self._flaws.blame(
                name, "S1", f"failures is {row.failures}, the journal knows of {failed} failures"
            )
        if row.state == ItemState.DONE.value:
            self._done(name, row, done)
        else:
            self._not_done(name, row, ends, done)

    def _done(self, name: str, row: ItemRow, done: _End | None) -> None:
        if done is None:
            self._flaws.blame(name, "S1", "it is done, and no consumer completed it")
            return
        pairs = [
            ("delivery", row.delivery, done.delivery),
            ("owner", row.owner, done.consumer),
            ("done_at", row.done_at, done.at),
            ("error", row.error, ""),
        ]
        self._flaws.add(differences(name, "S4", pairs))
        if int(said("", row.result)[:16], 16) != done.digest:
            self._flaws.blame(name, "S4", "its result is not the one that was completed")
        consumer = self._consumers.get(consumer_strand(row.owner))
        if consumer is not None:
            consumer.work_us += row.work_us

    def _not_done(self, name: str, row: ItemRow, ends: Sequence[_End], done: _End | None) -> None:
        if done is not None:
            what = f"it was completed ({done.words()}), and its row says {row.state}"
            self._flaws.blame(name, "S6", what)
        pairs = [("result", row.result, ""), ("done_at", row.done_at, 0), ("work_us", row.work_us, 0)]
        self._flaws.add(differences(name, "S1", pairs))
        last = ends[-1] if ends else None
        if row.state == ItemState.DEAD.value:
            if last is None or last.how not in (_How.DIED, _How.LOST):
                self._flaws.blame(name, "S1", "it is dead, and nothing in the journal let it die")
            elif last.delivery != row.delivery:
                what = f"delivery is {row.delivery}, it died as delivery {last.delivery}"
                self._flaws.blame(name, "S1", what)
        elif last is not None and row.delivery < last.delivery:
            what = f"delivery is {row.delivery}, and delivery {last.delivery} ended already"
            self._flaws.blame(name, "S6", what)

    def wants_leases(self) -> list[str]:
        """The leases whose rows the proof rests on."""
        return sorted(self._leases)

    def prove(self, consumers: Sequence[ConsumerRow], leases: Sequence[LeaseRow]) -> ItemProof:
        self._compare_queue()
        self._compare_consumers(consumers)
        self._compare_counts()
        flaws = FlawList(MOST_FLAWS)
        flaws.add(self._replay.main_flaws.kept)
        flaws.add(self._flaws.kept)
        flaws.add(self._replay.match_leases(self.wants_leases(), leases))
        told = self._consumers.values()
        counts = self._counts
        return ItemProof(
            queue=self._queue.name,
            tenant=self._queue.tenant,
            published=sum(consumer.published for consumer in told),
            completed=self._told_done,
            done=counts["done"],
            waiting=counts["ready"] + counts["delayed"] + counts["leased"],
            dead=counts["dead"],
            purged=sum(self._purged.values()),
            failed=sum(consumer.failed for consumer in told),
            refused=sum(consumer.stale for consumer in told),
            redriven=self._redriven,
            consumers=len(told),
            leases=len(self._leases),
            rows=sum(consumer.rows for consumer in told),
            began_at=self._made_at,
            completed_at=self._completed_at,
            flaws=tuple(flaws.kept),
            more_flaws=flaws.more + self._flaws.more,
        )

    def _compare_queue(self) -> None:
        queue = self._queue
        if self._terms is None:
            self._flaws.blame(self._name, "S7", "no row of the main strand says that this queue was made")
            return
        pairs: list[tuple[str, object, object]] = [
            (name, getattr(queue.terms, name), told) for name, told in zip(_TERMS, self._terms, strict=True)
        ]
        pairs += [
            ("paused", queue.paused, self._paused),
            ("created_at", queue.created_at, self._made_at),
            ("purged", queue.purged, sum(self._purged.values())),
        ]
        self._flaws.add(differences(self._name, "A1", pairs))

    def _compare_consumers(self, rows: Sequence[ConsumerRow]) -> None:
        missing = dict(self._consumers)
        for row in rows:
            name = f"consumer {row.id}"
            told = missing.pop(consumer_strand(row.id), None)
            if told is None:
                self._flaws.blame(name, "S7", "no row of the main strand says that it was opened")
                continue
            pairs: list[tuple[str, object, object]] = [
                ("host", row.host, told.host),
                ("pid", row.pid, told.pid),
                ("opened_at", row.opened_at, told.opened_at),
                ("batch_new", row.batch_new, told.batch_new),
                ("published", row.published, told.published),
                ("completed", row.completed, told.completed),
                ("failed", row.failed, told.failed),
                ("stale", row.stale, told.stale),
                ("strand_anchor", row.anchor, told.anchor),
            ]
            self._flaws.add(differences(name, "A1", pairs))
            if row.work_us != told.work_us and not (
                self._may_be_purged("done") and row.work_us > told.work_us
            ):
                what = f"work_us is {row.work_us}, that of the items it completed adds up to {told.work_us}"
                self._flaws.blame(name, "T4", what)
            for fault in told.chain.close(row.end):
                self._flaws.blame(name, "S7", fault.what)
        for strand in missing:
            self._flaws.blame(strand.replace(":", " "), "S7", "it was opened, and its row is missing")

    def _compare_counts(self) -> None:
        """What the journal does not name one by one must add up."""
        published = sum(consumer.published for consumer in self._consumers.values())
        there, purged = sum(self._counts.values()), sum(self._purged.values())
        if published != there + purged:
            what = f"{published} items were published; {there} are there and {purged} were purged"
            self._flaws.blame(self._name, "S1", what)
        if self._missing_done and not self._may_be_purged("done"):
            for item in self._missing:
                self._flaws.blame(f"item {item}", "S1", "it was completed, and its row is missing")
        else:
            self._within("completed", self._missing_done, "done")
        self._within("dead", self._told_dead - self._redriven - self._counts["dead"], "dead")

    def _within(self, word: str, missing: int, state: str) -> None:
        least, most = self._purged.get(frozenset([state]), 0), self._may_be_purged(state)
        if not least <= missing <= most:
            purged = f"{least}" if least == most else f"{least} to {most}"
            what = f"{missing} {word} items are not there any more; {purged} of them were purged"
            self._flaws.blame(self._name, "S1", what)

    def _may_be_purged(self, state: str) -> int:
        """A purge of several states at once says how many in all."""
        return sum(count for states, count in self._purged.items() if state in states)


_QUEUE_KINDS = {
    "queue.made",
    "queue.set",
    "queue.paused",
    "queue.resumed",
    "queue.redriven",
    "queue.purged",
    "consumer.opened",
}


def _tuples(told: object, length: int) -> Iterator[list[Any]]:
    if not isinstance(told, list):
        raise UnreadableRow("it does not say its items, as rows of this version do")
    for one in told:
        if not isinstance(one, list) or len(one) != length:
            raise UnreadableRow(f"{json.dumps(one)[:40]} is not what it says of an item")
        yield one


def _triples(told: object) -> Iterator[list[Any]]:
    return _tuples(told, 3)


def _digest(text: object) -> int:
    try:
        return int(str(text), 16)
    except ValueError:
        raise UnreadableRow(f"{str(text)[:40]!r} is no digest") from None
