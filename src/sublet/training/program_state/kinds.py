"""What sort of thing an object is, and so how it is taken apart and put together again.

Rules of this file:
- An object is taken apart by what it is made of (attributes, slots, members), not by what its class says of
  itself: a class may leave out of its pickle what a program needs to go on. A class's own protocol is used
  where it is made of something that cannot be taken apart.
- `content` is shallow: it holds other objects, which are taken apart by themselves. `fill` puts content into
  an object that is there, so that whoever else holds it sees it.
- Nothing of the program runs while it is taken apart: no property, no `__getattr__`, no `__setstate__`.
"""

from __future__ import annotations

import array
import collections
import contextlib
import copyreg
import datetime
import decimal
import enum
import fractions
import pathlib
import re
import sys
import types
import typing
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sublet.training.program_state.cpython.set_order import SetLayout, layout_of_set, order

#: Where an object is held: an index, or words such as ".weight" or "['lr']".
Edge = int | str
Parts = Iterable[tuple[Edge, Any]]


class Unknown(Exception):
    """An object that cannot be taken apart. `found` is the object."""

    def __init__(self, found: Any, why: str = "") -> None:
        super().__init__(why)
        self.found = found
        self.why = why


class Kind:
    """One sort of thing. Whoever has no `content` is a subclass that says why."""

    #: There is a number for it when the loop begins, and its content is put into the one that is there.
    has_identity = True
    #: What it holds is looked at for its own sake, and it is made anew each time.
    is_passed_through = False

    def parts(self, thing: Any) -> Parts:
        return ()

    def content(self, thing: Any) -> Any:
        raise Unknown(thing)

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """How one is made that is filled afterwards."""
        raise Unknown(thing)

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        raise AssertionError("a kind with content fills it")


class Value(Kind):
    """It cannot change, and equal ones are the same."""

    has_identity = False


class Named(Value):
    """Found by its name in an installed module."""


class OfTheProcess(Kind):
    """It belongs to the process, and the new process has its own: it has no content of interest."""

    def content(self, thing: Any) -> Any:
        return None

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        pass


class Unsaveable(Kind):
    """Nothing is known of what it holds."""


class Reduced(Kind):
    """Taken apart by its own `__reduce_ex__`, and made anew each time."""

    has_identity = False
    is_passed_through = True

    def parts(self, thing: Any) -> Parts:
        made = reduced(thing)
        if isinstance(made, str):
            return
        _, arguments, state, *members = made
        yield "<0>", arguments
        if _is_the_same(state, attributes_of(thing)):  # they come and go with the object
            yield from ((f".{name}", value) for name, value in state.items())
        elif state is not None:
            yield "<1>", state
        for at, found in enumerate(members[:2]):
            if found is not None:
                yield f"<{at + 2}>", list(found)


def _is_the_same(state: Any, attributes: dict[str, Any] | None) -> bool:
    """Whether it is these very attributes. No object is asked whether it equals another."""
    if attributes is None or type(state) is not dict or list(state) != list(attributes):
        return False
    return all(state[name] is value for name, value in attributes.items())


def reduced(thing: Any) -> str | tuple[Any, ...]:
    """Taken apart by its own protocol. Attributes that its class says nothing of are part of it."""
    try:
        reduce = copyreg.dispatch_table.get(type(thing))
        made: Any = reduce(thing) if reduce is not None else thing.__reduce_ex__(4)
    except Exception as error:
        raise Unknown(thing, f"{type(error).__name__}: {error}") from error
    if isinstance(made, str):
        return made
    function, arguments, state, *rest = (*made, None)[: max(3, len(made))]
    attributes = attributes_of(thing)
    if attributes and (state is None or state is attributes):
        state = dict(attributes)
    return function, arguments, state, *rest


VALUE, NAMED, OF_THE_PROCESS, UNSAVEABLE, REDUCED = Value(), Named(), OfTheProcess(), Unsaveable(), Reduced()


# --- containers of Python -----------------------------------------------------------------------------------


class ListKind(Kind):
    def parts(self, thing: list[Any]) -> Parts:
        return enumerate(list(thing))

    def content(self, thing: list[Any]) -> Any:
        return list(thing)

    @staticmethod
    def fill(thing: list[Any], content: list[Any]) -> None:
        thing[:] = content


_PLAIN_KEYS = frozenset((str, int, bool, float, bytes, type(None)))


def dict_parts(thing: dict[Any, Any]) -> Parts:
    for at, (key, value) in enumerate(list(thing.items())):
        if type(key) in _PLAIN_KEYS:
            yield f"[{key!r}]", value
        else:
            yield f"[key {at}]", key
            yield f"[value {at}]", value


def has_plain_keys(thing: dict[Any, Any]) -> bool:
    """Whether no key is hashed by what it holds."""
    return _PLAIN_KEYS.issuperset(map(type, thing))


@dataclass(frozen=True, slots=True)
class HashedMembers:
    """What is found by its hash, put in when every key is whole."""

    pairs: list[Any]
    layout: SetLayout | None = None  # of a set


def hashed_members(thing: set[Any] | frozenset[Any]) -> HashedMembers:
    layout: type[Any] = set if isinstance(thing, set) else frozenset
    members = list(layout.__iter__(thing))
    _check_hashes(thing, layout, members)
    return HashedMembers(members, layout_of_set(thing))


def hashed_pairs(thing: dict[Any, Any], layout: type[Any] = dict) -> HashedMembers:
    pairs = list(_items(layout, thing))
    _check_hashes(thing, dict, [key for key, _ in pairs])
    return HashedMembers(pairs)


def _check_hashes(thing: Any, layout: type[Any], members: list[Any]) -> None:
    """A key that is changed while it is in there is found by what it was, and put in by what it is."""
    for key in members:
        if _hash_is_the_programs(key) and not layout.__contains__(thing, key):
            raise Unknown(thing, f"the hash of a {type(key).__qualname__} in it has changed meanwhile")
    if len(set(map(id, members))) < len(members):
        raise Unknown(thing, "one object is in it twice, because its hash has changed meanwhile")


def _hash_is_the_programs(key: Any) -> bool:
    if isinstance(key, (tuple, frozenset)):
        return any(map(_hash_is_the_programs, key))
    return isinstance(type(key).__hash__, types.FunctionType)


class DictKind(Kind):
    def parts(self, thing: dict[Any, Any]) -> Parts:
        return dict_parts(thing)

    def content(self, thing: dict[Any, Any]) -> Any:
        return dict(thing) if has_plain_keys(thing) else hashed_pairs(thing)

    @staticmethod
    def fill(thing: dict[Any, Any], content: Any) -> None:
        thing.clear()
        if not isinstance(content, HashedMembers):
            thing.update(content)


class SetKind(Kind):
    def parts(self, thing: set[Any]) -> Parts:
        # Members have no place that another process would have too, unless there is only one.
        return [("{}", next(iter(thing)))] if len(thing) == 1 else ()

    def content(self, thing: set[Any]) -> Any:
        return hashed_members(thing)

    @staticmethod
    def fill(thing: set[Any], content: HashedMembers) -> None:
        thing.clear()


def fill_last(thing: Any, content: Any) -> None:
    """The second half of `fill`, when everything else is in its place."""
    cls = type(thing)
    if isinstance(content, tuple) and issubclass(cls, (dict, set)) and len(content) == 4:
        content = content[2][1] if issubclass(cls, dict) else content[2]
    if not isinstance(content, HashedMembers):
        return
    if issubclass(cls, (set, frozenset)):
        if issubclass(cls, set):
            set.update(thing, content.pairs)
        order(thing, content.pairs, content.layout)
    else:
        layout = collections.OrderedDict if issubclass(cls, collections.OrderedDict) else dict
        for key, value in content.pairs:
            layout.__setitem__(thing, key, value)


class DequeKind(Kind):
    def parts(self, thing: collections.deque[Any]) -> Parts:
        return enumerate(list(thing))

    def content(self, thing: collections.deque[Any]) -> Any:
        return list(thing)

    def bare(self, thing: collections.deque[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return collections.deque, ((), thing.maxlen)

    @staticmethod
    def fill(thing: collections.deque[Any], content: list[Any]) -> None:
        if len(thing) == len(content):  # an iterator over it minds anything else
            for at, member in enumerate(content):
                thing[at] = member
        else:
            thing.clear()
            thing.extend(content)


class BytesKind(Kind):
    """`bytearray` and `array.array`."""

    def content(self, thing: Any) -> Any:
        return bytes(thing) if isinstance(thing, bytearray) else thing.tobytes()

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (bytearray, ()) if isinstance(thing, bytearray) else (array.array, (thing.typecode,))

    @staticmethod
    def fill(thing: Any, content: bytes) -> None:
        fill_buffer(thing, content)


def fill_buffer(thing: Any, content: bytes) -> None:
    """A `bytearray` or `array.array`; where it is as large as it was, whoever views it keeps its view."""
    view = memoryview(thing).cast("B")
    if view.nbytes == len(content):
        view[:] = content
        return
    view.release()
    if isinstance(thing, bytearray):
        bytearray.__setitem__(thing, slice(None), content)
    else:
        array.array.__delitem__(thing, slice(None))
        array.array.frombytes(thing, content)


class Through(Kind):
    """It cannot change, but what it holds can."""

    has_identity = False
    is_passed_through = True

    def __init__(self, parts: Callable[[Any], Parts]) -> None:
        self._parts = parts

    def parts(self, thing: Any) -> Parts:
        return self._parts(thing)


# --- objects of classes that Python made --------------------------------------------------------------------

#: The layouts that a class can add attributes to, and which of them can be filled again.
_FILLED = (list, dict, set, collections.deque, bytearray, array.array)
_IMMUTABLE = (tuple, int, str, float, complex, bytes, frozenset)
_ONLY_ATTRIBUTES = (object, types.SimpleNamespace)
LAYOUTS = (
    *_FILLED,
    *_IMMUTABLE,
    collections.OrderedDict,
    collections.defaultdict,
    BaseException,
    *_ONLY_ATTRIBUTES,
)
_HEAP, _WORD = 1 << 9, 8


def layout_of(cls: type) -> type | None:
    """The class of C that decides what its objects are in memory; None if it is none of the known ones."""
    for base in cls.__mro__:
        if base in LAYOUTS:
            return base
        if not _adds_only_attributes(base) and not _is_exception_of_c(base):
            return None
    return None


def _is_exception_of_c(cls: type) -> bool:
    """What it adds to others is found like slots. The members of a group cannot be put in later."""
    return issubclass(cls, BaseException) and not issubclass(cls, BaseExceptionGroup)


def _adds_only_attributes(cls: type) -> bool:
    if not cls.__flags__ & _HEAP or cls.__base__ is None:
        return False
    added = sum(isinstance(member, types.MemberDescriptorType) for member in vars(cls).values())
    if sys.version_info < (3, 12):
        added += "__weakref__" in vars(cls)
        added += bool(cls.__itemsize__) and cls.__dictoffset__ != cls.__base__.__dictoffset__
    return cls.__basicsize__ == cls.__base__.__basicsize__ + _WORD * added


def attributes_of(thing: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


_NOT_SLOTS = {"__dict__", "__weakref__"}


def slots_of(cls: type) -> dict[str, Any]:
    """Its slots by name, with what reads and writes them."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base in LAYOUTS or base is BaseExceptionGroup:  # whose members cannot be set
            continue
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and name not in _NOT_SLOTS:
                found[name if name not in found else f"{base.__qualname__}.{name}"] = member
    return found


class InstanceKind(Kind):
    """An object of a class that was made by Python code: attributes, slots, and the members of its layout."""

    def __init__(self, cls: type, layout: type) -> None:
        self.layout = layout
        self._slots = slots_of(cls)
        # The value of a number or a tuple cannot be put into one that is there.
        self.is_passed_through = layout in _IMMUTABLE
        self.has_identity = not self.is_passed_through
        self.is_found_by_hash = issubclass(layout, (dict, set))

    def parts(self, thing: Any) -> Parts:
        for name, value in list((attributes_of(thing) or {}).items()):
            yield f".{name}", value
        for name, member in self._slots.items():
            try:
                yield f".{name}", member.__get__(thing)
            except AttributeError:
                continue
        yield from self._members(thing)
        if (home := type(thing)).__module__ == "__main__" or "<locals>" in home.__qualname__:
            yield ".__class__", home

    def _members(self, thing: Any) -> Parts:
        layout: Any = self.layout
        if issubclass(layout, (list, tuple, collections.deque)):
            return [(f"[{at}]", member) for at, member in enumerate(layout.__iter__(thing))]
        if issubclass(layout, dict):
            default = [(".default_factory", thing.default_factory)] if _has_default(layout) else []
            return [*default, *dict_parts(dict(_items(layout, thing)))]
        if layout is BaseException:
            return [
                (".args", thing.args),
                (".__cause__", thing.__cause__),
                (".__context__", thing.__context__),
                (".__traceback__", thing.__traceback__),
            ]
        return ()

    def content(self, thing: Any) -> Any:
        attributes = attributes_of(thing)
        slots = {}
        for name, member in self._slots.items():
            try:
                slots[name] = member.__get__(thing)
            except AttributeError:
                continue
        cls = type(thing)
        return dict(attributes) if attributes is not None else None, slots, self._base_content(thing), cls

    def _base_content(self, thing: Any) -> Any:
        layout: Any = self.layout
        if layout in _ONLY_ATTRIBUTES or layout in _IMMUTABLE:
            return None
        if issubclass(layout, dict):
            return thing.default_factory if _has_default(layout) else None, hashed_pairs(thing, layout)
        if layout is set:
            return hashed_members(thing)
        if layout is BaseException:
            trace = thing.__traceback__
            return thing.args, thing.__cause__, thing.__context__, thing.__suppress_context__, trace
        if layout in (bytearray, array.array):
            return memoryview(thing).tobytes()
        return list(layout.__iter__(thing))

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        layout, cls = self.layout, type(thing)
        if layout is array.array:
            return _bare, (layout, cls, thing.typecode)
        if layout is collections.deque and thing.maxlen is not None:
            return _bare_deque, (cls, thing.maxlen)
        if layout is frozenset:
            return new_frozenset, (cls, list(frozenset.__iter__(thing)), layout_of_set(thing))
        if layout in _IMMUTABLE:
            return _bare, (layout, cls, _as(layout, thing))
        return _bare, (layout, cls)

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        attributes, slots, base, cls = content
        if type(thing) is not cls:
            vars(object)["__class__"].__set__(thing, cls)
        there = attributes_of(thing)
        if attributes is not None and there is not None:
            there.clear()
            there.update(attributes)
        for name, member in slots_of(type(thing)).items():
            if name in slots:
                member.__set__(thing, slots[name])
            else:
                try:
                    member.__delete__(thing)
                except AttributeError:
                    continue
        if base is not None:
            _fill_base(thing, base)


def _fill_base(thing: Any, base: Any) -> None:
    if issubclass(type(thing), BaseException):
        thing.args, thing.__cause__, thing.__context__, thing.__suppress_context__, thing.__traceback__ = base
    elif issubclass(type(thing), dict):
        if issubclass(type(thing), collections.defaultdict):
            thing.default_factory = base[0]
        layout = collections.OrderedDict if issubclass(type(thing), collections.OrderedDict) else dict
        layout.clear(thing)
    elif issubclass(type(thing), set):
        set.clear(thing)
    elif issubclass(type(thing), list):
        list.__setitem__(thing, slice(None), base)
    elif issubclass(type(thing), collections.deque):
        collections.deque.clear(thing)
        collections.deque.extend(thing, base)
    elif issubclass(type(thing), (bytearray, array.array)):
        fill_buffer(thing, base)


def _has_default(layout: type) -> bool:
    return issubclass(layout, collections.defaultdict)


def _items(layout: type, thing: Any) -> Iterable[tuple[Any, Any]]:
    pairs: Iterable[tuple[Any, Any]] = (
        collections.OrderedDict.items(thing) if layout is collections.OrderedDict else dict.items(thing)
    )
    return pairs


def _as(layout: Any, thing: Any) -> Any:
    """The bare value of an object of a subclass."""
    if layout is tuple:
        return tuple(tuple.__iter__(thing))
    if layout is bytes:
        return bytes.__getitem__(thing, slice(None))
    return complex(thing) if layout is complex else layout.__getnewargs__(thing)[0]


_SHELLS: list[tuple[Callable[[type], bool], list[Any]]] = []


@contextlib.contextmanager
def shells_of_made(wanted: Callable[[type], bool]) -> Iterator[list[Any]]:
    """The objects of such classes that are made meanwhile."""
    found: list[Any] = []
    _SHELLS.append((wanted, found))
    try:
        yield found
    finally:
        _SHELLS.pop()


def forget_all(thing: Any) -> None:
    """Let go of whatever an object of a Python class holds."""
    (attributes_of(thing) or {}).clear()
    for member in slots_of(type(thing)).values():
        with contextlib.suppress(AttributeError, TypeError):
            member.__delete__(thing)


def _bare(layout: Any, cls: type, *value: Any) -> Any:
    if layout is BaseException:
        layout = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP)
    made = layout.__new__(cls, *value)
    for wanted, found in _SHELLS:
        if wanted(cls):
            found.append(made)
    return made


def new_frozenset(cls: type[frozenset[Any]], members: list[Any], layout: SetLayout | None) -> frozenset[Any]:
    made = frozenset.__new__(cls, members)
    if layout is not None:
        order(made, members, layout)
    return made


def _bare_deque(cls: type, most: int) -> Any:
    made: collections.deque[Any] = collections.deque.__new__(cls)
    collections.deque.__init__(made, (), most)
    return made


#: Objects that cannot change. Equal ones need not be one object again.
VALUES: tuple[type, ...] = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    type(Ellipsis),
    type(NotImplemented),
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    pathlib.PurePath,
    re.Pattern,
    types.GenericAlias,
    types.UnionType,
)


#: `typing.Literal` and its like: there is one of each.
_SPECIAL_FORM: type = type(typing.Optional)


def is_value(cls: type) -> bool:
    return (
        cls in VALUES
        or (issubclass(cls, VALUES) and cls.__module__ in sys.stdlib_module_names)
        or issubclass(cls, enum.Enum)
        or issubclass(cls, _SPECIAL_FORM)
    )
