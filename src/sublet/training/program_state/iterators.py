"""Iterators of the standard library, made anew by a call: of CSV files, pairs, cycles, dicts and sets.

Rules of this file:
- An iterator is what it goes through and how far it has come. One that does not say how far is asked for what
  it would give next.
"""

from __future__ import annotations

import collections
import csv
import gc
import itertools
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

from sublet.training.program_state.kinds import Unknown

_NO_DEQUE: collections.deque[int] = collections.deque()
DEQUE_FORWARDS, DEQUE_BACKWARDS = type(iter(_NO_DEQUE)), type(reversed(_NO_DEQUE))


def csv_reader(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Between two rows it holds its lines' iterator and how many it has read."""
    for found in held_by(thing):
        if hasattr(found, "__next__"):
            lines = found.lines if type(found) is _ReadBefore else found
            return new_csv_reader, (lines, _dialect(thing.dialect), thing.line_num)
    raise Unknown(thing, "a csv reader whose lines are not found")


_DIALECT = (
    "delimiter",
    "doublequote",
    "escapechar",
    "lineterminator",
    "quotechar",
    "quoting",
    "skipinitialspace",
)


def _dialect(dialect: Any) -> dict[str, Any]:
    return {name: getattr(dialect, name) for name in (*_DIALECT, "strict")}


class _ReadBefore:
    """Lines for a reader that has read some already, which counts them as they come."""

    def __init__(self, lines: Any, count: int) -> None:
        self.lines, self.count = lines, count

    def __iter__(self) -> _ReadBefore:
        return self

    def __next__(self) -> str:
        if self.count:
            self.count -= 1
            return ""
        line: str = next(self.lines)
        return line


def new_csv_reader(lines: Any, dialect: dict[str, Any], count: int) -> Any:
    reader = csv.reader(_ReadBefore(lines, count) if count else lines, **dialect)
    for _ in range(count):
        next(reader)
    return reader


def csv_writer(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:

    for found in gc.get_referents(thing):
        write = getattr(found, "__self__", None)
        if getattr(found, "__name__", "") == "write" and write is not None:
            return new_csv_writer, (write, _dialect(thing.dialect))
    raise Unknown(thing, "a csv writer whose file is not found")


def new_csv_writer(file: Any, dialect: dict[str, Any]) -> Any:
    return csv.writer(file, **dialect)


class _LastFirst:
    """An iterator that gives one more member first."""

    def __init__(self, last: Any, rest: Any) -> None:
        self.last = [last]
        self.rest = rest

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self.last.pop() if self.last else next(self.rest)


def held_by(thing: Any) -> list[Any]:
    return [found for found in gc.get_referents(thing) if found is not type(thing)]


def pairs(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    found = held_by(thing)
    if sys.version_info >= (3, 13):
        del found[-1:]  # the tuple that it gives again and again
    if not found:
        return finished_pairs, ()
    iterator, *last = found
    if isinstance(iterator, _LastFirst):
        iterator, last = iterator.rest, iterator.last or last
    return new_pairs, (iterator, tuple(last))


def new_pairs(iterator: Any, last: tuple[Any, ...]) -> Any:
    return itertools.pairwise(_LastFirst(last[0], iterator) if last else iterator)


def finished_pairs() -> Any:
    made: itertools.pairwise[Any] = itertools.pairwise(())
    next(made, None)
    return made


def place_in(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An iterator over a dict or a set: whose, of what, and how many it has given."""
    of = next((found for found in gc.get_referents(thing) if isinstance(found, (dict, set, frozenset))), None)
    name = type(thing).__name__
    if of is None:
        return new_place_in, ({}, name, 0)
    if name == "odict_iterator":
        name = _shown_by(thing, of)
    return new_place_in, (of, name, len(of) - operator.length_hint(thing))


def _shown_by(thing: Any, of: Any) -> str:
    """What an iterator over an OrderedDict gives: it does not say."""
    rest = thing.__reduce__()[1][0]
    for name, all_of_it in (("key", list(of)), ("value", list(of.values())), ("item", list(of.items()))):
        for direction, members in (("dict_", all_of_it), ("dict_reverse", all_of_it[::-1])):
            if all(map(operator.is_, _flat(rest), _flat(members[len(of) - len(rest) :]))):
                return f"{direction}{name}iterator"
    raise Unknown(thing, "an iterator over an OrderedDict that changed meanwhile")


def _flat(members: list[Any]) -> Iterator[Any]:
    return itertools.chain.from_iterable(m if isinstance(m, tuple) else (m,) for m in members)


def new_place_in(of: Any, name: str, given: int) -> Any:
    shown = next((view for view in ("value", "item") if view in name), "")
    view = getattr(of, f"{shown}s")() if shown else of
    made = reversed(view) if "reverse" in name else iter(view)
    next(itertools.islice(made, given, given), None)
    return made


def place_in_deque(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Python says all of it, but from 3.12 on names a class that is not there."""
    _, (of, given) = thing.__reduce__()
    return new_place_in_deque, (of, given, type(thing) is DEQUE_BACKWARDS)


def new_place_in_deque(of: Any, given: int, backwards: bool) -> Any:
    kind: Any = DEQUE_BACKWARDS if backwards else DEQUE_FORWARDS
    return kind(of, given)


def dict_view(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    (of,) = gc.get_referents(thing)
    return new_dict_view, (of, type(thing).__name__.removeprefix("odict_").removeprefix("dict_"))


def place_in_cycle(thing: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The same words for one that goes through what it remembers, whether it was put back there or came
    there."""
    _, (iterator,), (remembered, all_of_it) = thing.__reduce__()
    if not all_of_it:
        return new_cycle, (iterator, remembered, None)
    place = iterator.__reduce__()[2:]
    return new_cycle, (None, remembered, place[0] % len(remembered) if place and remembered else 0)


def new_cycle(iterator: Any, remembered: list[Any], place: int | None) -> Any:
    if place is not None:
        iterator = iter(remembered)
        iterator.__setstate__(place)
    made: Any = itertools.cycle(iterator)
    made.__setstate__((remembered, place is not None))
    return made


def new_dict_view(of: Any, name: str) -> Any:
    return getattr(of, name)()
