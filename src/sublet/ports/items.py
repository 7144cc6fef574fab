"""The ledger's part for queues: items, who works on them, and their results.

Rules of this port:
- A clerk is one process at one queue: it publishes, pulls and completes, and has a strand of the journal of its own, so that clerks do not wait for each other.
- Completing is the one commit point of an item: its result, its being done, what it cost and the journal row, together or not at all. The item is its
  own effect: done once, it is never handed out again, and its key cannot be published again.
- Publishing and completing are durable. Pulling and extending may be lost in a crash, which only hands an item out again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sublet.core.errors import SubletError
from sublet.core.item_proof import ItemProof
from sublet.core.items import Ack, Draft, ItemState, Nack, Tempo, Terms
from sublet.core.lease import Holder

if TYPE_CHECKING:
    from sublet.ports.ledger import LeaseKey


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRecord:
    id: int
    tenant: str
    name: str
    terms: Terms
    paused: bool = False
    created_at: int = 0
    purged: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClerkRecord:
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
    workers: int = 0  # clerks that have an item now


class ItemLedger(Protocol):
    # queues: called by whoever opens one, and by operators
    def open_queue(self, tenant: str, name: str, terms: Terms | None) -> QueueRecord:
        """Make it, unless it is there; with terms, these are its terms from now on."""

    def queue(self, tenant: str, name: str) -> QueueRecord:
        """`NotFound` names those there are."""

    def queues(self, tenant: str) -> list[QueueRecord]: ...
    def pause_queue(self, queue: int, *, paused: bool, actor: str) -> None:
        """A paused queue hands out nothing; what was handed out may be completed."""

    def queue_stats(self, queue: int) -> QueueStats: ...

    # items: called by a clerk
    def open_clerk(self, queue: int, holder: Holder, pid_space: int = 0) -> int:
        """A new clerk's number."""

    def publish(self, clerk: int, batch: int, drafts: Sequence[Draft]) -> Published:
        """One transaction. `batch` rises by one with each: repeating one whose answer was lost publishes nothing twice."""

    def pull(self, clerk: int, most: int, visibility_us: int, holding: Sequence[int] = ()) -> list[Delivery]:
        """Hand out up to so many, in order. `holding` are those the clerk knows it has: what a lost answer gave it besides goes back."""

    def extend(self, clerk: int, held: Sequence[tuple[int, int]], visibility_us: int) -> set[int]:
        """(item, delivery) each, called in the background while they are worked on. Which of them are not its any more."""

    def complete(
        self, clerk: int, acks: Sequence[Ack], *, lease: LeaseKey | None = None
    ) -> list[SubletError | None]:
        """One transaction for all: None for each that is done, or why it was refused. With a lease, none counts unless it is alive (`LeaseLost`)."""

    def give_back(self, clerk: int, nacks: Sequence[Nack]) -> list[SubletError | None]:
        """None for each that went back, or why it was refused."""

    # items: called when a clerk is known to be gone
    def clerks_at_work(self, queue: int) -> list[ClerkRecord]:
        """Those that have an item now."""

    def end_clerk(self, clerk: int) -> int:
        """Its process is gone: its items are to be had again at once. How many."""

    # items: called by listings and operators
    def prove_queue(self, queue: int, archived: Sequence[Path] = ()) -> ItemProof:
        """That each item was done exactly once, from the journal and the rows, as of one moment; or what shows that it was not.
        `NotFound` of a journal that was pruned whose archive is not given."""

    def clerks(self, queue: int) -> list[ClerkRecord]: ...
    def held_by(self, queue: int) -> dict[int, int]:
        """How many items each clerk has that has some."""

    def item(self, queue: int, item: int) -> ItemRecord: ...
    def items(self, queue: int, state: ItemState, *, after: int = 0, limit: int = 1000) -> list[ItemRecord]:
        """Ready ones in the order they will be handed out; done and dead ones by number, from the one after `after` on."""

    def items_by_key(self, queue: int, keys: Sequence[str]) -> list[ItemRecord]: ...
    def redrive(self, queue: int, items: Sequence[int] | None, *, most: int, actor: str) -> int:
        """Dead ones are ready again, with all their tries. None: all of them, up to so many."""

    def purge(self, queue: int, states: Sequence[ItemState], *, most: int, actor: str) -> int:
        """Forget items, up to so many at once."""
