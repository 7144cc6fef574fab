"""Two states that are unlike are told apart, with the path of what differs; two that are alike are not."""

from __future__ import annotations

import io
import pickle

import pytest

from sublet.training.program_state.comparing import StateToCompare, differences, pattern_of
from sublet.training.program_state.kinds import ListKind
from tests.conftest import needed
from tests.training.program_state.carried import differences_between

PROGRAM = """
import random, sys
random.seed(0)
if "numpy" in sys.modules:
    sys.modules["numpy"].random.seed(0)
{begin}
def run():
    begin()
    for i in range(4):
        variant = __sublet__.variant
        {turn}
        del variant
        step()
        print(i)
run()
"""
#: What is there at the beginning, what a turn does, and what is said of it: path and sort.
UNLIKE = {
    "a number": ("x = 0", "globals()['x'] = 1 + variant", "x", "number"),
    "zeros of two signs": ("x = 0.0", "globals()['x'] = -0.0 if variant else 0.0", "x", "number"),
    "a number and a truth": ("x = 0", "globals()['x'] = True if variant else 1", "x", "number"),
    "a text": ("x = ''", "globals()['x'] = 'ab'[variant]", "x", "text"),
    "a local variable": ("", "y = variant; print(y); globals()", "run.y", "number"),
    "a list's length": ("x = []", "x.extend([1] * variant)", "x", "structure"),
    "a list's member": ("x = [0, [1]]", "x[1][0] = variant", "x[1][0]", "number"),
    "a dict's key": ("x = {}", "x[variant] = 1", "x", "structure"),
    "a dict's order": ("x = {}", "x.update({1: 1, 2: 2} if variant else {2: 2, 1: 1})", "x", "structure"),
    "a set's member": ("x = {1, 2}", "x.add(5 + variant)", "x", "structure"),
    "a frozenset": ("x = 0", "globals()['x'] = frozenset([1, 2 + variant])", "x", "structure"),
    "an attribute": ("class A: pass\nx = A()", "x.y = variant", "x.y", "number"),
    "a slot": ("class A: __slots__ = ('y',)\nx = A()", "x.y = variant", "x.y", "number"),
    "a class's attribute": ("class A: y = 0", "A.y = variant", "A.y", "number"),
    "an object's class": (
        "class A: pass\nclass B(A): pass\nx = A()",
        "x.__class__ = (A, B)[variant]",
        "__class__",
        "structure",
    ),
    "a default": ("def f(a=1): return a", "f.__defaults__ = (variant,)", "f", "number"),
    "a function's code": (
        "def f(): return 1\ndef g(): return 2",
        "f.__code__ = (f, g)[variant].__code__",
        "f",
        "structure",
    ),
    "a cell": (
        "def make():\n    n = [0]\n    def get(): return n\n    return get\nget = make()",
        "get()[0] = variant",
        "get<n>[0]",
        "number",
    ),
    "who is the same": (
        "x = [1]; y = [1]; z = None",
        "globals()['z'] = [[x, x], [x, y]][variant]",
        "z[1]",
        "structure",
    ),
    "which of the new ones": (
        "x = None",
        "a = [1]; globals()['x'] = [a, a] if variant else [a, [1]]; del a",
        "x[1]",
        "structure",
    ),
    "which of the new ones, the other way": (
        "x = None",
        "a = [1]; globals()['x'] = [a, [1]] if variant else [a, a]; del a",
        "x[1]",
        "structure",
    ),
    "where a generator waits": (
        "def g():\n    yield 1\n    yield 2\nx = None",
        "globals()['x'] = g(); [next(x) for _ in range(1 + variant)]",
        "x",
        "structure",
    ),
    "what a generator holds": (
        "def g(n):\n    while True:\n        yield n\nx = None",
        "globals()['x'] = g(variant); next(x)",
        "g.n",
        "number",
    ),
    "where an iterator is": (
        "import itertools\nx = None",
        "globals()['x'] = itertools.count(variant)",
        "x",
        "number",
    ),
    "Python's random numbers": (
        "import random\nrandom.seed(1)",
        "variant and random.random()",
        "the random numbers of Python",
        "random",
    ),
    "a generator of random numbers": (
        "import random\nx = random.Random(1)",
        "variant and x.random()",
        "x",
        "random",
    ),
    "the environment": (
        "import os",
        "os.environ['SOME'] = str(variant)",
        "(the process's environment).SOME",
        "text",
    ),
    "a switch of the decimals": (
        "import decimal",
        "decimal.getcontext().prec = 10 + variant",
        "(the process's decimal)",
        "number",
    ),
    "a variable that is there": ("x = 0", "variant and globals().update(y=1)", "the variables", "structure"),
}
OF_NUMPY = {
    "an array's numbers": ("x = np.zeros(3)", "x[1] = variant", "x", "array"),
    "an array's type": ("x = None", "globals()['x'] = np.zeros(2, ['f4', 'i4'][variant])", "x", "text"),
    "an array's shape": ("x = None", "globals()['x'] = np.zeros([(2, 3), (3, 2)][variant])", "x", "number"),
    "whose memory a view has": (
        "x = np.zeros(3); y = np.zeros(3); z = None",
        "globals()['z'] = (x, y)[variant][1:]",
        "z",
        "structure",
    ),
    "where a view begins": ("x = np.zeros(3); z = None", "globals()['z'] = x[variant:][:2]", "z", "number"),
    "NumPy's random numbers": (
        "np.random.seed(1)",
        "variant and np.random.rand()",
        "the random numbers of NumPy",
        "random",
    ),
    "a generator of NumPy": ("x = np.random.default_rng(1)", "variant and x.random()", "x", "random"),
    "an array's members": (
        "x = np.array([None, [1]], dtype=object)",
        "x[1][0] = variant",
        "x.flat[1][0]",
        "number",
    ),
}
ALIKE = {
    "a list that grew in another way": ("x = []", "x[:] = [1, 2] if variant else [*range(1, 3)]"),
    "a text that was put together": ("x = 0", "globals()['x'] = 'ab' if variant else ''.join(['a', 'b'])"),
    "texts that are one object, or two": (
        "x = 0",
        "y = 'a b'; globals()['x'] = [y, y] if variant else [y, ' '.join('ab')]; del y",
    ),
    "tuples that are one object, or two": (
        "x = 0",
        "y = tuple([1]); globals()['x'] = [y, y] if variant else [y, tuple([1])]; del y",
    ),
    "another table of a set": ("x = set()", "x.update(range(50 * variant)); x.clear(); x.update([1, 2])"),
    "objects in a set": (
        "class A: pass\nx = [A() for _ in range(9)]; y = set()",
        "y.update(x[::-1] if variant else x)",
    ),
    "new objects": (
        "class A: pass\nx = None",
        "z = [bytearray(50) for _ in range(100 * variant)]; globals()['x'] = A(); x.y = {1: x}; del z",
    ),
    "a function made anew": ("x = None", "globals()['x'] = lambda a=1: a"),
    "a generator made anew": ("x = None", "globals()['x'] = (a for a in [1, 2]); next(x)"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_a_difference_is_found_and_named(name: str) -> None:
    begin, turn, path, sort = UNLIKE[name]
    _one_difference(begin, turn, path, sort)


@pytest.mark.parametrize("name", OF_NUMPY)
def test_a_difference_of_numpy_is_found_and_named(name: str) -> None:
    needed("numpy")
    begin, turn, path, sort = OF_NUMPY[name]
    _one_difference(f"import numpy as np\n{begin}", turn, path, sort)


def _one_difference(begin: str, turn: str, path: str, sort: str) -> None:
    found = differences_between(PROGRAM.format(begin=begin, turn=turn))
    assert found, "nothing was found"
    assert path in found[0].path
    assert found[0].sort == sort, found
    assert found[0].before != found[0].now or sort in ("array", "random")


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_equal_is_equal_however_it_came_about(name: str) -> None:
    begin, turn = ALIKE[name]
    assert differences_between(PROGRAM.format(begin=begin, turn=turn)) == []


def test_places_in_a_list_vary_alike() -> None:
    assert pattern_of("times[17].a[3]") == pattern_of("times[4].a[0]") == "times[…].a[…]"
    assert pattern_of("times['x']") != pattern_of("times['y']")


class Numbered:
    """In a state: an object of the program's beginning."""

    def __init__(self, number: int) -> None:
        self.number = number


class Writer(pickle.Pickler):
    def persistent_id(self, thing: object) -> int | None:
        return thing.number if isinstance(thing, Numbered) else None


def state(roots: object, contents: dict[int, list[int]]) -> StateToCompare:
    file = io.BytesIO()
    writer = Writer(file, protocol=5)
    writer.dump(roots)
    writer.dump([(number, ListKind.fill, content) for number, content in contents.items()])
    return StateToCompare(file.getvalue(), lambda *_: None, lambda number: f"#{number}")


def test_a_new_object_that_lies_where_another_one_lay_is_compared_by_what_it_holds() -> None:
    """Nothing can refer to a list weakly: one that is made at the place of one of the beginning has its number."""
    first = Numbered(5)
    mine = [1, 2]
    assert differences(state({"a": first, "b": first}, {5: [1, 2]}), state({"a": mine, "b": mine}, {})) == []
    assert differences(state({"a": mine}, {}), state({"a": first}, {5: [1, 2]})) == []
    (found,) = differences(state({"a": first}, {5: [1, 2]}), state({"a": [1, 3]}, {}))
    assert (found.path, found.before, found.now) == ("a[1]", "2", "3")
    # One object is not two.
    assert differences(state({"a": first, "b": first}, {5: [1, 2]}), state({"a": mine, "b": [1, 2]}, {}))
    assert differences(
        state({"a": first, "b": first}, {5: [1, 2]}), state({"a": mine, "b": first}, {5: [1, 2]})
    )
    assert differences(
        state({"a": first, "b": first}, {5: [1, 2]}), state({"a": first, "b": mine}, {5: [1, 2]})
    )
