"""Items of a queue: what may happen to one, and in which order they are handed out.

Rules of this file:
- Order within a queue: higher priority first; among equals the one at the earlier place. A place is the
  moment of publishing, plus a delay if one was asked for. An item that comes back because its worker was
  lost or drained keeps its place; one that failed goes to the end, so that it delays no other.
- A delivery is one hand-out of an item: its number rises each time. Only the consumer that has the newest one
  may complete it or give it back (S6).
- Failing and losing the worker are counted apart: an item that raises is dead after few tries, one whose
  machine was taken away has many.
- Nothing here reads a clock or a random generator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from sublet.core.errors import BadInput, NotJson, StaleDelivery, SubletError, TooLarge
from sublet.core.runs.requeue import backoff
from sublet.core.values import DAY_US, MINUTE_US, SECOND_US, format_duration, format_size

#: The most a body or a result holds, as JSON: what is larger belongs in a file, and its name in the item.
MOST_BYTES = 1 << 20
#: The deepest that lists and dicts may lie in each other: what one process can just write, another could not
#: read.
MOST_DEPTH = 500
#: The most of an error that is kept: the end of a traceback says what happened.
MOST_ERROR = 16_000
MOST_PRIORITY = 1_000_000
LEAST_VISIBILITY_US = 100_000
MOST_VISIBILITY_US = 12 * 60 * MINUTE_US
BACKOFF_CEILING_US = 10 * MINUTE_US
#: Completed items are counted in slots of this length, for the rate.
SLOT_US = 10 * SECOND_US


class ItemState(Enum):
    READY = "ready"  # to be handed out now
    DELAYED = "delayed"  # ready at `visible_at`
    LEASED = "leased"  # somebody has it until `visible_at`
    DONE = "done"
    DEAD = "dead"  # failed too often, or lost its worker too often; kept until somebody redrives it


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTerms:
    """How a queue treats its items."""

    visibility_us: int = 60 * SECOND_US  # how long a consumer that says nothing keeps an item
    tries: int = 5  # an item is dead after this many failures
    losses: int = 20  # an item is dead after this many lost workers
    backoff_us: int = SECOND_US  # before the second try; doubles with each
    concurrency: int = 0  # the most handed out at once; 0: no limit


def check_terms(terms: QueueTerms) -> QueueTerms:
    check_visibility(terms.visibility_us)
    if not 1 <= terms.tries <= 1000 or not 1 <= terms.losses <= 1000:
        raise BadInput("tries and losses are whole numbers from 1 to 1000")
    if not 0 <= terms.backoff_us <= DAY_US:
        raise BadInput("the backoff is a duration from 0s to 24h")
    if not 0 <= terms.concurrency <= 1_000_000:
        raise BadInput("the concurrency is a whole number up to 1000000; 0 is no limit")
    return terms


def check_visibility(visibility_us: int) -> int:
    if not LEAST_VISIBILITY_US <= visibility_us <= MOST_VISIBILITY_US:
        raise BadInput(
            f"a visibility of {format_duration(visibility_us)} cannot be used: from 100ms to 12h; "
            "it is extended while an item is worked on, so it need not be long"
        )
    return visibility_us


@dataclass(frozen=True, slots=True, kw_only=True)
class NewItem:
    """An item before it is published."""

    body: str  # JSON
    key: str = ""  # '': none, nothing to compare it with
    priority: int = 0
    delay_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemFacts:
    """What the rules need to know of one."""

    id: int
    state: ItemState
    delivery: int = 0
    owner: int = 0  # the consumer that has it, or had it last
    place: int = 0
    failures: int = 0
    losses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """An item is done."""

    item: int
    delivery: int
    result: str  # JSON
    work_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """An item was not done."""

    item: int
    delivery: int
    failed: bool  # it was tried and failed; False: it was given up untouched, as in a drain
    error: str = ""
    delay_us: int | None = None  # None: at once, or the queue's backoff after a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """Where an item stands that was given back, or whose worker was lost."""

    state: ItemState
    visible_at: int
    place: int
    failures: int
    losses: int
    why: str = ""


# --- texts --------------------------------------------------------------------------------------------------

_encode = json.JSONEncoder(separators=(",", ":")).encode  # ASCII: every database and file takes it


def to_text(value: Any, *, what: str) -> str:
    """As JSON, or why not."""
    try:
        text = _encode(value)
    except (TypeError, ValueError, RecursionError) as e:
        raise NotJson(f"{what} cannot be written as JSON: {e}; nothing was stored") from None
    if len(text) > MOST_BYTES:
        raise TooLarge(
            f"{what} has {format_size(len(text))}; a queue takes {format_size(MOST_BYTES)}. Nothing was "
            "stored"
        )
    if text.count("[") + text.count("{") > MOST_DEPTH and _depth(text) > MOST_DEPTH:
        raise NotJson(f"{what} is nested deeper than {MOST_DEPTH} lists and dicts; nothing was stored")
    return text


_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')


def _depth(text: str) -> int:
    deepest = depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        mark = found.group()
        if mark in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark in "]}":
            depth -= 1
    return deepest


def from_text(text: str) -> Any:
    return json.loads(text)


def shortened(error: str) -> str:
    """The end of an error, where the exception is, without what a database cannot hold."""
    kept = error.replace("\x00", "\\0").encode("utf-8", "backslashreplace").decode()
    return kept if len(kept) <= MOST_ERROR else f"…{kept[-MOST_ERROR + 1 :]}"


def check_whole(number: object, *, what: str) -> None:
    """A float or a text would reach the database as one, which refuses or rounds it."""
    if isinstance(number, bool) or not isinstance(number, int):
        raise BadInput(f"{what} is a whole number, not {number!r:.60}")


def check_draft(draft: NewItem) -> NewItem:
    check_whole(draft.priority, what="the priority")
    if not -MOST_PRIORITY <= draft.priority <= MOST_PRIORITY:
        raise BadInput(f"priority {draft.priority} is out of range: use -{MOST_PRIORITY} to {MOST_PRIORITY}")
    if not 0 <= draft.delay_us <= 366 * DAY_US:
        raise BadInput("a delay is a duration of up to a year")
    if draft.key and (len(draft.key) > 512 or not draft.key.isprintable()):
        raise BadInput(f"the key {draft.key[:60]!r} is not 1 to 512 printable characters on one line")
    return draft


# --- decisions ----------------------------------------------------------------------------------------------


def has_it(item: ItemFacts | None, consumer: int, delivery: int) -> bool:
    """Does this consumer have this very delivery? A visibility that ran out does not matter while nobody else
    was given it."""
    return (
        item is not None
        and item.state is ItemState.LEASED
        and item.owner == consumer
        and item.delivery == delivery
    )


def went_back(item: ItemFacts | None, consumer: int, delivery: int) -> bool:
    """Was this very delivery given back or lost, and the item handed to nobody since?"""
    return (
        item is not None
        and item.state in (ItemState.READY, ItemState.DELAYED, ItemState.DEAD)
        and item.owner == consumer
        and item.delivery == delivery
    )


def refusal(item: ItemFacts | None, consumer: int, delivery: int) -> SubletError | None:
    """Why an ack of this delivery does not count; None when it was counted before, and its answer lost."""
    if item is None:
        return StaleDelivery("the item was purged; its result was refused")
    if (item.state, item.owner, item.delivery) == (ItemState.DONE, consumer, delivery):
        return None
    how = {
        ItemState.DONE: "somebody else completed it",
        ItemState.LEASED: f"it was handed out again as delivery {item.delivery}",
        ItemState.DEAD: "it is in the dead-letter list",
    }.get(item.state, "its visibility ran out and it waits to be handed out again")
    return StaleDelivery(
        f"item {item.id}, delivery {delivery}, is not this worker's any more: {how}. The result was refused "
        "and overwrote nothing"
    )


def decide_nack(item: ItemFacts, nack: Nack, terms: QueueTerms, now: int) -> Back:
    """Where it goes: at once to its old place when it was only given up, later and to the end when it failed,
    or to the dead."""
    if not nack.failed:
        delay = nack.delay_us or 0
        state = ItemState.DELAYED if delay else ItemState.READY
        return Back(
            state=state,
            visible_at=now + delay,
            place=now + delay if delay else item.place,
            failures=item.failures,
            losses=item.losses,
        )
    failures = item.failures + 1
    dead = failures >= terms.tries
    # Items follow each other by number: times a prime, no item's second failure has the jitter of the next
    # one's first.
    pause = backoff(failures, item.id * 1009, terms.backoff_us, BACKOFF_CEILING_US)
    delay = pause if nack.delay_us is None else nack.delay_us
    state = ItemState.DEAD if dead else ItemState.DELAYED if delay else ItemState.READY
    return Back(
        state=state,
        visible_at=now if dead else now + delay,
        place=now + delay,
        failures=failures,
        losses=item.losses,
        why=f"it failed {failures} times" if dead else "",
    )


def decide_loss(item: ItemFacts, terms: QueueTerms, now: int) -> Back:
    """Its worker said nothing for a whole visibility, or is known to be gone. It keeps its place."""
    losses = item.losses + 1
    dead = losses >= terms.losses
    return Back(
        state=ItemState.DEAD if dead else ItemState.READY,
        visible_at=now,
        place=item.place,
        failures=item.failures,
        losses=losses,
        why=f"its worker was lost {losses} times while it had this item" if dead else "",
    )


# --- between queues -----------------------------------------------------------------------------------------


def in_turn(queues: Sequence[str], served: str) -> list[str]:
    """The order in which queues are asked for the next batch, beginning after the one that was served last. A
    queue that always has work gets no more than its turn while another has some."""
    if served not in queues:
        return list(queues)
    after = queues.index(served) + 1
    return [*queues[after:], *queues[:after]]


# --- the rate -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tempo:
    """How many were completed in this slot of time and in the one before."""

    slot: int = 0
    count: int = 0
    before: int = 0


def counted(tempo: Tempo, now: int, more: int) -> Tempo:
    slot = now // SLOT_US
    if slot == tempo.slot:
        return replace(tempo, count=tempo.count + more)
    return Tempo(slot, more, tempo.count if slot == tempo.slot + 1 else 0)


def per_second(tempo: Tempo, now: int) -> float:
    """Over the last slot's length, with the slot before counted by what of it still lies in that time."""
    tempo = counted(tempo, now, 0)
    passed = now % SLOT_US
    return (tempo.before * (SLOT_US - passed) / SLOT_US + tempo.count) / (SLOT_US / SECOND_US)
