"""Sets give their members in the same order in another process."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sublet.training.program_state.cpython.frame_memory import NotResumable
from sublet.training.program_state.cpython.set_order import layout_of_set, order
from sublet.training.program_state.kinds import Unknown, hashed_members, hashed_pairs
from tests.seeds import SEED
from tests.training.program_state.carried import assert_carried

PROGRAMS = {
    "sets that grew and shrank": """
s = set(range(40))
s2 = {'a', 'b', 'c', 'dd', 'eee'}
fs = frozenset({'x', 'y', 'z', 5, (1, 2)})

class K:

    def __init__(s, v):
        s.v = v

    def __hash__(s):
        return hash(s.v)

    def __eq__(s, o):
        return s.v == o.v

    def __repr__(s):
        return f'K{s.v}'
ks = {K(i) for i in range(12)}
kd = {K(1): [1]}
kf = frozenset(ks)
begin()
for i in range(5):
    s.discard(i * 7 % 40)
    s.add(i * 100 + 3)
    s2.add('q' * i)
    s2.discard('a')
    ks.add(K(i * 5))
    kd[K(i)] = i
    fs = fs | {i * 31}
    new = frozenset((f'w{j}' for j in range(i * 3 + 5))) - {'w3'}
    step()
    print(list(s), list(s2), list(fs), list(ks), kd, list(new), list(kf), next(iter(ks)) in kf)
""",
    "members found by their address": """
class A:

    def __init__(s, n):
        s.n = n
o = [A(i) for i in range(6)]
s = set(o)
d = {x: x.n for x in o}
begin()
for i in range(5):
    o[0].n += 1
    step()
    print(sorted((x.n for x in s)), d[o[0]], o[1] in s, [x.n for x in d])
""",
    "classes in a set": """
import collections
s = {int, str, collections.OrderedDict}
begin()
for i in range(5):
    step()
    print(int in s, len(s))
""",
    "objects in a frozenset": """
class A:

    def __init__(s, n):
        s.n = n
a = A(1)
f = frozenset([a])
g = frozenset([A(5)])
t = (f,)
h = next(iter(g))
begin()
for i in range(5):
    a.n += 1
    if i == 1:
        f2 = frozenset([a])
    h.n += 1
    step()
    print(a in f, next(iter(f)) is a, i < 1 or a in f2, next(iter(g)).n, next(iter(g)) is h)
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_goes_on_elsewhere(name: str) -> None:
    assert_carried(PROGRAMS[name])


def test_a_set_goes_on_as_the_other_would_have() -> None:
    chance = random.Random(SEED)
    for _ in range(60):
        first: set[int] = set()
        for _ in range(chance.randrange(300)):
            (first.add if chance.random() < 0.7 else first.discard)(
                chance.randrange(1 << chance.randrange(1, 40))
            )
        second = set()
        second.update(sorted(first))
        order(second, list(first), layout_of_set(first))
        assert list(second) == list(first)
        for number in range(40):
            for one in (first, second):
                one.add(number * 977)
                one.discard(number * 31)
            assert list(second) == list(first)
        while first:
            assert second.pop() == first.pop()


def test_members_with_other_hashes_are_found_and_in_order() -> None:
    class Member:
        pass

    for count in (2, 3, 10, 60):
        members = [Member() for _ in range(count)]
        layout = layout_of_set({Member() for _ in members})
        for made in (set(members), frozenset(members)):
            order(made, members, layout)
            assert list(made) == members
            assert all(member in made for member in members)
            assert Member() not in made
        grown = set(members)
        order(grown, members, layout)
        grown.update(range(500))
        assert grown == {*members, *range(500)}


def test_too_many_of_them_are_refused_in_words() -> None:
    members = [object() for _ in range(301)]
    with pytest.raises(NotResumable, match="a set of 301 objects"):
        order(set(members), members, layout_of_set({object() for _ in members}))


class Changing:
    def __init__(self, n: int) -> None:
        self.n = n

    def __hash__(self) -> int:
        return self.n

    def __eq__(self, other: object) -> bool:
        return self is other


def test_a_key_whose_hash_has_changed_is_refused() -> None:
    """X1: it is found by what it was, and another process could put it in only by what it is."""
    key = Changing(1)
    held: dict[object, int] = {key: 1}
    tuples: dict[object, int] = {(key, 2): 1}
    members, frozen = {key}, frozenset([key])
    for kept in (held, tuples, members, frozen):
        taken(kept)
    key.n = 2
    for kept in (held, tuples, members, frozen):
        with pytest.raises(Unknown, match="in it has changed meanwhile"):
            taken(kept)
    held[key] = 2  # a second time
    with pytest.raises(Unknown, match="in it twice"):
        taken(held)


def taken(kept: Any) -> object:
    return hashed_pairs(kept) if isinstance(kept, dict) else hashed_members(kept)
