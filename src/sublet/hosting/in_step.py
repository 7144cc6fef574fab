"""Which of a notebook's variables travel to the worker with a cell, and what the worker has of them already.

Rules of this file:
- A name travels when the notebook's value is not what the worker has: it was bound to another object, or its content changed. Large
  plain arrays travel every time: to send one costs what looking at it costs.
- Variables that share something that can change (an optimizer and its model) travel together or not at all, also those the cell does
  not read: what comes back replaces them, and they must not be left with the old one. One far larger than what is read stays.
- Functions and classes of the notebook bring the names they read.
- What could only stay in the worker is the worker's until the notebook binds the name anew.
- A cell whose report never came has done nobody knows what: nothing the worker has counts any more.
- What cannot travel is named, with what to do, before anything is leased or sent.
"""

from __future__ import annotations

import builtins
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any

import xxhash

from sublet.core.cell_flow import names_of_code
from sublet.core.errors import CannotTravel
from sublet.hosting.marks import is_large_array, mark, packed, unpacked
from sublet.hosting.pickling import ATOMS, Seen, main_globals, pack, pack_seen, unpack
from sublet.hosting.shared import Ties, changeable, reaches, ties, together
from sublet.hosting.shipping import UNSENDABLE
from sublet.ports.cell import Luggage, Packed, is_users

#: Too small to be worth a digest.
_ATOMS = frozenset(ATOMS)
_BUILTINS = frozenset(dir(builtins))
#: A variable the cell does not read comes along if it is at most so much larger than what the cell reads.
ALONG_TIMES, ALONG_BYTES = 4, 64 << 20


@dataclass(frozen=True, slots=True)
class _Known:
    """What the worker has under a name, as the notebook saw it."""

    identity: int
    digest: bytes | None  # None: not looked at, so that it travels again
    ties: Ties = frozenset()


#: It may have something under the name.
_UNSURE = _Known(0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A value as it is now."""

    known: _Known
    nbytes: int = 0
    places: Mapping[int, int] = field(default_factory=dict)
    seen: Seen = field(default_factory=dict)  # kept, so that no id is used again while looks are compared


class WorkerHas:
    """Implements `ports.cell.InStep`."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._under_way = False
        self.stayed: dict[str, str] = {}  # what is only there, and why
        self._beside: dict[str, _Known] = {}  # what the notebook has under such a name

    def luggage(self, space: Mapping[str, Any], names: Iterable[str], *, alone: bool = False) -> Luggage:
        """For a cell that reads these. Nothing counts as sent before `took`."""
        if self._under_way:
            self._doubt()
        met: list[FunctionType] = []
        files: set[str] = set()
        looks: dict[str, _Look] = {}
        queue = sorted((name for name in names if is_users(name)), reverse=True)
        seen: set[str] = set()
        while queue or met:
            if not queue:
                queue = sorted(self._read_by(met, seen), reverse=True)
                files.update(function.__code__.co_filename for function in met)
                met.clear()
                continue
            name = queue.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in space:
                looks[name] = _look(name, space[name], met)
        if not alone:
            _look_along(space, looks)
        tied = ties({name: look.places for name, look in looks.items()})
        now = {name: replace(look.known, ties=tied[name]) for name, look in looks.items()}
        there = {name for name in now if name in self.stayed and _is_as(now[name], self._beside.get(name))}
        moved = [name for name in now if now[name].digest is None or now[name] != self._known.get(name)]
        going = sorted(together((name for name in moved if name not in there), tied) - there)
        values = _packed_together({name: space[name] for name in going})
        self._under_way = True
        return Luggage(
            values=values,
            forget=tuple(sorted(name for name in seen if name not in space and name in self._known)),
            watch=tuple(sorted(name for name in looks if not _is_fixed(space[name]))),
            files=frozenset(files),
            sent={name: now[name] for name in going},
        )

    @staticmethod
    def _read_by(met: list[FunctionType], seen: set[str]) -> set[str]:
        main = main_globals()
        names: set[str] = set()
        for function in met:
            if function.__globals__ is main:
                names.update(names_of_code(function.__code__))
        return {name for name in names - seen if name not in _BUILTINS or name in main}

    def took(self, luggage: Luggage, *, watched: bool = True) -> None:
        """The worker has it, and has said what the cell did. Not `watched`: only to what it was asked for."""
        self._under_way = False
        self._known.update(luggage.sent)
        for name in luggage.forget:
            self._known.pop(name, None)
        for name in (*luggage.sent, *luggage.forget):
            self._is_not_only_there(name)
        if not watched:
            self._doubt()

    def came_back(self, values: Mapping[str, Any]) -> None:
        """Both sides have these now."""
        looks: dict[str, _Look] = {}
        for name, value in values.items():
            self._is_not_only_there(name)
            try:
                looks[name] = _look(name, value, [])
            except CannotTravel:
                self._known.pop(name, None)
        tied = ties({name: look.places for name, look in looks.items()})
        self._known.update({name: replace(look.known, ties=tied[name]) for name, look in looks.items()})

    def stays(self, stayed: Mapping[str, str], space: Mapping[str, Any]) -> None:
        for name, why in stayed.items():
            self.stayed[name] = why
            self._known.pop(name, None)
            self._beside.pop(name, None)
            if name in space:
                self._known[name] = _UNSURE  # to be deleted there when it is deleted here
                try:
                    self._beside[name] = _look(name, space[name], []).known
                except CannotTravel:
                    self._beside[name] = _Known(id(space[name]), None)

    def forgets(self, names: Iterable[str]) -> None:
        for name in names:
            self._known.pop(name, None)
            self._is_not_only_there(name)

    def _is_not_only_there(self, name: str) -> None:
        self.stayed.pop(name, None)
        self._beside.pop(name, None)

    def _doubt(self) -> None:
        self._known = dict.fromkeys(self._known, _UNSURE)


def _look(name: str, value: Any, met: list[FunctionType]) -> _Look:
    kind = type(value)  # never `isinstance`: what an object says it is may be anything, also an exception
    if kind in _ATOMS:
        return _Look(known=_Known(0, _of_atom(value)))
    if is_large_array(value):
        return _Look(known=_Known(id(value), None), nbytes=value.nbytes, places={id(value): 0})
    if issubclass(kind, ModuleType):
        return _Look(known=_Known(id(value), b"module " + value.__name__.encode()))
    try:
        parts, seen = pack_seen(value, met)
    except Exception as e:
        raise _cannot_travel(name, value, e) from e
    return _Look(
        known=_Known(id(value), mark(parts)),
        nbytes=sum(part.nbytes for part in parts),
        places=changeable(seen),
        seen=seen,
    )


def _of_atom(value: Any) -> bytes:
    """Of the pickle, not of the text: 0.0 is not -0.0, True is not 1, and a very long integer has no text."""
    data = pickle.dumps(value, 5)
    return data if len(data) <= 64 else xxhash.xxh3_128(data).digest()


def _look_along(space: Mapping[str, Any], looks: dict[str, _Look]) -> None:
    """Those the cell does not read, and which share something with what it does."""
    room = ALONG_TIMES * sum(look.nbytes for look in looks.values()) + ALONG_BYTES
    wanted = {key for look in looks.values() for key in look.places}
    others = {
        name: value
        for name, value in space.items()
        if type(value) not in _ATOMS and name not in looks and is_users(name) and not _is_fixed(value)
    }
    more = bool(wanted)
    while more:
        more = False
        for name in [name for name, value in others.items() if reaches(value, wanted)]:
            try:
                look = _look(name, others.pop(name), [])
            except CannotTravel:
                continue  # the cell does not need it
            if look.nbytes <= room:
                room -= look.nbytes
                looks[name] = look
                wanted.update(look.places)
                more = True


def _packed_together(values: Mapping[str, Any]) -> Packed:
    try:
        return packed(pack(values))
    except Exception as e:
        for name, value in values.items():
            try:
                pack({name: value})
            except Exception as of_one:
                raise _cannot_travel(name, value, of_one) from of_one
        raise CannotTravel(
            f"{', '.join(values)} cannot be sent to the GPU worker together: {_text(e)}"
        ) from e


def _cannot_travel(name: str, value: Any, error: Exception) -> CannotTravel:
    return CannotTravel(
        f"{name} ({type(value).__name__}) cannot be sent to the GPU worker: {_text(error)}",
        remedy=f"make {name} inside the %%gpu cell, or send what it is made from; if the cell does not need it, name what it "
        "does need with --in",
    )


def _text(error: Exception) -> str:
    try:
        said = str(error)
    except Exception:
        said = ""
    if isinstance(error, UNSENDABLE) and said:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _is_as(now: _Known, then: _Known | None) -> bool:
    return then is not None and now.identity == then.identity and now.digest == then.digest


class Travel:
    """Implements `ports.cell.Packing`."""

    def in_step(self) -> WorkerHas:
        return WorkerHas()

    def pack(self, value: Any) -> Packed:
        return packed(pack(value))

    def unpack(self, parts: Packed) -> Any:
        return unpack(unpacked(parts))

    def pack_there(self, groups: Sequence[Sequence[str]]) -> list[Packed]:
        space = main_globals()
        return [packed(pack({name: space[name] for name in names})) for names in groups]


def _is_fixed(value: Any) -> bool:
    """Nothing a cell could change inside it that would be expected to come back."""
    kind = type(value)
    if kind is FunctionType:
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        plain = all(type(default) in _ATOMS for default in defaults)
        return plain and not value.__closure__ and not value.__dict__
    return kind in _ATOMS or issubclass(kind, (ModuleType, type))
