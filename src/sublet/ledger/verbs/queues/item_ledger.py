"""The verbs of `ports.items`, each as one transaction.

Rules of this file:
- A verb is one line: which transaction function, durable or not. What it means is in `queues` and `items`.
- Inputs are checked before a lock is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sublet.core.errors import BadInput, SubletError
from sublet.core.leasing.lease import Holder
from sublet.core.queues.item_audit import ItemProof
from sublet.core.queues.items import (
    Ack,
    ItemState,
    Nack,
    NewItem,
    QueueTerms,
    check_draft,
    check_terms,
    check_visibility,
    check_whole,
)
from sublet.core.values import check_name
from sublet.ledger.engine import Verbs
from sublet.ledger.verbs.journal.archive import Archive
from sublet.ledger.verbs.queues import item_audit, items, queues
from sublet.ports.items import ConsumerRecord, Delivery, ItemRecord, Published, QueueRecord, QueueStats

if TYPE_CHECKING:
    from sublet.ports.ledger import LeaseKey

#: The most items of one transaction: longer ones would make others wait.
MOST_AT_ONCE = 10_000
#: The largest number a database holds.
LARGEST = (1 << 63) - 1


class ItemVerbs(Verbs):
    """Implements `ports.items.ItemLedger`; part of `SqlLedger`."""

    # queues

    def open_queue(self, tenant: str, name: str, terms: QueueTerms | None) -> QueueRecord:
        check_name(tenant, what="tenant")
        check_name(name, what="queue")
        if terms is not None:
            check_terms(terms)
        return self._write(lambda tx: queues.open_queue(tx, tenant, name, terms), durable=True)

    def queue(self, tenant: str, name: str) -> QueueRecord:
        check_name(name, what="queue")
        return self._read(lambda tx: queues.get_queue(tx, tenant, name))

    def queues(self, tenant: str) -> list[QueueRecord]:
        return self._read(lambda tx: queues.list_queues(tx, tenant))

    def pause_queue(self, queue: int, *, paused: bool, actor: str) -> None:
        self._write(lambda tx: queues.pause_queue(tx, queue, paused, actor), durable=True)

    def queue_stats(self, queue: int) -> QueueStats:
        return self._read(lambda tx: queues.stats(tx, queue))

    # items, by a consumer

    def open_consumer(self, queue: int, holder: Holder, pid_space: int = 0) -> int:
        check_name(holder.host, what="host")
        return self._write(lambda tx: queues.open_consumer(tx, queue, holder, pid_space), durable=True)

    def publish(self, consumer: int, batch: int, drafts: Sequence[NewItem]) -> Published:
        check_drafts(drafts)
        return self._write(lambda tx: items.publish(tx, consumer, batch, drafts), durable=True)

    def pull(
        self, consumer: int, most: int, visibility_us: int, holding: Sequence[int] = ()
    ) -> list[Delivery]:
        check_pull(most, visibility_us)
        return self._write(lambda tx: items.pull(tx, consumer, most, visibility_us, holding), durable=False)

    def extend(self, consumer: int, held: Sequence[tuple[int, int]], visibility_us: int) -> set[int]:
        return self._write(lambda tx: items.extend(tx, consumer, held, visibility_us), durable=False)

    def complete(
        self, consumer: int, acks: Sequence[Ack], *, lease: LeaseKey | None = None
    ) -> list[SubletError | None]:
        check_acks(acks)
        return self._write(lambda tx: items.complete(tx, consumer, acks, lease), durable=True)

    def give_back(self, consumer: int, nacks: Sequence[Nack]) -> list[SubletError | None]:
        _check_many(nacks)
        _check_apart([nack.item for nack in nacks])
        return self._write(
            lambda tx: items.give_back(tx, consumer, nacks), durable=any(nack.failed for nack in nacks)
        )

    # a consumer that is gone

    def consumers_at_work(self, queue: int) -> list[ConsumerRecord]:
        return self._read(lambda tx: queues.consumers_at_work(tx, queue))

    def end_consumer(self, consumer: int) -> int:
        return self._write(lambda tx: items.end_consumer(tx, consumer), durable=False)

    # listings and operators

    def prove_queue(self, queue: int, archived: Sequence[Path] = ()) -> ItemProof:
        archive = Archive(archived)
        return self._read(lambda tx: item_audit.prove_queue(tx, queue, archive))

    def consumers(self, queue: int) -> list[ConsumerRecord]:
        return self._read(lambda tx: queues.consumers(tx, queue))

    def held_by(self, queue: int) -> dict[int, int]:
        return self._read(lambda tx: queues.held_by(tx, queue))

    def item(self, queue: int, item: int) -> ItemRecord:
        check_number(item)
        return self._read(lambda tx: queues.get_item(tx, queue, item))

    def items(self, queue: int, state: ItemState, *, after: int = 0, limit: int = 1000) -> list[ItemRecord]:
        check_number(after)
        check_whole(limit, what="how many to list")
        if not 1 <= limit <= LARGEST:
            raise BadInput(f"list 1 item or more, not {limit}")
        return self._read(lambda tx: queues.list_items(tx, queue, state, after, limit))

    def items_by_key(self, queue: int, keys: Sequence[str]) -> list[ItemRecord]:
        return self._read(lambda tx: queues.by_key(tx, queue, keys))

    def redrive(self, queue: int, wanted: Sequence[int] | None, *, most: int, actor: str) -> int:
        for item in wanted or ():
            check_number(item)
        return self._write(lambda tx: items.redrive(tx, queue, wanted, most, actor), durable=True)

    def purge(self, queue: int, states: Sequence[ItemState], *, most: int, actor: str) -> int:
        return self._write(lambda tx: items.purge(tx, queue, states, most, actor), durable=True)


def check_number(item: int) -> None:
    check_whole(item, what="an item's number")
    if not 0 <= item <= LARGEST:
        raise BadInput(f"no item has the number {item!r:.40}")


def check_drafts(drafts: Sequence[NewItem]) -> None:
    _check_many(drafts)
    for draft in drafts:
        check_draft(draft)


def check_pull(most: int, visibility_us: int) -> None:
    check_visibility(visibility_us)
    check_whole(most, what="how many to pull")
    if not 1 <= most <= MOST_AT_ONCE:
        raise BadInput(f"pull 1 to {MOST_AT_ONCE} items at once, not {most}")


def check_acks(acks: Sequence[Ack]) -> None:
    _check_many(acks)
    _check_apart([ack.item for ack in acks])


def _check_many(given: Sequence[object]) -> None:
    if not 1 <= len(given) <= MOST_AT_ONCE:
        raise BadInput(f"1 to {MOST_AT_ONCE} items at once, not {len(given)}")


def _check_apart(numbers: Sequence[int]) -> None:
    if len(set(numbers)) != len(numbers):
        raise BadInput("one item was given twice")
