"""Where a program stands: its frames and its generators, read while they wait and made again elsewhere.

A frame that waits for a call it made is its code, the call it stands at, its variables and the values that
wait on its stack (the iterator of a `for`, the `__exit__` of a `with`, the left side of a `+`). All of that
can be read, and a code object that begins by putting it all in its place, and then jumps to that very call,
is the same frame again. A generator is a frame that waits at a `yield`; one that is running is a frame of the
call stack, whose caller waits for its next member.

Rules of this file:
- Nothing is guessed. The layout of a frame is known for each version of CPython here and compared with what
  Python itself says about the frame; what is not understood is refused with its line.
- A call is made again by its own instruction, with another function in the place of the one that was called:
  handlers, `with` blocks and line numbers are those of the original code.
- A frame made again is read as the original: the code it was made from is known, and by how much it moved.
- Whoever waits for a generator's next member (`for`, `yield from`, `next`) asks it again, by the same
  instruction with the same operands: the generator that is made again goes on in the middle.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import opcode
import platform
import sys
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sublet.training.program_state.cpython.code_objects import (
    OPTIMIZED,
    Analysis,
    analysed,
    made_from,
    numbers_of,
    original,
    slot_names,
)
from sublet.training.program_state.cpython.frame_memory import (
    KNOWN_VERSIONS,
    NOTHING,
    VERSION,
    NotResumable,
    address_of,
    called_by_c,
    handled_by,
    has_ended,
    owner_of,
    put_handled,
    put_slot,
    slots_by_number,
    slots_of,
    stack_of,
)

_CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
#: What asks a generator for its next member, and how deep on the stack that is.
_ASKS = {"FOR_ITER": 1, "SEND": 2}
_GENERATOR, _OTHERS_THAT_SUSPEND = 0x20, 0x80 | 0x200  # coroutines, asynchronous generators
_HAS_ARGS, _HAS_KEYWORDS = 4, 8


@dataclass(slots=True)
class Suspended:
    """A frame that waits for a call, or a generator that waits at a `yield` (or was never begun)."""

    code: types.CodeType
    offset: int | None  # of the instruction it waits at; None: not begun
    slots: list[Any]
    stack: list[Any]
    namespace: dict[str, Any]  # its globals
    handled: BaseException | None = None  # what a generator is handling

    @property
    def is_module(self) -> bool:
        return not self.code.co_flags & OPTIMIZED

    @property
    def names(self) -> list[str]:
        return slot_names(self.code)


def check_interpreter() -> None:
    """Refuse an interpreter whose frames have another layout than the known ones."""
    free_threads = not getattr(sys, "_is_gil_enabled", lambda: True)()
    if (
        sys.implementation.name != "cpython"
        or VERSION not in KNOWN_VERSIONS
        or sys.maxsize >> 32 == 0
        or free_threads
    ):
        raise NotResumable(
            f"unmodified scripts can be resumed on CPython 3.11 to 3.13, and this is "
            f"{platform.python_implementation()} {platform.python_version()}; nothing was started",
            remedy="run it with Python 3.11, 3.12 or 3.13, or use run = sublet.train(...) in the script",
        )
    address_of(sys._getframe())


# --- reading ------------------------------------------------------------------------------------------------


def read(frame: types.FrameType, inner: types.FrameType | None) -> Suspended:
    """`inner` is the frame that it called; None for the one whose call is answered by us."""
    code, moved = original(frame.f_code)
    analysis = analysed(code)
    at = analysis.instruction(frame.f_lasti - moved)
    if at.opname == "PRECALL":  # of 3.11, which may make the call by itself
        at = analysis.after(at)
    if code.co_flags & _OTHERS_THAT_SUSPEND:
        raise NotResumable(f"{place(frame)} trains inside a coroutine, which cannot be entered again")
    if inner is not None and inner.f_code.co_flags & _GENERATOR:
        stack = _asking(frame, at, analysis, inner)
    elif at.opname not in _CALLS:
        raise NotResumable(f"{place(frame)} trains inside an operator, a property or an import ({at.opname})")
    else:
        operands = analysis.depths[at.offset]
        below = operands + dis.stack_effect(at.opcode, at.arg) - 1
        # What stands between two frames that were made again is ours, and only passes on.
        if inner is not None and inner.f_back is frame and called_by_c(inner):
            _check_passes_on(stack_of(frame, operands)[below:], frame, inner)
        stack = stack_of(frame, below)
    slots = [] if frame.f_code.co_flags & OPTIMIZED == 0 else slots_of(frame)
    for n in analysis.dead_after(at.offset):
        if is_gone_unnoticed(slots[n]):
            slots[n] = NOTHING
    return Suspended(code, at.offset, slots, stack, frame.f_globals)


def _asking(
    frame: types.FrameType, at: dis.Instruction, analysis: Analysis, inner: types.FrameType
) -> list[Any]:
    """The stack of a frame that waits for the next member of a generator, with all operands."""
    generator, depth = generator_of(inner), analysis.depths[_first_part(at, analysis).offset]
    if at.opname == "SEND":  # what it sends may be taken from the stack already
        stack = [*stack_of(frame, depth - 1), None]
        asks = depth > 1 and stack[-2] is generator
    elif at.opname == "FOR_ITER":
        stack = stack_of(frame, depth)
        asks = depth > 0 and stack[-1] is generator
    elif at.opname == "CALL":
        stack = stack_of(frame, depth)
        called = [o for o in stack[depth - 2 - (at.arg or 0) :] if o is not NOTHING]
        asks = _asks(called[0], called[1:], generator)
    else:
        asks = False
    if not asks or inner.f_back is not frame:
        raise NotResumable(
            f"{place(frame)} trains inside the generator {inner.f_code.co_qualname}, which is not asked by "
            "for, next() or yield from"
        )
    return stack


def _first_part(at: dis.Instruction, analysis: Analysis) -> dis.Instruction:
    """In 3.11 PRECALL is a part of a call."""
    return analysis.before(at) if VERSION == (3, 11) and at.opname == "CALL" else at


def _asks(called: Any, arguments: Sequence[Any], generator: Any) -> bool:
    kind = types.GeneratorType
    if called is next or called is kind.send or called is kind.__next__:
        return bool(arguments) and arguments[0] is generator
    if type(called) not in (types.BuiltinMethodType, types.MethodWrapperType):
        return False
    return called.__self__ is generator and called.__name__ in ("send", "__next__")


def generator_of(frame: types.FrameType) -> types.GeneratorType[Any, Any, Any]:
    """The generator whose frame this is: the frame is a part of it in memory."""
    found = owner_of(frame) if frame.f_code.co_flags & _GENERATOR else None
    if type(found) is not types.GeneratorType or found.gi_frame is not frame:
        raise NotResumable(f"{place(frame)} its generator is not found")
    return found


#: By the id of a frame of the program that is on the stack: the one that it called.
_STANDING: dict[int, types.FrameType | None] = {}


@contextlib.contextmanager
def standing(frames: Sequence[types.FrameType]) -> Iterator[None]:
    """Meanwhile generators that are running are read as frames of this stack, innermost first."""
    inner: types.FrameType | None = None
    for frame in frames:
        _STANDING[id(frame)], inner = inner, frame
    try:
        yield
    finally:
        _STANDING.clear()


def read_running(generator: types.GeneratorType[Any, Any, Any]) -> Suspended | None:
    """None if it is not on the stack of the program: it runs in another thread."""
    frame = generator.gi_frame
    if frame is None or id(frame) not in _STANDING:
        return None
    return read(frame, _STANDING[id(frame)])


def is_gone_unnoticed(value: Any) -> bool:
    """Whether nobody sees that a variable that is never read again holds it no longer, or what it leads
    to."""
    if issubclass(type(value), type):
        return False
    met, waiting = {id(value)}, [value]
    while waiting:
        thing = waiting.pop()
        if is_seen_to_end(thing) or len(met) > _MOST_LOOKED_AT:
            return False
        found = [held for held in _held_by(thing) if id(held) not in met]
        met.update(map(id, found))
        waiting += found
    return True


def _held_by(thing: Any) -> list[Any]:
    """What may be gone with it: no class, no module, no variables of one."""
    if issubclass(type(thing), (type, types.ModuleType)):
        return []
    if type(thing) is types.FrameType:  # an object of the program is not asked what it is
        return list(slots_by_number(thing).values()) if has_ended(thing) else []
    space = thing.__globals__ if type(thing) is types.FunctionType else None
    return [held for held in gc.get_referents(thing) if held is not space]


_MOST_LOOKED_AT = 2000


class LooseReference(weakref.ref[Any]):
    """A weak reference of ours, by which no program sees anything."""

    __slots__ = ()


def is_seen_to_end(thing: Any) -> bool:
    """Whether the program can tell when this object is gone: by a finalizer, as files and generators have, or
    by a weak reference."""
    cls = type(thing)
    if issubclass(cls, (type, types.FunctionType, types.ModuleType)):
        return False  # Python itself refers to them weakly, and so do we
    if hasattr(cls, "__del__"):
        return True
    return any(type(reference) is not LooseReference for reference in weakref.getweakrefs(thing))


def _check_passes_on(operands: list[Any], outer: types.FrameType, inner: types.FrameType) -> None:
    """C code that called `inner` for `outer` returns what `inner` returns, and does nothing else."""
    called = next((o for o in operands if o is not NOTHING), None)
    if not _is_plain_call(called, original(inner.f_code)[0]):
        name = getattr(called, "__qualname__", type(called).__qualname__)
        raise NotResumable(
            f"{place(outer)} trains inside a call of {name}, which is in the middle of its work"
        )


def _is_plain_call(called: Any, code: types.CodeType, depth: int = 0) -> bool:
    if called is exec:
        return code.co_name == "<module>"
    if isinstance(called, types.FunctionType):
        return original(called.__code__)[0] is code
    if isinstance(called, types.MethodType):
        return _is_plain_call(called.__func__, code, depth + 1)
    if isinstance(called, functools.partial):
        return _is_plain_call(called.func, code, depth + 1)
    if isinstance(called, type) or depth > 8:
        return False
    return _is_plain_call(vars(type(called)).get("__call__"), code, depth + 1)


def read_generator(generator: types.GeneratorType[Any, Any, Any]) -> Suspended:
    """One that waits; a generator that is running, or over, is not for here."""
    frame = generator.gi_frame
    assert frame is not None, "it waits"
    code, moved = original(generator.gi_code)
    slots = slots_of(frame)
    if not generator.gi_suspended:
        return Suspended(code, None, slots, [], frame.f_globals)
    analysis = analysed(code)
    at = analysis.instruction(frame.f_lasti - moved)
    if at.opname == "RESUME":  # from 3.13 the next instruction is shown
        at = analysis.before(at)
    if at.opname != "YIELD_VALUE":
        raise NotResumable(f"the generator {code.co_qualname} waits at {at.opname}")
    for n in analysis.dead_after(at.offset):
        if is_gone_unnoticed(slots[n]):
            slots[n] = NOTHING
    stack = stack_of(frame, analysis.depths[at.offset] - 1)
    return Suspended(code, at.offset, slots, stack, frame.f_globals, handled_by(generator))


def offset_of(frame: types.FrameType) -> int:
    """The instruction it waits at, in the code that it was made from."""
    code, moved = original(frame.f_code)
    return analysed(code).instruction(frame.f_lasti - moved).offset


def place(frame: types.FrameType) -> str:
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_qualname}:"


def let_go(frame: types.FrameType) -> None:
    """A frame that is never returned to lets go of its variables, and of what waits on its stack below the
    call: the program goes on in another frame, and sees when they are gone."""
    code, moved = original(frame.f_code)
    analysis = analysed(code)
    at = analysis.instruction(frame.f_lasti - moved)
    below = analysis.depths[at.offset] + dis.stack_effect(at.opcode, at.arg) - 1
    if at.opname in _ASKS:  # the generator that it waits for is running
        below = analysis.depths[at.offset] - _ASKS[at.opname]
    names = len(slot_names(code))
    first = 0 if code.co_flags & OPTIMIZED else names
    for n in range(first, names + below):
        put_slot(frame, n, NOTHING)


# --- making again -------------------------------------------------------------------------------------------


def go_on(stack: list[Any], answer: Callable[[], Any]) -> Any:
    """Run a program on from where its frames wait, innermost first. It waits for `answer`. A generator among
    them is running, and its caller asks it."""

    def answered(*_: Any, **__: Any) -> Any:
        return answer()

    going: Callable[..., Any] = answered
    while stack:  # what a frame holds is held by it alone, so that it can be let go
        frame = stack.pop(0)
        if isinstance(frame, Suspended):
            going = resumed(frame, going, _given(stack))
        elif (waits := _WAITING.pop(id(frame), None)) is not None:
            waits.answer = going
    return going()


def _given(stack: list[Any]) -> int:
    """How many arguments the call that the next frame waits for is made with; a generator's has none."""
    if not stack or not isinstance(stack[0], Suspended):
        return 0
    assert stack[0].offset is not None
    at = analysed(stack[0].code).instruction(stack[0].offset)
    return 0 if at.opname == "CALL_FUNCTION_EX" else at.arg or 0


def resumed(frame: Suspended, answer: Callable[..., Any], given: int) -> Callable[..., Any]:
    """What goes on where `frame` waits when it is called with `given` arguments, which mean nothing. `answer`
    is called in place of the call it waits for. No frame of ours stands between the two: a program prints
    its tracebacks, and asks for its callers."""
    offset, operands = _entrance(frame, answer)
    fits = given == 0 or (not frame.is_module and bool(frame.code.co_varnames))
    code = _entering(frame, offset, operands, given if fits else 0)
    if frame.is_module:
        runs: Callable[..., Any] = functools.partial(exec, code, frame.namespace)
    else:
        runs = function = _function(code, frame.namespace)
        function.__defaults__ = (None,) * code.co_argcount
        keywords = code.co_varnames[code.co_argcount :][: code.co_kwonlyargcount]
        function.__kwdefaults__ = dict.fromkeys(keywords)
    return runs if fits else lambda *_: runs()


def _entrance(frame: Suspended, answer: Callable[..., Any]) -> tuple[int, list[Any]]:
    """Where to go on, and what that instruction finds on the stack besides what is there."""
    assert frame.offset is not None
    analysis = analysed(frame.code)
    at = analysis.instruction(frame.offset)
    enters = _first_part(at, analysis)
    asks_again = len(frame.stack) == analysis.depths[enters.offset]
    while enters.offset and analysis.before(enters).opname == "EXTENDED_ARG":
        enters = analysis.before(enters)
    return enters.offset, [] if asks_again else _operands(at, answer)


class _Waits:
    """In the place of the call that a running generator waits for."""

    answer: Callable[..., Any] | None = None

    def __call__(self, *_: Any, **__: Any) -> Any:
        answer, self.answer = self.answer, None
        assert answer is not None, "it goes on with the stack that it is a part of"
        return answer()


#: By the id of a running generator that was made again, until the stack goes on.
_WAITING: dict[int, _Waits] = {}


def made_generator(suspended: Suspended) -> Generator[Any, Any, Any]:
    code = suspended.code
    if suspended.offset is None:
        return _not_begun(suspended)
    if analysed(code).instruction(suspended.offset).opname != "YIELD_VALUE":
        return _made_running(suspended)
    made = _entering(suspended, suspended.offset, [None])
    arguments, keywords = _placeholders(code)
    generator: Generator[Any, Any, Any] = _function(made, suspended.namespace)(*arguments, **keywords)
    next(generator)  # to the `yield` where it waited
    if suspended.handled is not None:
        put_handled(generator, suspended.handled)
    return generator


def _made_running(suspended: Suspended) -> Generator[Any, Any, Any]:
    """It waits at its beginning to be asked, whatever it is sent, and goes on in the middle."""
    waits = _Waits()
    offset, operands = _entrance(suspended, waits)
    made = _entering(suspended, offset, operands, asked=True)
    arguments, keywords = _placeholders(suspended.code)
    generator: Generator[Any, Any, Any] = _function(made, suspended.namespace)(*arguments, **keywords)
    next(generator)
    _WAITING[id(generator)] = waits
    return generator


def _not_begun(suspended: Suspended) -> Generator[Any, Any, Any]:
    """Its function is called again, with what it was called with."""
    code, values = suspended.code, dict(zip(suspended.names, suspended.slots, strict=True))
    names = code.co_varnames
    held = {
        n: v.cell_contents if isinstance(v, types.CellType) else v for n, v in values.items() if n in names
    }
    count = code.co_argcount
    arguments = [held[name] for name in names[:count]]
    keywords = {name: held[name] for name in names[count : count + code.co_kwonlyargcount]}
    rest = iter(names[count + code.co_kwonlyargcount :])
    if code.co_flags & _HAS_ARGS:
        arguments += held[next(rest)]
    if code.co_flags & _HAS_KEYWORDS:
        keywords |= held[next(rest)]
    closure = tuple(values[name] for name in code.co_freevars)
    if not all(isinstance(cell, types.CellType) for cell in closure):
        raise NotResumable(
            f"the generator {code.co_qualname} was not begun, and what it refers to is unknown"
        )
    function = types.FunctionType(code, suspended.namespace, code.co_name, None, closure)
    generator: Generator[Any, Any, Any] = function(*arguments, **keywords)
    return generator


def _function(code: types.CodeType, namespace: dict[str, Any]) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(code, namespace, code.co_name, None, cells)


def _placeholders(code: types.CodeType) -> tuple[list[None], dict[str, None]]:
    """Arguments that the first instructions replace."""
    count = code.co_argcount
    return [None] * count, dict.fromkeys(code.co_varnames[count : count + code.co_kwonlyargcount])


def _operands(at: dis.Instruction, answer: Callable[..., Any]) -> list[Any]:
    """What the call's own instruction expects on the stack."""
    head = [answer, NOTHING] if VERSION >= (3, 13) else [NOTHING, answer]
    if at.opname == "CALL_FUNCTION_EX":
        return [*head, (), *([{}] if (at.arg or 0) & 1 else [])]
    return [*head, *[None] * (at.arg or 0), *([()] if at.opname == "CALL_KW" else [])]


def _entering(
    frame: Suspended, offset: int, operands: list[Any], given: int | None = None, *, asked: bool = False
) -> types.CodeType:
    """The frame's code, with a beginning that puts everything in its place and goes to `offset`. It is called
    with `given` arguments; None: it is a generator's. `asked`: a generator's beginning waits once."""
    code = frame.code
    values: list[Any] = []
    beginning = bytearray()
    if given is None:
        beginning += _instruction("RETURN_GENERATOR") + _instruction("POP_TOP")
    beginning += _instruction("RESUME")
    if asked:
        nothing = _instruction("LOAD_CONST", len(code.co_consts) + 1)
        beginning += (
            nothing + _instruction("YIELD_VALUE") + _instruction("RESUME", 1) + _instruction("POP_TOP")
        )
    code = _taking(code, given or 0)
    bound = code.co_argcount + code.co_kwonlyargcount
    bound += bool(code.co_flags & _HAS_ARGS) + bool(code.co_flags & _HAS_KEYWORDS)
    take = _call_without_arguments(len(code.co_consts))
    for n, value in enumerate(frame.slots):
        if value is not NOTHING:
            values.append(value)
            beginning += take + _instruction("STORE_FAST", n)
        elif n < bound:
            beginning += _instruction("DELETE_FAST", n)
    for value in [*frame.stack, *operands]:
        if value is NOTHING:
            beginning += _instruction("PUSH_NULL")
        else:
            values.append(value)
            beginning += take
    beginning += _instruction("JUMP_FORWARD", offset // 2)
    values.reverse()
    made = code.replace(
        co_code=bytes(beginning) + code.co_code,
        # Taken one by one: nothing is held longer than the frame needs it.
        co_consts=(*code.co_consts, values.pop, None),
        co_exceptiontable=_moved(code.co_exceptiontable, len(beginning) // 2),
        co_linetable=_without_lines(len(beginning) // 2) + code.co_linetable,
        co_stacksize=code.co_stacksize + len(frame.stack) + len(operands) + 4,
    )
    made_from(made, frame.code, len(beginning))
    return made


def _taking(code: types.CodeType, given: int) -> types.CodeType:
    """The code with a signature that so many arguments fit, even if the call went through a library that
    passed on others."""
    if given <= code.co_argcount or code.co_flags & _HAS_ARGS:
        return code
    flags = (code.co_flags | _HAS_ARGS) & ~_HAS_KEYWORDS
    return code.replace(co_argcount=0, co_posonlyargcount=0, co_kwonlyargcount=0, co_flags=flags)


def _find_caches() -> dict[str, int]:
    """How many inline caches follow each instruction."""
    entries: Any = vars(opcode)["_inline_cache_entries"]
    if isinstance(entries, dict):
        return dict(entries)
    return {opcode.opname[number]: count for number, count in enumerate(entries)}


_CACHES = _find_caches()


def _instruction(name: str, argument: int = 0) -> bytes:
    out = bytearray((dis.opmap[name], argument & 255))
    while argument := argument >> 8:
        out[:0] = (dis.opmap["EXTENDED_ARG"], argument & 255)
    return bytes(out) + bytes(2 * _CACHES.get(name, 0))


def _call_without_arguments(constant: int) -> bytes:
    load, null = _instruction("LOAD_CONST", constant), _instruction("PUSH_NULL")
    if VERSION >= (3, 13):
        return load + null + _instruction("CALL")
    precall = _instruction("PRECALL") if VERSION == (3, 11) else b""
    return null + load + precall + _instruction("CALL")


def _moved(table: bytes, units: int) -> bytes:
    out = bytearray()
    for n, number in enumerate(numbers_of(table)):
        moved = number + units if n % 4 in (0, 2) else number
        parts = [moved & 63]
        while moved := moved >> 6:
            parts.append(moved & 63 | 64)
        parts.reverse()
        parts[0] |= 128 if n % 4 == 0 else 0  # an entry begins
        out += bytes(parts)
    return bytes(out)


def _without_lines(units: int) -> bytes:
    return bytes(0x80 | 15 << 3 | min(8, units - at) - 1 for at in range(0, units, 8))
