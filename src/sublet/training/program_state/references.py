"""What refers to an object without holding it: weak references, proxies, and what is done when one is gone.

Rules of this file:
- What the program was told is not told again: whoever refers to what is gone refers to what is gone.
- While everything is made for the first time, nobody is told of an end: it is not the program's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from sublet.training.program_state.functions import generators_are_left_out
from sublet.training.program_state.kinds import Kind, Parts, Through, attributes_of, slots_of


def reference_parts(thing: weakref.ref[Any]) -> Parts:
    there = thing()
    if there is not None:
        yield "()", there
    if thing.__callback__ is not None:
        yield ".__callback__", thing.__callback__
    yield from ((f".{name}", value) for name, value in _added_slots(thing).items())
    yield from ((f".{name}", value) for name, value in (attributes_of(thing) or {}).items())


def _added_slots(thing: weakref.ref[Any]) -> dict[str, Any]:
    """What a class of references has besides: such as the key that its object had."""
    found = {}
    for name, member in slots_of(type(thing)).items():
        if member.__objclass__ is not weakref.ref:
            with contextlib.suppress(AttributeError):
                found[name] = member.__get__(thing)
    return found


def behind_proxy(thing: Any) -> Any:
    """What a proxy stands for, without asking it: it would ask the program's object. None if that is gone."""
    return ctypes.cast(
        ctypes.c_void_p.from_address(id(thing) + _BEHIND).value or id(None), ctypes.py_object
    ).value


#: Where the object is in CPython's weak reference.
_BEHIND = 2 * ctypes.sizeof(ctypes.c_void_p)


def proxy_parts(thing: Any) -> Parts:
    there = behind_proxy(thing)
    return [] if there is None else [("()", there)]


def proxy_of(there: Any) -> Any:
    return weakref.proxy(_Gone() if there is None else there)


class _Gone:
    def call(self) -> None:
        """Bound to what is gone."""


def how_refers(thing: weakref.ref[Any]) -> tuple[Any, ...]:
    """How a weak reference is made again: with whoever is told of the end, and what its class adds."""
    if isinstance(thing, weakref.WeakMethod):
        closure: Any = getattr(thing.__callback__, "__closure__", None)  # none when the end was told already
        names = thing.__callback__.__code__.co_freevars if closure else ()
        told = dict(zip(names, closure or (), strict=True)).get("callback", types.CellType(None))
        return weak_method, (type(thing), thing(), told.cell_contents)
    attributes = dict(attributes_of(thing) or {})
    return reference_to, (type(thing), thing(), thing.__callback__, _added_slots(thing), attributes)


def reference_to(
    cls: type[weakref.ref[Any]], there: Any, told: Any, slots: dict[str, Any], attributes: dict[str, Any]
) -> weakref.ref[Any]:
    if there is None or generators_are_left_out():
        told = None  # it was told already, or what is made now is not what the program goes on with
    made: weakref.ref[Any] = weakref.ref.__new__(cls, _Gone() if there is None else there, told)
    members = slots_of(cls)
    for name, value in slots.items():
        members[name].__set__(made, value)
    if attributes:
        vars(made).update(attributes)
    return made


def weak_method(cls: type[weakref.WeakMethod[Any]], method: Any, told: Any) -> weakref.WeakMethod[Any]:
    return cls(_Gone().call if method is None else method, None if generators_are_left_out() else told)


class FinalizerKind(Kind):
    """`weakref.finalize`: what is to be done when an object is gone is in a list of all of them."""

    def parts(self, thing: Any) -> Parts:
        found = thing.peek() or ()
        return [(f"<{at}>", part) for at, part in enumerate(found)]

    def content(self, thing: Any) -> Any:
        found = thing.peek()
        return (*found, thing.atexit) if found else None

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return object.__new__, (weakref.finalize,)

    @staticmethod
    def fill(thing: Any, content: tuple[Any, ...] | None) -> None:
        thing.detach()
        if content is None or generators_are_left_out():
            return
        there, function, args, keywords, at_exit = content
        # Entered as a new one is, and this one is put in its place.
        made = weakref.finalize(there, function, *args, **keywords)
        entries = vars(weakref.finalize)["_registry"]
        entry = entries.pop(made)
        entry.weakref = weakref.ref(there, thing)
        entry.atexit = at_exit
        entries[thing] = entry


def finalizers(is_own: Callable[[str], bool], *, makes_them: bool) -> list[Any]:
    """The finalizers that wait and do something of the program's, held or not, the first first. Of a program
    that speaks of them (`makes_them`), those that call Python's own functions are, too: `list.append`."""
    entries = vars(weakref.finalize)["_registry"]
    found = sorted(entries.items(), key=lambda item: item[1].index)
    return [one for one, entry in found if _is_programs(entry.func, is_own, makes_them)]


def _is_programs(function: Any, is_own: Callable[[str], bool], makes_them: bool) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
    return is_own(module) or (makes_them and module.partition(".")[0] in sys.stdlib_module_names)


REFERENCE, PROXY = Through(reference_parts), Through(proxy_parts)
FINALIZER = FinalizerKind()
