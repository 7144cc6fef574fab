"""What a program changes in its process besides its objects: random numbers, the environment, the folder it
is in, and switches of libraries.

Rules of this file:
- A library's switch is read and set through the library. What a library keeps in its modules is compared with
  what it was when the loop began; numbers and texts that changed are state.
- What the lease decides (which devices are visible, SUBLET_*) belongs to the process, never to the state.
"""

from __future__ import annotations

import contextlib
import contextvars
import decimal
import dis
import functools
import gc
import itertools
import os
import random
import re
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sublet.training.program_state.functions import installed_name
from sublet.training.program_state.memory import numpy_here, torch_here, with_arrays, with_bytes

#: Of the lease and of the process, not of the program.
_NOT_THE_PROGRAMS = ("SUBLET_", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE", "HIP_VISIBLE", "PWD", "OLDPWD", "_")
_HEAP = 1 << 9
_PLAIN = (bool, int, float, str, bytes, type(None))


def take_process(since: Mapping[str, str]) -> dict[str, Any]:
    """`since` is the environment the process began with."""
    return {
        "random": random.getstate(),
        "numpy": _numpy_state(),
        "torch": _torch_state(),
        "environment": _environment_changes(since),
        "folder": _folder(),
        # The very one, which a context of the program may hold too, and what it is now.
        "decimal": (decimal.getcontext(), decimal.getcontext().copy()),
        "recursion": sys.getrecursionlimit(),
        "path": list(sys.path),
        "gc": (gc.isenabled(), gc.get_threshold()),
        "umask": umask_now(),
        "signals": _signal_handlers(),
        "warnings": list(warnings.filters),
        "warned": _warned(),
        "threads named": vars(threading)["_counter"].__self__.__reduce__()[1][0],
    }


def put_process(taken: Mapping[str, Any], since: Mapping[str, str]) -> None:
    random.setstate(taken["random"])
    if taken["numpy"] is not None and (numpy := numpy_here()) is not None:
        state, errors, printed = taken["numpy"]
        numpy.random.set_state(with_arrays(state))
        numpy.seterr(**errors)
        numpy.set_printoptions(**printed)
    if taken["torch"] is not None and torch_here() is not None:
        _put_torch_state(taken["torch"])
    _put_environment(taken["environment"], since)
    if taken["folder"] and taken["folder"] != _folder():
        os.chdir(taken["folder"])
    context, was = taken["decimal"]
    for name in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "flags", "traps"):
        setattr(context, name, getattr(was, name))
    decimal.setcontext(context)
    sys.setrecursionlimit(taken["recursion"])
    sys.path[:] = taken["path"]
    enabled, threshold = taken["gc"]
    gc.set_threshold(*threshold)
    (gc.enable if enabled else gc.disable)()
    os.umask(taken["umask"])
    for number, handler in taken["signals"].items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    if warnings.filters != taken["warnings"]:
        warnings.resetwarnings()  # which tells the part of it that is written in C
        warnings.filters[:] = taken["warnings"]  # type: ignore[index]
    _put_warned(taken["warned"])
    vars(threading)["_counter"] = itertools.count(taken["threads named"]).__next__


def _warned() -> tuple[dict[str, dict[Any, Any]], dict[Any, Any]]:
    """What each module was warned of and is not told again, and what nobody is told again. Python forgets the
    first when the filters change, and counts these changes: that number is of the process."""
    version, found = _filters_version(), {}
    for name, module in list(sys.modules.items()):
        told = vars(module).get(_REGISTRY) if isinstance(module, types.ModuleType) else None
        if isinstance(told, dict) and told.get("version") == version and len(told) > 1:
            found[name] = {key: value for key, value in told.items() if key != "version"}
    return found, dict(vars(warnings)["onceregistry"])


def _put_warned(taken: tuple[dict[str, dict[Any, Any]], dict[Any, Any]]) -> None:
    version, (of_modules, once) = _filters_version(), taken
    for name, module in list(sys.modules.items()):
        told = vars(module).get(_REGISTRY) if isinstance(module, types.ModuleType) else None
        if told is not None or name in of_modules:
            vars(module)[_REGISTRY] = {"version": version, **of_modules.get(name, {})}
    vars(warnings)["onceregistry"].clear()
    vars(warnings)["onceregistry"].update(once)


_REGISTRY = "__warningregistry__"


class _WarningOfNothing(Warning):
    """A warning that nobody sees."""


def _filters_version() -> int:
    """How often the filters changed: what a module was warned of says so, and nothing else does."""
    told: dict[Any, Any] = {}
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    filters.insert(0, ("ignore", None, _WarningOfNothing, None, 0))
    try:
        warnings.warn_explicit("", _WarningOfNothing, "", 1, registry=told)
    finally:
        del filters[0]
    return int(told["version"])


def decimal_variable() -> list[tuple[str, Any]]:
    """Where the current context of `decimal` is: no module gives it by a name, and copied contexts hold
    it."""
    decimal.getcontext()  # it is not there before somebody asked
    return [("(decimal)", one) for one in contextvars.copy_context() if one.name == "decimal_context"][:1]


def umask_now() -> int:
    """Read without changing it: other threads write files."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    found = os.umask(0o077)
    os.umask(found)
    return found


def _signal_handlers() -> dict[int, Any]:
    """Those of the program. What sublet hears is the process's."""
    found = {int(number): signal.getsignal(number) for number in signal.valid_signals()}
    return {
        number: handler
        for number, handler in found.items()
        if handler is not None and not (getattr(handler, "__module__", "") or "").startswith("sublet.")
        if number not in (signal.SIGKILL, signal.SIGSTOP)
    }


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""


def _numpy_state() -> Any:
    numpy = numpy_here()
    if numpy is None:
        return None
    return with_bytes(numpy.random.get_state(legacy=False)), numpy.geterr(), numpy.get_printoptions()


def _environment_changes(since: Mapping[str, str]) -> dict[str, str | None]:
    changed: dict[str, str | None] = {
        name: value for name, value in os.environ.items() if since.get(name) != value
    }
    changed.update({name: None for name in since if name not in os.environ})
    return {name: value for name, value in changed.items() if not name.startswith(_NOT_THE_PROGRAMS)}


def _put_environment(changes: Mapping[str, str | None], since: Mapping[str, str]) -> None:
    for name in list(_environment_changes(since)):
        if name in since:
            os.environ[name] = since[name]
        else:
            del os.environ[name]
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# --- torch --------------------------------------------------------------------------------------------------


def _switches(torch: Any) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How each is read, and how it is set."""
    return {
        "grad": (torch.is_grad_enabled, torch._C._set_grad_enabled),
        "dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "threads": (torch.get_num_threads, torch.set_num_threads),
        "deterministic": (
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
        ),
        "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "autocast cpu": (
            lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            lambda found: _set_autocast(torch, "cpu", found),
        ),
        "autocast cuda": (
            lambda: (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
            lambda found: _set_autocast(torch, "cuda", found),
        ),
        "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        "autocast depth": (lambda: _autocast_depth(torch), lambda depth: _set_autocast_depth(torch, depth)),
        "anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    }


def _set_autocast(torch: Any, device: str, found: tuple[bool, Any]) -> None:
    torch.set_autocast_enabled(device, found[0])
    torch.set_autocast_dtype(device, found[1])


def _autocast_depth(torch: Any) -> int:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return int(depth)


def _set_autocast_depth(torch: Any, depth: int) -> None:
    while (now := _autocast_depth(torch)) != depth:
        if now < depth:
            torch.autocast_increment_nesting()
        else:
            torch.autocast_decrement_nesting()


def _torch_state() -> Any:
    torch = torch_here()
    if torch is None:
        return None
    devices = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices = torch.cuda.get_rng_state_all()
    return {
        "generator": bytes(torch.get_rng_state().numpy()),
        "devices": devices,
        "switches": {name: read() for name, (read, _) in _switches(torch).items()},
    }


def _put_torch_state(taken: Mapping[str, Any]) -> None:
    torch = torch_here()
    torch.set_rng_state(torch.frombuffer(bytearray(taken["generator"]), dtype=torch.uint8))
    if taken["devices"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(taken["devices"])
    for name, (read, put) in _switches(torch).items():
        if name in taken["switches"] and read() != taken["switches"][name]:
            put(taken["switches"][name])


# --- what installed modules keep ----------------------------------------------------------------------------


class ForeignVariables:
    """Numbers and texts in installed modules and their classes that changed since the loop began."""

    def __init__(self, is_own: Callable[[str], bool]) -> None:
        self._is_own = is_own
        self._places: list[tuple[tuple[str, str], Mapping[str, Any], int]] = []  # with how many names
        self._values: list[list[int]] = []  # by place: the ids of what it holds
        self._began: list[
            tuple[Mapping[str, Any], str, Any, int]
        ] = []  # where, name, value, number of the place
        self._names: frozenset[str] = frozenset()  # that the program may set anywhere

    def added(self) -> Iterator[tuple[str, str, str, Any]]:
        """What the program keeps in modules and classes of others: module, class, name and value."""
        for (module, cls), there, _ in self._places:
            for name in added_attributes(module, there, self._names):
                yield module, cls, name, there[name]

    def begin(self, names: frozenset[str] = frozenset()) -> None:
        """`names`: of attributes that the program may set."""
        self._names = names
        for name, module in list(sys.modules.items()):
            if not isinstance(module, types.ModuleType) or self._is_own(name):
                continue
            if name == "builtins":
                self._watch((name, ""), vars(module))
            if _is_ours(name):
                continue
            self._watch((name, ""), vars(module))
            for short, cls in list(vars(module).items()):
                if issubclass(type(cls), type) and cls.__module__ == name and cls.__flags__ & _HEAP:
                    self._watch((name, short), vars(cls))

    def _watch(self, place: tuple[str, str], there: Mapping[str, Any]) -> None:
        number = len(self._places)
        self._places.append((place, there, len(there)))
        self._values.append(list(map(id, there.values())))
        self._began += [
            (there, name, value, number)
            for name, value in list(there.items())
            if type(value) in _PLAIN and not name.startswith("__")
        ]

    def take(self) -> dict[tuple[str, str], dict[str, Any]]:
        changed: dict[tuple[str, str], dict[str, Any]] = {}
        for module, cls, name, value in self.added():
            changed.setdefault((module, cls), {})[name] = value
        for there, name, value, number in self._began:
            now = there.get(name, _MISSING)
            if now is not value and type(now) in _PLAIN:
                changed.setdefault(self._places[number][0], {})[name] = now
        for place, there, names in self._places:
            if len(there) != names:
                known = {name for of, name, _, _ in self._began if of is there}
                for name, value in list(there.items()):
                    if type(value) in _PLAIN and name not in known and not name.startswith("_"):
                        changed.setdefault(place, {})[name] = value
        for (place, there, _), ids in zip(self._places, self._values, strict=True):
            if list(map(id, there.values())) != ids:
                before = set(ids)
                for name, value in list(there.items()):
                    if id(value) not in before and not name.startswith("__") and self._is_meant(value):
                        changed.setdefault(place, {})[name] = value
        return changed

    def _is_meant(self, value: Any) -> bool:
        """The program's own, in a library's place, or another function of a library: no cache of it."""
        while isinstance(value, (functools.partial, types.MethodType, staticmethod, classmethod)):
            value = value.func if isinstance(value, functools.partial) else value.__func__
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            module = getattr(value, "__module__", "") or ""
            return module == "__main__" or self._is_own(module) or installed_name(value, self._is_own)
        return type(value).__module__ == "__main__" or self._is_own(type(value).__module__)

    def put(self, taken: Mapping[tuple[str, str], Mapping[str, Any]]) -> None:
        for (module, cls), values in taken.items():
            there: Any = sys.modules.get(module)
            there = getattr(there, cls, None) if cls else there
            for name, value in values.items() if there is not None else ():
                now = getattr(there, name, _MISSING)
                if now is not value and (type(value) not in _PLAIN or now != value):
                    setattr(there, name, value)


_MISSING = object()
#: Of the interpreter and of ours: what changes there belongs to the process.
_UNINTERESTING = (
    "sublet",
    "builtins",
    "sys",
    "_",
    "threading",
    "importlib",
    "signal",
    "site",
    "linecache",
    "multiprocessing",
    "subprocess",
    "asyncio",
    "torch._dynamo",
    "torch._inductor",
    "torch._guards",
    "tempfile",
    "logging",
    "warnings",
    "os",
    "gc",
    "faulthandler",
)


def _is_ours(module: str) -> bool:
    return module.startswith(_UNINTERESTING)


# --- threads ------------------------------------------------------------------------------------------------

#: Threads of libraries that hold nothing a step depends on, by what they run.
_HARMLESS = (
    "sublet.",
    "tqdm.",
    "tensorboard.",
    "tensorboardX.",
    "torch.utils.data._utils.pin_memory",
    "torch._inductor",
    "multiprocessing.queues",
    "multiprocessing.resource_sharer",
    "concurrent.futures.thread",
    "wandb.",
    "_pydev",
    "IPython.",
)


def running_threads() -> list[str]:
    """Threads of the program that are at work, each named in words."""
    found = []
    for thread in threading.enumerate():
        if thread is threading.main_thread() or thread is threading.current_thread():
            continue
        target = getattr(thread, "_target", None) or type(thread).run
        module = getattr(target, "__module__", "") or ""
        of = type(thread).__module__
        if not any(f"{name}.".startswith(_HARMLESS) for name in (module, of) if name != "threading"):
            found.append(f"the thread {thread.name!r} ({getattr(target, '__qualname__', target)})")
    return found


# --- attributes that a program gives to installed modules and their classes -------------------------------
# An attribute is the program's if the program's text sets one of that name, and the library's own code never
# speaks of it. What a library keeps in its modules for itself stays out.

_SETS = re.compile(r"\.(\w+)(?:\s*,[^=\n]*)?\s*(?::[^=\n]+)?[-+*/|&^%]*=(?!=)|setattr\([^,\n]*,\s*['\"](\w+)")
#: What has rules of its own: where standard output goes, what can be imported.
_OTHERS = ("sublet", "sys", "builtins", "__main__")
_FOUND_BY_NAME = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def names_set(codes: Iterable[types.CodeType], files: Iterable[str | None]) -> frozenset[str]:
    """Names of attributes that a program may set: by its code where it is at hand, by its text elsewhere."""
    found = {name for code in codes for name in _set_in(code)}
    for path in files:
        with contextlib.suppress(OSError, UnicodeDecodeError, TypeError):
            found |= {one or other for one, other in _SETS.findall(Path(str(path)).read_text())}
    return frozenset(name for name in found if not name.startswith("__"))


def speaks_of(word: str, codes: Iterable[types.CodeType], files: Iterable[str | None]) -> bool:
    """Whether a program has this name in its code, or in the text of its modules."""
    if any(word in _names_in(code) for code in codes):
        return True
    for path in files:
        with contextlib.suppress(OSError, UnicodeDecodeError, TypeError):
            if re.search(rf"\b{word}\b", Path(str(path)).read_text()):
                return True
    return False


def _set_in(code: types.CodeType) -> Iterator[str]:
    by_text = "setattr" in code.co_names
    yield from (at.argval for at in dis.get_instructions(code) if at.opname == "STORE_ATTR")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _set_in(constant)
        elif by_text and isinstance(constant, str):
            yield constant


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames, *code.co_cellvars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


@cache
def _spoken_of(module: str) -> frozenset[str] | None:
    """Names in the code of a library's module. None if it has no code that can be read, as one of C."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    with contextlib.suppress(Exception):  # a loader of any kind
        code = spec.loader.get_code(spec.name) if spec is not None else None
        return frozenset(_names_in(code)) if code is not None else None
    return None


def added_attributes(module: str, there: Mapping[str, Any], names: frozenset[str]) -> list[str]:
    """The attributes in this place that are the program's. Those that are found by their name are not."""
    if module.startswith(_OTHERS):
        return []
    found = [
        name
        for name in sorted(names & there.keys())
        if not issubclass(type(there[name]), _FOUND_BY_NAME) and not hasattr(type(there[name]), "__get__")
    ]
    spoken_of = _spoken_of(module) if found else None
    return [name for name in found if name not in spoken_of] if spoken_of is not None else []
