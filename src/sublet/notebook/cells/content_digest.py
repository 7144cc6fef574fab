"""Digests that tell whether a value is still what it was, without keeping a copy of it.

Rules of this file:
- A mark is a digest of everything a value's pickle consists of. Equal marks mean equal content. Two processes
  may give one value different marks, so a mark is meaningful only in the process that made it.
- It is fast (memory speed) and finds accidents; it is no protection against attacks.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any

import xxhash

from sublet.processes.channel import dirty_pages
from sublet.processes.channel.parallel_copy import WORTH_IT_BYTES, in_two_threads, pieces_of
from sublet.processes.channel.pickling import Pickled

#: A plain array above this is sent again rather than read twice to find out whether it must be.
LARGE_BYTES = 1 << 20


def mark(parts: Pickled) -> bytes:
    large = [part for part in parts if part.nbytes >= LARGE_BYTES]
    known = dict(zip(map(id, large), _digests(large), strict=True)) if large else {}
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.nbytes.to_bytes(8, "little"))
        digest.update(known.get(id(part), part))
    return digest.digest()


def _digests(parts: Pickled) -> list[bytes]:
    """For each part its dirty-page stamp, or else the digests of its pieces."""
    stamps = dirty_pages.stamps(parts)
    pieces = [
        (number, first, last)
        for number, part in enumerate(parts)
        if stamps[number] is None
        for first, last in pieces_of(part.nbytes)
    ]
    found: dict[tuple[int, int], bytes] = {}

    def read(piece: tuple[int, int, int]) -> None:
        number, first, last = piece
        found[number, first] = xxhash.xxh3_128(parts[number][first:last]).digest()

    if sum(last - first for _, first, last in pieces) >= WORTH_IT_BYTES:
        in_two_threads(pieces, read)
    else:
        for piece in pieces:
            read(piece)
    whole: list[list[bytes]] = [[] if stamp is None else [b"stamp %d" % stamp] for stamp in stamps]
    for (number, _), digest in sorted(found.items()):
        whole[number].append(digest)
    return [b"".join(digests) for digests in whole]


def is_large_array(value: Any) -> bool:
    """Whether it is a large plain array, which is as cheap to send again as to compare."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and type(value) is numpy.ndarray
        and value.nbytes >= LARGE_BYTES
        and not value.dtype.hasobject
    )


def packed(parts: Pickled) -> Sequence[Any]:
    """The parts as buffers inside another pickle.

    Each buffer is of the object behind a part, not of the view: a memoryview's buffer that dies in a cycle of
    references (a traceback, and what its frames held) crashes the process, in any Python 3.11 and before
    3.12.7 (CPython's issue 77894). This process may be a kernel."""
    return [pickle.PickleBuffer(_owner(part)) for part in parts]


def _owner(part: memoryview) -> Any:
    owner = part.obj
    whole = not isinstance(owner, memoryview) and memoryview(owner).nbytes == part.nbytes
    return owner if whole else bytes(part)


def unpacked(parts: Sequence[Any]) -> Pickled:
    return [memoryview(part) for part in parts]
