"""The points at which a running cell may be saved and stopped.

Rules of this file:
- A point is the start of an iteration of one of the cell's outermost loops: there the variables agree with
  each other.
- No line moves: the call stands on the loop's own line, so tracebacks are those of the cell as it was
  written.
- Functions, classes and comprehensions are left alone: what they do is one step of the cell.
"""

from __future__ import annotations

import ast

#: The builtin that is called at every point.
POINT = "__sublet_point__"

_Loop = ast.For | ast.AsyncFor | ast.While


class StopPoints(ast.NodeTransformer):
    """Inserts the points; one of IPython's `ast_transformers`."""

    def visit(self, node: ast.AST) -> ast.AST:
        waiting = [node]
        while waiting:
            at = waiting.pop()
            if isinstance(at, _Loop):
                at.body.insert(0, _point(at))
                waiting += at.orelse  # runs once, after the loop
            elif not isinstance(at, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                waiting += ast.iter_child_nodes(at)
        return node


def _point(loop: _Loop) -> ast.stmt:
    made = ast.Expr(ast.Call(ast.Name(POINT, ast.Load()), [], []))
    head = loop.test if isinstance(loop, ast.While) else loop.target
    for node in ast.walk(made):
        ast.copy_location(node, head)
    return made
