"""Points: one per iteration of the outermost loops, and nothing else about the cell changes."""

from __future__ import annotations

import ast
import builtins
import random
import traceback

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sublet.core.cells.stop_points import POINT, StopPoints
from tests.core.cell_programs import Writer, is_cell, run, shown


def with_points(source: str) -> ast.AST:
    return StopPoints().visit(ast.parse(source))


def lines_of_points(source: str) -> list[int]:
    found = ast.walk(with_points(source))
    return sorted(node.lineno for node in found if isinstance(node, ast.Name) and node.id == POINT)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = 1", []),
        ("for i in v:\n  pass", [1]),
        ("while c:\n  pass", [1]),
        ("async for i in v:\n  pass", [1]),
        ("for i in v:\n  for j in w:\n    while c: pass", [1]),
        ("for i in v: pass\nelse:\n  for j in w: pass", [1, 3]),
        ("while c: pass\nelse:\n  if d:\n    while e: pass", [1, 4]),
        ("if c:\n  for i in v: pass\nelse:\n  for i in w: pass", [2, 4]),
        ("with c:\n  for i in v: pass", [2]),
        ("async with c:\n  for i in v: pass", [2]),
        ("try:\n  for i in v: pass\nexcept E:\n  for i in v: pass\nelse:\n  for i in v: pass\nfinally:\n  for i in v: pass", [2, 4, 6, 8]),
        ("match v:\n  case 1:\n    for i in v: pass", [3]),
        ("def f():\n  for i in v: pass", []),
        ("async def f():\n  for i in v: pass", []),
        ("class A:\n  for i in v: pass", []),
        ("[i for i in v]", []),
        ("f = lambda: [i for i in v]", []),
        ("for i in v:\n  def f():\n    while c: pass", [1]),
        ("for (i,\n     j) in v:\n  pass", [1]),
    ],
)  # fmt: skip
def test_where_the_points_are(source: str, lines: list[int]) -> None:
    assert lines_of_points(source) == lines


def test_a_point_comes_before_everything_else_of_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(builtins, POINT, lambda: seen.append("point"), raising=False)
    source = (
        "for i in (1, 2):\n  seen.append(i)\n  for j in (7,): seen.append(j)\nelse:\n  seen.append('end')"
    )
    exec(compile(with_points(source), "<cell>", "exec"), {"seen": seen})
    assert seen == ["point", 1, 7, "point", 2, 7, "end"]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 3), st.integers(0, 2**32))
def test_a_cell_does_the_same_with_points_as_without(depth: int, seed: int) -> None:
    source = Writer(random.Random(seed).choice, depth).cell()
    assume(is_cell(source))
    calls: list[int] = []
    points = {POINT: lambda: calls.append(1)}
    plain = run(source, {"a": 1, "b": 2}, [True, False])
    pointed = run(ast.unparse(with_points(source)), {"a": 1, "b": 2}, [True, False], points)
    assert shown(pointed) == shown(plain)


def test_tracebacks_name_the_lines_of_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, POINT, lambda: None, raising=False)
    source = "x = 0\n\nfor i in (1,\n          2):\n    y = 1\n\n    1 / x\n"
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile(with_points(source), "<cell>", "exec"), {})
    assert traceback.extract_tb(raised.tb)[-1].lineno == 7


@pytest.mark.parametrize("head", ["for i in (1, 2):", "while True:"])
def test_what_a_point_raises_is_raised_at_the_head_of_the_loop(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, POINT, stop, raising=False)
    with pytest.raises(KeyboardInterrupt) as raised:
        exec(compile(with_points(f"x = 0\n{head}\n    x = 1"), "<cell>", "exec"), {})
    where = [frame.lineno for frame in traceback.extract_tb(raised.tb) if frame.filename == "<cell>"]
    assert where == [2]


def test_a_chain_of_choices_as_long_as_python_takes_it() -> None:
    source = "if a: pass\n" + "elif b:\n  for i in v: pass\n" * 500
    assert len(lines_of_points(source)) == 500
