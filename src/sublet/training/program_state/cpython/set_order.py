"""The order in which a set gives its members, which depends on how it grew and on what was taken out of it.

Rules of this file:
- A set is a table; a member lies at the first free place on the way that its hash prescribes. Where each
  lies, and which places were left, is read and put back: the set goes on as the first one would have.
- Members that are found by their address have another hash in another process. They are put where they are
  found, and given in the same order, until the set grows or shrinks.
- The layout of a set is known for the versions of CPython here and is compared with what Python says of one.
  Where it is another one, nothing is written, and a set whose order cannot be kept is refused.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from sublet.training.program_state.cpython.frame_memory import NotResumable

_FILL, _USED, _MASK, _TABLE, _FINGER, _SMALL = 16, 24, 32, 40, 56, 64
_ENTRY, _SMALL_COUNT = 16, 8
_LINEAR_PROBES = 9
#: More members found by their address are not kept in order: the table would be too large.
_MOST_BY_ADDRESS = 300


@dataclass(frozen=True, slots=True)
class SetLayout:
    """Where the members of a set lie, in the order in which it gives them."""

    mask: int
    finger: int  # where `pop` looks first
    places: tuple[int, ...]
    hashes: tuple[int, ...]
    left: tuple[int, ...]  # places of members that were taken out


def _number(at: int) -> ctypes.c_ssize_t:
    return ctypes.c_ssize_t.from_address(at)


def _entry(table: int, place: int) -> tuple[ctypes.c_ssize_t, ctypes.c_ssize_t]:
    """The address of what lies there, and its hash."""
    return _number(table + _ENTRY * place), _number(table + _ENTRY * place + 8)


@cache
def _taken_out() -> int:
    """What lies where a member was taken out; 0 if sets are laid out in an unknown way."""
    probe = {1, 2, 3}
    probe.discard(2)
    at = id(probe)
    known = sys.implementation.name == "cpython" and set.__basicsize__ == 200
    if not known or (_number(at + _FILL).value, _number(at + _USED).value) != (3, 2):
        return 0
    table = _number(at + _TABLE).value
    if _number(at + _MASK).value != 7 or table != at + _SMALL or _entry(table, 1)[1].value != 1:
        return 0
    return _entry(table, 2)[0].value if _entry(table, 2)[1].value == -1 else 0


def layout_of_set(thing: set[Any] | frozenset[Any]) -> SetLayout | None:
    """None if it need not or cannot be known."""
    if len(thing) < 2 and not isinstance(thing, set):
        return None
    if not (nothing := _taken_out()):
        return None
    table, mask = _number(id(thing) + _TABLE).value, _number(id(thing) + _MASK).value
    places, hashes, left = [], [], []
    for place in range(mask + 1):
        key, hashed = (found.value for found in _entry(table, place))
        if key == nothing:
            left.append(place)
        elif key:
            places.append(place)
            hashes.append(hashed)
    finger = _number(id(thing) + _FINGER).value
    return SetLayout(mask, finger, tuple(places), tuple(hashes), tuple(left))


def order(thing: set[Any] | frozenset[Any], members: list[Any], layout: SetLayout | None) -> None:
    """Let `thing`, which has these members, give them in their order."""
    if layout is not None and _taken_out():
        if tuple(map(hash, members)) == layout.hashes:
            _lay_out(thing, members, layout)
        elif list(_given(thing)) != members:
            _lay_out(thing, members, _found_in_order(members))
    if list(_given(thing)) != members:
        raise NotResumable(
            "the order in which a set of this program gives its members cannot be made again",
            remedy="use a list, or a dict: they keep their order",
        )


def _given(thing: set[Any] | frozenset[Any]) -> Iterator[Any]:
    return set.__iter__(thing) if isinstance(thing, set) else frozenset.__iter__(thing)


def _found_in_order(members: list[Any]) -> SetLayout:
    """Places on the way of each member, each behind the one before it. What lies before them on the way looks
    as if something had been taken out."""
    count = 64
    while count < 8 * len(members) ** 2:
        count *= 2
    for size in (count, 2 * count, 4 * count) if len(members) <= _MOST_BY_ADDRESS else ():
        if (found := _found_in_a_table_of(size, members)) is not None:
            return found
    raise NotResumable(
        f"the order in which a set of {len(members):,} objects gives them cannot be made again",
        remedy="use a list, or a dict: they keep their order",
    )


def _found_in_a_table_of(count: int, members: list[Any]) -> SetLayout | None:
    hashes = tuple(map(hash, members))
    places: list[int] = []
    left: set[int] = set()
    before = -1
    for at, hashed in enumerate(hashes):
        most = before + 2 * (count - before) // (len(members) - at + 1)
        way = list(itertools.islice(_way(hashed, count - 1), 100 * (len(members) + 5)))
        steps = next((n for n, place in enumerate(way) if before < place <= most), None)
        if steps is None:
            return None
        before = way[steps]
        places.append(before)
        left.update(way[:steps])
    left -= set(places)
    if len(places) + len(left) > count // 2:  # it is looked for something up to a place that is free
        return None
    return SetLayout(count - 1, 0, tuple(places), hashes, tuple(sorted(left)))


def _way(hashed: int, mask: int) -> Iterator[int]:
    """The places where CPython looks for what has this hash, one after the other."""
    perturb = hashed & ((1 << 64) - 1)
    at = hashed & mask
    while True:
        yield from range(at, at + (_LINEAR_PROBES if at + _LINEAR_PROBES <= mask else 0) + 1)
        perturb >>= 5
        at = (at * 5 + 1 + perturb) & mask


def _lay_out(thing: set[Any] | frozenset[Any], members: list[Any], layout: SetLayout) -> None:
    made = _empty_of_size(layout.mask + 1)
    made.update(members)
    table = _number(id(made) + _TABLE).value
    if _number(id(made) + _MASK).value != layout.mask or len(made) != len(members):
        return
    size = _ENTRY * (layout.mask + 1)
    ctypes.memset(table, 0, size)
    for member, place, hashed in zip(members, layout.places, layout.hashes, strict=True):
        key, of = _entry(table, place)
        key.value, of.value = id(member), hashed
    for place in layout.left:
        key, of = _entry(table, place)
        key.value, of.value = _taken_out(), -1
    _number(id(made) + _FILL).value = len(members) + len(layout.left)
    _number(id(made) + _FINGER).value = layout.finger
    _exchange(made, thing)


def _empty_of_size(count: int) -> set[Any]:
    """A set without members whose table has so many places."""
    made: set[Any] = set()
    if count > _SMALL_COUNT:
        fillers = set(range(max(5, count // 4)))
        made.update(fillers)
        for filler in fillers:  # one by one, for the table stays as large as it is
            made.discard(filler)
        table = _number(id(made) + _TABLE).value
        ctypes.memset(table, 0, _ENTRY * (_number(id(made) + _MASK).value + 1))
        _number(id(made) + _FILL).value = 0
    return made


def _exchange(one: set[Any], other: set[Any] | frozenset[Any]) -> None:
    """Each has the table and the members of the other afterwards."""
    small = _ENTRY * _SMALL_COUNT
    held = [ctypes.string_at(id(it) + _SMALL, small) for it in (one, other)]
    fields = [
        [_number(id(it) + at).value for at in (_FILL, _USED, _MASK, _TABLE, _FINGER)] for it in (one, other)
    ]
    for it, was, found, table in ((one, other, fields[1], held[1]), (other, one, fields[0], held[0])):
        ctypes.memmove(id(it) + _SMALL, table, small)
        if found[3] == id(was) + _SMALL:
            found[3] = id(it) + _SMALL
        for at, value in zip((_FILL, _USED, _MASK, _TABLE, _FINGER), found, strict=True):
            _number(id(it) + at).value = value
