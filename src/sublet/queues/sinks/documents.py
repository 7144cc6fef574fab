"""The name and the bytes of a result as a file or an object.

Rules of this file:
- The name follows from the key alone, is safe in any folder and bucket, and two keys never share one.
- A thousand results lie in one folder, whatever their number.
- The same result is the same bytes, so that a second attempt can be told from somebody else's.
"""

from __future__ import annotations

import json
from urllib.parse import quote

from blake3 import blake3

from sublet.core.errors import BadInput
from sublet.ports.sink import Made

IN_ONE_FOLDER = 1000
_LONGEST = 180  # file systems take 255


def place_of(key: str) -> tuple[str, str, str]:
    """`images/12345` is in `images`, `12`, as `12345.json`."""
    queue, _, item = key.rpartition("/")
    if not queue or not (item.isascii() and item.isdigit()) or len(item) > 30:
        raise BadInput(f"{key[:60]!r} is not the key of an item; nothing was stored")
    return _safe(queue), str(int(item) // IN_ONE_FOLDER), f"{int(item)}.json"


def document_of(made: Made) -> bytes:
    content = {
        "key": made.key,
        "queue": made.queue,
        "item": made.item,
        "item_key": made.item_key,
        "delivery": made.delivery,
        "body": made.body,
        "result": made.result,
    }
    try:
        return (json.dumps(content, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half a surrogate pair, which UTF-8 cannot carry
        return (json.dumps(content) + "\n").encode()


def _safe(queue: str) -> str:
    name = quote(queue, safe="@:", errors="surrogatepass")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > _LONGEST:
        # No name that was only quoted has %~ in it.
        digest = blake3(queue.encode(errors="surrogatepass")).hexdigest()[:32]
        name = f"{name[: _LONGEST // 2]}%~{digest}"
    return name
