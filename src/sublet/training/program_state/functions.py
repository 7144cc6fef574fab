"""Functions, classes, modules and generators: by name where they are installed, by what they are made of
where they are the program's own.

Rules of this file:
- What an installed module gives by its name is not looked into: the new process has it, too. Whatever changes
  in it, such as an attribute set from outside, is found by comparing (`changed_from_outside`).
- The code of a function is not state. A function that is made anew brings its code along.
"""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import abc
import builtins
import contextlib
import ctypes
import dis
import functools
import gc
import marshal
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from sublet.training.program_state import call_stack
from sublet.training.program_state.cpython.code_objects import exception_table
from sublet.training.program_state.cpython.frame_memory import NOTHING, NotResumable
from sublet.training.program_state.kinds import (
    NAMED,
    UNSAVEABLE,
    InstanceKind,
    Kind,
    Parts,
    Through,
    Unknown,
    attributes_of,
    slots_of,
)

#: Whether a module, by its name, is the program's own. Set by who runs the program.
IsOwn = Callable[[str], bool]
_MISSING = object()


def installed_name(thing: Any, is_own: IsOwn) -> bool:
    """Whether the new process will find this very thing by its module and name."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__" or is_own(module):
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, _MISSING) if part != "<locals>" else _MISSING
        if found is _MISSING:
            return False
    return found is thing


def other_name(cls: type, is_own: IsOwn) -> tuple[str, str] | None:
    """How an installed module gives a class that says another name of itself, as compiled ones do."""
    module, name = cls.__module__, cls.__qualname__.rpartition(".")[2]
    if not isinstance(module, str) or module == "__main__" or is_own(module):
        return None
    there = sys.modules.get(module)
    return (module, name) if there is not None and vars(there).get(name) is cls else None


_code_bytes: dict[int, tuple[types.CodeType, bytes]] = {}


def code_as_bytes(code: types.CodeType) -> bytes:
    """The same bytes each time, so that a pickle holds them once."""
    if id(code) not in _code_bytes:
        _code_bytes[id(code)] = (code, marshal.dumps(code))
    return _code_bytes[id(code)][1]


@functools.cache
def code_of(data: bytes) -> types.CodeType:
    found: types.CodeType = marshal.loads(data)
    return found


def module_of(namespace: dict[str, Any]) -> Any:
    """The name of the module whose variables these are, or the variables themselves."""
    name = namespace.get("__name__", "")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return namespace if module is None or module.__dict__ is not namespace else name


def namespace_of(module: Any) -> dict[str, Any]:
    if isinstance(module, dict):
        return module
    if module not in sys.modules:
        __import__(module)
    return sys.modules[module].__dict__


def installed_namespaces(is_own: IsOwn) -> dict[int, str]:
    """The modules that are not the program's, by the id of their variables."""
    return {
        id(vars(module)): name
        for name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType) and name != "__main__" and not is_own(name)
        if vars(module).get("__spec__") is not None and module.__name__ == name
    }


def folder_of_import(name: str) -> str:
    """Where a module, or the package that it is in, was found."""
    top = sys.modules.get(name.partition(".")[0])
    origin = getattr(getattr(top, "__spec__", None), "origin", None) or ""
    folder = os.path.dirname(origin)
    return os.path.dirname(folder) if hasattr(top, "__path__") else folder


def imported_from(name: str, folder: str) -> dict[str, Any]:
    if name not in sys.modules and folder and folder not in sys.path:
        sys.path.append(folder)  # what the program's path was is put back later
    return namespace_of(name)


def module_named(name: str) -> types.ModuleType:
    namespace_of(name)
    return sys.modules[name]


#: Modules that compiled modules make, to share things among them.
_OF_COMPILERS = ("_cython_", "cython_runtime", "pybind11_", "nanobind", "swig_runtime_data")


def made_by_hand(module: Any) -> bool:
    """Whether this is a module that was not imported from anywhere."""
    there = vars(module) if type(module) is types.ModuleType else {}
    is_made = bool(there) and there.get("__spec__") is None and "__file__" not in there
    return is_made and not module.__name__.startswith(_OF_COMPILERS)


class MadeModuleKind(Kind):
    """A module that the program made by hand."""

    def parts(self, thing: types.ModuleType) -> Parts:
        return [(f".{name}", value) for name, value in list(vars(thing).items())]

    def content(self, thing: types.ModuleType) -> Any:
        return dict(vars(thing)), sys.modules.get(thing.__name__) is thing

    def bare(self, thing: types.ModuleType) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return types.ModuleType, (thing.__name__,)

    @staticmethod
    def fill(thing: types.ModuleType, content: Any) -> None:
        variables, is_imported = content
        vars(thing).clear()
        vars(thing).update(variables)
        if is_imported:
            sys.modules[thing.__name__] = thing


class FunctionKind(Kind):
    """Its code is that of the script; another one that was put into it since is state."""

    def parts(self, thing: types.FunctionType) -> Parts:
        _code_at_first(thing)
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            yield f"<{name}>", cell
        for at, value in enumerate(thing.__defaults__ or ()):
            yield f"<default {at}>", value
        for name, value in (thing.__kwdefaults__ or {}).items():
            yield f"<default {name}>", value
        for name, value in list(vars(thing).items()):
            yield f".{name}", value

    def content(self, thing: types.FunctionType) -> Any:
        # The cells cannot be exchanged, but what they hold is saved with whoever names them.
        code = thing.__code__
        return (
            thing.__defaults__,
            thing.__kwdefaults__,
            dict(vars(thing)),
            thing.__closure__,
            None if _code_at_first(thing) is code else code_as_bytes(code),
            thing.__doc__,
            thing.__annotations__ or None,
        )

    def bare(self, thing: types.FunctionType) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return bare_function, (
            code_as_bytes(thing.__code__),
            module_of(thing.__globals__),
            thing.__name__,
            thing.__qualname__,
            thing.__module__,
            thing.__closure__,
        )

    @staticmethod
    def fill(thing: types.FunctionType, content: Any) -> None:
        thing.__defaults__, thing.__kwdefaults__, attributes, _, code, said, annotations = content
        vars(thing).clear()
        vars(thing).update(attributes)
        _code_at_first(thing)
        if code is not None:
            thing.__code__ = code_of(code)
        thing.__doc__, thing.__annotations__ = said, annotations or {}


#: By function: the code that it had when it was met first.
_FIRST_CODE: weakref.WeakKeyDictionary[types.FunctionType, types.CodeType] = weakref.WeakKeyDictionary()


def _code_at_first(function: types.FunctionType) -> types.CodeType:
    return _FIRST_CODE.setdefault(function, function.__code__)


def bare_function(
    code: bytes, module: Any, name: str, qualname: str, said_module: str, closure: tuple[types.CellType, ...]
) -> types.FunctionType:
    made = types.FunctionType(code_of(code), namespace_of(module), name, None, closure)
    made.__qualname__, made.__module__ = qualname, said_module
    return made


def new_cell() -> types.CellType:
    return types.CellType()


class CellKind(Kind):
    def parts(self, thing: types.CellType) -> Parts:
        try:
            yield "", thing.cell_contents
        except ValueError:
            return

    def content(self, thing: types.CellType) -> Any:
        try:
            return (thing.cell_contents,)
        except ValueError:
            return ()

    def bare(self, thing: types.CellType) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return new_cell, ()

    @staticmethod
    def fill(thing: types.CellType, content: tuple[Any, ...]) -> None:
        if content:
            (thing.cell_contents,) = content
        else:
            try:
                del thing.cell_contents
            except ValueError:
                return


#: Entries of a class that are not its state.
_OF_EVERY_CLASS = frozenset(
    ("__dict__", "__weakref__", "__module__", "__qualname__", "__abc_impl__", "_abc_impl")
)


class _OneField(ctypes.Structure):
    _fields_: ClassVar = [("x", ctypes.c_int)]


#: What a class made of its declaration, and gives to no other.
_OF_SLOTS = (types.GetSetDescriptorType, types.MemberDescriptorType, type(vars(_OneField)["x"]))


class ClassKind(Kind):
    """A class of the program's own: its attributes change like any others."""

    def parts(self, thing: type) -> Parts:
        for name, value in list(vars(thing).items()):
            if name not in _OF_EVERY_CLASS and not isinstance(value, _OF_SLOTS):
                yield f".{name}", value
        yield from ((f".__bases__[{at}]", base) for at, base in enumerate(thing.__bases__))
        yield from ((f"<registered {at}>", cls) for at, cls in enumerate(_registered(thing)))

    def content(self, thing: type) -> Any:
        own = {
            name: value
            for name, value in vars(thing).items()
            if name not in _OF_EVERY_CLASS and not isinstance(value, _OF_SLOTS)
        }
        return own, thing.__bases__, _registered(thing)

    def bare(self, thing: type) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        if type(thing).__new__ not in (type.__new__, abc.ABCMeta.__new__):
            raise Unknown(thing, f"a class that {type(thing).__qualname__} made after the loop began")
        own: dict[str, Any] = {"__module__": thing.__module__, "__qualname__": thing.__qualname__}
        # The others are in their places already: attributes of a class are in the order of their making.
        names = [name for name in self.content(thing)[0] if name not in ASKED_WHEN_MADE]
        own |= {name: vars(thing)[name] if name == "__slots__" else None for name in names}
        return bare_class, (type(thing), thing.__name__, thing.__bases__, own)

    @staticmethod
    def fill(thing: type, content: Any) -> None:
        there, (own, bases, registered) = vars(thing), content
        if thing.__bases__ != bases:
            thing.__bases__ = bases
        for name, value in own.items():
            now = there.get(name, _MISSING)
            if now is not value and name != "__slots__" and not _is_same_descriptor(now, value):
                type.__setattr__(thing, name, value)
        for name in [n for n in there if n not in own and n not in _OF_EVERY_CLASS]:
            if not isinstance(there[name], _OF_SLOTS):
                type.__delattr__(thing, name)
        known = set(map(id, _registered(thing)))
        for cls in registered:
            if id(cls) not in known:
                abc.ABCMeta.register(thing, cls)  # type: ignore[arg-type]


#: What the making of a class looks at.
ASKED_WHEN_MADE = frozenset(("__init_subclass__", "__classcell__", "__new__", "__hash__"))


def _registered(cls: type) -> list[type]:
    """Classes that were declared to be its subclasses."""
    if not isinstance(cls, abc.ABCMeta):
        return []
    found = [known for reference in _abc._get_dump(cls)[0] if (known := reference()) is not None]
    return sorted(found, key=lambda known: (known.__module__, known.__qualname__))


def _is_same_descriptor(one: Any, other: Any) -> bool:
    """They are made anew each time; what they are made of is not."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (staticmethod, classmethod)):
        return one.__func__ is other.__func__
    if isinstance(one, property):
        return (one.fget, one.fset, one.fdel) == (other.fget, other.fset, other.fdel)
    if isinstance(one, functools.cached_property):
        return one.func is other.func and one.attrname == other.attrname
    return False


def bare_class(metaclass: type, name: str, bases: tuple[type, ...], own: dict[str, Any]) -> type:
    made: type = metaclass.__new__(metaclass, name, bases, dict(own))
    return made


# --- generators ---------------------------------------------------------------------------------------------


class GeneratorKind(Kind):
    """It cannot be wound back, so it is made anew where it stood."""

    has_identity = False
    is_passed_through = True

    def parts(self, thing: types.GeneratorType[Any, Any, Any]) -> Parts:
        if thing.gi_frame is None:
            return
        suspended = _read(thing)
        for name, value in zip(suspended.names, suspended.slots, strict=True):
            if value is not NOTHING:
                yield f"<{name}>", value
        for at, value in enumerate(suspended.stack):
            if value is not NOTHING:
                yield f"<stack {at}>", value
        if suspended.handled is not None:
            yield "<handled>", suspended.handled

    def content(self, thing: types.GeneratorType[Any, Any, Any]) -> Any:
        return None if thing.gi_frame is None else suspended_as_parts(_read(thing))


def _read(generator: types.GeneratorType[Any, Any, Any]) -> call_stack.Suspended:
    try:
        if not generator.gi_running:
            return call_stack.read_generator(generator)
        running = call_stack.read_running(generator)
    except NotResumable as error:
        raise Unknown(generator, error.message) from error
    if running is None:
        raise Unknown(generator, "a generator that is running in another thread")
    return running


def suspended_as_parts(suspended: call_stack.Suspended) -> tuple[Any, ...]:
    return (
        code_as_bytes(suspended.code),
        suspended.offset,
        suspended.slots,
        suspended.stack,
        module_of(suspended.namespace),
        *([suspended.handled] if suspended.handled is not None else []),
    )


def suspended_from(parts: tuple[Any, ...]) -> call_stack.Suspended:
    code, offset, slots, stack, module, *handled = parts
    return call_stack.Suspended(code_of(code), offset, slots, stack, namespace_of(module), *handled)


#: How the handler begins that each generator has, which does nothing but raise.
_STOPS = {dis.opmap[name] for name in ("CALL_INTRINSIC_1",) if name in dis.opmap}


def _waits_inside_a_block(generator: types.GeneratorType[Any, Any, Any]) -> bool:
    frame = generator.gi_frame
    return frame is not None and any(
        handler.start <= frame.f_lasti < handler.end
        for handler in exception_table(frame.f_code.co_exceptiontable)
        if frame.f_code.co_code[handler.target] not in _STOPS
    )


def generators_with_an_end() -> list[Any]:
    """Generators that wait inside a `try` or `with`: to let one go runs what is to be done at its end."""
    found = [thing for thing in gc.get_objects() if type(thing) is types.GeneratorType]
    return [one for one in found if one.gi_suspended and _waits_inside_a_block(one)]


def finished_generator(name: str) -> types.GeneratorType[Any, Any, Any]:
    def over() -> Iterator[Any]:
        yield from ()

    made = over()
    made.__name__ = name  # type: ignore[attr-defined]
    list(made)
    return made  # type: ignore[return-value]


_LEFT_OUT: list[bool] = []


@contextlib.contextmanager
def generators_left_out() -> Iterator[None]:
    """None is made meanwhile: one that is made and let go would run its `finally`."""
    _LEFT_OUT.append(True)
    try:
        yield
    finally:
        _LEFT_OUT.pop()


def generators_are_left_out() -> bool:
    return bool(_LEFT_OUT)


def generator_from(parts: tuple[Any, ...] | None) -> Any:
    if _LEFT_OUT:
        return iter(())
    return finished_generator("over") if parts is None else call_stack.made_generator(suspended_from(parts))


# --- references and calls that are bound to something -------------------------------------------------------


def method_parts(thing: types.MethodType) -> Parts:
    return [(".__self__", thing.__self__), (".__func__", thing.__func__)]


def bound_builtin_parts(thing: types.BuiltinFunctionType) -> Parts:
    return [(".__self__", thing.__self__)]


class PartialKind(Kind):
    def parts(self, thing: functools.partial[Any]) -> Parts:
        yield ".func", thing.func
        for at, value in enumerate(thing.args):
            yield f".args[{at}]", value
        for name, value in thing.keywords.items():
            yield f".keywords[{name!r}]", value
        for name, value in vars(thing).items():
            yield f".{name}", value

    def content(self, thing: functools.partial[Any]) -> Any:
        return thing.func, thing.args, dict(thing.keywords), dict(vars(thing))

    def bare(self, thing: functools.partial[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return type(thing), (print,)

    @staticmethod
    def fill(thing: functools.partial[Any], content: Any) -> None:
        thing.__setstate__(content)  # type: ignore[attr-defined]


def name_of_sentinel(thing: Any, kind: Kind) -> tuple[str, str] | None:
    """An object without content that an installed module gives by name: it is known by being that one."""
    cls = type(thing)
    if (
        not isinstance(kind, InstanceKind)
        or kind.layout is not object
        or slots_of(cls)
        or attributes_of(thing)
    ):
        return None
    if cls is object:
        return name_of_constant(thing)
    home = sys.modules.get(cls.__module__)
    names = vars(home).items() if home is not None and cls.__module__ != "__main__" else ()
    return next(((cls.__module__, name) for name, value in list(names) if value is thing), None)


_constants: dict[int, tuple[str, str]] = {}
_looked_through: set[str] = set()


def look_for_constants(is_own: IsOwn) -> None:
    """In modules that were imported since: texts and bare objects that whoever holds one is asked whether it
    is that one, such as `argparse.SUPPRESS`."""
    for module in [name for name in list(sys.modules) if name not in _looked_through]:
        _looked_through.add(module)
        there = sys.modules[module]
        if module == "__main__" or is_own(module) or not isinstance(there, types.ModuleType):
            continue  # what the program's own modules hold is saved
        for name, value in list(vars(there).items()):
            is_text = type(value) is str and name.isupper() and not value.isidentifier() and len(value) > 1
            if is_text or type(value) is object:
                _constants.setdefault(id(value), (module, name))


def name_of_constant(thing: Any) -> tuple[str, str] | None:
    found = _constants.get(id(thing))
    if found is None or vars(sys.modules[found[0]]).get(found[1]) is not thing:
        return None
    return found


def sentinel_named(module: str, name: str) -> Any:
    return namespace_of(module)[name]


def kind_of_function(thing: Any, is_own: IsOwn) -> Kind | None:
    """The kind of anything that has a name or is bound to something; None for everything else."""
    cls = type(thing)
    if issubclass(cls, types.ModuleType):
        if made_by_hand(thing) and not made_by_hand(sys.modules.get(thing.__name__.partition(".")[0], thing)):
            return NAMED  # of a library: a part of a package
        if made_by_hand(thing):
            return MADE_MODULE
        return NAMED if thing.__name__ in sys.modules else UNSAVEABLE
    if issubclass(cls, type):
        is_named = _is_builtin(thing) or installed_name(thing, is_own) or other_name(thing, is_own)
        return NAMED if is_named else CLASS
    if issubclass(cls, types.FunctionType):
        return NAMED if installed_name(thing, is_own) else FUNCTION
    if issubclass(cls, types.BuiltinFunctionType):
        if thing.__self__ is None or isinstance(thing.__self__, (types.ModuleType, type)):
            return NAMED
        return BOUND_BUILTIN
    return None


def _is_builtin(cls: type) -> bool:
    return cls.__module__ == "builtins"


_UNNAMED: dict[str, type] = {
    cls.__name__: cls
    for cls in vars(types).values()
    if isinstance(cls, type) and cls.__module__ == "builtins" and not hasattr(builtins, cls.__name__)
}


def is_unnamed_builtin(thing: Any) -> bool:
    """A class of the interpreter, such as that of methods, which `builtins` does not give by its name."""
    return issubclass(type(thing), type) and _UNNAMED.get(thing.__name__) is thing


def unnamed_builtin(name: str) -> type:
    return _UNNAMED[name]


MADE_MODULE = MadeModuleKind()
FUNCTION, CELL, CLASS, GENERATOR, PARTIAL = (
    FunctionKind(),
    CellKind(),
    ClassKind(),
    GeneratorKind(),
    PartialKind(),
)
METHOD, BOUND_BUILTIN = Through(method_parts), Through(bound_builtin_parts)
#: Immutable and found by name, or by what they are bound to.
NAMED_TYPES = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodWrapperType,
)
