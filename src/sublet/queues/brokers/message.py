"""What a message says: its body, and the key it has at every redelivery.

Rules of this file:
- A body is what its JSON says, else its text. Bytes that are no text are `UnreadableBody`: such a message is
  put aside and named in a warning.
- A key is the sender's id, else the broker's, else a digest of the content: two equal messages without an id
  are then one item. An id that is no key (too long, not printable) is replaced by its digest, which is as
  constant as the id was.
- A message that we send always has an id, made before the first attempt: a repeated attempt is then the same
  message, and one item.
"""

from __future__ import annotations

import json
import math
import uuid
import warnings
from collections.abc import Iterable
from typing import Any

from blake3 import blake3

from sublet.core.errors import BadInput, NotJson
from sublet.core.progress.effect import check_key


class UnreadableBody(ValueError):
    """Neither JSON nor text."""


def body_of(data: bytes) -> Any:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise UnreadableBody from None
    try:
        body = json.loads(text, parse_constant=_no_number, parse_float=_number)
        if "\\u" in text:  # JSON can hold half of a surrogate pair, and no text encoding can
            json.dumps(body, ensure_ascii=False).encode("utf-8")
        return body
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        _no_number(text)
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text[:20]} is no number that JSON can hold")


def key_of(data: bytes, *ids: str | None) -> str:
    """The first id that is one, else the content's digest."""
    for found in ids:
        if found:
            return as_key(found)
    return f"content:{blake3(data).hexdigest()}"


def as_key(found: str) -> str:
    try:
        return check_key(found)
    except BadInput:
        return f"id:{blake3(found.encode('utf-8', 'surrogatepass')).hexdigest()}"


def sendable(items: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """(key, JSON) of each. Everything is looked at before anything is sent."""
    return [(check_key(key) if key else new_key(), json_of(body)) for key, body in items]


def new_key() -> str:
    return uuid.uuid4().hex


def json_of(body: Any) -> str:
    """In ASCII: no broker minds it."""
    try:
        return json.dumps(body, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as e:
        raise NotJson(
            f"an item is not made of texts, numbers, lists and dicts ({e}); nothing was sent"
        ) from e


def say_put_aside(queue: str, name: str, where: str, why: str = "is neither JSON nor text") -> None:
    warnings.warn(f"message {name} of {queue!r} {why}: {where}", RuntimeWarning, stacklevel=3)
