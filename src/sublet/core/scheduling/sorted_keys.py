"""Keys kept in order: what makes a decision cost a bisection instead of a walk.

Rules of this file:
- A key is a tuple that says where it stands and whose it is; it is there once, however often it is added.
- Adding, removing and finding one takes log n comparisons. (A list then moves what lies behind it, as one
  block: 80 kB for ten thousand keys.)
- Whoever walks it does not change it meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=tuple[Any, ...])


#: Sorts behind every name.
LAST = "\U0010ffff"


class SortedKeys(Generic[Key]):
    __slots__ = ("_keys",)

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys: list[Key] = sorted(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    def add(self, key: Key) -> None:
        at = bisect_left(self._keys, key)
        if at == len(self._keys) or self._keys[at] != key:
            self._keys.insert(at, key)

    def discard(self, key: Key) -> None:
        at = bisect_left(self._keys, key)
        if at < len(self._keys) and self._keys[at] == key:
            del self._keys[at]

    def first(self) -> Key | None:
        return self._keys[0] if self._keys else None

    def last(self) -> Key | None:
        return self._keys[-1] if self._keys else None

    def at_least(self, low: tuple[Any, ...]) -> Iterator[Key]:
        """Rising, from the first that is not below `low`."""
        keys = self._keys
        for at in range(bisect_left(keys, low), len(keys)):
            yield keys[at]

    def between(self, low: tuple[Any, ...], high: tuple[Any, ...]) -> list[Key]:
        return self._keys[bisect_left(self._keys, low) : bisect_left(self._keys, high)]

    def falling(self) -> Iterator[Key]:
        yield from reversed(self._keys)

    def below(self, high: tuple[Any, ...]) -> Iterator[Key]:
        """Rising, up to the last that is below `high`."""
        for key in self._keys:
            if not key < high:
                return
            yield key

    def count_below(self, high: tuple[Any, ...]) -> int:
        return bisect_left(self._keys, high)
