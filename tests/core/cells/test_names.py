"""The names of a cell: none that it reads is missed, and in the common cases none is taken that it does not
read."""

from __future__ import annotations

import builtins
import random

import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from sublet.core.cells.names import names_of
from tests.core.cell_programs import NAMES, Writer, is_cell, run, run_away, shown

#: What a class body, an annotation and a magic read besides.
_NOT_OF_THE_USER = {*dir(builtins), "__name__", "__annotations__", "get_ipython"}


def reads(source: str) -> set[str]:
    return set(names_of(source).reads) - _NOT_OF_THE_USER


# --- never missed ---


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 3), st.integers(0, 2**32), st.lists(st.booleans(), min_size=1, max_size=7))
def test_a_cell_does_the_same_with_nothing_but_what_it_reads(
    depth: int, seed: int, turns: list[bool]
) -> None:
    chance = random.Random(seed)  # choices drawn one by one take a hundred times as long
    source = Writer(chance.choice, depth).cell()
    assume(is_cell(source))
    space = {name: chance.choice([11, 11, lambda: 5]) for name in NAMES if chance.random() < 0.7}
    note(source)
    names = names_of(source)
    here = run(source, space, turns)
    assert shown(run_away(source, space, turns, names)) == shown(here)
    changed = {name for name, value in here.space.items() if name not in space or space[name] is not value}
    assert changed <= set(names.writes)
    assert space.keys() - here.space.keys() <= set(names.deletes)


# --- one construct after the other ---


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print(x)", "x"),
        ("x.y.z = 1", "x"),
        ("x[i] = v", "x i v"),
        ("x += 1", "x"),
        ("x.y += 1", "x"),
        ("f'{x:{w}}'", "x w"),
        ("print(*a, **b)", "a b"),
        ("x = x", "x"),
        ("a = b = c", "c"),
        ("(x, [y, *z]) = v\nx, y, z", "v"),
        ("x: T = v", "T v"),
        ("x: T", "T"),
        ("from __future__ import annotations\nx: T = v", "v"),
        ("assert c, m", "c m"),
        ("raise e from c", "e c"),
        ("print(x)\nx = 1", "x"),
        ("import x.y\nx", ""),
        ("import x.y as z\nx, z", "x"),
        ("from x import y, z as w\ny, w, z", "z"),
        ("from x import *\ny", "y"),
        # one side or the other
        ("if c: x = 1\nx", "c x"),
        ("if c: x = 1\nelif d: x = 2\nelse: x = 3\nx", "c d"),
        ("if c: x = 1\nelse: raise e\nx", "c e"),
        ("if c: x = 1\nelse:\n  with open(p): x = 1\nx", "c p"),
        ("if a or (y := b): c\nelse: print(y)\nd", "a b c d"),
        ("x = 1 if c else (y := 2)\ny", "c y"),
        ("c and (y := 2)\ny", "c y"),
        ("(y := 2) and c\ny", "c"),
        ("a < b < (y := 2)\ny", "a b y"),
        ("match v:\n  case [x, *r]: pass\n  case {'k': x, **r}: pass\n  case _: x = r = 1\nx, r", "v"),
        ("match v:\n  case [x]: pass\nx", "v x"),
        ("match v:\n  case C(k=D.e) | {D.f: 1} as x if g(x): pass", "v C D g"),
        ("match v:\n  case x: pass\nx", "v"),
        # again and again
        ("for i in v: print(i)", "v"),
        ("for i in v: pass\ni", "v i"),
        ("for i in v: x = i\nelse: x = 0\nx", "v"),
        ("for i in v:\n  if i: break\nelse: x = 0\nx", "v x"),
        ("for x[i] in v: pass", "v x i"),
        ("for i in v:\n  print(x)\n  x = i", "v x"),
        ("for i in v:\n  if i: continue\n  x = i\n  print(x)", "v"),
        ("while c: x = 1\nx", "c x"),
        ("while True:\n  x = 1\n  if c: break\nx", "c"),
        ("while (x := f()): pass\nx", "f"),
        ("while True:\n  if c:\n    x = 1\n    break\nx", "c"),
        ("async for i in v: print(i)", "v"),
        ("await f(x)", "f x"),
        ("async with open(p) as f: x = f\nx", "p"),
        # what goes wrong
        ("try: import x\nexcept ImportError: x = None\nx", ""),
        ("try: x = f()\nexcept E: pass\nx", "f E x"),
        ("try: x = f()\nexcept E: raise\nx", "f E"),
        ("try: f()\nexcept E: x = 1\nelse: x = 2\nx", "f E"),
        ("try: f()\nfinally: x = 1\nx", "f"),
        ("try: f()\nfinally:\n  with open(p): x = 1\nx", "f p"),
        ("try: raise\nexcept E: x", "E x"),
        ("try: x = f()\nfinally: print(x)", "f x"),
        ("try: x = f()\nfinally: pass\nx", "f"),
        ("try: f()\nexcept* E: x = 1\nx", "f E x"),
        ("with torch.no_grad(): x = 1\nx", "torch"),
        ("with open(p) as f, torch.autocast('cpu'): x = f\nx, f", "p torch"),
        ("with suppress(E): x = 1\nx", "suppress E x"),
        ("with open(p) as f, mine: x = 1\nx, f", "p mine x f"),
        ("with lock: x = 1\nx", "lock x"),
        ("with no_grad():\n  with no_grad():\n    x = 1\nx", "no_grad"),
        # functions
        ("def f(): return x", "x"),
        ("def f(): return x\nx = 1", ""),
        ("def f(): return x\nx = 1\nf()", ""),
        ("def f(): return x\nf()\nx = 1", "x"),
        ("def f(): return x\ng = f\nx = 1", "x"),
        ("def f(): return g()\ndef g(): return x\nx = 1\nf()", ""),
        ("def f(): return g()\ndef g(): return x\nf()\nx = 1", "x"),
        ("def f(): return f()\nf()", ""),
        ("def f(a, *b, c=d, **e): return a, b, c, e", "d"),
        ("def f(a: T) -> U: pass", "T U"),
        ("def f():\n  def g(): return x\n  return g", "x"),
        ("def f():\n  x = 1\n  def g():\n    nonlocal x\n    x += y\n  return g", "y"),
        ("def f():\n  global x\n  x = 1\nf()\nx", "x"),
        ("def f():\n  x = 1\n  return [x for y in z]", "z"),
        ("@d\ndef f(): return x\nx = 1", "d x"),
        ("@torch.no_grad()\ndef f(): return x\nx = 1\nf()", "torch"),
        ("@cache\n@mine\ndef f(): return x\nx = 1", "cache mine x"),
        ("if c:\n  def f(): return x\nx = 1\nf()", "c f"),
        ("if c:\n  def f(): return x\nx = 1", "c"),
        ("for i in v:\n  if i: f()\n  def f(): return x\n  x = 1", "v f x"),
        ("f = lambda a: a + x\nx = 1\nf(1)", ""),
        ("if c: f = lambda: x\nelse: f = lambda: y\nf()", "c x y"),
        ("f(lambda a: a + x)\nx = 1", "f x"),
        ("f = g(lambda: x)\nx = 1", "g x"),
        ("async def f(): await x\nx = 1\nawait f()", ""),
        ("@torch.no_grad()\nasync def f(): return x\nx = 1\nawait f()", "torch"),
        ("def f(): yield x\nx = 1\nlist(f())", ""),
        # classes
        ("class A(B, k=c): pass", "B c"),
        ("class A:\n  x = 1\n  y = x\n  def f(self): return z", "z"),
        ("class A:\n  y = x\n  x = 1", "x"),
        ("class A:\n  if c: x = 1\n  y = x", "c x"),
        ("class A:\n  x = 1\n  del x\n  y = x", "x"),
        ("class A:\n  @property\n  def x(self): return 1\n  @x.setter\n  def x(self, v): pass", ""),
        ("class A:\n  x = 1\n  y = [x for _ in v]", "v x"),
        ("class A:\n  x = 1\n  class B:\n    y = x", "x"),
        ("class A:\n  class B:\n    x = 1\n    y = x", ""),
        ("class A:\n  global x\n  x = 1\nx", "x"),
        ("class A:\n  global x\n  x = 1\n  y = x", "x"),
        ("class A:\n  def f(self): return __x", "_A__x"),
        ("class A: pass\nA()", ""),
        # comprehensions
        ("[x for x in v]", "v"),
        ("[x for x in v if c]\nx", "v c x"),
        ("{k: w for k, w in v for k in k}", "v"),
        ("[y := i for i in v]\ny", "v y"),
        ("sum(x for _ in v)", "v x"),
        # gone
        ("del x", "x"),
        ("del x.y, z[i]", "x z i"),
        ("x = 1\ndel x", "x"),
        ("try: f()\nexcept E as e: pass", "f E e"),
        ("def f():\n  global x\n  del x", "x"),
        # looked up by name
        ("if 'x' not in globals(): x = 1", "x"),
        ("if 'x' in dir(): print('it is', 'y', 2)", "x y"),
        ("vars(a)['x']", "a"),
        ("df.query('a > @cut')", "df a cut"),
        ("x = 1\neval('x + y', m)", "y m"),
        ("exec('x = y')\nx", "x y"),
    ],
)
def test_what_a_cell_reads(source: str, expected: str) -> None:
    assert reads(source) == set(expected.split())


@pytest.mark.parametrize(
    ("source", "writes", "deletes"),
    [
        ("x, (y, *z) = v", "x y z", ""),
        ("x += 1", "x", ""),
        ("x.y = z[1] = 2", "", ""),
        ("x: int", "", ""),
        ("x: int = 1", "x", ""),
        ("import a.b, c as d\nfrom e import f as g", "a d g", ""),
        ("for i in v: x = i", "i x", ""),
        ("with f() as (a, b): pass", "a b", ""),
        ("match v:\n  case [a, *b]: pass\n  case {'k': c, **d}: pass", "a b c d", ""),
        ("try: pass\nexcept E as e: pass", "e", "e"),
        ("def f(x): y = 1", "f", ""),
        ("class A: x = 1", "A", ""),
        ("def f():\n  global x, y\n  x = 1\n  del y", "f x", "y"),
        ("class A:\n  global x\n  x = 1\n  y = 2\n  del y", "A x", ""),
        ("[y := x for x in v]", "y", ""),
        ("if c: del x", "", "x"),
        ("x = 1\ndel x\nx = 2", "x", "x"),
        ("global x\nx = 1", "x", ""),
        ("@torch.no_grad()\ndef f(): pass", "f", ""),
        ("with torch.no_grad() as g: x = 1", "g x", ""),
        ("exec('x = y')", "x y", "x y"),
        ("eval('x')", "", ""),
    ],
)
def test_what_a_cell_binds_and_deletes(source: str, writes: str, deletes: str) -> None:
    names = names_of(source)
    assert set(names.writes) == set(writes.split())
    assert set(names.deletes) == set(deletes.split())


def test_a_training_cell_takes_what_it_needs_and_nothing_else() -> None:
    source = """
import torch
from torch import nn
@torch.no_grad()
def accuracy():
    return (model(test_x).argmax(1) == test_y).float().mean()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(width, 10)
    def forward(self, x):
        return self.layer(x)
model = Net()
optim = torch.optim.Adam(model.parameters(), lr=lr)
losses = []
for epoch in range(epochs):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optim.zero_grad(); loss.backward(); optim.step()
        losses.append(loss.item())
with torch.no_grad():
    final = accuracy()
print(f"{final:.3f}")
"""
    assert reads(source) == {"epochs", "loader", "lr", "test_x", "test_y", "width"}


def test_the_lists_are_sorted_and_without_doubles() -> None:
    names = names_of("c, b, a, a = z, y, y, x\ndel b, a")
    assert names.reads == ("a", "b", "x", "y", "z")
    assert names.writes == ("a", "b", "c")
    assert names.deletes == ("a", "b")


@pytest.mark.parametrize(
    "source",
    [
        "x = ",
        "return 1",
        "break",
        "def f(): await x",
        "x\0",
        "x = '\ud800'",
        "+".join(["x"] * 20_000),
        "-" * 100_000 + "x",
    ],
    ids=[
        "unfinished",
        "return",
        "break",
        "await",
        "null byte",
        "half a character",
        "too deep",
        "far too deep",
    ],
)
def test_what_cannot_be_compiled_is_a_syntax_error(source: str) -> None:
    with pytest.raises(SyntaxError):
        names_of(source)


@pytest.mark.parametrize(
    "source",
    ["if a: pass\n" + "elif b: pass\n" * 500, "x = " + "+".join(["a", *["b"] * 800])],
    ids=["many elifs", "long sum"],
)
def test_a_long_cell_is_read_like_a_short_one(source: str) -> None:
    assert reads(source) == {"a", "b"}


def test_more_names_than_fit_one_byte_do_not_hide_that_a_function_only_gets_a_name() -> None:
    many = "\n".join(f"v{i} = 1" for i in range(300))
    assert reads(f"{many}\ndef f(): return x\nx = 1\nf()") == set()
