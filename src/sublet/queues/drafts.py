"""Items before they are published: their keys, and the batches they are published in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sublet.core.errors import BadInput
from sublet.core.queues.items import NewItem, to_text

PUBLISHED_AT_ONCE = 1000
PUBLISHED_BYTES_AT_ONCE = 4 << 20

Key = Callable[[Any], str] | str | None


def drafts_of(items: Any, key: Key, *, priority: int, delay_us: int) -> Iterator[NewItem]:
    """One item, or any number of them; a text, bytes or a dict is one."""
    one = not isinstance(items, Iterable) or isinstance(items, str | bytes | bytearray | dict)
    if isinstance(key, str) and not one:
        raise BadInput("for several items, key is a function of the item, such as key=str")
    return (
        NewItem(
            body=to_text(body, what=f"item {number}"),
            key=key_of(key, body),
            priority=priority,
            delay_us=delay_us,
        )
        for number, body in enumerate([items] if one else items, 1)
    )


def key_of(key: Key, body: Any) -> str:
    if key is None:
        return ""
    if not isinstance(key, str) and not callable(key):
        raise BadInput(f"key {key!r:.60} is neither a text nor a function of the item")
    made = key if isinstance(key, str) else key(body)
    if not isinstance(made, str) or not made:
        raise BadInput(f"key made {made!r} of an item: it must be a text, such as with key=str")
    return made


def batches(drafts: Iterable[NewItem], most: int) -> Iterator[list[NewItem]]:
    """By number and by size, so that a batch of large items is not gigabytes."""
    batch: list[NewItem] = []
    size = 0
    for draft in drafts:
        batch.append(draft)
        size += len(draft.body)
        if len(batch) >= most or size >= PUBLISHED_BYTES_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
