"""Which of a notebook's variables travel to the worker with a cell, and what the worker already has of them.

Rules of this file:
- A name travels when the notebook's value is not what the worker has: it was bound to another object, or its
  content changed. Large plain arrays always travel, because sending one costs as much as comparing it.
- Variables that share something mutable (an optimizer and its model) travel together or not at all, even
  those the cell does not read: what comes back replaces them, and none may be left with the old object. One
  far larger than what is read does not travel.
- Functions and classes of the notebook bring the names they read.
- A value that had to stay in the worker belongs to the worker until the notebook binds the name anew.
- When a cell's report never came, nothing is known about the worker's variables, and all of them count as
  changed.
- A value that cannot travel is named, with what to do, before anything is leased or sent.
"""

from __future__ import annotations

import builtins
import pickle
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import xxhash

from sublet.core.cells.global_reads import names_of_code
from sublet.core.errors import CannotTravel
from sublet.notebook.cells.aliasing import Ties, changeable, reaches, ties, together
from sublet.notebook.cells.content_digest import is_large_array, mark, packed, unpacked
from sublet.notebook.cells.messages import Packed, is_users
from sublet.processes.channel.pickling import ATOMS, Seen, main_globals, pack, pack_seen, unpack
from sublet.processes.worker.main_module import UNSENDABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPayload:
    """The variables that are sent with one cell."""

    values: Packed
    forget: tuple[str, ...]
    watch: tuple[str, ...]
    files: frozenset[str]  # where the functions among it were written
    sent: Mapping[str, Any]  # what the worker then has, in words of whoever packed it


#: Too small to be worth a digest.
_ATOMS = frozenset(ATOMS)
_BUILTINS = frozenset(dir(builtins))
#: A variable the cell does not read comes along if it is at most so much larger than what the cell reads.
ALONG_TIMES, ALONG_BYTES = 4, 64 << 20


@dataclass(frozen=True, slots=True)
class _KnownValue:
    """What the worker has under a name, as the notebook last saw it."""

    identity: int
    digest: bytes | None  # None: not looked at, so that it travels again
    ties: Ties = frozenset()


#: It may have something under the name.
_UNSURE = _KnownValue(0, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ValueLook:
    """A value of the notebook as it is now."""

    known: _KnownValue
    nbytes: int = 0
    places: Mapping[int, int] = field(default_factory=dict)
    seen: Seen = field(default_factory=dict)  # kept, so that no id is used again while looks are compared


class SyncedVariables:
    """What one worker has of the notebook's variables. A new worker has nothing."""

    def __init__(self) -> None:
        self._known: dict[str, _KnownValue] = {}
        self._under_way = False
        self.stayed: dict[str, str] = {}  # what is only there, and why
        self._beside: dict[str, _KnownValue] = {}  # what the notebook has under such a name

    def payload(self, space: Mapping[str, Any], names: Iterable[str], *, alone: bool = False) -> CellPayload:
        """The payload for a cell that reads these names; with `alone`, without variables that share objects
        with them. Nothing counts as sent before `took`."""
        if self._under_way:
            self._doubt()
        met: list[FunctionType] = []
        files: set[str] = set()
        looks: dict[str, _ValueLook] = {}
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
        return CellPayload(
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

    def took(self, payload: CellPayload, *, watched: bool = True) -> None:
        """Called when the report is here. Without `watched` it does not tell everything the cell changed."""
        self._under_way = False
        self._known.update(payload.sent)
        for name in payload.forget:
            self._known.pop(name, None)
        for name in (*payload.sent, *payload.forget):
            self._is_not_only_there(name)
        if not watched:
            self._doubt()

    def came_back(self, values: Mapping[str, Any]) -> None:
        """Called with all values of one report, which both sides have now."""
        looks: dict[str, _ValueLook] = {}
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
                    self._beside[name] = _KnownValue(id(space[name]), None)

    def forgets(self, names: Iterable[str]) -> None:
        for name in names:
            self._known.pop(name, None)
            self._is_not_only_there(name)

    def _is_not_only_there(self, name: str) -> None:
        self.stayed.pop(name, None)
        self._beside.pop(name, None)

    def _doubt(self) -> None:
        self._known = dict.fromkeys(self._known, _UNSURE)


def _look(name: str, value: Any, met: list[FunctionType]) -> _ValueLook:
    kind = type(value)  # never `isinstance`: what an object says it is may be anything, also an exception
    if kind in _ATOMS:
        return _ValueLook(known=_KnownValue(0, _of_atom(value)))
    if is_large_array(value):
        return _ValueLook(known=_KnownValue(id(value), None), nbytes=value.nbytes, places={id(value): 0})
    if issubclass(kind, ModuleType):
        return _ValueLook(known=_KnownValue(id(value), b"module " + value.__name__.encode()))
    try:
        parts, seen = pack_seen(value, met)
    except Exception as e:
        raise _cannot_travel(name, value, e) from e
    return _ValueLook(
        known=_KnownValue(id(value), mark(parts)),
        nbytes=sum(part.nbytes for part in parts),
        places=changeable(seen),
        seen=seen,
    )


def _of_atom(value: Any) -> bytes:
    """A digest of the pickle, not of the text: 0.0 is not -0.0, True is not 1, and very long integers have no
    text."""
    data = pickle.dumps(value, 5)
    return data if len(data) <= 64 else xxhash.xxh3_128(data).digest()


def _look_along(space: Mapping[str, Any], looks: dict[str, _ValueLook]) -> None:
    """Adds variables that the cell does not read but that share objects with those it does."""
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
        remedy=f"make {name} inside the %%gpu cell, or send what it is made from; if the cell does not need "
        "it, name what it "
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


def _is_as(now: _KnownValue, then: _KnownValue | None) -> bool:
    return then is not None and now.identity == then.identity and now.digest == then.digest


def _is_fixed(value: Any) -> bool:
    """Whether a cell cannot change anything inside it that would be expected to come back."""
    kind = type(value)
    if kind is FunctionType:
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        plain = all(type(default) in _ATOMS for default in defaults)
        return plain and not value.__closure__ and not value.__dict__
    return kind in _ATOMS or issubclass(kind, (ModuleType, type))


def unpack_values(parts: Packed) -> Any:
    return unpack(unpacked(parts))


def pack_there(groups: Sequence[Sequence[str]]) -> list[Packed]:
    """Called in the worker: its variables of these names, each group in a pickle of its own."""
    space = main_globals()
    return [packed(pack({name: space[name] for name in names})) for names in groups]


class LateModule(ModuleType):
    """A module a cell imported in the worker, imported here when it is first used: `torch` would cost seconds
    in a notebook that never uses it itself."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__version__", "__path__", "__file__", "__all__"):
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(import_module(self.__name__), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(import_module(self.__name__), name)

    def __dir__(self) -> list[str]:
        return dir(import_module(self.__name__))

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return import_module, (self.__name__,)

    def __repr__(self) -> str:
        return f"<module {self.__name__!r}, imported here when it is first used>"


def module_or_late(name: str) -> ModuleType:
    return sys.modules.get(name) or LateModule(name)
