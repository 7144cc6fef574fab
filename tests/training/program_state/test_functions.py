"""Functions, classes and references in another process: closures, methods, what changed in them since they were made."""

from __future__ import annotations

import pytest

from tests.training.program_state.carried import assert_carried, carry

PROGRAMS = {
    "a class of tuples that is made in the loop": """
from collections import namedtuple
pair = made = None
begin()
for i in range(5):
    if i == 0:
        pair = namedtuple("Pair", "x y")
    made = [pair(i, made)]
    step()
    print(made, type(made[0]) is pair, pair._fields)
""",
    "closures": """
def make():
    n = 0

    def inc(by=[1]):
        nonlocal n
        n += sum(by)
        by.append(1)
        return n

    def get():
        return n
    return (inc, get)
inc, get = make()
late = None
begin()
for i in range(5):
    inc()
    late = late or make()
    late[0]()
    step()
    print(inc(), get(), late[0](), late[1](), inc.__defaults__)
""",
    "attributes, defaults and annotations": '''
def f(a, b=[], *, c={}):
    """doc"""
    f.n += 1
    b.append(f.n)
    return f.n
f.n = 0

def outer():
    x = [0]

    class In:

        def m(s):
            x[0] += 1
            return (x[0], __class__ is In)
    return In
In = outer()
o = In()
lam = [lambda q=i: q for i in range(3)]
begin()
for i in range(4):
    f(1)
    o.m()
    if i == 1:

        def f2(*a, k=o, **kw):
            return k.m()
        f2.z = [f]
        f.__defaults__ = (f.__defaults__[0],)
        f.__doc__ = 'new'
        f.__kwdefaults__ = {'c': 5}
        In2 = outer()
        o2 = In2()
        g = f.__get__(o)
        f2.__annotations__['x'] = int
    step()
    print(f.n, f.__defaults__, f.__doc__, f.__kwdefaults__, o.m(), [l() for l in lam], i < 1 or (f2(), f2.z[0] is f, o2.m(), o2.__class__ is In2, g.__self__ is o, f2.__annotations__, f2.__name__, f2.__qualname__))
''',
    "another code": """
def f():
    return 1

def g():
    return 2
begin()
for i in range(4):
    if i == 1:
        f.__code__ = g.__code__
    step()
    print(f())
""",
    "bound methods and partials": """
import functools

class A:
    n = 0

    def m(s, k=1):
        s.n += k
        return s.n
a = A()
m = a.m
p = functools.partial(a.m, k=3)
q = functools.partial(p, k=4)
l = []
ap = l.append
d = {}
up = d.update
g = d.get
begin()
for i in range(5):
    m()
    p()
    q()
    ap(i)
    up({i: i})
    r = a.m if i < 2 else r
    step()
    print(a.n, m(), p(), q(), l, m.__self__ is a, p.func.__self__ is a, g(i), r())
""",
    "weak references": """
import weakref

class A:
    pass
a = A()
w = weakref.ref(a)
dead = weakref.ref(A())
ws = weakref.WeakSet([a])
wk = weakref.WeakKeyDictionary({a: [1]})
wv = weakref.WeakValueDictionary({'a': a})
wm = weakref.WeakMethod(a.__init__) if False else None
pr = weakref.proxy(a)
b = None
begin()
for i in range(5):
    wk[a].append(i)
    if i == 1:
        b = A()
        b.x = 5
        ws.add(b)
        wk[b] = ['b']
        wv['b'] = b
    step()
    print(w() is a, dead(), len(ws), wk[a], wv['a'] is a, sorted(wv), len(wk))
    if b:
        print(wv['b'] is b, wk[b], b in ws)
    if i == 3:
        del b
        b = None
""",
    "properties and class attributes": """
class A:
    count = 0
    items = []

    def __init__(s):
        s._v = 0

    @property
    def v(s):
        return s._v

    @v.setter
    def v(s, x):
        s._v = x * 2

    @classmethod
    def inc(cls):
        cls.count += 1
        return cls.count

    @staticmethod
    def st():
        return A.count
a = A()
begin()
for i in range(5):
    a.v = i + a.v
    A.inc()
    A.items.append(i)
    if i == 1:
        A.new = lambda self: self.v + 100
        A.extra = [1]
    if i == 1:

        def v2(self):
            return self._v - 1
        A.v = property(v2, A.v.fset)
    step()
    print(a.v, A.count, A.st(), A.items, hasattr(A, 'new') and a.new(), getattr(A, 'extra', None))
""",
    "metaclasses and classes made in the loop": """
class M(type):
    n = 0

    def __call__(c, *a):
        M.n += 1
        o = super().__call__(*a)
        o.num = M.n
        return o

    def __setattr__(c, k, v):
        super().__setattr__(k, ('set', v))

class A(metaclass=M):
    pass

class B(A):
    pass
a = A()
Dyn = None
begin()
for i in range(5):
    b = B()
    A.k = i
    if i == 1:

        class Dyn(A):
            z = []

            def __init__(s):
                super().__init__()
                s.y = 1

            def m(s):
                return __class__.z
            __slots__ = ('s',)
        dd = Dyn()
    if Dyn:
        Dyn.z[1].append(i) if isinstance(Dyn.z, tuple) else Dyn.z.append(i)
    step()
    print(M.n, a.num, b.num, A.k, Dyn and (dd.m(), dd.num, type(dd) is Dyn, Dyn.__mro__[1] is A, isinstance(Dyn(), Dyn), Dyn.__name__))
""",
    "__init_subclass__ and __set_name__": """
class Base:
    subs = []

    def __init_subclass__(cls, **k):
        Base.subs.append(cls)
        super().__init_subclass__(**k)

class X(Base):
    v = 1

class Desc:

    def __set_name__(s, o, n):
        s.n = n
        print('setname', n)

    def __get__(s, o, t=None):
        return (s.n, o is None)
New = None
begin()
for i in range(5):
    if i == 1:

        class New(Base):
            d = Desc()

            def f(self):
                return super().__repr__()[:5]
    step()
    print([c.__name__ for c in Base.subs], New and New.d, New and New().f(), New and Base.subs[-1] is New)
""",
    "abstract classes": """
import abc

class S(abc.ABC):

    @abc.abstractmethod
    def f(self):
        ...

class T(S):

    def f(self):
        return 1

class R:
    pass
New = None
begin()
for i in range(5):
    if i == 1:
        S.register(R)

        class New(S):

            def f(s):
                return 2

        class Half(S):
            pass
    step()
    print(isinstance(R(), S), issubclass(T, S), New and New().f(), New and isinstance(New(), S))
    if New:
        try:
            Half()
        except TypeError as e:
            print(str(e)[:30])
""",
    "caches": """
import functools

@functools.lru_cache
def f(x):
    print('computing', x)
    return [x]

class A:

    @functools.cached_property
    def v(s):
        print('cp')
        return [1]
a = A()

@functools.singledispatch
def sd(x):
    return 'any'

@sd.register
def _(x: int):
    return 'int'

@functools.wraps(sd)
def w(x):
    return 1
begin()
for i in range(5):
    f(i % 2)
    a.v.append(i)
    if i == 1:
        sd.register(str, lambda x: 'str')
    step()
    print(f(1), a.v, sd(1), sd('a'), f.cache_info() if 0 else 0)
""",
    "another class, other methods": """
class A:

    def m(s):
        return 1

class B(A):

    def m(s):
        return super().m() + 10

class Z:

    def m(s):
        return 5
a = A()
b = B()
begin()
for i in range(4):
    if i == 1:
        a.__class__ = B
        A.m = lambda s: 3
        B.__bases__ = (Z,) if 0 else B.__bases__
        A.__doc__ = 'x'
        del_me = 1
    if i == 2:
        del del_me
    step()
    print(a.m(), type(a) is B, b.m(), 'del_me' in globals(), A.__doc__)
""",
    "other bases": """
class A:

    def m(s):
        return 1

class B(A):
    pass

class C(A):

    def m(s):
        return 2

class D(B):
    pass
d = D()
begin()
for i in range(4):
    if i == 1:
        D.__bases__ = (C,)
    step()
    print(d.m(), D.__mro__)
""",
    "objects that act at their end": """
log = []

class R:

    def __init__(s, n):
        s.n = n

    def __del__(s):
        log.append(s.n)
rs = [R(1), R(2), R(3)]
begin()
for i in range(4):
    rs.append(R(10 + i))
    if i == 1:
        del rs[0]
    step()
    rs.pop(0)
    print(log)
""",
    "known subclasses": """
class Base:
    pass
begin()
for i in range(4):
    if i == 1:

        class K(Base):
            pass
    step()
    print([c.__name__ for c in Base.__subclasses__()])
""",
    "imports in the loop": """
begin()
for i in range(4):
    if i == 1:
        import colorsys, json as js
        from collections import abc as cabc
    step()
    print(i < 1 or (colorsys.rgb_to_hsv(1, 1, 1), js.dumps(1), cabc.__name__))
""",
    "enums": """
import enum

class E(enum.Enum):
    A = 1
    B = 2

    def other(self):
        return E.B if self is E.A else E.A

class F(enum.Flag):
    X = 1
    Y = 2

class I(enum.IntEnum):
    U = 1
    V = 2
e = E.A
f = F.X | F.Y
t = {E.A: [], E.B: []}
i_ = I.U
begin()
for i in range(5):
    e = e.other()
    t[e].append(i)
    f ^= F.X
    i_ = I.V if i_ == I.U else I.U
    step()
    print(e is E.A, e, f, t, i_ is I.V, f in (F.Y,), E(1) is E.A)
""",
    "named tuples": """
from typing import NamedTuple
from collections import namedtuple

class S(NamedTuple):
    n: int
    l: list

    def nxt(self):
        return self._replace(n=self.n + 1)
T = namedtuple('T', 'a b')
s = S(0, [])
t = T(s, s.l)
begin()
for i in range(5):
    s = s.nxt()
    s.l.append(i)
    t = T(s, t.b)
    step()
    print(s, t, s.l is t.b, type(s) is S, isinstance(t, T), T._fields)
""",
    "frozen dataclasses": """
from dataclasses import dataclass, field

@dataclass(frozen=True, slots=True)
class P:
    a: int
    l: list = field(default_factory=list)

@dataclass(frozen=True)
class Q:
    a: int
    l: list
p = P(1)
q = Q(2, p.l)
d = {Q(1, None) if False else P.__name__: p}

@dataclass(frozen=True)
class K:
    a: int
    b: tuple
table = {K(1, (2,)): p, K(2, (3, K(1, ()))): q}
begin()
for i in range(5):
    p.l.append(i)
    q = Q(q.a + 1, q.l)
    table[K(i + 10, (i,))] = q
    step()
    print(p, q, p.l is q.l, table[K(1, (2,))] is p, list(table), hash(p.a))
""",
    "slots": """
class A:
    __slots__ = ('x', 'y', '__weakref__')

class B(A):
    __slots__ = ('z',)

class C(B):
    pass
objs = [A(), B(), C()]
objs[0].x = 1
objs[2].extra = []
objs[1].z = objs

def show(o):
    return [(n, getattr(o, n, '-') if n != 'z' else type(getattr(o, n, None)).__name__) for n in ('x', 'y', 'z', 'extra')]
begin()
for i in range(5):
    objs[0].x += 1
    if i == 1:
        del objs[0].x
        objs[0].x = 0
        objs[1].y = i
        objs[2].extra.append(i)
    if i == 2:
        objs.append(B())
        objs[-1].z = [objs]
    step()
    print([show(o) for o in objs], objs[1].z is objs)
    if i > 2:
        print(objs[-1].z[0] is objs)
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_goes_on_elsewhere(name: str) -> None:
    assert_carried(PROGRAMS[name])


def test_a_class_that_cannot_be_made_again_is_refused_in_words() -> None:
    text = "import enum\nbegin()\nfor i in range(4):\n    if i == 1:\n        class E(enum.Enum):\n            A = 1\n    step()\nprint(E)\n"
    assert "E EnumType a class that EnumType made after the loop began" in carry(text).fault
