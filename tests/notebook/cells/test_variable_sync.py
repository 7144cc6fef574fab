"""Which variables travel: a `%%gpu` cell sees what a normal cell would see, and a normal cell sees what it
did."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sublet.core.errors import CannotTravel
from sublet.notebook.cells import aliasing, variable_sync
from sublet.notebook.cells.notebook_lease import NotebookLease
from sublet.notebook.cells.variable_sync import LateModule, SyncedVariables, unpack_values
from sublet.processes.worker.local import LocalWorker
from sublet.processes.worker.workers import LocalWorkers
from tests.conftest import MORE_EXAMPLES
from tests.notebook.cells.notebooks import CellRaised, Notebook
from tests.processes.conftest import moved_in


@pytest.fixture(scope="module")
def one_worker(workers: LocalWorkers) -> Iterator[LocalWorker]:
    made = moved_in(workers)
    yield made
    made.end("the tests are over")


@pytest.fixture
def book(one_worker: LocalWorker, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made = Notebook(one_worker)
    monkeypatch.setitem(sys.modules, "__main__", made.main)
    return made


def payload_of(has: SyncedVariables, space: dict[str, Any], *names: str) -> dict[str, Any]:
    """What would travel, and then has."""
    payload = has.payload(space, names)
    has.took(payload)
    found: dict[str, Any] = unpack_values(payload.values)
    return found


# --- what is not changed does not travel ---


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        -(10**5000),
        0.0,
        float("nan"),
        1j,
        "text \ud800",
        b"\0",
        [],
        [1, [2]],
        {"a": {1, 2}},
        numpy.arange(5),
        numpy.array([{"a": 1}], dtype=object),
        numpy,
        int,
        len,
        (1, "x", None),
        range(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_travels_once(value: Any) -> None:
    has = SyncedVariables()
    assert set(payload_of(has, {"x": value}, "x")) == {"x"}
    assert payload_of(has, {"x": value}, "x") == {}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (0, False),
        (0, None),
        ("1", b"1"),
        ("a" * 1000, "a" * 999 + "b"),
        (10**5000, 10**5000 + 1),
        (float("nan"), float("inf")),
        (1j, complex(0.0, 1.5)),
        ([1], [1.0]),
        ((1,), [1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_not_quite_the_same_travels_again(old: Any, new: Any) -> None:
    has = SyncedVariables()
    payload_of(has, {"x": old}, "x")
    found = payload_of(has, {"x": new}, "x")["x"]
    assert type(found) is type(new)
    assert pickle.dumps(found) == pickle.dumps(new)


class Text(str):
    __slots__ = ()


def test_a_text_of_a_class_of_its_own_is_not_taken_for_a_text() -> None:
    has = SyncedVariables()
    payload_of(has, {"x": "a"}, "x")
    assert type(payload_of(has, {"x": Text("a")}, "x")["x"]) is Text


def test_another_object_at_the_place_of_one_that_is_gone_travels() -> None:
    has = SyncedVariables()
    space: dict[str, Any] = {"x": [1, 2, 3]}
    payload_of(has, space, "x")
    at = id(space["x"])
    for n in range(1000):
        del space["x"]
        space["x"] = [4, 5, n]
        if id(space["x"]) == at:
            break
    else:
        pytest.skip("the place was not used again")
    assert payload_of(has, space, "x")["x"][:2] == [4, 5]


def test_another_module_under_the_same_name_travels() -> None:
    import json
    import string

    has = SyncedVariables()
    payload_of(has, {"m": json}, "m")
    assert payload_of(has, {"m": string}, "m") == {"m": string}
    late = LateModule("json")
    payload_of(has, {"m": late}, "m")
    late.__name__ = "string"  # as if another stood where this one was
    assert payload_of(has, {"m": late}, "m") == {"m": string}


def test_large_plain_arrays_travel_every_time_and_large_arrays_of_objects_are_looked_at() -> None:
    has = SyncedVariables()
    plain, objects = numpy.zeros(1 << 20, numpy.uint8), numpy.array([[1]] * (1 << 17) + [None], dtype=object)
    for expected in ({"plain", "objects"}, {"plain"}):
        assert set(payload_of(has, {"plain": plain, "objects": objects}, "plain", "objects")) == expected


def test_ten_thousand_names_and_each_change_of_one_is_found() -> None:
    has = SyncedVariables()
    space: dict[str, Any] = {f"n{i}": i if i % 2 else [i] for i in range(10_000)}
    assert len(payload_of(has, space, *space)) == 10_000
    assert payload_of(has, space, *space) == {}
    space["n3"] += 1
    space["n4"].append(1)
    assert payload_of(has, space, *space) == {"n3": 4, "n4": [4, 1]}


def test_names_of_the_shell_never_travel_and_names_nobody_has_are_no_error() -> None:
    space = {"In": [1], "_": 2, "_i1": "x", "__name__": "__main__", "get_ipython": 3, "mine": 4}
    assert payload_of(SyncedVariables(), space, *space, "unknown") == {"mine": 4}


# --- what the worker has ---


def test_nothing_counts_as_sent_before_it_was_taken() -> None:
    has = SyncedVariables()
    for _ in range(2):
        payload = has.payload({"x": 1}, ["x"])
        assert set(payload.sent) == {"x"}
    has.took(payload)
    assert has.payload({"x": 1}, ["x"]).sent == {}


def test_after_a_cell_whose_report_never_came_everything_travels_again() -> None:
    """It may have changed anything: also what it was not sent, and what it only wrote to."""
    has = SyncedVariables()
    space = {"x": 1, "y": [2], "z": 3}
    payload_of(has, space, "x", "y", "z")
    has.payload(space | {"x": 5}, ["x"])
    assert payload_of(has, space, "x", "y", "z") == space
    assert payload_of(has, space, "x", "y", "z") == {}


def test_a_deleted_name_is_forgotten_there_until_it_surely_is() -> None:
    has = SyncedVariables()
    payload_of(has, {"x": 1}, "x")
    assert has.payload({}, ["x"]).forget == ("x",)
    payload = has.payload({}, ["x"])
    assert payload.forget == ("x",)
    has.took(payload)
    assert has.payload({}, ["x"]).forget == ()


def test_what_a_refused_cell_did_not_send_was_not_sent() -> None:
    has = SyncedVariables()
    with pytest.raises(CannotTravel):
        has.payload({"a": 1, "lock": threading.Lock()}, ["a", "lock"])
    assert payload_of(has, {"a": 1}, "a") == {"a": 1}


# --- sharing ---


def test_an_optimizer_changed_in_a_normal_cell_still_trains_the_model(book: Notebook) -> None:
    book.here("""
import torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optim = torch.optim.Adam(model.parameters(), lr=0.1)
""")
    # A step by hand: the first of an optimizer's own takes seconds of imports.
    step = """
model(torch.ones(1, 2)).sum().backward()
for group in optim.param_groups:
    for p in group["params"]:
        p.data -= group["lr"] * p.grad
        p.grad = None
        optim.state[p]["step"] = torch.ones(1) + optim.state[p].get("step", 0)
"""
    book.there(step)
    for change in (
        "optim.param_groups[0]['lr'] = 0.5",
        "model.eval()",
        "model.weight.data += 1",
        "optim = torch.optim.SGD(model.parameters(), lr=1.0)",
        "pass",
    ):
        book.here(change)
        book.here("before = model.weight.detach().clone()")
        book.there(step + "same = optim.param_groups[0]['params'][0] is model.weight")
        assert book.space["same"], change
        book.here("assert not torch.equal(before, model.weight)")
        book.here("assert optim.param_groups[0]['params'][0] is model.weight")
        book.here("assert optim.state[model.weight]['step'] >= 1")
        book.here("weights = [*model.parameters()]; assert weights[1] is optim.param_groups[0]['params'][1]")


def test_a_cell_that_reads_only_the_model_does_not_part_it_from_its_optimizer(book: Notebook) -> None:
    book.here("""
import torch
model = torch.nn.Linear(2, 1)
optim = torch.optim.SGD(model.parameters(), lr=0.1)
alias = model.weight.detach()
""")
    book.there("model.eval()")
    assert not book.space["model"].training
    book.here("assert optim.param_groups[0]['params'][0] is model.weight")
    book.here("model.weight.data.fill_(7); assert alias[0, 0] == 7")
    book.there("optim.param_groups[0]['params'][0].data -= 0.1; moved = float(model.weight[0, 0])")
    assert book.space["moved"] == pytest.approx(6.9)
    assert float(book.space["alias"][0, 0]) == pytest.approx(6.9)


@pytest.mark.parametrize(
    ("setup", "change", "fact"),
    [
        ("a = [1]; b = {'a': a}", "a.append(2)", "b['a'] is a and a == [1, 2]"),
        ("a = [1]; b = {'a': a}", "b['a'].append(2)", "b['a'] is a and a == [1, 2]"),
        ("a = [1]; b = (0, a); c = [b]", "a.append(2)", "c[0][1] is a and b is c[0] and a == [1, 2]"),
        ("import numpy; a = numpy.zeros(3); b = [a]", "a[0] = 1", "b[0] is a and a[0] == 1"),
        ("import numpy; a = numpy.zeros(1 << 18); b = [a]", "a[0] = 1", "b[0] is a and a[0] == 1"),
        ("import numpy; a = [1]; b = numpy.array([a, 0], dtype=object)", "a.append(2)", "b[0] is a"),
        ("a = []; a.append(a); b = [a]", "a.append(1)", "a[0] is a and b[0] is a"),
        ("class A: pass\na = A(); b = A(); b.a = a", "a.x = 1", "b.a is a and b.a.x == 1"),
        ("class A: pass\na = A(); f = lambda: a; g = f", "a.x = 1", "f().x == 1"),
        (
            "def pair():\n n = [0]\n def up(): n[0] += 1\n def get(): return n[0]\n return up, get\nup, get = pair()",
            "up()",
            "get() == 1",
        ),
        ("a = [1]; b = a", "a.append(2)", "b is a"),
        ("a = [1]; b = [1]", "a.append(2)", "b == [1]"),
        ("a = [1]; b = [a]", "c = a", "c is a and b[0] is a"),
        ("a = [1]; b = [a]", "a = [2]", "b == [[1]] and a == [2]"),
        ("a = [[1], [2]]; b = a[0]", "del a[0]; a[0].append(3)", "b == [1] and a == [[2, 3]]"),
        ("a = [[1], [2]]; b = a[0]", "a.reverse(); a[0].append(3)", "b is a[1] and a == [[2, 3], [1]]"),
        ("a = bytearray(b'x'); b = [a]", "a += b'y'", "b[0] is a and a == b'xy'"),
    ],
)
def test_what_was_one_object_stays_one_also_where_the_cell_does_not_look(
    book: Notebook, setup: str, change: str, fact: str
) -> None:
    book.here(setup)
    book.there(change)
    assert eval(fact, book.space)
    book.there(f"told = {fact}")
    assert book.space["told"]


def test_a_tie_that_was_cut_without_any_other_change_is_cut_there_too(book: Notebook) -> None:
    book.here("a = [1]; b = [a]")
    book.there("a, b")
    book.here("b[0] = [1]")
    book.there("a.append(2); told = b")
    assert book.space["told"] == [[1]]
    assert book.space["b"] == [[1]]
    book.here("b[0] = a")
    book.there("a.append(3); told = b[0] is a")
    assert book.space["told"]
    assert book.space["b"][0] is book.space["a"]


def test_strings_numbers_classes_and_types_tie_nothing(book: Notebook) -> None:
    book.here("""
import numpy, enum, datetime
class Color(enum.Enum): RED = 1
class P: pass
text, day = "a long text that is one object", datetime.date(2024, 1, 1)
def same(v): return v
a = [text, day, Color.RED, P, P(), numpy.zeros(2), numpy.float32, same, (1, text), frozenset([text]), len]
b = [text, day, Color.RED, P, P(), numpy.zeros(2), numpy.float32, len, (1, text), frozenset([text])]
""")
    book.there("a")
    assert "b" not in book.sent
    book.there("a, b")
    book.here("a.append(1)")
    book.there("a, b")
    assert book.sent == {"a"}


def test_what_is_not_read_and_far_larger_than_what_is_stays_behind(
    book: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variable_sync, "ALONG_BYTES", 1000)
    book.here("config = {'a': 1}; small = [config]; data = [config, bytes(100_000)]")
    book.there("config['a'] += 1")
    assert book.sent == {"config", "small"}
    assert book.space["small"][0] is book.space["config"]
    assert book.space["data"][0] == {"a": 1}


def test_what_is_not_read_and_cannot_travel_is_no_hindrance(book: Notebook) -> None:
    book.here("import threading; config = {'a': 1}; holder = [config, threading.Lock()]; space = globals()")
    book.there("config['a'] += 1")
    assert book.space["config"] == {"a": 2}


def test_a_variable_for_the_whole_namespace_ties_nothing(book: Notebook) -> None:
    book.here("config = {'a': 1}; space = globals(); f = lambda: config; look = [space]")
    book.there("config['a'] += 1")
    assert book.sent == {"config"}


def test_a_search_for_ties_ends(book: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    config: dict[str, int] = {}
    monkeypatch.setattr(aliasing, "STEPS_MOST", 1000)
    assert aliasing.reaches([[config]], {id(config)})
    assert not aliasing.reaches([[0] * 2000, [config]], {id(config)})
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep, config]
    assert aliasing.reaches(deep, {id(config)})
    assert not aliasing.reaches([[n] for n in range(2000)], {id(config)})


# --- kinds of values ---


def test_functions_bring_what_they_read_and_call(book: Notebook) -> None:
    book.here("""
import math
rate, unused = 2, object()
def double(x): return rate * x
def area(r): return double(math.pi) * r
twice = lambda x: double(double(x))
class Shape:
    def area(self): return area(self.r)
    def __init__(self, r): self.r = r
shape = Shape(1)
""")
    book.there("told = (round(area(1), 2), twice(1), round(shape.area(), 2), isinstance(shape, Shape))")
    assert book.space["told"] == (6.28, 4, 6.28, True)
    assert "unused" not in book.sent
    book.here("rate = 3")
    book.there("told = twice(1)")
    assert (book.space["told"], book.sent) == (9, {"rate"})
    book.here("def double(x): return -x")
    book.there("told = twice(1)")
    assert book.space["told"] == 1


def test_global_state_of_functions_comes_back(book: Notebook) -> None:
    book.here("count, log = 0, []\ndef bump():\n global count\n count += 1\n log.append(count)")
    book.there("bump(); bump()")
    assert (book.space["count"], book.space["log"]) == (2, [1, 2])
    book.here("bump()")
    book.there("bump()")
    assert (book.space["count"], book.space["log"]) == (4, [1, 2, 3, 4])


def test_a_class_defined_anew_is_another_class_and_its_old_instances_keep_theirs(book: Notebook) -> None:
    define = "class P:\n def hi(self): return {!r}"
    book.here(define.format("old") + "\np = P()")
    book.there("told = p.hi(), isinstance(p, P)")
    assert book.space["told"] == ("old", True)
    book.here(define.format("new"))
    book.there("told = p.hi(), P().hi(), isinstance(p, P)")
    assert book.space["told"] == ("old", "new", False)
    book.here("P.hi = lambda self: 'patched'; p = P()")
    book.there("told = p.hi(); q = P()")
    assert book.space["told"] == "patched"
    assert isinstance(book.space["q"], book.space["P"])


def test_values_of_all_kinds_arrive_as_what_they_are(book: Notebook) -> None:
    book.here("""
import collections, dataclasses, enum, functools, decimal, fractions, datetime, pathlib, re, types
@dataclasses.dataclass
class Point: x: int; y: list = dataclasses.field(default_factory=list)
class Color(enum.Enum): RED = 1
Pair = collections.namedtuple("Pair", "a b")
@functools.lru_cache
def cached(n): return n + 1
values = [Point(1, [2]), Color.RED, Pair(1, 2), decimal.Decimal("1.5"), fractions.Fraction(1, 3), datetime.date(2024, 2, 29),
    pathlib.PurePosixPath("/a"), re.compile("a+"), collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]),
    collections.deque([1, 2], 3), types.SimpleNamespace(a=1), range(3), slice(1, 2), frozenset([1]), {1, 2}, bytearray(b"x"),
    functools.partial(max, 3), memoryview(b"x").tobytes(), ..., NotImplemented, int, len]
""")
    book.there("back = list(values); told = cached(1), Color.RED is values[1], values[0].y, values[9]['new']")
    back, values = book.space["back"], book.space["values"]
    assert book.space["told"] == (2, True, [2], [])
    assert [type(v) for v in back] == [type(v) for v in values]
    assert back[1] is book.space["Color"].RED
    assert isinstance(back[0], book.space["Point"])
    assert back[0] is values[0]


def test_modules_go_by_name_and_one_imported_there_is_imported_here_when_it_is_used(book: Notebook) -> None:
    book.here("import json as j")
    book.there("import colorsys; told = j.dumps([1])")
    assert book.space["told"] == "[1]"
    book.there("told = colorsys.rgb_to_hsv(0, 0, 0)[0]; again = j.loads('2')")
    assert (book.space["told"], book.space["again"]) == (0.0, 2)
    assert book.sent <= {"colorsys"}
    book.here("assert colorsys.rgb_to_hsv(1, 0, 0)[0] == 0")


def test_a_self_referring_list_travels(book: Notebook) -> None:
    book.here("a = [1]; a.append(a)")
    book.there("told = a[1] is a; a.append(2)")
    assert book.space["told"]
    assert book.space["a"][1] is book.space["a"]


UNSENDABLE = {
    "a generator": "x = (i for i in range(3))",
    "an open file": "import os; x = open(os.devnull, 'w')",
    "a lock": "import threading; x = threading.Lock()",
    "a lock inside": "import threading; x = {'a': [threading.Lock()]}",
    "too deep": "x = []\nfor _ in range(100_000): x = [x]",
    "an odd exception": "class X:\n def __reduce__(self): return 1 / 0\nx = X()",
    "an exception of its own": "class E(Exception):\n def __str__(self): raise ValueError\n"
    "class X:\n def __reduce__(self): raise E\nx = X()",
    "a lying class": "class X:\n @property\n def __class__(self): raise RuntimeError('no')\n def __reduce__(self): raise OSError('no')\nx = X()",
    "anything for any attribute": "class X:\n def __getattr__(self, name): return 5\n def __reduce_ex__(self, p): return 5\nx = X()",
    "a wrong reduction": "class X:\n def __reduce__(self): return 'no', 'no', 'no'\nx = X()",
    "memory": "class X:\n def __reduce__(self): raise MemoryError\nx = X()",
    "an array of locks": "import numpy, threading; x = numpy.array([threading.Lock()] * (1 << 18))",
    "in a module that is no file": "import types, threading; x = types.ModuleType('made_up'); x.lock = threading.Lock()",
}


@pytest.mark.parametrize("what", UNSENDABLE)
def test_what_cannot_travel_is_named_with_what_to_do(book: Notebook, what: str) -> None:
    book.here("fine = [1]\n" + UNSENDABLE[what])
    with pytest.raises(CannotTravel) as caught:
        book.there("fine, x")
    assert caught.value.message.startswith(
        f"x ({type(book.space['x']).__name__}) cannot be sent to the GPU worker: "
    )
    assert not caught.value.message.rstrip().endswith(":")
    assert "make x inside the %%gpu cell" in caught.value.remedy
    assert "--in" in caught.value.remedy
    book.there("fine.append(2)")
    assert book.space["fine"] == [1, 2]


@pytest.mark.parametrize(
    "source",
    [
        "class X:\n def __eq__(self, other): raise ValueError\n __hash__ = None\nx = X()",
        "class X:\n def __repr__(self): raise ValueError\nx = X()",
        "class X:\n def __bool__(self): raise ValueError\n def __len__(self): raise ValueError\nx = X()",
        "class X:\n def __getattribute__(self, name):\n  if name[:2] != '__': raise ValueError(name)\n  return object.__getattribute__(self, name)\nx = X()",
    ],
    ids=["eq", "repr", "bool and len", "getattribute"],
)
def test_an_object_that_behaves_badly_otherwise_travels_all_the_same(book: Notebook, source: str) -> None:
    book.here(source)
    book.there("told = type(x).__name__; y = x")
    assert book.space["told"] == "X"
    assert type(book.space["y"]) is book.space["X"]


def test_an_interrupt_in_the_middle_of_packing_is_an_interrupt(book: Notebook) -> None:
    book.here("class X:\n def __reduce__(self): raise KeyboardInterrupt\nx = X()")
    with pytest.raises(KeyboardInterrupt):
        book.there("x")


# --- what can only stay there ---


def test_what_cannot_come_back_is_there_for_the_next_cell_and_the_notebooks_own_does_not_replace_it(
    book: Notebook,
) -> None:
    book.here("x, big = 1, 2")
    ran = book.there("x = (i for i in range(5)); big = 3")
    assert set(ran.stayed) == {"x"}
    assert (book.space["x"], book.space["big"]) == (1, 3)
    book.there("told = next(x), next(x)")
    assert book.space["told"] == (0, 1)
    assert book.only_there() == {"x"}
    book.here("x = iter([7])")
    book.there("told = next(x)")
    assert book.space["told"] == 7
    assert book.only_there() == set()


def test_what_stays_there_is_not_replaced_by_what_the_notebooks_own_is_tied_to(book: Notebook) -> None:
    book.here("x = [1]; y = [x]")
    book.there("x = (i for i in range(5))")
    book.here("y.append(2)")
    book.there("told = next(x), y")
    assert book.space["told"] == (0, [[1], 2])


def test_what_stays_there_goes_when_the_notebook_deletes_its_own(book: Notebook) -> None:
    book.here("x = [1]")
    book.there("x = (i for i in range(5))")
    book.here("del x")
    with pytest.raises(CellRaised) as caught:
        book.there("x")
    assert caught.value.args[0] == "NameError"
    book.there("y = (i for i in range(5))")
    book.there("told = next(y)")
    assert book.space["told"] == 0


def test_all_that_comes_back_with_something_that_cannot_comes_back(book: Notebook) -> None:
    ran = book.there("class Bad:\n def __reduce__(self): return 1 / 0\na, b, c = [1], Bad(), {'a': 2}")
    assert set(ran.stayed) == {"b"}
    assert (book.space["a"], book.space["c"]) == ([1], {"a": 2})


# --- by name ---


def test_what_a_cell_changed_and_was_not_asked_for_is_not_what_the_next_one_sees(book: Notebook) -> None:
    book.here("a, b, c = [1], [2], 3")
    book.there("a, b, c")
    book.there("a.append(5); b = 6; c = 7; d = 8", gives=("d",))
    assert (book.space["a"], book.space["b"], book.space["c"], book.space["d"]) == ([1], [2], 3, 8)
    book.there("told = a, b, c, d")
    assert book.space["told"] == ([1], [2], 3, 8)
    book.there("a.append(9); c = 10", takes=("a",))
    assert (book.space["a"], book.space["c"]) == ([1], 10)
    book.there("told = a, c")
    assert book.space["told"] == ([1], 10)


def test_what_is_named_goes_alone(book: Notebook) -> None:
    book.here("a = [1]; b = [a]")
    book.there("a", takes=("a",))
    assert book.sent == {"a"}


# --- any order of things ---

NAMES = ("a", "b", "c", "d")
ATOM = st.sampled_from([0, 1, 1.0, True, None, "", "x", -0.0, 0.0, b"x", 2**70])


def test_interrupted_while_results_come_back_the_worker_is_not_believed_to_have_what_the_notebook_has(
    book: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.here("seen = [0]")
    book.there("before = len(seen)")
    held = book.lease

    def interrupted(self: Any, *_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(NotebookLease, "_bring_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        book.there("seen.append(1)")
    monkeypatch.undo()
    assert held.status == "ended"
    book.there("there = list(seen)")
    assert book.space["seen"] == book.space["there"] == [0]


class InStep(RuleBasedStateMachine):
    """Two notebooks do the same: one with `%%gpu` cells, one with normal cells only. They never differ in
    anything that can be seen."""

    worker: LocalWorker

    @initialize()
    def begin(self) -> None:
        self.book = Notebook(self.worker)
        sys.modules["__main__"] = self.book.main
        self.plain: dict[str, Any] = {}

    def both(self, source: str) -> None:
        exec(source, self.plain)
        self.book.here(source)

    def cell(self, source: str) -> None:
        exec(source, self.plain)
        self.book.there(source)
        self.compare()

    def compare(self) -> None:
        assert pictured(self.book.space) == pictured(self.plain)

    @rule(name=st.sampled_from(NAMES), value=ATOM)
    def bind(self, name: str, value: Any) -> None:
        self.both(f"{name} = {value!r}")

    @rule(name=st.sampled_from(NAMES), value=ATOM, kind=st.sampled_from(["[{}]", "{{'k': {}}}", "({}, [])"]))
    def bind_container(self, name: str, value: Any, kind: str) -> None:
        self.both(f"{name} = {kind.format(repr(value))}")

    @rule(
        name=st.sampled_from(NAMES),
        of=st.sampled_from(NAMES),
        kind=st.sampled_from(["{}", "[{}]", "[{0}, {0}]"]),
    )
    def share(self, name: str, of: str, kind: str) -> None:
        if of in self.plain:
            self.both(f"{name} = {kind.format(of)}")

    @rule(name=st.sampled_from(NAMES), value=ATOM)
    def mutate(self, name: str, value: Any) -> None:
        self.both(changed(self.plain, name, repr(value)))

    @rule(name=st.sampled_from(NAMES), other=st.sampled_from(NAMES))
    def hold(self, name: str, other: str) -> None:
        if other in self.plain:
            self.both(changed(self.plain, name, other))

    @rule(name=st.sampled_from(NAMES))
    def copy_deeply(self, name: str) -> None:
        """Nothing changes but what is one object and what is two."""
        if name in self.plain:
            self.both(f"import copy as _copy; {name} = _copy.deepcopy({name})")

    @rule(name=st.sampled_from(NAMES))
    def untie(self, name: str) -> None:
        if type(self.plain.get(name)) is list and self.plain[name]:
            self.both(f"import copy as _copy; {name}[0] = _copy.deepcopy({name}[0])")

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        if name in self.plain:
            self.both(f"del {name}")

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def read(self, names: set[str]) -> None:
        there = sorted(name for name in names if name in self.plain)
        self.cell("seen = [" + ", ".join(there) + "]; del seen")

    @rule(name=st.sampled_from(NAMES), value=ATOM)
    def mutate_there(self, name: str, value: Any) -> None:
        self.cell(changed(self.plain, name, repr(value)))

    @rule(name=st.sampled_from(NAMES), other=st.sampled_from(NAMES))
    def hold_there(self, name: str, other: str) -> None:
        if other in self.plain:
            self.cell(changed(self.plain, name, other))

    @rule(name=st.sampled_from(NAMES), value=ATOM)
    def bind_there(self, name: str, value: Any) -> None:
        self.cell(f"{name} = [{value!r}]")

    @rule(name=st.sampled_from(NAMES))
    def delete_there(self, name: str) -> None:
        if name in self.plain:
            self.cell(f"del {name}")

    @rule(names=st.sets(st.sampled_from(NAMES), min_size=1))
    def twice(self, names: set[str]) -> None:
        """The second time there is nothing to send."""
        there = sorted(name for name in names if name in self.plain)
        self.cell(f"({', '.join(there)},)" if there else "0")
        self.cell(f"({', '.join(there)},)" if there else "0")
        assert self.book.sent == set()

    @rule()
    def lose(self) -> None:
        self.book.lose_the_worker()

    @precondition(lambda self: self.book._cells.lease is not None)
    @rule()
    def never_begins(self) -> None:
        self.book.fail_before_the_next_cell()

    @rule(name=st.sampled_from(NAMES))
    def left(self, name: str) -> None:
        """The notebook's user looks away in the middle of a cell: it changed things there, and nobody heard
        of it."""
        if type(self.plain.get(name)) is list:
            report = None

            class Left(Exception):
                pass

            def leave(what: str) -> None:
                raise Left

            before, self.book.screen._fail = self.book.screen._fail, leave
            try:
                report = self.book.there(
                    f"{name}.append('unheard'); {name}2 = 1; a = 'unheard'; print('x'); import time; "
                    "[time.sleep(0.01) for _ in range(500)]"
                )
            except Left:
                pass
            finally:
                self.book.screen._fail = before
            assert report is None


def changed(space: dict[str, Any], name: str, value: str) -> str:
    """A statement that changes what is inside the variable, if there is an inside."""
    kind = type(space.get(name))
    if kind is list:
        return f"{name}.append({value})"
    if kind is dict:
        return f"{name}[len({name})] = {value}"
    if kind is tuple:
        return f"{name}[1].append({value})"
    return f"{name} = [{value}]" if name in space else "pass"


def pictured(space: dict[str, Any]) -> Any:
    """The variables and all that is in them, with one number for one object."""
    numbers: dict[int, int] = {}

    def picture(value: Any) -> Any:
        if type(value) not in (list, dict, tuple):
            return f"{type(value).__name__} {value!r}"
        if type(value) is not tuple:
            if id(value) in numbers:
                return ("again", numbers[id(value)])
            numbers[id(value)] = len(numbers)
        inner = (
            [(str(k), picture(v)) for k, v in value.items()]
            if type(value) is dict
            else [picture(v) for v in value]
        )
        return (type(value).__name__, inner)

    return {name: picture(space[name]) for name in NAMES if name in space}


def test_cells_there_and_cells_here_never_differ(
    one_worker: LocalWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(InStep, "worker", one_worker, raising=False)
    run_state_machine_as_test(
        InStep,
        settings=settings(
            max_examples=40 * MORE_EXAMPLES,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
