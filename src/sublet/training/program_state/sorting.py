"""Which kind an object is of. One place decides, in one order.

Rules of this file:
- What has a name in an installed module is not looked into. What is a value is not, either.
- An object is of the first kind that knows it; an object of a class of C that nobody knows is taken apart by
  its own protocol, if it has one.
- A class whose objects were found to hold what cannot be taken apart is asked for its own protocol instead
  (`ask_itself`), if it has one.
"""

from __future__ import annotations

import array
import collections
import copyreg
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from sublet.training.program_state import functions, references
from sublet.training.program_state.arrays import is_tensor_class, kind_of_array
from sublet.training.program_state.cpython import tracebacks
from sublet.training.program_state.kinds import (
    NAMED,
    OF_THE_PROCESS,
    REDUCED,
    UNSAVEABLE,
    VALUE,
    BytesKind,
    DequeKind,
    DictKind,
    InstanceKind,
    Kind,
    ListKind,
    Parts,
    SetKind,
    Through,
    Unknown,
    is_value,
    layout_of,
    reduced,
)
from sublet.training.program_state.live import (
    can_be_closed,
    class_name,
    is_machinery,
    is_ufunc_class,
    kind_of_live,
)

LIST, DICT, SET, DEQUE, BYTES = ListKind(), DictKind(), SetKind(), DequeKind(), BytesKind()
TUPLE = Through(enumerate)

_EXACT: dict[type, Kind] = {
    list: LIST,
    dict: DICT,
    set: SET,
    tuple: TUPLE,
    # Its members have no place that another process would have too, unless there is only one.
    frozenset: Through(lambda thing: [("{}", member) for member in thing] if len(thing) == 1 else []),
    collections.deque: DEQUE,
    bytearray: BYTES,
    array.array: BYTES,
    slice: TUPLE.__class__(
        lambda thing: [(".start", thing.start), (".stop", thing.stop), (".step", thing.step)]
    ),
    types.CellType: functions.CELL,
    types.GeneratorType: functions.GENERATOR,
    types.MethodType: functions.METHOD,
    types.MethodWrapperType: functions.BOUND_BUILTIN,
    types.CodeType: VALUE,
    functools.partial: functions.PARTIAL,
    weakref.ReferenceType: references.REFERENCE,
    weakref.ProxyType: references.PROXY,
    weakref.CallableProxyType: references.PROXY,
    types.FrameType: tracebacks.FRAME,
    types.CoroutineType: UNSAVEABLE,
    types.AsyncGeneratorType: UNSAVEABLE,
    **dict.fromkeys(functions.NAMED_TYPES, NAMED),
}
#: Instances of these differ from one another in kind.
_ONE_BY_ONE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)


class OwnProtocolKind(Kind):
    """Taken apart by its own `__getstate__`, and filled by its own `__setstate__`."""

    def parts(self, thing: Any) -> Parts:
        return [("<state>", self.content(thing))]

    def content(self, thing: Any) -> Any:
        return thing.__reduce_ex__(4)[2]

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        if hasattr(thing, "__setstate__"):
            thing.__setstate__(content)
            return
        attributes, slots = content if isinstance(content, tuple) else (content, None)
        vars(thing).clear()
        vars(thing).update(attributes or {})
        for name, value in (slots or {}).items():
            object.__setattr__(thing, name, value)


OWN_PROTOCOL = OwnProtocolKind()
#: What `__reduce_ex__` names where the object is made first and filled afterwards.
_MAKES_BARE = (vars(copyreg)["__newobj__"], vars(copyreg)["__newobj_ex__"])


class Sorting:
    """The kinds of a program's objects. `is_own` says of a module, by name, whether it is the program's."""

    def __init__(self, is_own: Callable[[str], bool]) -> None:
        self.is_own = is_own
        self._known: dict[type, Kind] = dict(_EXACT)
        self._known[types.TracebackType] = tracebacks.TracebackKind(is_own)
        #: Kinds of whoever builds on this file: which classes, and what they are.
        self.further: list[tuple[Callable[[type], bool], Kind]] = []
        self.ask_themselves: set[str] = set()  # classes by name, for the next process

    def kind_of(self, thing: Any) -> Kind:
        cls = type(thing)
        found = self._known.get(cls)
        if found is None:
            found = self._find(thing, cls)
        return found

    def _find(self, thing: Any, cls: type) -> Kind:
        if issubclass(cls, _ONE_BY_ONE):
            return functions.kind_of_function(thing, self.is_own) or OF_THE_PROCESS
        kind = kind_of_array(thing)
        if kind is not None:
            return kind
        kind = self._of_class(thing, cls)
        if not (is_tensor_class(cls) or can_be_closed(cls) or is_ufunc_class(cls)):
            self._known[cls] = kind  # of the others one may be unlike another
        return kind

    def _of_class(self, thing: Any, cls: type) -> Kind:
        if is_value(cls) or (cls.__module__ in ("typing", "types") and not hasattr(thing, "__dict__")):
            return VALUE
        if found := [kind for knows, kind in self.further if knows(cls)]:
            return found[0]
        live = kind_of_live(thing)
        if live is not None:
            return live
        if is_machinery(cls):
            return OF_THE_PROCESS
        if class_name(cls) in self.ask_themselves:
            return self._its_protocol(thing)
        if issubclass(cls, weakref.ReferenceType):
            return references.REFERENCE
        if issubclass(cls, BaseExceptionGroup):
            return tracebacks.GroupKind(cls, BaseException)
        layout = layout_of(cls)
        if _is_known_by_its_name(thing):
            return REDUCED
        if layout is not None:
            return InstanceKind(cls, layout)
        return REDUCED if _has_protocol(thing) else UNSAVEABLE

    def _its_protocol(self, thing: Any) -> Kind:
        made = thing.__reduce_ex__(4)
        in_place = isinstance(made, tuple) and len(made) == 3 and made[0] in _MAKES_BARE
        return OWN_PROTOCOL if in_place else REDUCED

    def ask_itself(self, cls: type) -> bool:
        """From now on objects of this class are taken apart by its own protocol. False if it has none."""
        own = any(
            name in vars(base)
            for base in cls.__mro__[:-1]
            for name in ("__getstate__", "__reduce_ex__", "__reduce__")
        )
        if not own or class_name(cls) in self.ask_themselves:
            return False
        self.ask_themselves.add(class_name(cls))
        self._known.pop(cls, None)
        return True


def _is_known_by_its_name(thing: Any) -> bool:
    """The only one of its kind, found by the name that it gives itself, and without variables."""
    own = any("__reduce__" in vars(cls) or "__reduce_ex__" in vars(cls) for cls in type(thing).__mro__[:-1])
    try:
        return own and isinstance(thing.__reduce_ex__(4), str) and not getattr(thing, "__dict__", None)
    except Exception:
        return False


def _has_protocol(thing: Any) -> bool:
    try:
        reduced(thing)
    except Unknown:
        return False
    return True
