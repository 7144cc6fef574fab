"""What a worker must be sent of this process's `__main__` before it can run a call.

Rules of this file:
- A function is sent once and then called by number, until it changes. A global it reads is sent when it
  differs from what was sent last, and only then: what the worker itself put there since (a loaded model)
  stays. One that was deleted is deleted there.
- Numbers, strings and the like are compared by value; modules, classes of modules and functions that refer to
  nothing but globals by identity; everything else by its pickle, at every call. Large data is better passed
  as an argument.
- What a parcel holds counts as sent when the worker has taken it (`took`), not before: one that got lost is
  packed again.
- Of functions only the last few are remembered, by both sides: a lambda in a loop is a new one each time.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from sublet.core.cells.global_reads import names_of_code
from sublet.core.errors import BadInput
from sublet.processes.channel.pickling import (
    ATOMS,
    Pickled,
    is_plain,
    main_globals,
    pack,
    pack_plain,
    pack_whole,
)

FUNCTIONS_KEPT = 256
#: What pickling raises when something cannot be pickled.
UNSENDABLE = (TypeError, AttributeError, ValueError, ImportError, RecursionError, pickle.PicklingError)
_MISSING = object()
#: Functions by number and globals by name, pickled; an empty pickle deletes the entry.
News = list[tuple[int | str, bytes]]


#: The traits of a function that the worker imports for itself: nothing in this process can change it.
_BY_NAME = ("by name",)


@dataclass(frozen=True, slots=True)
class _Sent:
    """One function or global, as it was when it was sent."""

    value: Any  # kept, so that no other can come to have its id; None when the pickle is what is compared
    traits: tuple[Any, ...] | None
    digest: bytes
    number: int = 0


@dataclass(slots=True)
class Parcel:
    """One call: which function, what must be defined first, and everything packed."""

    number: int = 0
    news: News = field(default_factory=list)
    packed: Pickled = field(default_factory=list)
    functions: dict[int, _Sent] = field(default_factory=dict)
    globals: dict[str, _Sent | None] = field(default_factory=dict)


class Shipped:
    """What one worker has been sent."""

    def __init__(self) -> None:
        self._globals: dict[str, _Sent] = {}
        self._functions: dict[int, _Sent] = {}  # by id, the one used last at the end
        # Not from 0: one worker may be called by several clients that know nothing of each other.
        self._numbers = secrets.randbits(48)
        self._forgotten: list[int] = []

    def parcel(self, function: Callable[..., Any], values: Any, several: bool = False) -> Parcel:
        """Pack a call, or with `several` the values of several calls."""
        met: list[FunctionType] = []
        plain = is_plain(values)
        packed = [] if plain else pack(values, met)
        made = Parcel(news=[(number, b"") for number in self._forgotten])
        self._function(function, met, made)
        self._globals_of(met, made)
        intro = (made.number, made.news, several)
        # Most calls are one small pickle.
        made.packed = pack_plain((*intro, values)) if plain else [*pack_plain(intro), *packed]
        return made

    def took(self, parcel: Parcel) -> None:
        """Note that the worker has the parcel."""
        for name, sent in parcel.globals.items():
            if sent is None:
                self._globals.pop(name, None)
            else:
                self._globals[name] = sent
        for key, known in parcel.functions.items():
            old = self._functions.pop(key, None)
            self._functions[key] = known
            if old is not None and old.number != known.number:
                self._forgotten.append(old.number)
        told = {name for name, blob in parcel.news if not blob}
        self._forgotten = [number for number in self._forgotten if number not in told]
        while len(self._functions) > FUNCTIONS_KEPT:
            oldest = next(iter(self._functions))
            self._forgotten.append(self._functions.pop(oldest).number)

    def _function(self, function: Callable[..., Any], met: list[FunctionType], made: Parcel) -> None:
        known = self._functions.get(id(function))
        if known is not None and known.value is not function:
            known = None
        traits = _BY_NAME if known is not None and known.traits is _BY_NAME else _traits(function)
        if known is not None and traits is not None and known.traits == traits:
            if isinstance(function, FunctionType):
                met.append(function)
        else:
            blob = pack_whole(function, met)
            digest = _digest(blob)
            if known is None or known.digest != digest:
                self._numbers += 1
                known = _Sent(function, traits, digest, self._numbers)
                made.news.append((self._numbers, blob))
        made.number = known.number
        made.functions[id(function)] = known

    def _globals_of(self, met: list[FunctionType], made: Parcel) -> None:
        space = main_globals()
        seen: set[str] = set()
        while met:
            function = met.pop()
            if function.__globals__ is not space:
                continue
            for name in names_of_code(function.__code__):
                if name in seen:
                    continue
                seen.add(name)
                value = space.get(name, _MISSING)
                if value is not _MISSING:
                    self._global(name, value, met, made)
                elif name in self._globals:
                    made.globals[name] = None
                    made.news.append((name, b""))

    def _global(self, name: str, value: Any, met: list[FunctionType], made: Parcel) -> None:
        last = self._globals.get(name)
        traits = _constant(value)
        if last is not None and traits is not None and last.traits == traits:
            if isinstance(value, FunctionType):
                met.append(value)
            return
        try:
            blob = pack_whole(value, met)
        except UNSENDABLE as e:
            raise BadInput(
                f"the global {name!r}, which the function reads, cannot be sent to the worker: {e}",
                remedy="make it inside the function, or pass what it is made from",
            ) from e
        digest = _digest(blob)
        if last is None or last.digest != digest:
            made.news.append((name, blob))
        made.globals[name] = _Sent(None if traits is None else value, traits, digest)


def _digest(blob: bytes) -> bytes:
    return hashlib.blake2b(blob, digest_size=16).digest()


def _constant(value: Any) -> tuple[Any, ...] | None:
    """Return what would change if the global did; None when only its pickle can tell."""
    kind = type(value)
    if kind is float or kind is complex:
        return (kind, repr(value))  # 0.0 and -0.0 are equal, and not the same
    if kind in ATOMS:
        return (kind, value)
    if kind is ModuleType or (isinstance(value, type) and value.__module__ != "__main__"):
        return (value,)
    if kind is FunctionType:
        traits = _traits(value)
        return None if traits is None else (value, *traits)
    return None


def _traits(function: Any) -> tuple[Any, ...] | None:
    """Return what would change if the function did; None when only its pickle can tell."""
    if getattr(function, "travels_by_name", False):
        return _BY_NAME
    if not isinstance(function, FunctionType) or function.__closure__ or function.__dict__:
        return None
    if not all(isinstance(v, ATOMS) for v in function.__defaults__ or ()) or function.__kwdefaults__:
        return None
    return (function.__code__, function.__defaults__)
