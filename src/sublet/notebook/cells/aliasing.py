"""Which variables share objects: objects that would be duplicated if only some of the variables travelled.

Rules of this file:
- Only mutable objects count: two variables that hold one string are not tied by it. Views of one NumPy array
  are not tied either, because pickling copies them.
- A variable is tied by what its pickle consists of. For one that is not pickled (`reaches`) it is what can be
  reached from it within a number of steps: searching gigabytes for every cell is worse than missing a tie.
"""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import gc
import pathlib
import re
import sys
import types
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from sublet.processes.channel.pickling import ATOMS, Seen, main_globals

#: Types whose copies cannot be told from the original. Tuples and the like count only for what they hold.
_STILL = frozenset(
    [
        *ATOMS,
        tuple,
        frozenset,
        range,
        slice,
        type(Ellipsis),
        type(NotImplemented),
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
        types.CodeType,
        types.ModuleType,
        types.MappingProxyType,
        property,
        classmethod,
        staticmethod,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
        decimal.Decimal,
        fractions.Fraction,
        uuid.UUID,
        pathlib.PosixPath,
        pathlib.PurePosixPath,
        re.Pattern,
    ]
)
_STILL_ELSEWHERE = frozenset(["dtype", "device", "Size", "memory_format", "layout", "qscheme", "ufunc"])
_LEAVES = frozenset([*ATOMS, types.BuiltinFunctionType, types.CodeType, types.ModuleType])
#: How many references of one variable are followed.
STEPS_MOST = 20_000

#: The variables one shares objects with, and the objects' places in their pickles.
Ties = frozenset[tuple[int, str, int]]


def can_change(value: Any) -> bool:
    kind = type(value)
    if kind in _STILL or issubclass(kind, (type, enum.Enum, types.ModuleType)):
        return False
    if kind is FunctionType:
        return value.__globals__ is main_globals()
    package = kind.__module__.partition(".")[0]
    return not (package in ("numpy", "torch") and _is_still_there(kind))


def _is_still_there(kind: type) -> bool:
    return any(base.__name__ in _STILL_ELSEWHERE for base in kind.__mro__)


def changeable(seen: Seen) -> dict[int, int]:
    """The position in the pickle of each mutable object, by id. Objects of a class are skipped, since every
    instance's pickle has them."""
    of_classes: set[int] = set()
    for _, value in seen.values():
        if issubclass(type(value), type) and value.__module__ == "__main__":
            of_classes.update(_found_from([*vars(value).values()]))
    return {key: at for key, (at, value) in seen.items() if key not in of_classes and can_change(value)}


def ties(places: Mapping[str, Mapping[int, int]]) -> dict[str, Ties]:
    """The ties of every variable with every other. `places` is what `changeable` found, while all of it is
    alive."""
    owners: dict[int, list[tuple[str, int]]] = {}
    for name, found in places.items():
        for key, at in found.items():
            owners.setdefault(key, []).append((name, at))
    made: dict[str, set[tuple[int, str, int]]] = {name: set() for name in places}
    for together in owners.values():
        if len(together) > 1:
            for name, at in together:
                made[name].update((at, other, there) for other, there in together if other != name)
    return {name: frozenset(found) for name, found in made.items()}


def together(names: Iterable[str], tied: Mapping[str, Ties]) -> set[str]:
    """These names and, transitively, all that are tied to them."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += {other for _, other, _ in tied.get(name, ())}
    return found


def reaches(value: Any, wanted: Collection[int]) -> bool:
    """Whether one of these objects can be found from the value."""
    return any(found in wanted for found in _found_from([value]))


def _found_from(values: list[Any]) -> Iterator[int]:
    """The ids of these objects and of what they refer to, breadth first, not following classes and
    modules."""
    left = STEPS_MOST
    known: set[int] = {id(main_globals())}
    waiting = deque(values)
    while waiting:
        at = waiting.popleft()
        if id(at) in known:
            continue
        yield id(at)
        known.add(id(at))
        left -= len(at) if type(at) in (list, tuple, dict, set, frozenset) else 1
        if left < 0:
            return
        waiting += [inner for inner in _inside(at) if type(inner) not in _LEAVES]


def _inside(value: Any) -> Iterable[Any]:
    kind = type(value)
    if issubclass(kind, (type, types.ModuleType)):
        return ()
    if kind is FunctionType:
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    package = kind.__module__.partition(".")[0]
    if package == "numpy" and kind.__name__ == "ndarray":
        return value.ravel().tolist() if value.dtype.hasobject and value.size <= STEPS_MOST else ()
    inner = gc.get_referents(value)
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        try:
            inner.append(value.untyped_storage())
        except Exception:  # a tensor without memory of its own: sparse, meta, a subclass
            return inner
    return inner
