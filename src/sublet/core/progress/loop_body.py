"""What the body of a loop does with names, by its text: which it reads, and which carry something on.

A name carries something from step to step if the body makes it, and may read it before. What only a clock
makes carries nothing that a result depends on.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any

_CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns", "now", "utcnow"}


@dataclass
class LoopBody:
    """The names that the body of a loop reads, that it makes, and that carry something from step to step."""

    read: set[str] = field(default_factory=set)
    made: set[str] = field(default_factory=set)
    carried: set[str] = field(default_factory=set)


def body_around(text: str, line: int) -> LoopBody | None:
    """Of the innermost loop around this line; None where there is none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.For, ast.While)) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not loops:
        return None
    loop = max(loops, key=lambda node: node.lineno)
    reading = _Reading()
    if isinstance(loop, ast.For):
        reading.visit(loop.target)
    for statement in loop.body:
        reading.visit(statement)
    of_clocks = {name for name, clocks in reading.made_by_clocks.items() if clocks}
    return LoopBody(reading.read, reading.made, (reading.read_first & reading.made) - of_clocks)


class _Reading(ast.NodeVisitor):
    """Goes through statements in the order in which they run."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.read_first: set[str] = set()  # before it is certain that they are made
        self.made: set[str] = set()
        self.made_by_clocks: dict[str, bool] = {}  # whether nothing else makes them
        self._certain: set[str] = set()

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read.add(node.id)
            if node.id not in self._certain:
                self.read_first.add(node.id)
        else:
            self._make(node.id, by_clock=False)

    def _make(self, name: str, *, by_clock: bool) -> None:
        self.made.add(name)
        self._certain.add(name)
        self.made_by_clocks[name] = by_clock and self.made_by_clocks.get(name, True)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        if _asks_a_clock(node.value) and all(isinstance(target, ast.Name) for target in node.targets):
            for target in node.targets:
                assert isinstance(target, ast.Name)
                self._make(target.id, by_clock=True)
            return
        for target in node.targets:
            self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self.visit_Name(ast.Name(node.target.id, ast.Load()))
        self.visit(node.target)

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._perhaps([node.target, *node.body], node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._perhaps(node.body, node.orelse)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._perhaps(node.body, node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        self._perhaps([*node.body, *node.orelse], *(handler.body for handler in node.handlers))
        for statement in node.finalbody:
            self.visit(statement)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        ways = [[case.pattern, *case.body] for case in node.cases]
        always = any(ast.unparse(case.pattern) == "_" and case.guard is None for case in node.cases)
        self._perhaps(*ways, *([] if always else [[]]))

    def _perhaps(self, *ways: list[Any]) -> None:
        """One of these is run: certain is what each of them makes."""
        before, after = self._certain, []
        for way in ways:
            self._certain = set(before)
            for statement in way:
                self.visit(statement)
            after.append(self._certain)
        self._certain = set.intersection(*after)

    def visit_comprehension_of(self, node: Any) -> None:
        own = {
            name.id
            for part in node.generators
            for name in ast.walk(part.target)
            if isinstance(name, ast.Name)
        }
        self._read_inside(node, own)

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_comprehension_of

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._read_inside(node, {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)})

    def visit_FunctionDef(self, node: Any) -> None:
        self._make(node.name, by_clock=False)

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def _read_inside(self, node: ast.AST, own: set[str]) -> None:
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and name.id not in own:
                self.visit_Name(name)


def _asks_a_clock(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return called in _CLOCKS
