"""What is known of a code object: how deep its stack is, what it still reads, where it handles exceptions.

Rules of this file:
- A code object is known by being that very one: code objects of the same text are equal.
- Code that was made to enter a frame again is known by the code that it was made from.
"""

from __future__ import annotations

import bisect
import dis
import functools
import itertools
import opcode
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

OPTIMIZED = 1
_ENDS = frozenset(("RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS", "INTERPRETER_EXIT"))
#: A program that asks for its variables by text may read any of them.
_READS_ALL = frozenset(("locals", "vars", "eval", "exec", "globals", "dir", "breakpoint"))


@dataclass(frozen=True, slots=True)
class _ById:
    """A key that is this very code object: code objects of the same text are equal."""

    code: types.CodeType = field(compare=False)
    number: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", id(self.code))


@functools.cache
def _slot_names(code: _ById) -> list[str]:
    of = code.code
    own = list(of.co_varnames)
    return [*own, *(name for name in of.co_cellvars if name not in own), *of.co_freevars]


def slot_names(code: types.CodeType) -> list[str]:
    return _slot_names(_ById(code))


#: The code of frames made again: what it was made from, and by how many bytes its instructions moved.
_MADE: dict[_ById, tuple[types.CodeType, int]] = {}


def original(code: types.CodeType) -> tuple[types.CodeType, int]:
    return _MADE.get(_ById(code), (code, 0))


def made_from(made: types.CodeType, code: types.CodeType, moved: int) -> None:
    """Code that enters a frame again; its instructions stand `moved` bytes behind those of `code`."""
    _MADE[_ById(made)] = (code, moved)


def analysed(code: types.CodeType) -> Analysis:
    return _analysed(_ById(code))


@functools.cache
def _analysed(key: _ById) -> Analysis:
    return Analysis(key.code)


class Analysis:
    """Of one code object: how deep its stack is before each instruction, and which variables are still read
    after it."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        self.instructions = list(dis.get_instructions(code))
        self._offsets = [i.offset for i in self.instructions]
        self._number = {offset: n for n, offset in enumerate(self._offsets)}
        self._handlers = list(exception_table(code.co_exceptiontable))
        self.depths = self._find_depths()
        self._live: list[frozenset[str]] | None = None

    def instruction(self, offset: int) -> dis.Instruction:
        """The one at this place; places inside an instruction are its inline caches."""
        return self.instructions[bisect.bisect_right(self._offsets, offset) - 1]

    def before(self, at: dis.Instruction) -> dis.Instruction:
        return self.instructions[self._number[at.offset] - 1]

    def after(self, at: dis.Instruction) -> dis.Instruction:
        return self.instructions[self._number[at.offset] + 1]

    def _next(self, at: dis.Instruction) -> list[int]:
        """Where it may go on."""
        found = []
        if at.opcode in dis.hasjrel or at.opcode in dis.hasjabs:
            found.append(at.argval)
        if at.opname not in _ENDS and not at.opname.startswith(("JUMP_FORWARD", "JUMP_BACKWARD")):
            n = self._number[at.offset] + 1
            found += self._offsets[n : n + 1]
        return found

    def _find_depths(self) -> dict[int, int]:
        depths: dict[int, int] = {}
        waiting = [(0, 0), *((h.target, h.depth + h.lasti + 1) for h in self._handlers)]
        while waiting:
            offset, depth = waiting.pop()
            if offset in depths:
                continue
            depths[offset] = depth
            at = self.instructions[self._number[offset]]
            argument = at.arg if at.opcode >= opcode.HAVE_ARGUMENT else None
            for there in self._next(at):
                jumps = there == at.argval and at.opcode in (*dis.hasjrel, *dis.hasjabs)
                effect = (
                    1
                    if at.opname == "RETURN_GENERATOR"
                    else dis.stack_effect(at.opcode, argument, jump=jumps)
                )
                waiting.append((there, depth + effect))
        return depths

    def dead_after(self, offset: int) -> list[int]:
        """The variables of a function that nothing reads when it goes on behind this instruction."""
        live = self.live_after(offset)
        cells = {*self.code.co_cellvars, *self.code.co_freevars}
        if not self.code.co_flags & OPTIMIZED:
            return []
        return [n for n, name in enumerate(slot_names(self.code)) if name not in live and name not in cells]

    def live_after(self, offset: int) -> frozenset[str]:
        if not self.code.co_flags & OPTIMIZED or not _READS_ALL.isdisjoint(self.code.co_names):
            kept = {*slot_names(self.code), *self.code.co_names}
        else:
            kept = {"self", "cls", "__class__"}  # `super()` reads them without a name
        return self._read_after(offset) | kept

    def _read_after(self, offset: int) -> frozenset[str]:
        if self._live is None:
            self._live = self._find_live()
        there = self._next(self.instructions[self._number[offset]])
        handlers = [h.target for h in self._handlers if h.start <= offset < h.end]
        return frozenset().union(*(self._live[self._number[t]] for t in [*there, *handlers]))

    def bound_anew_after(self, offset: int) -> frozenset[str]:
        """The variables of a module that its own code binds, and does not read before it binds them again."""
        bound = frozenset().union(*(_uses(at)[1] for at in self.instructions))
        return bound - self._read_after(offset)

    def _find_live(self) -> list[frozenset[str]]:
        """Before each instruction, from the last to the first until nothing changes."""
        count = len(self.instructions)
        reads, binds = zip(*map(_uses, self.instructions), strict=True) if count else ((), ())
        after = [
            [self._number[o] for o in self._next(i)]
            + [self._number[h.target] for h in self._handlers if h.start <= i.offset < h.end]
            for i in self.instructions
        ]
        live: list[frozenset[str]] = [frozenset()] * count
        changed = True
        while changed:
            changed = False
            for n in reversed(range(count)):
                found = frozenset().union(*(live[t] for t in after[n])) - binds[n] | reads[n]
                if found != live[n]:
                    live[n], changed = found, True
        return live


def _uses(at: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """The variables that it reads, and those that it binds anew. DELETE reads: there must be something."""
    name = at.opname
    if name in ("LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST"):
        first, second = at.argval
        first_is, second_is = name.removesuffix("_FAST").split("_FAST_")
        reads = {v for v, does in ((first, first_is), (second, second_is)) if does == "LOAD"}
        binds = {v for v, does in ((first, first_is), (second, second_is)) if does == "STORE"}
        return frozenset(reads - (binds if first_is == "STORE" else set())), frozenset(binds)
    if name.startswith(
        ("LOAD_FAST", "LOAD_NAME", "DELETE_FAST", "DELETE_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT")
    ):
        return frozenset((at.argval,)), frozenset()
    if name in ("STORE_FAST", "STORE_NAME"):
        return frozenset(), frozenset((at.argval,))
    if name == "STORE_FAST_MAYBE_NULL":
        return frozenset(), frozenset((at.argval,))
    return frozenset(), frozenset()


def names_used_inside(code: types.CodeType) -> frozenset[str]:
    """Every name that the functions and classes in this code mention."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset().union(*(frozenset(one.co_names) | names_used_inside(one) for one in inner))


def may_read_all(names: Iterable[str]) -> bool:
    return not _READS_ALL.isdisjoint(names)


@dataclass(frozen=True, slots=True)
class Handler:
    start: int  # bytes
    end: int
    target: int
    depth: int
    lasti: bool


def exception_table(table: bytes) -> Iterator[Handler]:
    numbers = numbers_of(table)
    while True:
        entry = tuple(itertools.islice(numbers, 4))
        if len(entry) < 4:
            return
        start, length, target, depth = entry
        yield Handler(2 * start, 2 * (start + length), 2 * target, depth >> 1, bool(depth & 1))


def numbers_of(table: bytes) -> Iterator[int]:
    """Six bits in a byte, the highest first; bit 6 says that more follow."""
    number = 0
    for byte in table:
        number = number << 6 | byte & 63
        if not byte & 64:
            yield number
            number = 0
