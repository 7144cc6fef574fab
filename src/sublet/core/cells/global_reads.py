"""Which globals compiled code reads, in the order in which it runs.

Rules of this file:
- The compiler knows every construct; we follow what it made, one instruction after the other, along every way
  it may take. An instruction we do not know is one that may go on or jump, whichever it can.
- A global is settled where every way has bound it: from there on its former value cannot be seen. One that is
  read where it is not settled is read from outside.
- A function reads its globals when it is called, which is when its name is used, or after the end. That holds
  for `def f` and `f = lambda`; a function that goes anywhere else may be called there and then. The methods
  of a class too: its body runs at once.
- In doubt a name is read.
"""

from __future__ import annotations

import dis
import heapq
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CodeType

_LOADS = frozenset(["LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"])
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_ENDS = frozenset(["RETURN_VALUE", "RETURN_CONST"])
_GOES_ELSEWHERE = _ENDS | {
    "JUMP_BACKWARD",
    "JUMP_FORWARD",
    "RAISE_VARARGS",
    "RERAISE",
}
#: Instructions between the code of a function and the name it gets.
_MAKING = frozenset(["EXTENDED_ARG", "MAKE_FUNCTION", "SET_FUNCTION_ATTRIBUTE"])

_Settled = frozenset[str]


@lru_cache(maxsize=512)
def names_of_code(code: CodeType) -> tuple[str, ...]:
    """Every global that a function reads, also in functions defined inside it, whatever the order."""
    return tuple(sorted(_named(_all_code(code), _LOADS)))


def read_from_outside(cell: CodeType) -> set[str]:
    """Globals read by the code of a cell, or by a function that it leaves behind."""
    made = _instructions(cell)
    settled = _settled_before(cell, made)
    later = {place: (name, code) for place, name, code in _functions(made)}
    needs: dict[str, set[str]] = {}
    for name, code in later.values():
        needs.setdefault(name, set()).update(names_of_code(code))
    after_the_end = set[str]().union(*needs.values())
    found: set[str] = set()
    for place, instruction in enumerate(made):
        if instruction.opname in _LOADS:
            due: Iterable[str] = [instruction.argval]
        elif isinstance(instruction.argval, CodeType) and place not in later:
            due = _at_once(instruction.argval)
        elif instruction.opname in _ENDS:
            due = after_the_end
        else:
            continue
        found |= _with_needs(due, needs) - settled[place]
    return found


def bound_by(cell: CodeType) -> set[str]:
    """Globals that the cell, or a function of it, may bind."""
    return _changed(cell, "STORE_NAME", "STORE_GLOBAL")


def deleted_by(cell: CodeType) -> set[str]:
    return _changed(cell, "DELETE_NAME", "DELETE_GLOBAL")


def _changed(cell: CodeType, here: str, anywhere: str) -> set[str]:
    """A class body has names of its own."""
    return _named([cell], {here}) | _named(_all_code(cell), {anywhere})


@lru_cache(maxsize=128)  # each is looked at several times, and making them is most of the work
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


def _named(codes: Iterable[CodeType], operations: Iterable[str]) -> set[str]:
    return {i.argval for code in codes for i in _instructions(code) if i.opname in operations}


def _all_code(code: CodeType) -> Iterator[CodeType]:
    waiting = [code]
    while waiting:
        at = waiting.pop()
        yield at
        waiting += _inner(at)


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _functions(made: Sequence[dis.Instruction]) -> Iterator[tuple[int, str, CodeType]]:
    """Functions that only get a name, and are not touched otherwise: (place, name, code)."""
    for place, instruction in enumerate(made):
        if not isinstance(instruction.argval, CodeType):
            continue
        after = place + 1
        while made[after].opname in _MAKING:
            after += 1
        if made[after].opname == "STORE_NAME":
            yield place, made[after].argval, instruction.argval


def _at_once(code: CodeType) -> set[str]:
    if code.co_flags & CO_OPTIMIZED:  # not the body of a class
        return set(names_of_code(code))
    made = _instructions(code)
    settled = _settled_before(code, made)
    deleted = _named([code], {"DELETE_NAME"})  # what is behind the class's own name can be seen again
    found = {name for inner in _inner(code) for name in _at_once(inner)}
    for instruction, here in zip(made, settled, strict=True):
        own = instruction.opname == "LOAD_NAME" and instruction.argval in here - deleted
        if instruction.opname in _LOADS and not own:
            found.add(instruction.argval)
    return found


def _with_needs(names: Iterable[str], needs: dict[str, set[str]]) -> set[str]:
    """What the functions behind the names read, and so on."""
    found: set[str] = set()
    due = list(names)
    while due:
        name = due.pop()
        if name not in found:
            found.add(name)
            due += needs.get(name, ())
    return found


def _settled_before(code: CodeType, made: Sequence[dis.Instruction]) -> list[_Settled]:
    """The globals that are settled before each instruction."""
    place_of = {instruction.offset: place for place, instruction in enumerate(made)}
    handler_of: dict[int, int] = {}
    for entry in dis.Bytecode(code).exception_entries:  # type: ignore[attr-defined]
        handler = place_of[entry.target]
        guarded = (place_of.get(offset) for offset in range(entry.start, entry.end))
        handler_of.update((place, handler) for place in guarded if place is not None)
    found: list[_Settled | None] = [None] * len(made)  # None: no way there yet
    found[0] = frozenset()
    waiting = [0]
    while waiting:
        place = heapq.heappop(waiting)
        instruction = made[place]
        before = found[place]
        assert before is not None
        after = before | {instruction.argval} if instruction.opname == "STORE_NAME" else before
        ways = [] if place not in handler_of else [(handler_of[place], before)]
        if instruction.opcode in _JUMPS:
            ways.append((place_of[instruction.argval], after))
        if instruction.opname not in _GOES_ELSEWHERE:
            ways.append((place + 1, after))
        for way, arriving in ways:
            known = found[way]
            if known is None or not known <= arriving:
                found[way] = arriving if known is None else known & arriving
                heapq.heappush(waiting, way)
    return [here or frozenset() for here in found]
