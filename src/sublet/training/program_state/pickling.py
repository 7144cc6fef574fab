"""A program's objects as bytes and blocks of memory, and back.

Rules of this file:
- Objects that exist when the loop begins are referred to by number; their content follows, and is put into
  those of the new process. Everything else is made anew. Who is the same object as whom is kept.
- What is found by its hash (a set, a dict whose keys are objects) has a number too and is filled last: a key
  may be hashed by what it holds, which must be in its place by then.
- What is written here is read by a pickle machine, which runs what it is told. It is read only for the job
  that wrote it, by the tenant who owns it, after the ledger's digest of it was checked; a studio, a queue or
  another tenant never reads it.
"""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import struct
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from sublet.core.errors import SubletError
from sublet.training.program_state import functions, references
from sublet.training.program_state.anchors import Anchors, type_name
from sublet.training.program_state.arrays import (
    BLOCKS,
    JAX_ARRAY,
    NUMPY_ARRAY,
    jax_array,
    place_of_array,
    place_of_tensor,
)
from sublet.training.program_state.call_stack import is_seen_to_end
from sublet.training.program_state.cpython.frame_memory import NotResumable
from sublet.training.program_state.cpython.set_order import SetLayout
from sublet.training.program_state.kinds import (
    NAMED,
    OF_THE_PROCESS,
    REDUCED,
    UNSAVEABLE,
    HashedMembers,
    InstanceKind,
    Kind,
    Unknown,
    fill_last,
    forget_all,
    has_plain_keys,
    hashed_members,
    reduced,
    shells_of_made,
)
from sublet.training.program_state.live import MadeByCall
from sublet.training.program_state.memory import Blocks, Overlap, Refilling, bytes_at, restoring
from sublet.training.program_state.sorting import DICT, LIST, SET, Sorting

#: How often a taking may begin again because it learned something.
_MOST_TRIES = 60
#: A number above may be the `id` of an object, which is another one in the next process.
_LEAST_ADDRESS = 1 << 32
#: How the roots name the script's own variables.
_OF_THE_SCRIPT = "modules['__main__']."
Recipe = tuple[Callable[..., Any], tuple[Any, ...]]


class CannotBeSaved(Exception):
    """Objects that cannot be taken apart, each with its path, itself, and why."""

    def __init__(self, found: list[tuple[str, Any, str]]) -> None:
        super().__init__(", ".join(path for path, _, _ in found))
        self.found = found


class _Learned(Exception):
    """Something about a class; the taking begins again."""


@dataclass(slots=True)
class Taken:
    """A state as it was between two steps. The blocks are the program's own memory."""

    data: bytes
    recipes: bytes  # how the numbered ones are made where they are missing
    blocks: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)  # blocks that are not saved, and their digests
    shown: dict[str, list[list[int]]] = field(default_factory=dict)  # the parts of a block that count
    kinds: frozenset[type] = frozenset()  # of the objects in it


class Taking:
    """Takes states of one program, again and again."""

    def __init__(self, sorting: Sorting, anchors: Anchors) -> None:
        self._sorting = sorting
        self._anchors = anchors
        self._late_classes: set[type] = {set}
        self._blocks = Blocks()
        anchors.name_blocks(self._blocks)

    def take(self, roots: dict[str, Any]) -> Taken:
        for _ in range(_MOST_TRIES):
            try:
                return self._take(roots)
            except (Overlap, _Learned):
                continue
            except Unknown as unknown:
                known = len(self._sorting.ask_themselves)
                found = self._where(unknown, roots)
                if len(self._sorting.ask_themselves) > known:
                    continue  # on the way to it was one that knows better
                asked = [self._sorting.ask_itself(type(holder)) for _, _, _, holder in found]
                if not any(asked):
                    raise CannotBeSaved([(path, thing, why) for path, thing, why, _ in found]) from unknown
        raise CannotBeSaved([("memory", None, "its arrays overlap in ever new ways")])

    def _take(self, roots: dict[str, Any]) -> Taken:
        self._blocks.begin()
        functions.look_for_constants(self._sorting.is_own)
        written = io.BytesIO()
        pickler = _ProgramPickler(written, self._sorting, self._anchors, self._late_classes)
        BLOCKS.append(self._blocks)
        try:
            pickler.dump(roots)
            done, things = 0, list[tuple[int, Any]]()
            while done < len(pickler.needed):
                things = pickler.needed[done:]
                done += len(things)
                pickler.dump([(number, *self._content(thing)) for number, thing in things])
            pickler.dump([(one, OF_THE_PROCESS.fill, hashed_members(one)) for one in pickler.frozen])
            recipes = self._recipes(pickler)
        except (
            pickle.PicklingError,
            AttributeError,
            TypeError,
            RecursionError,
            NotImplementedError,
        ) as error:
            raise Unknown(pickler.last, f"{type(error).__name__}: {error}") from error
        finally:
            BLOCKS.pop()
        kinds = frozenset(pickler.kinds)
        del pickler, things  # they hold what was met
        found = self._blocks.found
        return Taken(
            written.getvalue(),
            recipes,
            {name: block.holder for name, block in found.items()},
            {name: block.size for name, block in found.items()},
            shown=self._blocks.shown(self._anchors.holds),
            kinds=kinds,
        )

    def _content(self, thing: Any) -> tuple[Any, Any]:
        kind = self._anchors.kind_of(thing)
        return (OF_THE_PROCESS.fill, None) if kind is UNSAVEABLE else (kind.fill, kind.content(thing))

    def _recipes(self, pickler: _ProgramPickler) -> bytes:
        """Only what can be missing: things of the process, and those that are nowhere described, cannot."""
        found: dict[int, Recipe] = {}
        for number, thing in pickler.needed:
            try:
                found[number] = how_made(self._anchors.kind_of(thing), thing)
            except Unknown:
                continue
        written = io.BytesIO()
        again = _ProgramPickler(written, self._sorting, self._anchors, self._late_classes, pickler.temporary)
        again.dump(found)
        return written.getvalue()

    def _where(self, unknown: Unknown, roots: dict[str, Any]) -> list[tuple[str, Any, str, Any]]:
        """The path of what cannot be taken apart, and the nearest object that may know better."""
        probe = self._anchors.probe()
        probe.walk(roots.items())
        found = []
        for part in probe.unknown:
            if id(part.thing) not in self._anchors.numbers:
                path = part.path.removeprefix(_OF_THE_SCRIPT)
                before = probe.paths.before[part.number]
                found.append((path, part.thing, part.why, probe.things[before] if before >= 0 else None))
        if not found:
            number = probe.numbers.get(id(unknown.found))
            path = probe.paths.words(number) if number is not None else type_name(unknown.found)
            path = path.removeprefix(_OF_THE_SCRIPT)
            found.append((path, unknown.found, unknown.why, unknown.found))
        return found


class _ProgramPickler(pickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        sorting: Sorting,
        anchors: Anchors,
        late: set[type],
        temporary: dict[int, int] | None = None,
    ) -> None:
        super().__init__(file, protocol=5)
        self._sorting, self._anchors, self._late = sorting, anchors, late
        self._number_of = anchors.number_of
        self._installed = functions.installed_namespaces(sorting.is_own)
        self._met: set[int] = set()
        self._met_frozen: set[int] = set()
        self._nans: dict[int, tuple[int, bytes]] = {}
        self.frozen: list[frozenset[Any]] = []  # they are made whole, and put in order at the end
        self.temporary = {} if temporary is None else temporary  # id to number, of this taking
        self.needed: list[tuple[int, Any]] = []
        self.kinds: set[type] = set()
        self.last: Any = None

    def persistent_id(self, thing: Any) -> Any:
        number = self._number_of(thing)
        if number is None:
            cls = type(thing)
            if cls is str:
                return functions.name_of_constant(thing)
            if cls is int and thing > _LEAST_ADDRESS:  # what an object is known by in a dict of some library
                known = self._anchors.number_at(thing)
                return None if known is None else (known,)
            if cls is float and thing != thing:  # equal to nothing, found by being that one
                return self._nans.setdefault(id(thing), (len(self._nans), struct.pack("<d", thing)))
            if cls is frozenset and len(thing) > 1 and id(thing) not in self._met_frozen:
                self._met_frozen.add(id(thing))
                self.frozen.append(thing)
            if cls is dict and id(thing) in self._installed:
                return self._installed[id(thing)]
            is_plain = cls is not dict or (has_plain_keys(thing) and not self._anchors.is_namespace(thing))
            if cls not in self._late and is_plain:
                return None
            number = self.temporary.setdefault(id(thing), -len(self.temporary) - 1)
        elif number in self._anchors.notes and not NUMPY_ARRAY.still_is(thing, self._anchors.notes[number]):
            return None
        if number not in self._met:
            self._met.add(number)
            self.needed.append((number, thing))
        return number

    def reducer_override(self, thing: Any) -> Any:
        self.last = thing
        self.kinds.add(type(thing))
        if type(thing) is HashedMembers:  # an object of the program is not asked what it is
            return HashedMembers, tuple(getattr(thing, field.name) for field in fields(thing))
        if type(thing) is SetLayout:  # hashes are what they were then, also those of ids
            hashes = " ".join(map(str, thing.hashes))
            return set_layout, (thing.mask, thing.finger, thing.places, hashes, thing.left)
        kind = self._sorting.kind_of(thing)
        if issubclass(type(thing), types.ModuleType) and kind is not functions.MADE_MODULE:
            return functions.module_named, (thing.__name__,)
        if type(thing) is types.CodeType:
            return functions.code_of, (functions.code_as_bytes(thing),)
        if functions.is_unnamed_builtin(thing):
            return functions.unnamed_builtin, (thing.__name__,)
        if kind is NAMED and isinstance(thing, type) and (name := self._other_name(thing)):
            return functions.sentinel_named, name
        if kind is functions.GENERATOR:
            return functions.generator_from, (functions.GENERATOR.content(thing),)
        if kind is functions.METHOD:
            return types.MethodType, (thing.__func__, thing.__self__)
        if kind is references.REFERENCE:
            return references.how_refers(thing)
        if kind is references.PROXY:
            return references.proxy_of, (references.behind_proxy(thing),)
        if kind is JAX_ARRAY:
            return jax_array, JAX_ARRAY.content(thing)
        if isinstance(kind, MadeByCall):
            return kind.reduce(thing)
        if kind is UNSAVEABLE:
            raise Unknown(thing)
        if kind is REDUCED:
            return reduced(thing)
        if kind is OF_THE_PROCESS or not is_filled(kind):
            return NotImplemented
        if isinstance(kind, InstanceKind) and kind.is_found_by_hash:
            self._late.add(type(thing))
            raise _Learned
        name = functions.name_of_sentinel(thing, kind)
        if name is not None:
            return functions.sentinel_named, name
        function, arguments = how_made(kind, thing)
        return function, arguments, kind.content(thing), None, None, kind.fill

    def _other_name(self, cls: type) -> tuple[str, str] | None:
        is_own = self._sorting.is_own
        return None if functions.installed_name(cls, is_own) else functions.other_name(cls, is_own)


def set_layout(
    mask: int, finger: int, places: tuple[int, ...], hashes: str, left: tuple[int, ...]
) -> SetLayout:
    return SetLayout(mask, finger, places, tuple(map(int, hashes.split())), left)


def is_filled(kind: Kind) -> bool:
    return type(kind).content is not Kind.content


def how_made(kind: Kind, thing: Any) -> Recipe:
    simple = {LIST: list, DICT: dict, SET: set}.get(kind)
    return (simple, ()) if simple is not None else kind.bare(thing)


# --- and back -----------------------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, things: Callable[[int], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._things = things
        self._nans: dict[int, float] = {}

    def persistent_load(self, number: Any) -> Any:
        if isinstance(number, str):
            return functions.namespace_of(number)
        if isinstance(number, tuple):
            if len(number) == 1:
                with contextlib.suppress(NotResumable):
                    return id(self._things(number[0]))
                return -number[0]  # nothing leads to that object any more
            first, second = number
            if isinstance(first, str):
                return functions.sentinel_named(first, second)
            return self._nans.setdefault(first, struct.unpack("<d", second)[0])
        return self._things(number)


#: What must not be let go: the program would see it, by the `finally` of a generator or by `__del__`.
KEPT: list[Any] = []


def _is_finalized(cls: type) -> bool:
    return hasattr(cls, "__del__")


class _Hole:
    """In the place of an object that is not made yet."""


class Restore:
    """One state, put into the objects of this process."""

    def __init__(
        self, anchors: Anchors, data: bytes, recipes: bytes, saved: dict[str, Any], sizes: dict[str, int]
    ) -> None:
        self._anchors = anchors
        self._data, self._recipes = data, recipes
        self._saved, self._sizes = saved, sizes
        self._made: dict[int, Any] = {}
        self._used: list[tuple[int, int]] = []
        self._filling: Any = None  # the number of what is being filled

    def put(self) -> Any:
        """The roots, as they were. Everything that they lead to is as it was."""
        try:
            return self._put()
        except SubletError:
            raise
        except Exception as error:
            raise NotResumable(
                f"{self._what()} cannot be put back as it was: {_why(error)}; nothing was run",
                remedy="start it again; if that changes nothing, begin a new job with another --name: "
                "what is saved stays as it is",
            ) from error

    def _what(self) -> str:
        """The words for what is being filled."""
        if self._filling is None:
            return "what was saved"
        numbered = isinstance(self._filling, int) and self._filling >= 0
        return self._anchors.paths.words(self._filling) if numbered else "an object"

    def _put(self) -> Any:
        rehearsed = Refilling({}, self._sizes, self._bytes_here)
        with restoring(rehearsed), functions.generators_left_out():
            self._make_missing()
            # Read twice: an iterator over a list is made from the list, and stands where it stood only if the
            # list has its members by then.
            KEPT.extend(functions.generators_with_an_end())
            with shells_of_made(_is_finalized) as shells:
                read = self._read()
            first = self._fill(read)
        shells += self._gone(read[1])
        self._used.clear()
        refilling = Refilling(self._saved, self._sizes, self._bytes_here)
        with restoring(refilling):
            roots = self._fill(self._read())
            refilling.rest()
        for thing in shells:  # kept, but what they hold is not
            forget_all(thing)
        KEPT.extend(shells)
        for number, made in self._made.items():
            if number >= 0:
                self._anchors.adopt(number, made)
        del read, first
        gc.collect()  # what was read first: classes know their subclasses as long as they are there
        return roots

    def _gone(self, contents: Iterable[tuple[int, Any, Any]]) -> list[Any]:
        """Of the beginning, what the program saw to be gone by then: it is not to see it again."""
        there = {number for number, _, _ in contents if isinstance(number, int)}
        return [
            thing
            for number, thing in enumerate(self._anchors.things)
            if number not in there and thing is not None and is_seen_to_end(thing)
        ]

    def _read(self) -> tuple[Any, list[tuple[int, Callable[[Any, Any], None], Any]]]:
        unpickler = _Unpickler(self._data, self._thing)
        roots = unpickler.load()
        contents: list[tuple[int, Callable[[Any, Any], None], Any]] = []
        with contextlib.suppress(EOFError):
            while True:
                contents += unpickler.load()
        return roots, contents

    def _fill(self, read: tuple[Any, list[tuple[int, Callable[[Any, Any], None], Any]]]) -> Any:
        roots, contents = read
        for number, fill, content in contents:
            if not isinstance(number, frozenset):
                self._filling = number
                fill(self._thing(number), content)
        for number, _, content in contents:
            self._filling = number
            fill_last(number if isinstance(number, frozenset) else self._thing(number), content)
        return roots

    def _thing(self, number: int) -> Any:
        there = self._anchors.things[number] if 0 <= number < len(self._anchors.things) else None
        if there is not None:
            return there
        if number not in self._made:
            raise NotResumable(
                f"{self._anchors.paths.words(number)} was there when the loop began, is not there now, and "
                "cannot be made from what was saved",
                remedy="start the script as it was started, with the files that it had",
            )
        return self._made[number]

    def _make_missing(self) -> None:
        """What the new process does not have. One may need another, so it takes several readings."""
        hole = _Hole()
        while True:
            recipes: dict[int, Recipe] = _Unpickler(
                self._recipes, lambda number: self._known(number, hole)
            ).load()
            ready = {
                number: recipe
                for number, recipe in recipes.items()
                if self._known(number, hole) is hole and not _holds(recipe[1], hole)
            }
            if not ready:
                return
            for number, (function, arguments) in ready.items():
                self._made[number] = function(*arguments)

    def _known(self, number: int, hole: _Hole) -> Any:
        there = self._anchors.things[number] if 0 <= number < len(self._anchors.things) else None
        return there if there is not None else self._made.get(number, hole)

    def _bytes_here(self, name: str) -> Any:
        """The memory that this process has for a block of the beginning, unless it is used already."""
        thing = self._anchors.things[int(name[1:])] if name.startswith("a") else None
        if thing is None:
            return None
        numpy_place = place_of_array(thing) if not hasattr(thing, "untyped_storage") else None
        place = place_of_tensor(thing) if hasattr(thing, "untyped_storage") else numpy_place
        if place is None or any(at < place[0] + place[1] and place[0] < at + size for at, size in self._used):
            return None
        self._used.append(place)
        owner = thing.untyped_storage() if hasattr(thing, "untyped_storage") else thing
        return bytes_at(*place, owner)


def _holds(arguments: Iterable[Any], hole: _Hole) -> bool:
    return any(a is hole or (isinstance(a, tuple) and _holds(a, hole)) for a in arguments)


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, Unknown) else f"{type(error).__name__}: {error}"
