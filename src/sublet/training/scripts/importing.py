"""The modules of a program's own: the script, and what it imports from outside the installed packages.

Rules of this file:
- A module is the program's own if it was imported by it, and its file lies neither in the standard library
  nor in an installed package nor in sublet.
- Own modules with a training loop are compiled with their steps marked; all others as Python does it.
- `functools.lru_cache` of an own function keeps what it remembers where it can be seen.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from sublet.training.program_state.functions import made_by_hand
from sublet.training.scripts.boundaries import NAME, TrainingLoop, with_boundaries
from sublet.training.scripts.remembering import Remembering

#: The folder of this package.
_SUBLET = Path(__file__).parents[2]


def _installed_places() -> tuple[str, ...]:
    named = sysconfig.get_paths()
    found = {named[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found.update(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    if user := site.getusersitepackages():
        found.add(user)
    found.add(str(_SUBLET))
    # A virtual environment's standard library is that of the Python it was made from.
    found.update(str(Path(place).resolve()) for place in list(found))
    return tuple(f"{place.rstrip('/')}/" for place in found)


class OwnModules:
    """What the program imports from now on."""

    def __init__(self) -> None:
        self._places = _installed_places()
        self._before = frozenset(sys.modules)
        self._known: dict[str, bool] = {"__main__": True}

    def __contains__(self, name: str) -> bool:
        found = self._known.get(name)
        if found is None:
            module = sys.modules.get(name)
            if module is None:
                return False
            found = self._known[name] = name not in self._before and self._is_own(module)
        return found

    def is_own(self, name: str) -> bool:
        return name in self

    def is_own_file(self, path: str | None) -> bool:
        if not path:
            return False
        whole = path if path.startswith("/") else str(Path(path).absolute())
        return not whole.startswith(self._places) and "/site-packages/" not in whole

    def _is_own(self, module: ModuleType) -> bool:
        spec = getattr(module, "__spec__", None)
        if spec is None:
            return made_by_hand(module) and made_by_hand(sys.modules.get(module.__name__.partition(".")[0]))
        if spec.origin is None:
            return any(self.is_own_file(f"{place}/") for place in spec.submodule_search_locations or ())
        return bool(spec.has_location) and self.is_own_file(spec.origin)

    def files(self) -> dict[str, str]:
        """The files of those that are imported, by module."""
        found = {}
        for name, module in sorted(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name != "__main__" and name in self and file:
                found[name] = str(file)
        return found

    def names(self) -> list[str]:
        return ["__main__", *self.files()]


class _MarkedSource(importlib.machinery.SourceFileLoader):
    """Compiles without a cache: what Python has cached has no marks."""

    def __init__(self, name: str, path: str, script: Any, found: list[TrainingLoop]) -> None:
        super().__init__(name, path)
        self._script = script
        self._found = found

    def get_code(self, fullname: str) -> CodeType | None:
        data = self.get_data(self.path)
        source = with_boundaries(importlib.util.decode_source(data), self.path)
        if not source.loops:
            return super().get_code(fullname)
        self._found += source.loops
        code: CodeType = compile(source.tree, self.path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[NAME] = self._script
        super().exec_module(module)


class OwnFinder(MetaPathFinder):
    """Finds own modules before Python's own finder does."""

    def __init__(self, own: OwnModules, script: Any) -> None:
        self._own = own
        self._script = script
        self.loops: list[TrainingLoop] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        if not self._own.is_own_file(spec.origin):
            return None
        spec.loader = _MarkedSource(fullname, spec.loader.path, self._script, self.loops)
        return spec


class WhenImported(MetaPathFinder):
    """Acts on installed modules as soon as they are there: at once, or when the program imports them."""

    def __init__(self) -> None:
        self._acts: dict[str, list[Callable[[], None]]] = {}
        self._looking: set[str] = set()

    def do(self, module: str, act: Callable[[], None]) -> None:
        if module in sys.modules:
            act()
        else:
            self._acts.setdefault(module, []).append(act)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._acts or fullname in self._looking:
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _ActsAfter(fullname, spec.loader.path, self._acts.pop(fullname))
        return spec


class _ActsAfter(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, acts: list[Callable[[], None]]) -> None:
        super().__init__(name, path)
        self._acts = acts

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        for act in self._acts:
            act()


def remember_visibly(own: OwnModules) -> None:
    """From now on, what an own function's cache remembers can be saved."""
    plain = functools.lru_cache

    def lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
        if callable(maxsize) and isinstance(typed, bool):
            function = maxsize
            if _is_of(function, own):
                return functools.update_wrapper(Remembering(function, 128, typed), function)
            return plain(function)

        def deciding(function: Callable[..., Any]) -> Any:
            if _is_of(function, own):
                return functools.update_wrapper(Remembering(function, maxsize, typed), function)
            return plain(maxsize, typed)(function)

        return deciding

    functools.lru_cache = functools.update_wrapper(lru_cache, plain)
    functools.cache = functools.update_wrapper(
        lambda function, /: lru_cache(maxsize=None)(function), functools.cache
    )


def _is_of(function: Any, own: OwnModules) -> bool:
    return getattr(function, "__module__", "") in own
