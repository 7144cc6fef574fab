"""Which of a notebook's variables travel to the worker with a cell, and what the worker has of them already.

Rules of this file:
- A name travels when the notebook's value is not what the worker has: it was bound to another object, or its content changed. Large
  plain arrays travel every time: to send one costs what looking at it costs.
- Functions and classes of the notebook bring the names they read.
- What cannot travel is named, with what to do, before anything is leased or sent.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from sublet.core.cell import names_of_code
from sublet.core.errors import CannotTravel
from sublet.hosting.marks import is_large_array, mark, packed, unpacked
from sublet.hosting.pickling import ATOMS, main_globals, pack, unpack
from sublet.hosting.shipping import UNSENDABLE
from sublet.ports.cell import Luggage, Packed, is_users

#: Too small to be worth a digest.
_ATOMS = frozenset(ATOMS)
_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True, slots=True)
class _Known:
    """What the worker has under a name, as the notebook saw it."""

    identity: int
    digest: bytes | None  # None: not looked at, so that it travels again


class WorkerHas:
    """Implements `ports.cell.InStep`."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self.stayed: dict[str, str] = {}  # what is only there, and why

    def luggage(self, space: Mapping[str, Any], names: Iterable[str]) -> Luggage:
        """For a cell that reads these. Nothing counts as sent before `took`."""
        travelling: dict[str, Any] = {}
        sent: dict[str, _Known] = {}
        forget: list[str] = []
        met: list[FunctionType] = []
        files: set[str] = set()
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
            if name not in space:
                if name in self._known:
                    forget.append(name)
                continue
            value = space[name]
            known = self._known.get(name)
            now = self._look(name, value, known, met)
            if known is None or now.digest is None or now != known:
                travelling[name] = value
                sent[name] = now
        parts = pack(travelling)
        watch = tuple(sorted(name for name in seen if name in space and not _is_fixed(space[name])))
        return Luggage(
            values=packed(parts), forget=tuple(forget), watch=watch, files=frozenset(files), sent=sent
        )

    def _look(self, name: str, value: Any, known: _Known | None, met: list[FunctionType]) -> _Known:
        if type(value) in _ATOMS:
            return _Known(0, repr(value).encode() + type(value).__name__.encode())
        if is_large_array(value):
            return _Known(id(value), None)
        if isinstance(value, ModuleType):
            return _Known(id(value), b"module")
        try:
            return _Known(id(value), mark(pack(value, met)))
        except UNSENDABLE as e:
            raise CannotTravel(
                f"{name} ({type(value).__name__}) cannot be sent to the GPU worker: {e}",
                remedy=f"make {name} inside the %%gpu cell, or send what it is made from; if the cell does not need it, name what it "
                "does need with --in",
            ) from e

    @staticmethod
    def _read_by(met: list[FunctionType], seen: set[str]) -> set[str]:
        main = main_globals()
        names: set[str] = set()
        for function in met:
            if function.__globals__ is main:
                names.update(names_of_code(function.__code__))
        return {name for name in names - seen if name not in _BUILTINS or name in main}

    def took(self, luggage: Luggage) -> None:
        """The worker has it."""
        self._known.update(luggage.sent)
        for name in luggage.forget:
            self._known.pop(name, None)
        for name in (*luggage.sent, *luggage.forget):
            self.stayed.pop(name, None)

    def came_back(self, name: str, value: Any) -> None:
        """Both sides have it now."""
        self.stayed.pop(name, None)
        try:
            self._known[name] = self._look(name, value, None, [])
        except CannotTravel:
            self._known.pop(name, None)

    def stays(self, stayed: Mapping[str, str]) -> None:
        for name, why in stayed.items():
            self.stayed[name] = why
            self._known.pop(name, None)

    def forgets(self, names: Iterable[str]) -> None:
        for name in names:
            self._known.pop(name, None)
            self.stayed.pop(name, None)


class Travel:
    """Implements `ports.cell.Packing`."""

    def in_step(self) -> WorkerHas:
        return WorkerHas()

    def pack(self, value: Any) -> Packed:
        return packed(pack(value))

    def unpack(self, parts: Packed) -> Any:
        return unpack(unpacked(parts))


def _is_fixed(value: Any) -> bool:
    """Nothing a cell could change inside it."""
    return type(value) in _ATOMS or isinstance(value, (ModuleType, FunctionType, type))
