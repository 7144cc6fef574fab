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

from sublet.hosting.pickling import Pickled

#: A plain array above this is sent again rather than read twice to find out whether it must be.
LARGE_BYTES = 1 << 20


def mark(parts: Pickled) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.nbytes.to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


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
    """Parts on their way inside another pickle."""
    return [pickle.PickleBuffer(part) for part in parts]


def unpacked(parts: Sequence[Any]) -> Pickled:
    return [memoryview(part) for part in parts]
