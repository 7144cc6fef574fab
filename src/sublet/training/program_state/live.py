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
from collections.abc import Callable
from importlib import import_module
from typing import Any

from sublet.training.program_state.iterators import (
    DEQUE_BACKWARDS,
    DEQUE_FORWARDS,
    csv_reader,
    csv_writer,
    dict_view,
    held_by,
    pairs,
    place_in,
    place_in_cycle,
    place_in_deque,
)
from sublet.training.program_state.kinds import OF_THE_PROCESS, Kind, Parts, Reduced, Unknown, Value
from sublet.training.program_state.memory import numpy_here
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
            _stale(thing),
        )

    def bare(self, thing: logging.Logger) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if thing is thing.root:
            return logging.getLogger, ()
        known = thing.manager.loggerDict.get(thing.name) is thing
        return logging.getLogger if known else type(thing), (thing.name,)

    @staticmethod
    def fill(thing: logging.Logger, content: Any) -> None:
        level, thing.handlers[:], thing.filters[:], thing.propagate, thing.disabled, disabled, seen = content
        if thing.level != level:
            thing.setLevel(level)  # what every logger remembers is forgotten
        vars(thing)["_cache"].clear()
        vars(thing)["_cache"].update(seen)
        if disabled is not None:
            thing.manager.disable = disabled
        known = {id(reference()) for reference in vars(logging)["_handlerList"]}
        for handler in thing.handlers:
            if id(handler) not in known:
                vars(logging)["_addHandlerRef"](handler)  # flushed when the process ends


def _stale(thing: logging.Logger) -> dict[int, bool]:
    """What it remembers of levels and would not find again: of a logger that nobody knows it is never
    cleared. The rest is found again when it is asked for."""
    least, off = thing.getEffectiveLevel(), thing.manager.disable
    return {at: on for at, on in vars(thing)["_cache"].items() if on != (at >= least and at > off)}


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
    return new_compared_by, tuple(held_by(thing))


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
    **dict.fromkeys((DEQUE_FORWARDS, DEQUE_BACKWARDS), MadeByCall(place_in_deque)),
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
    if is_ufunc_class(cls) and made_of(thing) is not None:
        return _MADE_UFUNC
    if can_be_closed(cls) and _CLOSED[class_name(cls)][0](thing):
        return _CLOSED_KIND
    return None


# --- what was closed ----------------------------------------------------------------------------------------


class ClosedKind(Kind):
    """Something of the process that was closed: there is nothing left in it."""

    def content(self, thing: Any) -> Any:
        return None

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return closed_one, (class_name(type(thing)),)

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        if not _CLOSED[class_name(type(thing))][0](thing):  # the beginning may have it open by now
            thing.close()


def _is_a_closed_base(thing: Any) -> bool:
    try:
        return thing.in_transaction is None
    except import_module("sqlite3").ProgrammingError:
        return True


def _closed_cursor() -> Any:
    base = import_module("sqlite3").connect(":memory:")
    made = base.cursor()
    base.close()
    return made


#: By the name of their class: whether one is closed, and how a closed one is made.
_CLOSED: dict[str, tuple[Callable[[Any], bool], Callable[[], Any]]] = {
    "sqlite3.Connection": (_is_a_closed_base, lambda: import_module("sqlite3").connect(":memory:")),
    "sqlite3.Cursor": (lambda thing: _is_a_closed_base(thing.connection), _closed_cursor),
    "socket.socket": (lambda thing: bool(thing.fileno() < 0), lambda: import_module("socket").socket()),
    "select.epoll": (lambda thing: bool(thing.closed), lambda: import_module("select").epoll()),
    "mmap.mmap": (lambda thing: bool(thing.closed), lambda: import_module("mmap").mmap(-1, 1)),
}


def closed_one(name: str) -> Any:
    made = _CLOSED[name][1]()
    ClosedKind.fill(made, None)
    return made


def class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def can_be_closed(cls: type) -> bool:
    return class_name(cls) in _CLOSED


_CLOSED_KIND = ClosedKind()


class MadeUfuncKind(Kind):
    """A function of one element that `numpy.frompyfunc` made one of arrays, as `numpy.vectorize` does."""

    def parts(self, thing: Any) -> Parts:
        return [(".function", made_of(thing))]

    def content(self, thing: Any) -> Any:
        return None

    def bare(self, thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return ufunc_of, (made_of(thing), thing.nin, thing.nout, thing.identity)

    @staticmethod
    def fill(thing: Any, content: Any) -> None:
        pass


def made_of(ufunc: Any) -> Any:
    """None for one of a library in C."""
    return next((one for one in gc.get_referents(ufunc) if callable(one)), None)


def ufunc_of(function: Any, taken: int, given: int, identity: Any) -> Any:
    named = {} if identity is None else {"identity": identity}
    return import_module("numpy").frompyfunc(function, taken, given, **named)


def is_ufunc_class(cls: type) -> bool:
    numpy = numpy_here()
    return numpy is not None and cls is numpy.ufunc


_MADE_UFUNC = MadeUfuncKind()


def profiled(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return entered_record, (thing.name, thing.args)


def entered_record(name: str, args: str | None) -> Any:
    """torch notes what an optimizer's step takes in a context that it is inside of."""
    return import_module("torch.autograd.profiler").record_function(name, args).__enter__()


_PROFILED = MadeByCall(profiled)
_THREAD_LOCAL, _CTYPES, _LOGGER = ThreadLocalKind(), CtypesKind(), LoggerKind()


# --- of JAX -------------------------------------------------------------------------------------------------


def is_trace_state(cls: type) -> bool:
    """What objects of flax keep of JAX: in which trace they were made. Between two steps it is that of no
    trace, which each process has anew."""
    return cls.__name__ == "OpaqueTraceState" and cls.__module__.startswith("jax.")


def no_trace() -> Any:
    return import_module("jax.extend.core").get_opaque_trace_state(convention="nnx")


def _trace_state(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if "jax.extend.core" not in sys.modules or thing != no_trace():
        raise Unknown(thing, "an object that was made inside a function that JAX follows")
    return no_trace, ()


TRACE_STATE = MadeByCall(_trace_state)
