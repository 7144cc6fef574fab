"""Frames and generators that go on in another process, where they stood."""

from __future__ import annotations

import sys

import pytest

from sublet.training.program_state.call_stack import Suspended, offset_of, read, slot_names
from sublet.training.program_state.cpython.code_objects import analysed
from sublet.training.program_state.cpython.frame_memory import NOTHING
from tests.training.program_state.carried import assert_carried, carry

PROGRAMS = {
    "a traceback and callers, without frames of ours": """
import sys, traceback, warnings
class Stop(Exception): pass
def inner(log):
    begin()
    for n in range(6):
        log.append(n)
        step()
        names, at = [], sys._getframe()
        while at.f_code.co_name != '<module>':
            names.append(at.f_code.co_name)
            at = at.f_back
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter('always')
            warnings.warn('now', stacklevel=3)
        print(names, told[0].filename, told[0].lineno)
        if n == 4:
            raise Stop(n)
def keywords_only(*, log):
    inner(log)
class Runner:
    def __call__(s, log, more=()):
        keywords_only(log=log)
def no_variables():
    Runner()([], more=(1, 2))
def outer(*rest, **options):
    try:
        no_variables(*())
    except Stop:
        print(traceback.format_exc())
outer(1, 2, k=3)
""",
    "what a function held when the loop began is gone when it holds something else": """
import weakref
class T:
    n = 1
def go(parts):
    t, told = T(), []
    r, p = weakref.ref(t, told.append), weakref.proxy(t)
    for k in [1, 2]:
        begin()
        for n in range(6):
            p.n = t.n * 3 % 31
            if n % 2 == 1:
                t = T()
                print(r() is None, len(told))
                r, p = weakref.ref(t, told.append), weakref.proxy(t)
            step()
            print(n, r().n)
        break
go([])
""",
    "arguments that are deleted": """
def f(a, b=2):
    for i in range(5):
        if i == 1:
            del a
        step()
        try:
            print(a, b)
        except UnboundLocalError as error:
            print(error)
begin()
f(1)
""",
    "a loop in a module": """
x = []
y = x
begin()
for i in range(5):
    x.append(i)
    step()
    print(x, x is y, i)
""",
    "nested calls, with, try and finally": """
import contextlib

class C:

    def __enter__(s):
        print('in')
        return s

    def __exit__(s, *a):
        print('out', a[0])
        return False

def outer(n):
    with C() as c:
        for k, (a, b) in enumerate(zip(range(n), 'abcdef')):
            try:
                total = 100 + inner(k, x=b)
                print('got', total)
            except ZeroDivisionError as e:
                print('zde', e)
            finally:
                print('fin', k)
    return 'done'

def inner(k, *, x):
    acc = 0
    begin_once()
    for j in {'p': 1, 'q': 2}.items():
        acc += j[1]
        step()
        print(k, x, j, acc)
    if k == 1:
        1 / 0
    return acc
B = []

def begin_once():
    pass
import sys

def run():
    global begin_once
    l = [lambda z: inner(z, x='l')]
    return (outer(3), l[0](9), [q for q in range(3)])
begin()
print(run())
""",
    "every kind of place that a call can stand in": """
class A:

    def __call__(s, n):
        return s.m(n)

    def m(s, n, *a, **k):
        r = [s.go(i, *a, **k) for i in range(n)]
        return r

    def go(s, i, *a, **k):
        z = i

        def cell():
            return z + 1
        for w in range(2):
            z += w
            step()
            print(i, w, cell(), a, k)
        return z
a = A()
begin()
print(a.m(3, 1, q=2), a(2))
f = lambda *x: a.go(*x)
print(f(1, 2, 3), {**{'a': a.go(5)}, 'b': a.go(6)}, f'{a.go(7)} {a.go(8)!r}', a.go(1) + a.go(2) * a.go(3))
x = yyy = a.go(1) if a.go(1) else 0
assert a.go(2)
while a.go(1) < 3:
    break

def deflt(q=a.go(2)):
    return q
print(deflt(), [*range(2)], (lambda: a.go(3))())

def rec(n):
    return a.go(n) if n == 0 else rec(n - 1) + n
print(rec(4))

def many(a1, b1=2, *c, d=4, **e):
    del b1
    try:
        a.go(1)
        raise KeyError(a1)
    except KeyError as ke:
        a.go(2)
        print(repr(ke))
    else:
        pass
    finally:
        a.go(3)
    for _ in ():
        pass
    else:
        a.go(4)
    return (a1, c, d, e)
print(many(1, 2, 3, d=5, z=6))
print(sorted([3, 1, 2]), max(a.go(1), a.go(2)))
with open('/dev/null') as f1, open('/dev/null') as f2:
    a.go(4)
    print(f1.closed)
match a.go(2):
    case 3:
        print('three', a.go(1))
    case _:
        print('other')
try:
    try:
        a.go(1)
        1 / 0
    finally:
        a.go(2)
except ZeroDivisionError:
    print('ok', a.go(3))

class InBody:
    v = a.go(2)
print(InBody.v)
g = (a.go(i) for i in range(2))
for h in a.m(2):
    print(h)
try:
    list(map(a.go, [1, 2]))
except Exception as e:
    print(e)
""",
    "decorators, partials and static methods": """
import functools

@functools.wraps(print)
def deco(f):

    @functools.wraps(f)
    def inner(*a, **k):
        r = f(*a, **k)
        return r
    return inner

@deco
def train(n, lr=0.1):
    w = 0
    for e in range(n):
        for b in [1, 2]:
            w -= lr * b
            step()
            print(e, b, round(w, 3))
    return w
p = functools.partial(train, 2)
begin()
print(p(), p(lr=1), train(1))

class S:

    @property
    def x(self):
        return train(1)

    @staticmethod
    def s():
        return train(1)

    @classmethod
    def c(cls):
        return train(1)
print(S.s(), S.c(), S().s())
""",
    "inside an exception handler": """
def f():
    for i in range(5):
        try:
            raise ValueError(i)
        except ValueError as e:
            step()
            print(repr(e), i)
begin()
f()
""",
    "variables that are deleted": """
def f():
    x = 1
    y = [2]
    for i in range(5):
        if i == 1:
            del x
        step()
        try:
            print(x)
        except UnboundLocalError as e:
            print('unbound', y)
        print(sorted(locals()))
begin()
f()
""",
    "generators of all kinds": """
def g1(n):
    for i in range(n):
        yield i

def g2():
    try:
        for x in [1, 2, 3, 4, 5, 6]:
            yield x
    finally:
        print('closed')

def g3():
    r = (yield from g1(3))
    yield from (x * 2 for x in g1(10))

def g4():
    while True:
        got = (yield)
        if got:
            print('got', got)

def g5(n):
    if n > 0:
        for x in g5(n - 1):
            yield x
        yield n

def g6():
    with open('/dev/null') as f:
        for x in range(9):
            try:
                yield (x, f.closed)
            except ValueError as e:
                print('caught', e)

def g7(*a, k=1, **kw):
    y = []

    def inner():
        y.append(k)
        return len(y)
    while 1:
        yield (inner(), a, kw)
a = [g1(9), g2(), g3(), g4(), g5(9), g7(1, k=5, q=3), (z for z in range(9) if z % 2 == 0), g1(7)]
nb = g1(5)
over = g1(1)
list(over)
l = []
lz = (l.append(q) or q for q in iter(range(20)))
begin()
for i in range(5):
    out = [next(x, 'over') for x in a[:7]]
    next(lz)
    if i == 1:
        a[1] = g2()
        next(a[1])
    step()
    print(out, list(over), l)
    if i > 1:
        a[3].send(i)
print([next(x, 'over') for x in a], list(nb))
a[1].close()
""",
    "a generator that belongs to an object": """
class A:

    def __init__(s):
        s.it = s.run()
        s.n = 0
        next(s.it)

    def run(s):
        while 1:
            s.n += 1
            yield s.n
a = A()
b = None
begin()
for i in range(5):
    next(a.it)
    if i == 1:
        b = A()
    step()
    print(a.n, next(a.it), b and next(b.it), b and b.n)
""",
    "inside a generator that next() asks": """
class Engine:

    def __init__(self):
        self.running, self.count = None, 0

    def run(self, how):
        self.running = self.turns()
        try:
            return how(self.running) if how is not next else next(self.running)
        except StopIteration as over:
            self.running = None
            return over.value

    def turns(self):
        try:
            total = yield from self.once()
            total += yield from self.once()
        finally:
            print("over", self.count)
        return total

    def once(self):
        done = 0
        for i in range(3):
            if i > 7:
                yield i
            done += self.turn(i)
        return done

    def turn(self, i):
        self.count += 1
        step()
        print(self.count, i, self.running.gi_running)
        return i

engine = Engine()
begin()
print(engine.run(next), engine.running)
""",
    "inside generators that a loop asks and sends to": """
def lines(n):
    with_end = "abc"
    for i in range(n):
        got = 0
        try:
            step()
            print("inside", i, got)
            got = yield i, with_end
        finally:
            print("left", i, got)

def through(n):
    for pair in lines(n):
        sent = yield pair
        print("sent", sent)

def sending(n):
    asked = through(n)
    print(next(asked))
    try:
        for i in range(9):
            print(asked.send(i))
    except StopIteration:
        print("end")

begin()
sending(5)
""",
    "a generator that is asked often": """
def numbers():
    n = 0
    while True:
        n += 1
        if n == 20:
            begin()
        if n >= 20:
            step()
        yield n

asked = numbers()
def ask():
    return next(asked), 1
for i in range(25):
    print(ask())
""",
    "what a frame lets go": """
import weakref

class A:
    pass

def f():
    b = A()
    w = weakref.ref(b)
    l = [b]
    big = [A()]
    v = None
    u = weakref.ref(big[0])
    begin()
    for i in range(5):
        if i == 1:
            c = A()
            l.append(c)
            v = weakref.ref(c)
        step()
        print(w() is None, u() is None, v and v() is None)
        if i == 2:
            big = None
        if i == 3:
            del b
            l.clear()
            print(w() is None)
            c = None
            print(v() is None)
f()
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_goes_on_elsewhere(name: str) -> None:
    assert_carried(PROGRAMS[name])


REFUSED = {
    "a property": (
        "class S:\n    @property\n    def x(self):\n        begin()\n        step()\nS().x\n",
        "LOAD_ATTR",
    ),
    "an operator": (
        "class S:\n    def __add__(self, other):\n        begin()\n        step()\nS() + 1\n",
        "BINARY_OP",
    ),
    "C code in the middle of its work": (
        "def f(n):\n    begin()\n    step()\nlist(map(f, [1, 2]))\n",
        "in the middle of its work",
    ),
    "a generator": (
        "def f():\n    begin()\n    step()\n    yield 1\nlist(f())\n",
        "not asked by for, next() or yield from",
    ),
    "an asynchronous generator": (
        "async def g():\n    yield 1\nx = g()\nbegin()\nstep()\n",
        "x async_generator",
    ),
    "a coroutine": ("async def g():\n    pass\nx = g()\nbegin()\nstep()\nx.close()\n", "x coroutine"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_entered_again_is_refused_in_words_at_the_beginning(name: str) -> None:
    text, words = REFUSED[name]
    assert words in carry(text).refused


def test_places_are_known_by_their_instruction() -> None:
    def twice() -> list[int]:
        return [offset_of(sys._getframe()), offset_of(sys._getframe())]

    first, second = twice()
    assert second > first
    assert twice() == [first, second]


def test_what_is_read_after_a_place_is_kept() -> None:
    def function(a: int, b: int, c: int) -> int:
        print(a)
        for b in range(c):
            print(b)
        return c

    analysis = analysed(function.__code__)
    first_call = next(i for i in analysis.instructions if i.opname == "CALL")
    names = slot_names(function.__code__)
    assert [names[n] for n in analysis.dead_after(first_call.offset)] == ["a", "b"]


def test_a_function_that_reads_its_variables_by_text_keeps_all() -> None:
    def function(a: int) -> dict[str, int]:
        print(a)
        return locals()

    analysis = analysed(function.__code__)
    assert analysis.dead_after(next(i for i in analysis.instructions if i.opname == "CALL").offset) == []


def test_what_is_never_read_again_is_not_taken() -> None:
    def function() -> Suspended:
        needless, needed = [1], [2]
        print(needless)
        found = read(sys._getframe(), None)
        print(needed)
        return found

    slots = function()
    held = dict(zip(slots.names, slots.slots, strict=True))
    assert held["needed"] == [2]
    assert held["needless"] is NOTHING


def test_what_the_program_lets_go_is_gone_at_once_before_a_resume_too() -> None:
    """A list that is reached on one way, and what it holds by a weak reference on another."""
    found = carry("""
import weakref
class A: pass
def f():
    big = [[A()]]
    u = weakref.ref(big[0][0])
    begin()
    for n in range(5):
        step()
        big = None if n == 2 else big
        print(n, u() is None)
f()
""")
    found.check()
    assert [line for line in found.said.split("\n") if line[:1].isdigit()] == [
        "1 False",
        "2 True",
        "3 True",
        "4 True",
    ]
