"""`functools.lru_cache` with its memory in sight: the one of C shows it to nobody."""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

_NOT_THERE = object()


class CacheInfo(NamedTuple):
    hits: int
    misses: int
    maxsize: int | None
    currsize: int


class Remembering:
    """A function that remembers what it returned for which arguments, and forgets the least recently used."""

    def __init__(self, function: Callable[..., Any], most: int | None, typed: bool) -> None:
        self.__wrapped__ = function
        self._most = None if most is None else max(0, most)
        self._typed = typed
        self._results: OrderedDict[Hashable, Any] = OrderedDict()
        self._hits = self._misses = 0

    def __call__(self, /, *args: Any, **keywords: Any) -> Any:
        key = self._key(args, keywords)
        found = self._results.get(key, _NOT_THERE)
        if found is not _NOT_THERE:
            self._hits += 1
            self._results.move_to_end(key)
            return found
        self._misses += 1
        result = self.__wrapped__(*args, **keywords)
        if self._most != 0:
            self._results[key] = result
            self._results.move_to_end(key)
            if self._most is not None and len(self._results) > self._most:
                self._results.popitem(last=False)
        return result

    def __get__(self, holder: Any, cls: type | None = None) -> Any:
        return self if holder is None else types.MethodType(self, holder)

    def _key(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Hashable:
        key: tuple[Any, ...] = (args, *keywords.items())
        if self._typed:
            key += (tuple(map(type, args)), *map(type, keywords.values()))
        return key

    def cache_info(self) -> CacheInfo:
        return CacheInfo(self._hits, self._misses, self._most, len(self._results))

    def cache_clear(self) -> None:
        self._results.clear()
        self._hits = self._misses = 0

    def cache_parameters(self) -> dict[str, Any]:
        return {"maxsize": self._most, "typed": self._typed}
