"""What a process has besides data: locks, threads, places in a context, readers, shared memory of C.

Rules of this file:
- What only works (a lock, a logger, a compiled function) belongs to the process: the new one has its own.
- What holds data in a way of its own (a thread's variables, a reader's place) says how it is taken apart.
- A thread of the program that is running is refused: what it does between two steps cannot be saved.
"""

from __future__ import annotations

import _csv
import collections
import contextvars
import csv
import ctypes
import functools
import gc
import itertools
import logging
import operator
import queue
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from sublet.training.program_state.kinds import OF_THE_PROCESS, Kind, Parts, Reduced, Unknown, Value
from sublet.training.program_state.references import FINALIZER

#: Whose objects are machinery: caches, compiled code, own connections. Found by their class's module.
MACHINERY = (
    # What runs the program: a frame of a library that steps an optimizer holds our hooks.
    "sublet.training.scripts.script",
    "sublet.training.scripts.output",
    "sublet.training.scripts.importing",
    "sublet.training.scripts.file_history",
    "sublet.training.loop",
    "sublet.leases",
    "sublet.ledger",
    "sublet.notice_bus",
    "sublet.store",
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch._ops",
    "torch._C",
    "torch.fx",
    "torch.cuda",
    "torch.jit",
    "torch.distributed",
    "torch.autograd.profiler",
    "torch.profiler",
    "triton",
    "jax._src",
    "jaxlib",
    "multiprocessing.synchronize",
    "multiprocessing.context",
    "_multiprocessing",
    "concurrent.futures",
    "threading._Timer",
    "wandb",
    "mlflow",
    "pyarrow",
    "warnings",
    "inspect",
    "ast",
    "importlib",
    "_frozen_importlib",
    "_frozen_importlib_external",
    "IPython",
    "google.protobuf",
    "psutil",
)


def is_machinery(cls: type) -> bool:
    module = cls.__module__ or ""
    return any(module == name or module.startswith(f"{name}.") for name in MACHINERY)


class LockKind(Kind):
    def content(self, thing: Any) -> Any:
        return bool(thing.locked())

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return threading.Lock, ()

    @staticmethod
    def fill(thing: Any, content: bool) -> None:
        if content and not thing.locked():
            thing.acquire(blocking=False)
        elif not content and thing.locked():
            thing.acquire(timeout=_A_MOMENT)  # a library's thread may have it just now
            thing.release()


_A_MOMENT = 0.2


class ConditionKind(Kind):
    """Who waits for it is a thread of this process, and goes on waiting."""

    def parts(self, thing: Any) -> Parts:
        return [("._lock", vars(thing)["_lock"])]

    def content(self, thing: Any) -> Any:
        return vars(thing)["_lock"]

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return threading.Condition, ()

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        if vars(thing)["_lock"] is not content:
            vars(thing).clear()  # what it has of the other lock
            threading.Condition.__init__(thing, content)


class ReentrantLockKind(Kind):
    """Held by nobody between two steps, or by the main thread."""

    def content(self, thing: Any) -> Any:
        return thing._is_owned()

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return threading.RLock, ()

    @staticmethod
    def fill(thing: Any, content: bool) -> None:
        if content and not thing._is_owned():
            thing.acquire(blocking=False)


class ThreadLocalKind(Kind):
    def parts(self, thing: Any) -> Parts:
        return [(f".{name}", value) for name, value in vars(thing).items()]

    def content(self, thing: Any) -> Any:
        return dict(vars(thing))

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return threading.local.__new__, (type(thing),)

    @staticmethod
    def fill(thing: Any, content: dict[str, Any]) -> None:
        vars(thing).clear()
        vars(thing).update(content)


_UNSET = "unset"


class ContextVariableKind(Kind):
    def parts(self, thing: contextvars.ContextVar[Any]) -> Parts:
        found = contextvars.copy_context()
        return [("()", found[thing])] if thing in found else []

    def content(self, thing: contextvars.ContextVar[Any]) -> Any:
        found = contextvars.copy_context()
        return (found[thing],) if thing in found else ()

    def bare(self, thing: contextvars.ContextVar[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return contextvars.ContextVar, (thing.name,)

    @staticmethod
    def fill(thing: contextvars.ContextVar[Any], content: tuple[Any, ...]) -> None:
        if content:
            thing.set(content[0])


class ContextKind(Kind):
    """Variables and their values; one that is set cannot be unset again."""

    def parts(self, thing: contextvars.Context) -> Parts:
        for at, (variable, value) in enumerate(self.content(thing)):
            yield from ((f"[key {at}]", variable), (f"[value {at}]", value))

    def content(self, thing: contextvars.Context) -> Any:
        # Its own order is that of addresses.
        return sorted(thing.items(), key=lambda pair: pair[0].name)

    def bare(self, thing: contextvars.Context) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return contextvars.Context, ()

    @staticmethod
    def fill(thing: contextvars.Context, content: list[tuple[Any, Any]]) -> None:
        for variable, value in content:
            thing.run(variable.set, value)


class LoggerKind(Kind):
    """Found by its name. What it hands a record to, and which, is the program's."""

    def parts(self, thing: logging.Logger) -> Parts:
        yield from ((f".handlers[{at}]", handler) for at, handler in enumerate(thing.handlers))
        yield from ((f".filters[{at}]", one) for at, one in enumerate(thing.filters))

    def content(self, thing: logging.Logger) -> Any:
        disabled = thing.manager.disable if thing is thing.root else None
        return (
            thing.level,
            list(thing.handlers),
            list(thing.filters),
            thing.propagate,
            thing.disabled,
            disabled,
            dict(vars(thing)["_cache"]),  # of a logger that nobody knows it is never cleared
        )

    def bare(self, thing: logging.Logger) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if thing is thing.root:
            return logging.getLogger, ()
        known = thing.manager.loggerDict.get(thing.name) is thing
        return logging.getLogger if known else type(thing), (thing.name,)

    @staticmethod
    def fill(thing: logging.Logger, content: Any) -> None:
        level, thing.handlers[:], thing.filters[:], thing.propagate, thing.disabled, disabled, seen = content
        thing.setLevel(level)
        vars(thing)["_cache"].clear()
        vars(thing)["_cache"].update(seen)
        if disabled is not None:
            thing.manager.disable = disabled
        known = {id(reference()) for reference in vars(logging)["_handlerList"]}
        for handler in thing.handlers:
            if id(handler) not in known:
                vars(logging)["_addHandlerRef"](handler)  # flushed when the process ends


def loggers(is_own: Callable[[str], bool]) -> list[logging.Logger]:
    """Those that a program may set up without holding them: the root, and what no library is named as."""
    found = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    of_nobody = [
        one for one in found if (top := one.name.partition(".")[0]) not in sys.modules or is_own(top)
    ]
    return [logging.root, *sorted(of_nobody, key=lambda one: one.name)]


class SimpleQueueKind(Kind):
    def content(self, thing: Any) -> Any:
        members = []
        while not thing.empty():
            members.append(thing.get_nowait())
        for member in members:
            thing.put(member)
        return members

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return queue.SimpleQueue, ()

    @staticmethod
    def fill(thing: Any, content: list[Any]) -> None:
        while not thing.empty():
            thing.get_nowait()
        for member in content:
            thing.put(member)


class CtypesKind(Kind):
    """Numbers and arrays and records of them, without pointers: an address means nothing elsewhere."""

    def content(self, thing: Any) -> Any:
        if _has_pointers(type(thing)):
            raise Unknown(thing, "an address of memory that C manages")
        return bytes(thing) if not isinstance(thing, ctypes._SimpleCData) else thing.value

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        kind = type(thing)
        if thing._b_base_ is not None:
            raise Unknown(thing, "a part of another object of ctypes")
        if isinstance(thing, ctypes.Array):
            return new_ctypes_array, (kind._type_, kind._length_)
        return kind, ()

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        if isinstance(content, bytes) and not isinstance(thing, ctypes._SimpleCData):
            ctypes.memmove(ctypes.addressof(thing), content, len(content))
        else:
            thing.value = content


def new_ctypes_array(kind: Any, length: int) -> Any:
    return (kind * length)()


def _has_pointers(kind: Any) -> bool:
    if issubclass(kind, ctypes._SimpleCData):
        return kind._type_ in "PzZO"
    if issubclass(kind, ctypes.Array):
        return _has_pointers(kind._type_)
    if issubclass(kind, (ctypes.Structure, ctypes.Union)):
        return any(_has_pointers(field[1]) for field in getattr(kind, "_fields_", ()))
    return True


# --- made anew each time ------------------------------------------------------------------------------------


class MadeByCall(Reduced):
    """MadeByCall anew by a call."""

    def __init__(self, call: Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
        self.reduce = call

    def parts(self, thing: Any) -> Parts:
        return [(f"<{at}>", part) for at, part in enumerate(self.reduce(thing)[1])]


def csv_reader(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Between two rows it holds its lines' iterator and how many it has read."""
    for found in _held_by(thing):
        if hasattr(found, "__next__"):
            lines = found.lines if type(found) is _ReadBefore else found
            return new_csv_reader, (lines, _dialect(thing.dialect), thing.line_num)
    raise Unknown(thing, "a csv reader whose lines are not found")


_DIALECT = (
    "delimiter",
    "doublequote",
    "escapechar",
    "lineterminator",
    "quotechar",
    "quoting",
    "skipinitialspace",
)


def _dialect(dialect: Any) -> dict[str, Any]:
    return {name: getattr(dialect, name) for name in (*_DIALECT, "strict")}


class _ReadBefore:
    """Lines for a reader that has read some already, which counts them as they come."""

    def __init__(self, lines: Any, count: int) -> None:
        self.lines, self.count = lines, count

    def __iter__(self) -> _ReadBefore:
        return self

    def __next__(self) -> str:
        if self.count:
            self.count -= 1
            return ""
        line: str = next(self.lines)
        return line


def new_csv_reader(lines: Any, dialect: dict[str, Any], count: int) -> Any:
    reader = csv.reader(_ReadBefore(lines, count) if count else lines, **dialect)
    for _ in range(count):
        next(reader)
    return reader


def csv_writer(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:

    for found in gc.get_referents(thing):
        write = getattr(found, "__self__", None)
        if getattr(found, "__name__", "") == "write" and write is not None:
            return new_csv_writer, (write, _dialect(thing.dialect))
    raise Unknown(thing, "a csv writer whose file is not found")


def new_csv_writer(file: Any, dialect: dict[str, Any]) -> Any:
    return csv.writer(file, **dialect)


class _LastFirst:
    """An iterator that gives one more member first."""

    def __init__(self, last: Any, rest: Any) -> None:
        self.last = [last]
        self.rest = rest

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.last.pop() if self.last else next(self.rest)


def _held_by(thing: Any) -> list[Any]:
    return [found for found in gc.get_referents(thing) if found is not type(thing)]


def pairs(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    found = _held_by(thing)
    if sys.version_info >= (3, 13):
        del found[-1:]  # the tuple that it gives again and again
    if not found:
        return finished_pairs, ()
    iterator, *last = found
    if isinstance(iterator, _LastFirst):
        iterator, last = iterator.rest, iterator.last or last
    return new_pairs, (iterator, tuple(last))


def new_pairs(iterator: Any, last: tuple[Any, ...]) -> Any:
    return itertools.pairwise(_LastFirst(last[0], iterator) if last else iterator)


def finished_pairs() -> Any:
    made: itertools.pairwise[Any] = itertools.pairwise(())
    next(made, None)
    return made


def place_in(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An iterator over a dict or a set: whose, of what, and how many it has given."""
    of = next((found for found in gc.get_referents(thing) if isinstance(found, (dict, set, frozenset))), None)
    name = type(thing).__name__
    if of is None:
        return new_place_in, ({}, name, 0)
    if name == "odict_iterator":
        name = _shown_by(thing, of)
    return new_place_in, (of, name, len(of) - operator.length_hint(thing))


def _shown_by(thing: Any, of: Any) -> str:
    """What an iterator over an OrderedDict gives: it does not say."""
    rest = thing.__reduce__()[1][0]
    for name, all_of_it in (("key", list(of)), ("value", list(of.values())), ("item", list(of.items()))):
        for direction, members in (("dict_", all_of_it), ("dict_reverse", all_of_it[::-1])):
            if all(map(operator.is_, _flat(rest), _flat(members[len(of) - len(rest) :]))):
                return f"{direction}{name}iterator"
    raise Unknown(thing, "an iterator over an OrderedDict that changed meanwhile")


def _flat(members: list[Any]) -> Iterator[Any]:
    return itertools.chain.from_iterable(m if isinstance(m, tuple) else (m,) for m in members)


def new_place_in(of: Any, name: str, given: int) -> Any:
    shown = next((view for view in ("value", "item") if view in name), "")
    view = getattr(of, f"{shown}s")() if shown else of
    made = reversed(view) if "reverse" in name else iter(view)
    next(itertools.islice(made, given, given), None)
    return made


def dict_view(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    (of,) = gc.get_referents(thing)
    return new_dict_view, (of, type(thing).__name__.removeprefix("odict_").removeprefix("dict_"))


def place_in_cycle(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same words for one that goes through what it remembers, whether it was put back there or came
    there."""
    _, (iterator,), (remembered, all_of_it) = thing.__reduce__()
    if not all_of_it:
        return new_cycle, (iterator, remembered, None)
    place = iterator.__reduce__()[2:]
    return new_cycle, (None, remembered, place[0] % len(remembered) if place and remembered else 0)


def new_cycle(iterator: Any, remembered: list[Any], place: int | None) -> Any:
    if place is not None:
        iterator = iter(remembered)
        iterator.__setstate__(place)
    made: Any = itertools.cycle(iterator)
    made.__setstate__((remembered, place is not None))
    return made


def new_dict_view(of: Any, name: str) -> Any:
    return getattr(of, name)()


def descriptor(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if isinstance(thing, property):
        return property, (thing.fget, thing.fset, thing.fdel, thing.__doc__)
    if isinstance(thing, functools.cached_property):
        return new_cached_property, (thing.func, thing.attrname)
    return type(thing), (thing.__func__,)


def new_cached_property(function: Any, name: str) -> Any:
    made = functools.cached_property(function)
    made.__set_name__(object, name)
    return made


def proxy(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:

    (of,) = gc.get_referents(thing)
    return new_proxy, (of,)


def new_proxy(of: Any) -> Any:
    return types.MappingProxyType(of)


def buffer_view(thing: memoryview) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    whole = memoryview(thing.obj)
    if thing.contiguous and thing.nbytes == whole.nbytes:
        return new_buffer_view, (thing.obj, thing.format, thing.shape, 0, thing.nbytes)
    if thing.contiguous and whole.contiguous and thing.ndim == 1 and thing.obj is not None:
        begins = _address_of(thing) - _address_of(whole)
        return new_buffer_view, (thing.obj, thing.format, thing.shape, begins, thing.nbytes)
    raise Unknown(thing, "a memoryview with gaps")


def _address_of(view: memoryview) -> int:

    found = import_module("numpy").frombuffer(view, dtype="uint8").__array_interface__["data"][0]
    return int(found)


def new_buffer_view(of: Any, format: str, shape: tuple[int, ...], begins: int, size: int) -> memoryview:
    flat: Any = memoryview(of).cast("B")[begins : begins + size]
    viewed: memoryview = flat.cast(format, shape) if (format, shape) != ("B", (size,)) else flat
    return viewed


def compared_by(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What `functools.cmp_to_key` makes: a function, and what it is a key of, if it is one of something."""
    return new_compared_by, tuple(_held_by(thing))


def new_compared_by(compare: Any, *of: Any) -> Any:
    made: Any = functools.cmp_to_key(compare)
    return made(*of) if of else made


_PAIRWISE: type = itertools.pairwise
_EMPTY: dict[int, int] = {}
_EMPTY_ORDERED: collections.OrderedDict[int, int] = collections.OrderedDict()
_PLACES: tuple[type, ...] = (
    type(iter(set())),
    *(type(way(view)) for view in (_EMPTY, _EMPTY.values(), _EMPTY.items()) for way in (iter, reversed)),
    type(iter(_EMPTY_ORDERED)),
)
_DICT_VIEWS: tuple[type, ...] = tuple(
    type(view) for of in (_EMPTY, _EMPTY_ORDERED) for view in (of.keys(), of.values(), of.items())
)
_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())

_KINDS: dict[type, Kind] = {
    _LOCK: LockKind(),
    _RLOCK: ReentrantLockKind(),
    threading.Condition: ConditionKind(),
    contextvars.ContextVar: ContextVariableKind(),
    weakref.finalize: FINALIZER,
    contextvars.Token: OF_THE_PROCESS,
    contextvars.Context: ContextKind(),
    queue.SimpleQueue: SimpleQueueKind(),
    _csv.Reader: MadeByCall(csv_reader),
    _csv.Writer: MadeByCall(csv_writer),
    _csv.Dialect: Value(),
    _PAIRWISE: MadeByCall(pairs),
    itertools.cycle: MadeByCall(place_in_cycle),
    type(functools.cmp_to_key(operator.gt)): MadeByCall(compared_by),
    struct.Struct: MadeByCall(lambda thing: (struct.Struct, (thing.format,))),
    types.MappingProxyType: MadeByCall(proxy),
    memoryview: MadeByCall(buffer_view),
    **dict.fromkeys(_PLACES, MadeByCall(place_in)),
    **dict.fromkeys(_DICT_VIEWS, MadeByCall(dict_view)),
    **dict.fromkeys((staticmethod, classmethod, property, functools.cached_property), MadeByCall(descriptor)),
}


def kind_of_live(thing: Any) -> Kind | None:
    cls = type(thing)
    found = _KINDS.get(cls)
    if found is not None:
        return found
    if cls.__qualname__ == "record_function" and cls.__module__ == "torch.autograd.profiler":
        return _PROFILED
    if issubclass(cls, logging.Logger):
        return _LOGGER
    if issubclass(cls, threading.local):
        return _THREAD_LOCAL
    if issubclass(cls, (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)):
        return _CTYPES
    if issubclass(cls, threading.Thread):
        return OF_THE_PROCESS
    return None


def profiled(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return entered_record, (thing.name, thing.args)


def entered_record(name: str, args: str | None) -> Any:
    """torch notes what an optimizer's step takes in a context that it is inside of."""
    return import_module("torch.autograd.profiler").record_function(name, args).__enter__()


_PROFILED = MadeByCall(profiled)
_THREAD_LOCAL, _CTYPES, _LOGGER = ThreadLocalKind(), CtypesKind(), LoggerKind()
