"""Results as a worker would have made them."""

from __future__ import annotations

from typing import Any

from sublet.ports.sink import Made


def made(
    item: int,
    *,
    delivery: int = 1,
    result: Any = None,
    body: Any = None,
    queue: str = "images",
    item_key: str = "",
) -> Made:
    return Made(
        key=f"{queue}/{item}",
        queue=queue,
        item=item,
        item_key=item_key,
        delivery=delivery,
        body={"n": item} if body is None else body,
        result=[item, delivery] if result is None else result,
    )
