"""The objects that exist when the loop begins, each found again in another process by its path.

Rules of this file:
- The walk goes from the program's variables outwards, nearest first, so that a path is short and reads as
  the program would write it.
- An object keeps its number for the life of the job. A new process finds it by the same path; what it does
  not find there, or finds as something else, is made from the save.
- What nobody but this file holds any more is let go.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sublet.training.program_state import functions
from sublet.training.program_state.arrays import NUMPY_ARRAY, TENSOR, place_of_array, place_of_tensor
from sublet.training.program_state.call_stack import LooseReference, is_seen_to_end
from sublet.training.program_state.kinds import UNSAVEABLE, Edge, InstanceKind, Kind, Unknown
from sublet.training.program_state.memory import Blocks, bytes_at
from sublet.training.program_state.sorting import Sorting

#: What leads to nothing else, met most often: not even asked for its kind.
_LEAVES = frozenset((int, float, str, bool, bytes, type(None), complex))
#: The references to a thing that nobody else holds: our list, a variable of ours, the call's argument.
_OURS = 3


@dataclass(slots=True)
class Paths:
    """For each number: where it was found (the number before it, and the edge) and what it was."""

    before: list[int] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    types: list[str] = field(default_factory=list)

    def add(self, before: int, edge: Edge, thing: Any) -> int:
        self.before.append(before)
        self.edges.append(edge)
        self.types.append(type_name(thing))
        return len(self.before) - 1

    def words(self, number: int) -> str:
        """As a reader of the program would write it."""
        found = ""
        while number >= 0:
            edge = self.edges[number]
            found = (f"[{edge}]" if isinstance(edge, int) else edge) + found
            number = self.before[number]
        return found.removeprefix(".")


def type_name(thing: Any) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


@dataclass(frozen=True, slots=True)
class UnknownPart:
    """Something that cannot be taken apart, and where it was found."""

    number: int
    path: str
    thing: Any
    why: str


@dataclass(frozen=True, slots=True)
class _FoundPart:
    edge: Edge
    thing: Any
    kind: Kind
    why: str = ""


class Anchors:
    """The numbered objects of this process."""

    def __init__(self, sorting: Sorting, paths: Paths | None = None) -> None:
        self._sorting = sorting
        self.paths = paths or Paths()
        self.numbers: dict[int, int] = {}  # id to number
        self.things: list[Any] = []  # by number; None when it is gone, or was not found
        self.notes: dict[int, Any] = {}
        self.unknown: list[UnknownPart] = []
        self._namespaces: dict[int, Kind] = {}  # by id: a module's variables are no dict like others
        self._installed: dict[int, str] = {}  # ids of the variables of other modules
        self._loose: dict[int, weakref.ref[Any] | None] = {}  # by number: what is not held any more
        self._holds: list[tuple[int, int]] = []  # besides the paths: which number holds which

    def namespaces(self, kind: Kind, found: Iterable[dict[str, Any]]) -> None:
        """Variables of modules, which are walked and filled in a way of their own."""
        self._namespaces = {id(namespace): kind for namespace in found}
        self._installed = functions.installed_namespaces(self._sorting.is_own)

    def is_namespace(self, thing: Any) -> bool:
        return id(thing) in self._namespaces

    def probe(self) -> Anchors:
        """Another numbering of the same program."""
        made = Anchors(self._sorting)
        made._namespaces, made._installed = self._namespaces, self._installed
        return made

    def kind_of(self, thing: Any) -> Kind:
        return self._namespaces.get(id(thing)) or self._sorting.kind_of(thing)

    # finding them

    def walk(self, roots: Iterable[tuple[Edge, Any]]) -> None:
        """Number everything that the roots lead to."""
        roots = list(roots)
        while True:
            self.paths, self.numbers, self.things, self.notes, self.unknown = Paths(), {}, [], {}, []
            self._holds = []
            self._walk(roots)
            asked = [self._sorting.ask_itself(type(holder)) for holder in list(self._holders_of_unknown())]
            if not any(asked):
                return

    def _walk(self, roots: Iterable[tuple[Edge, Any]]) -> None:
        waiting: deque[tuple[int, Any, Kind]] = deque()
        parts = self._leading(roots, set())
        number = -1
        while True:
            for part in parts:
                if (known := self.numbers.get(id(part.thing))) is not None:
                    self._holds.append((number, known))
                    continue
                found = self._hold(self.paths.add(number, part.edge, part.thing), part.thing, part.kind)
                if part.kind is UNSAVEABLE:
                    unknown = UnknownPart(found, self.paths.words(found), part.thing, part.why)
                    self.unknown.append(unknown)
                else:
                    waiting.append((found, part.thing, part.kind))
            if not waiting:
                return
            number, thing, kind = waiting.popleft()
            parts = self._parts_of(thing, kind, set())

    def _parts_of(self, thing: Any, kind: Kind, seen: set[int]) -> Iterator[_FoundPart]:
        try:
            found = list(kind.parts(thing))
        except Unknown as unknown:
            yield _FoundPart("", unknown.found, UNSAVEABLE, unknown.why)
            return
        yield from self._leading(found, seen)

    def _leading(self, parts: Iterable[tuple[Edge, Any]], seen: set[int]) -> Iterator[_FoundPart]:
        """What has an identity, through whatever is made anew each time."""
        for edge, thing in parts:
            if type(thing) in _LEAVES:
                continue
            kind = self._namespaces.get(id(thing)) or self._sorting.kind_of(thing)
            if type(thing) is dict and id(thing) in self._installed:
                continue
            if kind.is_passed_through:
                if id(thing) not in seen:
                    seen.add(id(thing))
                    for further in self._parts_of(thing, kind, seen):
                        yield _FoundPart(f"{_as_words(edge)}{_as_words(further.edge)}", *_rest(further))
            elif kind.has_identity:
                yield _FoundPart(edge, thing, kind)

    def _hold(self, number: int, thing: Any, kind: Kind) -> int:
        self.numbers[id(thing)] = number
        self.things.append(thing)
        if kind is NUMPY_ARRAY:
            self.notes[number] = NUMPY_ARRAY.note(thing)
        return number

    def adopt(self, number: int, thing: Any) -> None:
        """One that this process did not have, and has now."""
        self.numbers[id(thing)] = number
        self.things[number] = thing
        if self._sorting.kind_of(thing) is NUMPY_ARRAY:
            self.notes[number] = NUMPY_ARRAY.note(thing)

    def _holders_of_unknown(self) -> Iterator[Any]:
        """The nearest object on the way to each, which may know better how it is taken apart."""
        for unknown in self.unknown:
            number = self.paths.before[unknown.number]
            while number >= 0:
                thing = self.things[number]
                if isinstance(self._sorting.kind_of(thing), InstanceKind):
                    yield thing
                    break
                number = self.paths.before[number]

    def follow(self, roots: Iterable[tuple[Edge, Any]]) -> None:
        """Find the same objects by their paths."""
        led_to: dict[int, dict[str, _FoundPart]] = {-1: self._by_edge(self._leading(roots, set()))}
        for number, (before, edge) in enumerate(zip(self.paths.before, self.paths.edges, strict=True)):
            if before not in led_to:
                holder = self.things[before]
                kind = self.kind_of(holder)
                parts = self._parts_of(holder, kind, set()) if holder is not None else ()
                led_to[before] = self._by_edge(parts)
            part = led_to[before].get(str(edge))
            fits = part is not None and type_name(part.thing) == self.paths.types[number]
            if part is not None and fits and id(part.thing) not in self.numbers:
                self._hold(number, part.thing, part.kind)
            else:
                self.things.append(None)

    @staticmethod
    def _by_edge(parts: Iterable[_FoundPart]) -> dict[str, _FoundPart]:
        found: dict[str, _FoundPart] = {}
        for part in parts:
            found.setdefault(str(part.edge), part)
        return found

    # what they are now

    def loosen(self) -> None:
        """From now on an object lives as long as the program holds it: a program sees when one is gone, by
        weak references and finalizers. What cannot be referred to weakly is held, and looked at with each
        state, unless it holds what a program sees."""
        seen = {n for n, thing in enumerate(self.things) if thing is not None and is_seen_to_end(thing)}
        seen = self._with_their_holders(seen)
        for number in range(len(self.things)):
            thing = self.things[number]
            if thing is None or (number not in seen and self._sorting.kind_of(thing) is NUMPY_ARRAY):
                continue  # an array that is referred to weakly cannot be resized
            try:
                self._loose[number] = LooseReference(thing, self._forgets(id(thing), number))
            except TypeError:
                if number not in seen:
                    continue
                self._loose[number] = None
            self.things[number] = None

    def _with_their_holders(self, numbers: set[int]) -> set[int]:
        """And whatever leads to them, on any way."""
        holders: dict[int, list[int]] = {}
        for holder, held in itertools.chain(zip(self.paths.before, itertools.count()), self._holds):
            holders.setdefault(held, []).append(holder)
        found, waiting = set(numbers), list(numbers)
        while waiting:
            more = set(holders.get(waiting.pop(), ())) - found - {-1}
            found |= more
            waiting += more
        return found

    def note_holders(self) -> None:
        """Which object holds which, in a process that found them by their paths."""
        self._holds = [
            (number, known)
            for number, thing in enumerate(self.things)
            if thing is not None
            for part in self._parts_of(thing, self.kind_of(thing), set())
            if (known := self.numbers.get(id(part.thing))) is not None
        ]

    def _forgets(self, identity: int, number: int) -> Callable[[Any], None]:
        numbers = self.numbers

        def forget(_: Any) -> None:
            if numbers.get(identity) == number:
                del numbers[identity]

        return forget

    def number_of(self, thing: Any) -> int | None:
        """None also for an object that was made where a numbered one had been."""
        number = self.numbers.get(id(thing))
        if number is None or self._loose.get(number, number) is not None:
            return number
        return number if type_name(thing) == self.paths.types[number] else None

    def number_at(self, identity: int) -> int | None:
        """The number of the object that is known to be there."""
        number = self.numbers.get(identity)
        return number if number is not None and id(self._at(number)) == identity else None

    def holds(self, thing: Any) -> bool:
        """Whether one of its references is ours."""
        number = self.numbers.get(id(thing))
        return number is not None and self.things[number] is thing

    def _at(self, number: int) -> Any:
        reference = self._loose.get(number)
        return self.things[number] if reference is None else reference()

    def forget_the_gone(self) -> None:
        """Of what cannot be referred to weakly and is not held. Something of ours may come to be where it
        was, and is not to be taken for it; what is there before a taking stays there meanwhile."""
        if all(reference is not None for reference in self._loose.values()):
            return
        there = gc.get_objects()
        unsure = {at for at, number in self.numbers.items() if self._loose.get(number, number) is None}
        gone = unsure.difference(map(id, there))
        if gone:  # a dict of numbers and texts alone is known to its holder only
            gone.difference_update(id(held) for thing in there for held in gc.get_referents(thing))
        for identity in gone:
            del self.numbers[identity]

    def let_go(self) -> None:
        """Of what the program no longer holds."""
        for number in range(len(self.things)):
            thing = self.things[number]
            if thing is not None and sys.getrefcount(thing) <= _OURS:
                del self.numbers[id(thing)]
                self.things[number] = None

    def name_blocks(self, blocks: Blocks) -> None:
        """Name the memory of arrays after the first of them that holds it."""
        for number, place, _ in self._places():
            blocks.named(*place, f"a{number}")

    def memory(self) -> dict[str, Any]:
        """The bytes of each block, by the name it is given first."""
        names: dict[tuple[int, int], str] = {}
        found = {}
        for number, place, owner in self._places():
            if place not in names:
                names[place] = f"a{number}"
                found[names[place]] = bytes_at(*place, owner)
        return found

    def _places(self) -> Iterator[tuple[int, tuple[int, int], Any]]:
        for number in range(len(self.things)):
            thing = self._at(number)
            kind = self._sorting.kind_of(thing) if thing is not None else None
            if kind is TENSOR and (place := place_of_tensor(thing))[1]:
                yield number, place, thing.untyped_storage()
            elif kind is NUMPY_ARRAY and (of := place_of_array(thing)) is not None:
                yield number, of, thing


def _rest(part: _FoundPart) -> tuple[Any, Kind, str]:
    return part.thing, part.kind, part.why


def _as_words(edge: Edge) -> str:
    return f"[{edge}]" if isinstance(edge, int) else edge
