"""Random small cells, and what they do in a notebook and in a worker that was sent only what they read.

The notebook is a namespace with some of `NAMES`. Where a program turns is decided by `flip()`, the same way in every run, and
everything it sees is noted, so that two runs can be compared. What it calls besides is builtin to both.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import CO_COROUTINE
from typing import Any

from sublet.core.cells.names import CellNames

NAMES = "abcde"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

Choose = Callable[[Sequence[str]], str]


class Writer:
    """Writes one cell, given somebody who chooses."""

    def __init__(self, choose: Choose, deepest: int) -> None:
        self._choose = choose
        self._deepest = deepest
        self._in_loop = False
        self._in_function = False
        self._awaits = True

    def cell(self) -> str:
        return "\n".join(self._block(0, least=2)) + "\n"

    def _name(self) -> str:
        return self._choose(NAMES)

    def _block(self, depth: int, least: int = 1) -> list[str]:
        many = int(self._choose("1223")) + least - 1
        return [line for _ in range(many) for line in self._statement(depth)]

    def _inside(self, depth: int, **around: bool) -> list[str]:
        before = {name: getattr(self, name) for name in around}
        for name, value in around.items():
            setattr(self, name, value)
        lines = ["    " + line for line in self._block(depth + 1)]
        for name, value in before.items():
            setattr(self, name, value)
        return lines

    def _expression(self, depth: int = 0) -> str:
        n, m = self._name(), self._name()
        kinds = [f"{n}", f"{n}", "1", f"call({n})"]
        if depth < 2:
            e, o = self._expression(depth + 1), self._expression(depth + 1)
            kinds += [
                f"see({e})",
                f"({n} := {e})",
                f"(flip() and {e})",
                f"({e} or {o})",
                f"({e} if flip() else {o})",
                f"[{e} for {n} in (1, 2)]",
                f"[{e} for {n} in (1, 2) if {o} for {m} in ({n}, 3)]",
                f"{{{n}: {e} for {n} in (1, 2)}}",
                f"list({e} for {n} in (1, 2))",
                f"call(lambda: {e})",
                f"call(lambda {n}={o}: {e})",
                f"f'{{size({e})}}'",
                f"(0 < 1 < size({e}))",
            ]
            if self._awaits:
                kinds.append(f"(await soon({e}))")
        return self._choose(kinds)

    def _statement(self, depth: int) -> list[str]:
        n, m, e = self._name(), self._name(), self._expression()
        simple = [
            f"{n} = {e}",
            f"{n} = {e}",
            f"{n} = {m} = {e}",
            f"{n}, *{m} = {e}, 1, 2",
            f"{n} += 1",
            f"{n}: {m} = {e}",
            f"{n}: {m}",
            f"del {n}",
            f"see({e})",
            f"see({n})",
            f"see({n})",
            f"import math as {n}",
            f"from math import pi as {n}",
            f"{n} = lambda: {e}",
            f"assert flip(), {e}",
            "raise ValueError",
        ]
        if self._in_loop:
            simple += ["break", "continue", "if flip(): break"]
        if self._in_function:
            simple.append(f"return {e}")
        compound = [
            "if",
            "for",
            "while",
            "try",
            "finally",
            "with",
            "match",
            "def",
            "def",
            "class",
            "decorated",
        ]
        kind = self._choose([*simple, *compound] if depth < self._deepest else simple)
        return getattr(self, f"_{kind}")(depth) if kind in compound else [kind]

    def _if(self, depth: int) -> list[str]:
        lines = [f"if flip() and {self._expression()}:", *self._inside(depth)]
        if self._choose("01") == "1":
            lines += [f"elif {self._expression()}:", *self._inside(depth)]
        if self._choose("01") == "1":
            lines += ["else:", *self._inside(depth)]
        return lines

    def _for(self, depth: int) -> list[str]:
        n, e = self._name(), self._expression()
        heads = [f"for {n} in (1, 2):", f"for {n} in ():", f"for {n} in many({e}):"]
        if self._awaits:
            heads.append(f"async for {n} in later({e}):")
        lines = [self._choose(heads), *self._inside(depth, _in_loop=True)]
        return lines + (["else:", *self._inside(depth)] if self._choose("01") == "1" else [])

    def _while(self, depth: int) -> list[str]:
        head = self._choose(["flip()", f"flip() and {self._expression()}", "True"])
        body = self._inside(depth, _in_loop=True)
        if head == "True":
            body.append("    if fuel(): break")
        lines = [f"while {head}:", "    fuel()", *body]
        return lines + (["else:", *self._inside(depth)] if self._choose("01") == "1" else [])

    def _try(self, depth: int) -> list[str]:
        caught = self._choose(["Exception", "ValueError", "(NameError, TypeError)"])
        lines = ["try:", *self._inside(depth)]
        lines += [
            self._choose([f"except {caught}:", f"except {caught} as {self._name()}:"]),
            *self._inside(depth),
        ]
        if self._choose("01") == "1":
            lines += ["else:", *self._inside(depth)]
        return lines + (["finally:", *self._inside(depth)] if self._choose("01") == "1" else [])

    def _finally(self, depth: int) -> list[str]:
        return ["try:", *self._inside(depth), "finally:", *self._inside(depth)]

    def _with(self, depth: int) -> list[str]:
        n = self._name()
        kinds = [
            f"with swallows() as {n}:",
            "with swallows(), no_grad():",
            f"with no_grad() as {n}:",
            "with no_grad():",
        ]
        return [self._choose(kinds), *self._inside(depth)]

    def _match(self, depth: int) -> list[str]:
        n, m = self._name(), self._name()
        several = f"case [{n}, *{m}]:" if n != m else f"case [{n}, *_]:"
        cases = [
            several,
            "case int():",
            f"case {n} if flip():",
            f"case {{'k': {n}}}:",
            f"case (1 | 2) as {n}:",
        ]
        lines = [f"match {self._expression()}:"]
        for _ in range(2):
            lines += ["    " + line for line in [self._choose(cases), *self._inside(depth)]]
        if self._choose("01") == "1":
            lines += ["    " + line for line in [f"case {n}:", *self._inside(depth)]]
        return lines

    def _def(self, depth: int, name: str = "") -> list[str]:
        n, m = name or self._name(), self._name()
        body = self._inside(depth, _in_function=True, _in_loop=False, _awaits=False)
        told = self._choose(["", f"    global {m}", "    global a, b"])
        head = self._choose([f"def {n}():", f"def {n}({self._other(told)}=1):", f"def {n}() -> {m}:"])
        return [head, *([told] if told else []), *body, *self._choose([(), (f"see(call({n}))",)])]

    def _other(self, told: str) -> str:
        return "e" if " e" not in told else "p"

    def _class(self, depth: int) -> list[str]:
        body = self._inside(depth, _in_function=False, _in_loop=False, _awaits=False)
        told = self._choose(["", f"    global {self._name()}"])
        return [f"class {self._name()}:", *([told] if told else []), *body]

    def _decorated(self, depth: int) -> list[str]:
        return [self._choose(["@no_grad()", "@now", f"@keeps({self._expression()})"]), *self._def(depth)]


class OutOfFuel(BaseException):
    """Not to be caught by the program."""


@dataclass(frozen=True, slots=True)
class Ran:
    seen: tuple[str, ...]
    raised: str
    space: Mapping[str, object]


def is_cell(source: str) -> bool:
    """What was written may still not be allowed: a name that is global and a parameter."""
    try:
        compile(source, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError:
        return False
    return True


def run(
    source: str, space: Mapping[str, object], turns: Sequence[bool], also: Mapping[str, object] | None = None
) -> Ran:
    """In a namespace of its own. `also`: further builtins."""
    seen: list[str] = []
    left = [60]
    depth = [0]

    def fuel() -> bool:
        left[0] -= 1
        if left[0] < 0:
            raise OutOfFuel
        return left[0] % 3 == 0

    def flip() -> bool:
        fuel()
        return turns[left[0] % len(turns)]

    def see(value: object) -> object:
        seen.append(_shown(value))
        return value

    def call(value: Any) -> object:
        fuel()
        if not callable(value) or depth[0] > 3:
            return value
        depth[0] += 1
        try:
            return value()
        finally:
            depth[0] -= 1

    def now(function: Any) -> object:
        call(function)
        return function

    async def soon(value: object) -> object:
        return value

    async def later(value: object) -> AsyncIterator[object]:
        for _ in many(value):
            yield 1

    def many(value: object) -> tuple[int, ...]:
        return (1, 2) if value else ()

    @contextlib.contextmanager
    def swallows() -> Iterator[int]:
        with contextlib.suppress(Exception):
            yield 7

    @contextlib.contextmanager
    def no_grad() -> Iterator[int]:
        yield 8

    given = {f.__name__: f for f in (fuel, flip, see, call, now, soon, later, many, swallows, no_grad)}
    given["size"] = lambda value: len(_shown(value))
    given["keeps"] = lambda _: lambda function: function
    after = {**space, "__name__": "cell", "__builtins__": {**vars(builtins), **given, **(also or {})}}
    code = compile(source, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    raised = ""
    try:
        running = eval(code, after)
        if code.co_flags & CO_COROUTINE:
            with contextlib.suppress(StopIteration):
                running.send(None)
    except (Exception, OutOfFuel, RecursionError) as e:
        raised = f"{type(e).__name__}: {e}"
    mine = {name: value for name, value in after.items() if not name.startswith("__")}
    return Ran(tuple(seen), raised, mine)


def run_away(source: str, space: Mapping[str, object], turns: Sequence[bool], names: CellNames) -> Ran:
    """In a worker that has only what the cell reads; what it changed comes back to the notebook."""
    sent = {name: value for name, value in space.items() if name in names.reads}
    ran = run(source, sent, turns)
    back = {name: value for name, value in space.items() if name not in sent or name in ran.space}
    return Ran(ran.seen, ran.raised, {**back, **ran.space})


def shown(ran: Ran) -> str:
    """To be compared: functions and the like by what they are."""
    said = ran.seen, ran.raised, {name: _shown(value) for name, value in sorted(ran.space.items())}
    return _ADDRESS.sub("", repr(said))


def _shown(value: object, depth: int = 0) -> str:
    """Not all of it: a list of lists of the same list can be longer than any memory."""
    if isinstance(value, (list, tuple, dict)):
        parts = value.items() if isinstance(value, dict) else value
        inside = "..." if depth > 3 else ", ".join(_shown(part, depth + 1) for part in parts)
        return f"{type(value).__name__}({inside})"
    return repr(value) if type(value) in (int, str, float, bool, type(None)) else type(value).__name__
