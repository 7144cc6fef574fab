"""Shipping: what a worker must be told of this process's `__main__` before a call makes sense there.

Rules of this file:
- A function is sent once and then called by number, until it changes. A global it reads is sent when it differs from what was
  sent last, and only then: what the worker itself put there since (a loaded model) stays.
- Numbers, strings and the like are compared by value; functions, classes and modules by identity; everything else by its
  pickle, at every call. Large data is better passed as an argument.
"""

from __future__ import annotations

import dis
import hashlib
from collections.abc import Callable
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from sublet.hosting.pickling import ATOMS, Pickled, is_plain, main_globals, pack, pack_plain, pack_whole

_MISSING = object()
#: The traits of what the worker imports for itself: nothing of it can change from here.
_BY_NAME = ("by name",)
#: Functions by number and globals by name, pickled.
News = list[tuple[int | str, bytes]]


@lru_cache(maxsize=512)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Every global name the code reads, also in functions defined inside it."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= set(global_names(constant))
    return tuple(sorted(names))


class Shipped:
    """What one worker has."""

    def __init__(self) -> None:
        self._globals: dict[str, tuple[Any, bytes]] = {}
        self._functions: dict[int, tuple[Callable[..., Any], tuple[Any, ...], bytes, int]] = {}
        self._numbers = 0

    def parcel(self, function: Callable[..., Any], values: Any, several: bool) -> Pickled:
        """One call: which function, what must be defined first, whether the values are several calls', and the values."""
        met: list[FunctionType] = []
        news: News = []
        if is_plain(values):
            number = self._function(function, met, news)
            self._globals_of(met, news)
            return pack_plain((number, news, several, values))
        packed = pack(values, met)
        number = self._function(function, met, news)
        self._globals_of(met, news)
        return [*pack_plain((number, news, several)), *packed]

    def _function(self, function: Callable[..., Any], met: list[FunctionType], news: News) -> int:
        known = self._functions.get(id(function))
        if known is not None and known[0] is function and known[1] == _BY_NAME:
            return known[3]
        traits = _traits(function)
        if known is not None and known[0] is function and traits is not None and known[1] == traits:
            if isinstance(function, FunctionType):
                met.append(function)
            return known[3]
        blob = pack_whole(function, met)
        if known is not None and known[0] is function and known[2] == blob:
            return known[3]
        self._numbers += 1
        # The function is kept, so that no other can come to have its id.
        traits = _BY_NAME if getattr(function, "travels_by_name", False) else traits or ()
        self._functions[id(function)] = (function, traits, blob, self._numbers)
        news.append((self._numbers, blob))
        return self._numbers

    def _globals_of(self, met: list[FunctionType], news: News) -> None:
        space = main_globals()
        seen: set[str] = set()
        while met:
            function = met.pop()
            if function.__globals__ is not space:
                continue
            for name in global_names(function.__code__):
                value = space.get(name, _MISSING)
                if name in seen or value is _MISSING:
                    continue
                seen.add(name)
                self._global(name, value, met, news)

    def _global(self, name: str, value: Any, met: list[FunctionType], news: News) -> None:
        last = self._globals.get(name)
        if last is not None and _same(last[0], value):
            if isinstance(value, FunctionType):
                met.append(value)
            return
        blob = pack_whole(value, met)
        if last is not None and last[1] and last[1] == _digest(blob):
            return
        fixed = isinstance(value, (*ATOMS, FunctionType, type, ModuleType))
        self._globals[name] = (value if fixed else None, _digest(blob))
        news.append((name, blob))


def _digest(blob: bytes) -> bytes:
    return hashlib.blake2b(blob, digest_size=16).digest()


def _same(last: Any, value: Any) -> bool:
    if last is None or type(last) is not type(value):
        return False
    if isinstance(value, ATOMS):
        return bool(last == value)
    return last is value


def _traits(function: Any) -> tuple[Any, ...] | None:
    """What would change if the function did; None when only its pickle can tell."""
    if not isinstance(function, FunctionType) or function.__closure__ or function.__dict__:
        return None
    if not all(isinstance(v, ATOMS) for v in function.__defaults__ or ()) or function.__kwdefaults__:
        return None
    return (function.__code__, function.__defaults__)
