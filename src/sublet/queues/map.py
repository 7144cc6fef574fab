"""`queue.map(function, items)`: the simple case, in the caller's own process.

Rules of this file:
- An item is identified by its key, or else by its content: mapping again after a crash publishes nothing
  twice, and finds what is done.
- The number of items between the source and the caller is bounded, however many there are.
- Results come in the order of the items, whoever computed them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sublet.core.errors import FingerprintMismatch, ItemFailed, NotFound, StaleDelivery
from sublet.core.queues.items import ItemState, NewItem, from_text, to_text
from sublet.ports.items import ItemRecord
from sublet.queues.drafts import key_of
from sublet.queues.queue import Queue

#: How often, and for how many items at once, the ledger is asked what others have done.
LOOK_SECONDS = 0.05
LOOKED_AT = 200
AHEAD = 2000


def mapped(
    queue: Queue,
    function: Callable[[Any], Any],
    items: Iterable[Any],
    key: Callable[[Any], str] | None,
    visibility_us: int | None,
) -> Iterator[Any]:
    waiting: deque[str] = deque()
    known: dict[str, ItemRecord] = {}
    source = iter(items)
    while True:
        fresh = list(itertools.islice(source, max(0, AHEAD - len(waiting))))
        if fresh:
            drafts = [NewItem(body=to_text(body, what="an item"), key=_own_key(key, body)) for body in fresh]
            _publish(queue, drafts)
            waiting.extend(draft.key for draft in drafts)
        if not waiting:
            return
        while waiting and waiting[0] in known:
            yield _value_of(known[waiting[0]], waiting[0])
            done = waiting.popleft()
            if done not in waiting:
                del known[done]
        if not waiting:
            continue
        worked = _work_one(queue, function, visibility_us)
        if not worked or waiting[0] not in known:
            known |= _learned(queue, waiting, known)
        if not worked and waiting[0] not in known:
            time.sleep(LOOK_SECONDS)


def _own_key(key: Callable[[Any], str] | None, body: Any) -> str:
    """An item without a key is identified by its content."""
    if key is not None:
        return key_of(key, body)
    return hashlib.sha256(to_text(body, what="an item").encode()).hexdigest()[:32]


def _publish(queue: Queue, drafts: Sequence[NewItem]) -> None:
    each = {draft.key: draft for draft in drafts}
    conflicts = [draft.key for draft in drafts if each[draft.key] != draft]
    if not conflicts:
        conflicts = [key for done in queue.publish_drafts(each.values()) for key in done.conflicts]
    if conflicts:
        raise FingerprintMismatch(
            f"the key {conflicts[0][:80]} is known with another item",
            remedy="give map a key that tells the items apart",
        )


def _work_one(queue: Queue, function: Callable[[Any], Any], visibility_us: int | None) -> bool:
    worked = False
    # The caller of map wants the results themselves, also those that only the sink has.
    for item in queue.take(1, visibility_us=visibility_us, also_stored=True):
        worked = True
        with item, contextlib.suppress(StaleDelivery):
            try:
                result = function(item.body)
            except Exception as e:
                item.fail(e)
            else:
                item.complete(result)
    return worked


def _learned(queue: Queue, waiting: deque[str], known: dict[str, ItemRecord]) -> dict[str, ItemRecord]:
    """The finished ones among the next items."""
    wanted = [key for key in itertools.islice(waiting, LOOKED_AT) if key not in known]
    found = {record.key: record for record in queue.by_key(wanted)}
    if waiting[0] in wanted and waiting[0] not in found and not queue.waits_at_a_broker:
        raise NotFound(
            f"an item that map waits for was purged ({waiting[0][:80]}); results before it were given out",
            remedy="map again: what is done is not done twice, what was purged is published again",
        )
    over = (ItemState.DONE, ItemState.DEAD)
    return {key: record for key, record in found.items() if record.state in over}


def _value_of(record: ItemRecord, key: str) -> Any:
    if record.state is ItemState.DEAD:
        lines = record.error.strip().splitlines() or ["no error was kept"]
        raise ItemFailed(f"item {record.id} ({key[:80]}) failed {record.failures} times: {lines[-1][:300]}")
    return from_text(record.result)
