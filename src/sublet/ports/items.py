"""The ledger's part for queues: items, who works on them, and their results.

Rules of this port:
- A consumer is one process that uses one queue. It has its own strand of the journal, so that consumers do
  not wait for each other.
- Completing is the one commit point of an item: result, state, cost and journal row are written together. The
  item is its own effect: once done it is never handed out again, and its key cannot be published again.
- Publishing and completing are durable. Pulling and extending may be lost in a crash; the item is then handed
  out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sublet.core.errors import SubletError
from sublet.core.leasing.lease import Holder
from sublet.core.queues.item_audit import ItemProof
from sublet.core.queues.items import Ack, ItemState, Nack, NewItem, QueueTerms, Tempo

if TYPE_CHECKING:
    from sublet.ports.ledger import LeaseKey


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRecord:
    id: int
    tenant: str
    name: str
    terms: QueueTerms
    paused: bool = False
    created_at: int = 0
    purged: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerRecord:
    id: int
    queue: int
    host: str
    pid: int
    started: int
    pid_space: int  # the namespace the pid means something in
    opened_at: int = 0
    published: int = 0
    completed: int = 0
    failed: int = 0
    stale: int = 0  # acks that were refused
    work_us: int = 0
    tempo: Tempo = field(default_factory=Tempo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    new: int
    duplicates: int = 0  # the key was known, with the same body
    conflicts: tuple[str, ...] = ()  # keys that were known with another body; not published


@dataclass(frozen=True, slots=True)
class Delivery:
    """One hand-out of an item."""

    item: int
    key: str
    body: str
    delivery: int
    failures: int
    losses: int
    priority: int
    published_at: int


@dataclass(frozen=True, slots=True)
class ItemRecord:
    """An item as it stands, for listings and results."""

    id: int
    key: str
    state: ItemState
    priority: int
    visible_at: int
    place: int
    delivery: int
    failures: int
    losses: int
    owner: int
    body: str
    result: str
    error: str
    published_at: int
    done_at: int
    work_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    at: int
    ready: int = 0
    delayed: int = 0
    leased: int = 0
    done: int = 0
    dead: int = 0
    oldest_at: int = 0  # the place of the oldest that is ready; 0: none is
    published: int = 0
    completed: int = 0
    failed: int = 0
    stale: int = 0
    purged: int = 0
    work_us: int = 0
    rate: float = 0.0  # completed a second, lately
    workers: int = 0  # consumers that have an item now

    @property
    def depth(self) -> int:
        """What is still to be done."""
        return self.ready + self.delayed + self.leased

    @property
    def eta_us(self) -> int | None:
        """At the recent rate; None when nothing is being completed."""
        return None if self.rate <= 0 else int(self.depth / self.rate * 1e6)


class ItemLedger(Protocol):
    # queues: called by whoever opens one, and by operators
    def open_queue(self, tenant: str, name: str, terms: QueueTerms | None) -> QueueRecord:
        """Create the queue unless it exists; terms, if given, apply from now on."""

    def queue(self, tenant: str, name: str) -> QueueRecord:
        """`NotFound` names the queues that exist."""

    def queues(self, tenant: str) -> list[QueueRecord]: ...
    def pause_queue(self, queue: int, *, paused: bool, actor: str) -> None:
        """A paused queue hands out nothing; what was handed out may be completed."""

    def queue_stats(self, queue: int) -> QueueStats: ...

    # items: called by a consumer
    def open_consumer(self, queue: int, holder: Holder, pid_space: int = 0) -> int:
        """Returns the new consumer's number."""

    def publish(self, consumer: int, batch: int, drafts: Sequence[NewItem]) -> Published:
        """Publish in one transaction. `batch` rises by one each time, so repeating a call publishes nothing
        twice."""

    def pull(
        self, consumer: int, most: int, visibility_us: int, holding: Sequence[int] = ()
    ) -> list[Delivery]:
        """Hand out up to `most` items, in order. Items the consumer has that are not in `holding` were handed
        out in a lost answer and go back."""

    def extend(self, consumer: int, held: Sequence[tuple[int, int]], visibility_us: int) -> set[int]:
        """Hide (item, delivery) pairs for longer while they are worked on. Returns the items the consumer no
        longer has."""

    def complete(
        self, consumer: int, acks: Sequence[Ack], *, lease: LeaseKey | None = None
    ) -> list[SubletError | None]:
        """Complete all in one transaction. Returns None for each that is done, or why it was refused. With a
        lease, none counts unless the lease is alive (`LeaseLost`)."""

    def give_back(self, consumer: int, nacks: Sequence[Nack]) -> list[SubletError | None]:
        """Returns None for each that went back, or why it was refused."""

    # items: called when a consumer is known to be gone
    def consumers_at_work(self, queue: int) -> list[ConsumerRecord]:
        """The consumers that have an item now."""

    def end_consumer(self, consumer: int) -> int:
        """The process is gone: its items are available again at once. Returns how many."""

    # items: called by listings and operators
    def prove_queue(self, queue: int, archived: Sequence[Path] = ()) -> ItemProof:
        """Prove from the journal and the rows that each item was done exactly once, or show what contradicts
        it. `NotFound` if the journal was pruned and its archive is not given."""

    def consumers(self, queue: int) -> list[ConsumerRecord]: ...
    def held_by(self, queue: int) -> dict[int, int]:
        """How many items each consumer has, for those that have any."""

    def item(self, queue: int, item: int) -> ItemRecord: ...
    def items(self, queue: int, state: ItemState, *, after: int = 0, limit: int = 1000) -> list[ItemRecord]:
        """Ready items in the order they will be handed out, done and dead ones by number, beginning after
        `after`."""

    def items_by_key(self, queue: int, keys: Sequence[str]) -> list[ItemRecord]: ...
    def redrive(self, queue: int, items: Sequence[int] | None, *, most: int, actor: str) -> int:
        """Make dead items ready again, with all their tries; None means all of them, up to `most`."""

    def purge(self, queue: int, states: Sequence[ItemState], *, most: int, actor: str) -> int:
        """Delete items, at most `most` at once."""
