"""Objects in another process: who is the same as whom, and what each holds."""

from __future__ import annotations

import pytest

from tests.training.program_state.carried import assert_carried, carry

PROGRAMS = {
    "objects that are known by their ids": """
import os, sys

class T:
    pass

sys.shift = [T() for _ in range(os.getpid() % 61)]  # they lie elsewhere in each process
things = [T() for _ in range(3)]
places = {id(one): n for n, one in enumerate(things)}
seen = {id(one) for one in things}
begin()
for i in range(5):
    places[id(things[i % 3])] += 10
    seen.discard(id(things[i % 2]))
    step()
    print([places[id(one)] for one in things], [id(one) in seen for one in things], len(places))
""",
    "an object that lets nobody look at it, made in the loop": """
class Shy:
    def __init__(s): object.__setattr__(s, 'n', 1)
    def __getattribute__(s, name):
        if name != 'n': raise KeyError(name)
        return object.__getattribute__(s, 'n')
made = None
begin()
for i in range(5):
    if i == 1: made = Shy()
    step()
    print(made and made.n)
    batch = Shy()
""",
    "shared lists and cycles": """
a = [1]
a.append(a)
b = {'a': a}
c = None
begin()
for i in range(5):
    c = [a, i, c]
    step()
    print(a[1] is a, b['a'] is a, c[0] is a, c[1], c[2] and c[2][1])
""",
    "collections and their subclasses": """
from collections import *
import array
u = UserList([1])
ud = UserDict(a=1)
a = array.array('d', [1.5])
dq = deque([1, 2], 3)
od = OrderedDict(a=1, b=2)
dd = defaultdict(list)
c = Counter('abca')
cm = ChainMap(ud.data, {'z': 1})

class L(list):

    def __init__(s, *x):
        super().__init__(*x)
        s.k = 0

class D(dict):

    def __missing__(s, k):
        return -1

class DD(defaultdict):
    pass

class OD(OrderedDict):
    pass

class DQ(deque):
    pass

class ST(set):
    pass
l = L([1])
d = D(a=1)
ddd = DD(int)
odd = OD(q=1)
dqq = DQ([1], 2)
st = ST([1, 2])

class STR(str):
    pass

class T(tuple):
    pass

class IN(int):
    pass

class BA(bytearray):
    pass
sx = STR('x')
sx.foo = [1]
tt = T((1, [2]))
tt.y = l
n = IN(5)
n.q = 3
ba = BA(b'ab')
ba.z = 1
begin()
for i in range(5):
    u.append(i)
    ud[i] = u
    a.append(i)
    dq.append(dq[-1] + 1)
    od.move_to_end('a' if i % 2 else 'b')
    dd[i].append(i)
    c['a'] += 1
    cm['n'] = i
    l.append(i)
    l.k += 1
    d[i] = i
    ddd['x'] += 1
    odd[i] = i
    odd.move_to_end('q')
    dqq.append(i)
    st.add(i)
    sx.foo.append(i)
    tt[1].append(i)
    ba.append(i)
    if i == 1:
        new = [L([1]), D(b=2), DD(list), OD(z=1), DQ([1, 2], 2), ST([5]), STR('n'), T((1,)), IN(7), BA(b'q'), UserList([u]), Counter('zz'), deque(maxlen=4), array.array('i', [1])]
        new[6].zz = new
        new[2]['a'].append(new)
    step()
    print(u, list(ud), a, dq, dq.maxlen, od, dd, c, cm.maps[0] is ud.data, l, l.k, d, d['no'], ddd, odd, dqq, st, sx.foo, tt, tt.y is l, n.q, ba, ba.z, type(sx), type(n))
    if i > 1:
        print([str(x)[:50] for x in new], new[6].zz is new, new[2]['a'][0] is new, new[10][0] is u, type(new[5]))
""",
    "iterators of itertools": """
import collections
import itertools as it
isl = it.islice(it.count(), 3, None, 2)
z = zip([1, 2, 3, 4, 5, 6], 'abcdefg')
cy = it.cycle([[1], [2], [3]])
ch = it.chain([1, 2], [3, 4], [5, 6, 7])
co = it.count(5, 2)
en = enumerate('abcdefgh')
mp = map(lambda x: x + 1, range(10))
fl = filter(lambda x: x % 2, range(20))
rv = reversed([1, 2, 3, 4, 5, 6])
dq = iter(collections.deque(range(9)))
rd = reversed(collections.deque(range(9)))
pr = it.product('ab', repeat=3)
pm = it.permutations(range(4))
cb = it.combinations(range(5), 2)
ac = it.accumulate(range(10))
gb = it.groupby([1, 1, 2, 2, 3, 3, 4])
tk = it.takewhile(lambda x: x < 100, it.count())
sm = it.starmap(pow, [(2, 3)] * 9)
zl = it.zip_longest([1], [2, 3, 4, 5, 6])
li = iter([1, 2, 3, 4, 5, 6])
di = iter({1: 2, 3: 4, 5: 6, 7: 8, 9: 10, 11: 12})
ri = iter(range(100))
si = iter('abcdefghi')
t1, t2 = it.tee(range(10))
rp = it.repeat(3, 9)
pw = it.pairwise(range(10))
ci = iter(lambda: 5, 6)
fc = it.chain.from_iterable([[1, 2], [3, 4], [5, 6, 7]])
by = iter(b'abcdefgh')
cmp = it.compress('abcdefgh', [1] * 8)
dw = it.dropwhile(lambda x: x < 3, range(20))
its = [isl, z, cy, ch, co, en, mp, fl, rv, dq, rd, pr, pm, cb, ac, gb, tk, sm, zl, li, di, ri, si, t1, rp, pw, ci, fc, by, cmp, dw]

def show(x):
    try:
        v = next(x)
    except StopIteration:
        return 'over'
    return v if not isinstance(v, tuple) or not hasattr(v[-1], '__next__') else (v[0], list(v[1]))
begin()
for i in range(5):
    out = [show(x) for x in its]
    if i == 2:
        next(t2)
    step()
    print([show(x) for x in its] if i == 4 else out)
""",
    "iterators that share another": """
import itertools as it
l = [1, 2, 3, 4, 5, 6, 7]
i1 = iter(l)
i2 = i1
z = zip(i1, i2)
cyc = it.cycle(l)
t1, t2 = it.tee(iter(l))
begin()
for i in range(5):
    r = next(i1) if i % 2 else next(z)
    if i == 0:
        next(t1)
    l.append(i)
    step()
    print(r, next(cyc), list(i1) if i == 4 else 0, i1 is i2)
print(list(t1), list(t2))
""",
    "exceptions": """
class E(Exception):

    def __init__(s, a, b):
        super().__init__(a)
        s.b = b
e = E(1, [2])
try:
    raise ValueError('x') from e
except ValueError as v:
    keep = v
begin()
for i in range(5):
    e.b.append(i)
    if i == 1:
        try:
            try:
                1 / 0
            except ZeroDivisionError as z:
                raise E(3, [z]) from z
        except E as n:
            new = n
    step()
    print(repr(e), e.b, keep.__cause__ is e, repr(keep), i < 1 or (repr(new), new.b[0] is new.__cause__, repr(new.__cause__)))
""",
    "random numbers": """
import random
r = random.Random(5)

class R(random.Random):

    def __init__(s, *a):
        super().__init__(*a)
        s.k = [0]
q = R(3)
f = r.random
g = random.shuffle
begin()
for i in range(5):
    l = [1, 2, 3, 4]
    g(l)
    r.random()
    q.random()
    q.k.append(i)
    if i == 1:
        n = random.Random(1)
        n.gauss(0, 1)
    step()
    print(r.random(), q.gauss(0, 1), q.k, f(), random.random(), l, i < 1 or n.gauss(0, 1))
""",
    "values and subclasses of them": """
import datetime, decimal, fractions, uuid, pathlib, re
v = [datetime.datetime(2020, 1, 1), datetime.timedelta(1), decimal.Decimal('1.1'), fractions.Fraction(1, 3), pathlib.Path('/a'), re.compile('a+'), range(5), 1j, b'x', slice(1, [2], 3), ..., NotImplemented, float('nan'), float('inf'), -0.0, list[int], int | str, 10 ** 50]

class DT(datetime.datetime):
    pass

class PP(pathlib.PosixPath):
    pass
dt = DT(2020, 1, 1)
dt.z = [1]
pp = PP('/q')
begin()
for i in range(5):
    v[1] += datetime.timedelta(i)
    v[2] *= 2
    v[3] += i
    v[4] /= 'x'
    if i == 1:
        dt2 = DT(2021, 2, 2)
        dt2.q = [dt]
    dt.z.append(i)
    step()
    print(v, dt, dt.z, i < 1 or (dt2.q[0] is dt, type(dt2)), pp / 'x')
""",
    "buffers and arrays of bytes": """
import array
a = array.array('d')
b = bytearray()

class AA(array.array):
    pass
c = AA('i', [1])
c.z = a
begin()
for i in range(4):
    a.append(i)
    b.append(i)
    c.append(i)
    if i == 1:
        d = AA('d', [2.5])
        d.q = c
        e = array.array('u', 'hé')
    step()
    print(a, b, c, c.z is a, i < 1 or (d, d.q is c, e))
""",
    "context variables, queues and locks": """
import contextvars, threading, queue, functools, operator
v = contextvars.ContextVar('v', default=3)
v.set(4)
l = threading.local()
l.x = [1]
q = queue.Queue()
q.put(1)
sq = queue.SimpleQueue()
sq.put([1])
pq = queue.PriorityQueue()
pq.put((2, 'a'))
lk = threading.Lock()
ev = threading.Event()
sem = threading.Semaphore(2)
ig = operator.itemgetter(1)
ag = operator.attrgetter('x')
mc = operator.methodcaller('f', 1)
cond = threading.Condition()

def th():
    return threading.current_thread().name
begin()
for i in range(4):
    v.set(v.get() + 1)
    l.x.append(i)
    l.y = i
    q.put(i)
    sq.put(i)
    pq.put((-i, 'b'))
    sem.acquire(blocking=False)
    if i == 2:
        ev.set()
        lk.acquire()
    if i == 1:
        nq = queue.Queue(3)
        nq.put([l.x])
        nl = threading.Lock()
        nv = contextvars.ContextVar('nv')
        nv.set([5])
    step()
    print(v.get(), l.x, l.y, list(q.queue), sq.qsize(), pq.queue, lk.locked(), ev.is_set(), sem._value, ig([1, 2]), ag(l), th(), i < 1 or (list(nq.queue), nl.locked(), nv.get()))
""",
    "ctypes": """
import ctypes

class P(ctypes.Structure):
    _fields_ = [('x', ctypes.c_int), ('y', ctypes.c_double * 2)]
p = P(1, (1.0, 2.0))
a = (ctypes.c_int * 3)(1, 2, 3)
i_ = ctypes.c_int(5)
y = p.y
begin()
for i in range(4):
    p.x += 1
    a[0] += i
    i_.value += 1
    y[0] += 1
    if i == 1:
        n = P(3)
        na = (ctypes.c_float * 2)(1)
    step()
    print(p.x, list(p.y), list(a), i_.value, list(y), i < 1 or (n.x, list(na)))
""",
    "csv": """
import csv, io
r = csv.reader(iter(['a,b', '1,2', '3,4', '5,6', '7,8']))
dr = csv.DictReader(iter(['a;b', '1;2', '3;4', '5;6', '7;8']), delimiter=';')
out = io.StringIO()
w = csv.writer(out)
begin()
for i in range(4):
    x = next(r)
    y = next(dr)
    w.writerow(x)
    step()
    print(x, y, out.getvalue(), r.line_num, dr.line_num)
""",
    "loggers": """
import logging
lg = logging.getLogger('x')
lg.setLevel(20)
begin()
for i in range(4):
    lg.setLevel(10 + i)
    step()
    print(lg.level, logging.getLogger('x') is lg)
""",
    "keys that are found by what they hold": """
d = {'a': 1, 'b': 2}

class H:

    def __init__(s, n):
        s.n = n

    def __eq__(s, o):
        return s.n == o.n

    def __hash__(s):
        return s.n
k = H(1)
hd = {k: 1, H(2): 2}
begin()
for i in range(4):
    d.pop('a')
    d['a'] = i
    hd[k] = i
    if i == 1:
        hd[H(5)] = k
        hd2 = {(k, H(9)): 1, frozenset([k]): 2}
        del hd[H(2)]
    step()
    print(d, [x.n for x in hd], hd[H(1)], i < 1 or (hd2[H(1), H(9)], hd2[frozenset([H(1)])]))
""",
    "numbers, texts, nan": """
import sys, math
x = 2 ** 3000
s = sys.intern('abc')
y = 'abc'
z = -0.0
nan = float('nan')
l = [nan]
begin()
for i in range(4):
    x += 1
    step()
    print(x % 1000007, s is y, math.copysign(1, z), l[0] is nan, nan in l)
""",
    "a long chain": """
class N:

    def __init__(s, nx):
        s.nx = nx
h = None
for _ in range(3000):
    h = N(h)
begin()
for i in range(4):
    h = N(h)
    step()
    c = 0
    p = h
    while p:
        c += 1
        p = p.nx
    print(c)
""",
    "XML": """
import xml.etree.ElementTree as ET
r = ET.Element('a')
r.set('n', '1')
ET.SubElement(r, 'b')
begin()
for i in range(4):
    ET.SubElement(r, 'c').text = str(i)
    step()
    print(ET.tostring(r))
""",
    "decimal contexts": """
import decimal, locale, time, random
c = decimal.Context(prec=5)
D = decimal.Decimal
begin()
for i in range(4):
    decimal.getcontext().prec = 10 + i
    c.prec += 1
    step()
    print(D(1) / 3, c.divide(D(1), D(3)), random.random() < 2)
""",
    "classes of the standard library": """
import argparse, configparser, types, heapq, string, time, collections
ns = argparse.Namespace(a=[1])
cp = configparser.ConfigParser()
cp['x'] = {'y': '1'}
h = [3, 1]
heapq.heapify(h)
tpl = string.Template('$a')
lt = time.localtime(0)
p = argparse.ArgumentParser()
p.add_argument('--x', type=int, default=3)
cm = collections.ChainMap({}, {'a': 1})
begin()
for i in range(4):
    ns.a.append(i)
    cp['x']['y'] = str(i)
    heapq.heappush(h, -i)
    cm['z'] = i
    step()
    print(ns, cp['x']['y'], h, tpl.substitute(a=1), lt.tm_year, p.parse_args([]), cm)
""",
    "variables by name": """
z = 1
a = 2
begin()
for i in range(4):
    if i == 1:
        globals()['dyn'] = 5
        del z
        z = 7
    step()
    print([k for k in globals() if not k.startswith('__')], dict(sorted(vars().items(), key=str)).keys() == {})
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_goes_on_elsewhere(name: str) -> None:
    assert_carried(PROGRAMS[name])


REFUSED = {
    "a pointer": ("import ctypes\np = ctypes.pointer(ctypes.c_int(3))\n", "p LP_c_int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_refused_in_words_at_the_beginning(name: str) -> None:
    text, words = REFUSED[name]
    assert words in carry(f"{text}begin()\nstep()\n").refused


def test_what_knows_better_how_it_is_saved_is_asked_when_it_comes_late() -> None:
    """Matplotlib's pages are such: made again from three numbers, and with functions of C as attributes."""
    assert_carried("""
import re
class Page:
    def __init__(self, size):
        self.size, self.drawn = size, re.compile("a").scanner("a" * size)
        self.draw = self.drawn.search
    def __getstate__(self): return {"size": self.size}
    def __setstate__(self, state): self.__init__(state["size"])
pages = []
begin()
for n in range(6):
    pages.append(Page(n + 1))
    step()
    print([page.size for page in pages], bool(pages[-1].draw()))
""")
