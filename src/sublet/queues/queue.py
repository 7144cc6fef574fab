"""A queue as its users see it: publish, pull, complete, results.

Rules of this file:
- The ledger's queue is the truth. With a broker, what comes from there becomes an item first and is settled
  there afterwards; with a sink, a result is stored there first and acknowledged here afterwards. A crash
  between the two is a duplicate later, never a loss.
- Items go to and come from the ledger in batches, and never more than a batch of them is in memory.
- A consumer is opened at the first use, by each process for itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sublet.core.errors import (
    BadInput,
    FingerprintMismatch,
    NotFound,
    NotJson,
    StaleDelivery,
    SubletError,
    TooLarge,
)
from sublet.core.leasing.lease import Holder
from sublet.core.queues.items import (
    Ack,
    ItemState,
    Nack,
    NewItem,
    QueueTerms,
    check_visibility,
    check_whole,
    from_text,
    to_text,
)
from sublet.core.values import check_name, parse_duration
from sublet.leases.lease import Lease
from sublet.ports.bell import Bell, queue_topic
from sublet.ports.broker import Broker
from sublet.ports.clock import Clock
from sublet.ports.items import ConsumerRecord, ItemRecord, Published, QueueRecord, QueueStats
from sublet.ports.ledger import Ledger
from sublet.ports.sink import Made, Sink
from sublet.queues.drafts import PUBLISHED_AT_ONCE, Key, batches, drafts_of
from sublet.queues.intake import BrokerIntake
from sublet.queues.item import Item, PulledItems

LISTED_AT_ONCE = 1000
#: The first page of a listing is small, because the size of the items is not known yet; later pages are about
#: so many bytes.
LISTED_FIRST = 16
LISTED_BYTES = 4 << 20
PURGED_AT_ONCE = 10_000
#: A pull that waits looks this often, even when no bell rings.
LOOK_US = 1_000_000
#: Whether a consumer of this host that has items is alive is asked no more often than this.
ALIVE_US = 1_000_000
#: How long one question to a broker waits there when nothing else is available.
BROKER_WAIT_US = 200_000


@dataclass(frozen=True, slots=True)
class ItemResult:
    """The outcome of one item."""

    id: int
    key: str
    body: Any
    value: Any
    done_at: int
    work_us: int
    delivery: int


@dataclass(frozen=True, slots=True)
class ConsumerIdentity:
    """What a queue needs to know of the process and host it is used on."""

    holder: Callable[[], Holder]  # this process, as others on this host can look it up
    pid_space: int
    alive: Callable[[ConsumerRecord], bool]  # False only for one of this host that is surely gone


class Queue:
    """What `sublet.queue(...)` returns. Nothing is asked of the ledger until it is used."""

    def __init__(
        self,
        name: str,
        tenant: str,
        ledger: Callable[[], Ledger],
        clock: Clock,
        identity: ConsumerIdentity,
        *,
        terms: Callable[[QueueTerms], QueueTerms] | None = None,
        sink: Sink | None = None,
        broker: Callable[[], Broker] | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = check_name(name, what="queue")
        self.tenant = tenant
        self.lease: Lease | None = None  # with one, nothing is completed unless it is alive
        self._open = ledger
        self._clock = clock
        self._identity = identity
        self._terms = terms
        self.sink = sink
        self._intake = None if broker is None else BrokerIntake(name, broker, self._into_ledger)
        self._prepare = prepare
        self.new_locks()
        _used.add(self)
        self._pid = os.getpid()
        self._record: QueueRecord | None = None
        self._consumer = 0
        self._batch = 0
        self._unanswered: list[NewItem] | None = (
            None  # the last batch, while nobody knows whether it is there
        )
        self._held = self._new_held()
        self._asked_alive_us = -ALIVE_US

    def new_locks(self) -> None:
        self._lock = threading.RLock()
        if self._intake is not None:
            self._intake.new_lock()

    @property
    def name(self) -> str:
        return self._name

    @property
    def waits_at_a_broker(self) -> bool:
        """Its items come from a broker, and asking for one waits there a moment."""
        return self._intake is not None

    def __repr__(self) -> str:
        return f"<Queue {self._name}>"

    # opening

    def _new_held(self) -> PulledItems:
        return PulledItems(
            self._clock,
            lambda held, visibility: self._ledger.extend(self._consumer, held, visibility),
            self._name,
        )

    @property
    def _ledger(self) -> Ledger:
        return self._open()

    def _at(self, *, make: bool = False) -> QueueRecord:
        """The queue's row; made when somebody publishes, otherwise it must be there."""
        with self._lock:
            if self._pid != os.getpid():
                # A forked child has none of its parent's items, and is a consumer of its own.
                self._pid, self._consumer, self._batch, self._unanswered = os.getpid(), 0, 0, None
                if self._intake is not None:
                    self._intake.forget()
                self._held = self._new_held()
            if self._record is None:
                self._prepare()
                if self.sink is not None:
                    self.sink.check()  # a wrong address is reported before any work, not after it
                ledger = self._ledger
                try:
                    found: QueueRecord | None = ledger.queue(self.tenant, self._name)
                except NotFound:
                    if not make and self._intake is None:
                        raise
                    found = None
                wanted = self._terms(found.terms if found else QueueTerms()) if self._terms else None
                if found is None or (wanted is not None and wanted != found.terms):
                    found = ledger.open_queue(self.tenant, self._name, wanted)
                self._record = found
            return self._record

    def _me(self, *, make: bool = False) -> int:
        with self._lock:
            record = self._at(make=make)
            if not self._consumer:
                self._consumer = self._ledger.open_consumer(
                    record.id, self._identity.holder(), self._identity.pid_space
                )
            return self._consumer

    # publishing

    def publish(
        self,
        items: Any,
        *,
        key: Key = None,
        priority: int = 0,
        delay: str | float = 0,
        batch: int = PUBLISHED_AT_ONCE,
        on_progress: Callable[[int], None] = lambda count: None,
    ) -> Published:
        """One item, or any number of them: a list, a generator, an open file of them. Each batch is one
        transaction.

        `key` is for dedupe: a function of the item, or the key itself for one item. A key is published once;
        the same key with another item is refused with `FingerprintMismatch` after the others are in.
        """
        check_whole(batch, what="the batch")
        if not 1 <= batch <= 10_000:
            raise BadInput(f"a batch is 1 to 10000 items, not {batch}")
        delay_us = parse_duration(delay, what="delay") if delay else 0
        drafts = drafts_of(items, key, priority=priority, delay_us=delay_us)
        new = duplicates = 0
        conflicts: list[str] = []
        try:
            for done in self.publish_drafts(drafts, batch=batch):
                new, duplicates = new + done.new, duplicates + done.duplicates
                conflicts += done.conflicts
                on_progress(new + duplicates + len(conflicts))
        except (NotJson, TooLarge, BadInput) as e:
            if not new:
                raise
            told = f"{e.message}. The first {new + duplicates + len(conflicts)} items are published"
            raise type(e)(
                told,
                remedy="correct it and publish the rest; with key= those that are there are not "
                "published twice",
            ) from e
        if conflicts:
            shown = ", ".join(conflicts[:3]) + (" …" if len(conflicts) > 3 else "")
            raise FingerprintMismatch(
                f"{len(conflicts)} items were not published: their key is known with another item ({shown}). "
                f"{new} were published, {duplicates} were there already",
                remedy="use a new key for a new item; what was stored under the key was not touched",
            )
        return Published(new=new, duplicates=duplicates)

    def publish_drafts(
        self, drafts: Iterable[NewItem], *, batch: int = PUBLISHED_AT_ONCE
    ) -> Iterator[Published]:
        """Like `publish`, for items that are JSON already; yields the outcome of each batch, conflicts
        included."""
        for some in batches(drafts, batch):
            yield self._into_ledger(some) if self._intake is None else self._intake.publish(some)

    def make(self) -> QueueRecord:
        """Make the queue without publishing anything, unless it exists, with the terms it was opened with."""
        return self._at(make=True)

    def _into_ledger(self, drafts: Sequence[NewItem]) -> Published:
        with self._lock:  # batches are numbered, so that one whose answer was lost is not published twice
            consumer = self._me(make=True)
            if self._unanswered is not None and self._unanswered != list(drafts):
                # The number may be used already: another batch under it would count as a repetition, and be
                # dropped.
                self._batch += 1
            self._unanswered = list(drafts)
            done = self._ledger.publish(consumer, self._batch + 1, drafts)
            self._batch += 1
            self._unanswered = None
            return done

    # pulling

    def pull(
        self, most: int = 1, *, visibility: str | float | None = None, wait: str | float = 0
    ) -> Iterator[Item]:
        """Up to so many items, one after the other. Those the loop did not come to are given back when it is
        left.

        `visibility` is how long an item stays with a process that says nothing; it is extended while this
        process lives. `wait` is how long to wait for the first one.
        """
        items = deque(
            self.take(
                most,
                visibility_us=None if visibility is None else parse_duration(visibility, what="visibility"),
                wait_us=parse_duration(wait, what="wait") if wait else 0,
            )
        )
        return self._handed(items)

    def _handed(self, items: deque[Item]) -> Iterator[Item]:
        try:
            while items:
                item = items.popleft()
                item.begun_us = self._clock.monotonic_us()
                yield item
        finally:
            if items:
                with contextlib.suppress(SubletError):
                    self.give_back((item, item.untouched()) for item in items)

    def take(
        self,
        most: int,
        *,
        visibility_us: int | None = None,
        wait_us: int = 0,
        still_wanted: Callable[[], bool] = lambda: True,
        also_stored: bool = False,
    ) -> list[Item]:
        """Like `pull`, but all at once, and the caller gives them back. `also_stored` includes items whose
        result the sink has already."""
        record = self._at()
        visibility_us = check_visibility(
            record.terms.visibility_us if visibility_us is None else visibility_us
        )
        until = self._clock.monotonic_us() + wait_us
        bell: Bell | None = None
        try:
            while True:
                items = self._take_now(most, visibility_us)
                if self.sink is not None and not also_stored:
                    items = self._without_stored(items)
                left = until - self._clock.monotonic_us()
                if items or left <= 0 or not still_wanted():
                    return items
                if self._intake is not None:
                    continue  # it was waited for there
                if bell is None:
                    bell = self._ledger.bell()
                    bell.listen(queue_topic(record.id))
                    continue  # something may have come before we listened
                bell.wait(min(left, LOOK_US))
        finally:
            if bell is not None:
                bell.close()

    def _take_now(self, most: int, visibility_us: int) -> list[Item]:
        items = self._pulled(most, visibility_us)
        missing = most - len(items)
        if missing and self._intake is not None:
            try:
                if self._intake.take_in(missing, wait_us=0 if items else BROKER_WAIT_US):
                    items += self._pulled(missing, visibility_us)
            except SubletError:
                if not items:
                    # pulled items are not held up by a broker that is down: the next call reports it
                    raise
        if not items and self._end_the_dead():
            items = self._pulled(most, visibility_us)
        return items

    def _pulled(self, most: int, visibility_us: int) -> list[Item]:
        sent = self._clock.monotonic_us()
        given = self._ledger.pull(self._me(), most, visibility_us, self._held.numbers())
        items = [Item(self, delivery, visibility_us, sent) for delivery in given]
        self._held.add(items)
        return items

    def _end_the_dead(self) -> bool:
        """Items of a process of this host that is gone need not wait for their visibility to run out."""
        now = self._clock.monotonic_us()
        if now - self._asked_alive_us < ALIVE_US:
            return False
        self._asked_alive_us = now
        gone = [
            consumer.id
            for consumer in self._ledger.consumers_at_work(self._at().id)
            if consumer.id != self._consumer and not self._identity.alive(consumer)
        ]
        return sum(self._ledger.end_consumer(consumer) for consumer in gone) > 0

    def _without_stored(self, items: list[Item]) -> list[Item]:
        """Drop items whose result the sink has, because their acknowledgement was lost: they are not worked
        on again, and the ledger has no result of them."""
        assert self.sink is not None
        again = [item for item in items if item.delivery > 1]
        if not again:
            return items
        try:
            known = self.sink.known([item.idempotency_key for item in again])
            stored = [item for item in again if item.idempotency_key in known]
            self._acknowledge([(item, "null") for item in stored])
        except BaseException:
            with contextlib.suppress(SubletError):
                self.give_back((item, item.untouched()) for item in items)
            raise
        return [item for item in items if not item.over]

    # ending items

    def complete(self, done: Iterable[tuple[Item, Any]]) -> list[SubletError | None]:
        """Store results and acknowledge their items, all in one transaction: None for each, or why it was
        refused."""
        return self.complete_written(
            [(item, to_text(result, what=f"the result of item {item.id}")) for item, result in done]
        )

    def complete_written(self, pairs: Sequence[tuple[Item, str]]) -> list[SubletError | None]:
        """As `complete`, for results that were written as JSON where they were made."""
        if self.sink is not None:
            self.sink.store(
                [
                    Made(
                        key=item.idempotency_key,
                        queue=self._name,
                        item=item.id,
                        item_key=item.key,
                        delivery=item.delivery,
                        body=item.body,
                        result=from_text(text),
                    )
                    for item, text in pairs
                    if not item.lost
                ]
            )
        return self._acknowledge(pairs)

    def _acknowledge(self, pairs: Sequence[tuple[Item, str]]) -> list[SubletError | None]:
        if not pairs:
            return []
        now = self._clock.monotonic_us()
        acks = [
            Ack(
                item=item.id,
                delivery=item.delivery,
                result=text,
                work_us=max(0, now - item.begun_us),
            )
            for item, text in pairs
        ]
        lease = self.lease.key if self.lease is not None else None
        answers = self._ledger.complete(self._me(), acks, lease=lease)
        for (item, _), refused in zip(pairs, answers, strict=True):
            item.over = True
            item.lost = refused is not None
        self._held.remove(item for item, _ in pairs)
        return answers

    def give_back(self, nacks: Iterable[tuple[Item, Nack]]) -> None:
        """Items that are not this process's any more are no error here: somebody has them."""
        pairs = [(item, nack) for item, nack in nacks if not item.over]
        if not pairs:
            return
        self._held.remove(item for item, _ in pairs)
        answers = self._ledger.give_back(self._me(), [nack for _, nack in pairs])
        for (item, _), refused in zip(pairs, answers, strict=True):
            item.over = True
            item.lost = isinstance(refused, StaleDelivery)

    # the simple case

    def map(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        *,
        key: Callable[[Any], str] | None = None,
        visibility: str | float | None = None,
    ) -> Iterator[Any]:
        """The function's result for every item, in their order, each computed once: started again after a
        crash it goes on, and other processes at the same queue help. An item that failed every try raises
        `ItemFailed` when its turn comes."""
        from sublet.queues.map import mapped

        visibility_us = None if visibility is None else parse_duration(visibility, what="visibility")
        return mapped(self, function, items, key, visibility_us)

    def by_key(self, keys: Sequence[str]) -> list[ItemRecord]:
        """Those of these keys that are there, in no order."""
        return self._ledger.items_by_key(self._at().id, keys)

    # looking, and operating

    def results(self, *, after: int = 0) -> Iterator[ItemResult]:
        """Every stored result, in the order of publishing; `after` an item's id for those behind it."""
        for record in self._listed(ItemState.DONE, after):
            yield ItemResult(
                record.id,
                record.key,
                from_text(record.body),
                from_text(record.result),
                record.done_at,
                record.work_us,
                record.delivery,
            )

    def dead(self, *, after: int = 0) -> Iterator[ItemRecord]:
        """The dead-letter list, each with its last error; `after` an item's id for those behind it."""
        return self._listed(ItemState.DEAD, after)

    def peek(self, most: int = 10, *, state: ItemState = ItemState.READY) -> list[ItemRecord]:
        """Look at some items without taking them; ready ones in the order they will be handed out."""
        return self._ledger.items(self._at().id, state, limit=most)

    def item(self, number: int) -> ItemRecord:
        return self._ledger.item(self._at().id, number)

    def _listed(self, state: ItemState, after: int) -> Iterator[ItemRecord]:
        queue = self._at().id
        page = LISTED_FIRST
        while some := self._ledger.items(queue, state, after=after, limit=page):
            size = sum(len(one.body) + len(one.result) + len(one.error) for one in some)
            page = max(1, min(LISTED_AT_ONCE, page * 4, page * LISTED_BYTES // max(size, 1)))
            after = some[-1].id
            yield from some
            del some  # this page is freed while the next one is read

    def stats(self) -> QueueStats:
        return self._ledger.queue_stats(self._at().id)

    def record(self) -> QueueRecord:
        """Its terms, and whether it is paused, as they stand now."""
        self._at()
        return self._ledger.queue(self.tenant, self._name)

    def workers(self) -> list[ConsumerRecord]:
        """The consumers that have an item now."""
        return self._ledger.consumers_at_work(self._at().id)

    def held_by(self) -> dict[int, int]:
        """How many items each of them has, by the consumer's number."""
        return self._ledger.held_by(self._at().id)

    def redrive(self, items: Iterable[int] | None = None, *, actor: str = "") -> int:
        """Dead items are ready again, with all their tries: these, or all."""
        wanted = None if items is None else list(items)
        return self._in_parts(
            lambda: self._ledger.redrive(
                self._at().id, wanted, most=PURGED_AT_ONCE, actor=actor or self.tenant
            )
        )

    def purge(
        self, *states: ItemState, actor: str = "", on_progress: Callable[[int], None] = lambda n: None
    ) -> int:
        """Forget items of these states; how many."""
        if not all(isinstance(state, ItemState) for state in states):
            raise BadInput("purge takes states, such as ItemState.DEAD")
        return self._in_parts(
            lambda: self._ledger.purge(
                self._at().id, states, most=PURGED_AT_ONCE, actor=actor or self.tenant
            ),
            on_progress,
        )

    @staticmethod
    def _in_parts(work: Callable[[], int], on_progress: Callable[[int], None] = lambda n: None) -> int:
        done = 0
        while some := work():
            done += some
            on_progress(done)
            if some < PURGED_AT_ONCE:
                break
        return done

    def pause(self, *, actor: str = "") -> None:
        """Nothing is handed out until `resume`; what was handed out may be completed."""
        self._ledger.pause_queue(self._at().id, paused=True, actor=actor or self.tenant)

    def resume(self, *, actor: str = "") -> None:
        self._ledger.pause_queue(self._at().id, paused=False, actor=actor or self.tenant)

    def close(self) -> None:
        """Give back what is held, and close the broker and the sink."""
        with self._lock:
            if self._pid == os.getpid():
                held = self._held.all()
                with contextlib.suppress(SubletError):
                    self.give_back((item, item.untouched()) for item in held)
                if self._intake is not None:
                    self._intake.close()
                if self.sink is not None:
                    self.sink.close()


#: A lock that another thread held at a fork would stay locked in the child for ever, so each queue gets new
#: ones.
_used: weakref.WeakSet[Queue] = weakref.WeakSet()


def _after_fork() -> None:
    for queue in _used:
        queue.new_locks()


os.register_at_fork(after_in_child=_after_fork)
