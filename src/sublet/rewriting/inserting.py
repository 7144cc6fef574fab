"""A script with the calls around its loops that make it resumable.

Rules of this file:
- Only the iterables and tests of the loops change, and statements are added. What is added stands on the line of its loop, so that a
  traceback shows the user's own lines.
- Everything added goes through one name, `__sublet__`: what it does is `runtime.script`'s.
- A variable of a function can be bound only by a statement in that function: so each is bound again by one, when there is something to bind.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from sublet.rewriting.finding import AnyLoop, Found, Loop, Scope

NAME = "__sublet__"


def insert(found: Found) -> ast.Module:
    """The script's tree, changed in place."""
    scopes = {scope.key: scope for scope in found.scopes}
    for level, loop in reversed(list(enumerate(found.loops))):
        binding = _binding(scopes[loop.scope])
        before = (
            _around_training(level, loop, binding)
            if loop is found.training
            else _around(level, loop, binding)
        )
        after = _parsed(f"{NAME}.over()\n{binding}", loop.node) if level == 0 else []
        _replace(found.parents[loop.node], loop.node, [*before, loop.node, *after])
    return ast.fix_missing_locations(found.tree)


def _around_training(level: int, loop: Loop, binding: str) -> list[ast.stmt]:
    node = loop.node
    for parent, leaving in list(_breaks(node)):
        _replace(parent, leaving, [*_parsed(f"{NAME}.leave()", leaving), leaving])
    if isinstance(node, ast.While):
        node.test = _with_test(f"{NAME}.turn()", node)
        return _parsed(f"{NAME}.making({level})\n{NAME}.make(())\n{binding}", node)
    making = _parsed(f"{NAME}.making({level})\n{NAME}.make(...)\n{binding}", node)
    _fill(making, node.iter)
    node.iter = _expression(f"{NAME}.batches()", node)
    return making


def _around(level: int, loop: Loop, binding: str) -> list[ast.stmt]:
    node = loop.node
    node.body[:0] = _parsed(f"{NAME}.top({level})\n{binding}", node)
    if isinstance(node, ast.While):
        node.test = _with_test(f"{NAME}.more()", node)
        return _parsed(f"{NAME}.making({level})\n{NAME}.before({level})\n{binding}", node)
    making = _parsed(f"{NAME}.making({level})", node)
    rounds = _expression(f"{NAME}.rounds({level}, ...)", node)
    assert isinstance(rounds, ast.Call)
    rounds.args[1] = node.iter
    node.iter = rounds
    return making


def _binding(scope: Scope) -> str:
    """The module's variables are bound from outside."""
    names = sorted(scope.stored) if scope.key else []
    return "".join(f"if {NAME}.holds({name!r}): {name} = {NAME}.value({name!r})\n" for name in names)


def _with_test(call: str, loop: ast.While) -> ast.expr:
    joined = ast.BoolOp(op=ast.And(), values=[_expression(call, loop), loop.test])
    return ast.copy_location(joined, loop.test)


def _fill(statements: list[ast.stmt], value: ast.expr) -> None:
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            call.args = [value if _is_ellipsis(a) else a for a in call.args]


def _is_ellipsis(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _expression(text: str, at: ast.AST) -> ast.expr:
    statement = _parsed(text, at)[0]
    assert isinstance(statement, ast.Expr)
    return statement.value


def _parsed(text: str, at: ast.AST) -> list[ast.stmt]:
    made = ast.parse(text).body
    for statement in made:
        for node in ast.walk(statement):
            if hasattr(node, "lineno"):
                ast.copy_location(node, at)
                node.end_lineno = node.lineno  # type: ignore[attr-defined]
                node.end_col_offset = node.col_offset  # type: ignore[attr-defined]
    return made


def _breaks(loop: AnyLoop) -> Iterator[tuple[ast.AST, ast.stmt]]:
    """The `break`s that leave this loop, not one inside it."""

    def follow_all(parent: ast.AST, children: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, ast.stmt]]:
        for child in children:
            if isinstance(child, ast.Break):
                yield parent, child
            elif isinstance(child, (ast.For, ast.While, ast.AsyncFor)):
                yield from follow_all(child, child.orelse)
            elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
                yield from follow_all(child, ast.iter_child_nodes(child))

    return follow_all(loop, loop.body)


def _replace(parent: ast.AST, node: ast.stmt, by: list[ast.stmt]) -> None:
    for _, value in ast.iter_fields(parent):
        if isinstance(value, list) and any(member is node for member in value):
            at = next(i for i, member in enumerate(value) if member is node)
            value[at : at + 1] = by
            return
    raise AssertionError("a statement is in what holds it")
