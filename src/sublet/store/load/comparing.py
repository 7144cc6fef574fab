"""Comparing two states: which parts of them differ, to the last bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TreeDifference:
    path: str  # as listings show it
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


def differing(one: Any, other: Any) -> Iterator[TreeDifference]:
    """Every part that differs between the two."""
    return _compare(one, other, "")


def _compare(one: Any, other: Any, path: str) -> Iterator[TreeDifference]:
    here = path or "state"
    if type(one) is not type(other):
        yield TreeDifference(here, f"{type(one).__name__} and {type(other).__name__}")
    elif isinstance(one, dict):
        for key in [*one, *(k for k in other if k not in one)]:
            inner = f"{path}.{key}" if path else str(key)
            if key not in one or key not in other:
                yield TreeDifference(inner, f"only in the {'first' if key in one else 'second'}")
            else:
                yield from _compare(one[key], other[key], inner)
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield TreeDifference(here, f"{len(one)} and {len(other)} members")
            return
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _compare(a, b, f"{path}.{number}" if path else str(number))
    elif hasattr(one, "dtype") and hasattr(one, "shape"):
        if one.dtype != other.dtype or tuple(one.shape) != tuple(other.shape):
            yield TreeDifference(
                here, f"{one.dtype} of {tuple(one.shape)} and {other.dtype} of {tuple(other.shape)}"
            )
        elif (count := _differing(one, other)) is not None:
            yield TreeDifference(here, count)
    elif one != other and not (one != one and other != other):
        yield TreeDifference(here, f"{_short(one)} and {_short(other)}")


def _differing(one: Any, other: Any) -> str | None:
    a, b = _bytes_of(one), _bytes_of(other)
    if a == b:
        return None
    elements = max(1, len(a) // max(1, int(one.dtype.itemsize)))
    width = len(a) // elements
    first = next(
        i for i in range(elements) if a[i * width : (i + 1) * width] != b[i * width : (i + 1) * width]
    )
    return f"from element {first} of {elements} on, the bits differ"


def _bytes_of(array: Any) -> bytes:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        flat = array.detach().cpu().contiguous().reshape(-1)
        return bytes(flat.view(torch.uint8).numpy().tobytes())
    import numpy

    return numpy.ascontiguousarray(array).tobytes()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
