"""Marks: whether a value is still what it was, without keeping a copy of it.

Rules of this file:
- A mark is a digest of everything a value's pickle consists of. Equal marks mean equal content; two processes may well give one value
  different marks, so a mark means something only where it was made.
- It is no protection against anybody: it is fast (memory speed) and finds accidents, not attacks.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any

import xxhash

from sublet.hosting import written
from sublet.hosting.in_pieces import WORTH_IT_BYTES, by_two, pieces_of
from sublet.hosting.pickling import Pickled

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
    """Of each its stamp, or else the digests of its pieces."""
    stamps = written.stamps(parts)
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
        by_two(pieces, read)
    else:
        for piece in pieces:
            read(piece)
    whole: list[list[bytes]] = [[] if stamp is None else [b"stamp %d" % stamp] for stamp in stamps]
    for (number, _), digest in sorted(found.items()):
        whole[number].append(digest)
    return [b"".join(digests) for digests in whole]


def is_large_array(value: Any) -> bool:
    """Memory and nothing else: to send it again is as cheap as to look whether it changed, and nobody can tell the difference."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and type(value) is numpy.ndarray
        and value.nbytes >= LARGE_BYTES
        and not value.dtype.hasobject
    )


def packed(parts: Pickled) -> Sequence[Any]:
    """Parts on their way inside another pickle.

    Of what a part is a view of, not of the view: a buffer of a memoryview that dies in a reference cycle (a traceback, and what its
    frames held) takes the process with it, in any Python 3.11 and before 3.12.7 (CPython's issue 77894). This process may be a kernel."""
    return [pickle.PickleBuffer(_owner(part)) for part in parts]


def _owner(part: memoryview) -> Any:
    owner = part.obj
    whole = not isinstance(owner, memoryview) and memoryview(owner).nbytes == part.nbytes
    return owner if whole else bytes(part)


def unpacked(parts: Sequence[Any]) -> Pickled:
    return [memoryview(part) for part in parts]
