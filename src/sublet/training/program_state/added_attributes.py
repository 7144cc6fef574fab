"""Attributes that a program gives to installed modules and their classes: state in a place that is not its
own.

Rules of this file:
- An attribute is the program's if the program's text sets one of that name, and the library's own code never
  speaks of it. What a library keeps in its modules for itself stays out.
"""

from __future__ import annotations

import contextlib
import dis
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

_SETS = re.compile(r"\.(\w+)(?:\s*,[^=\n]*)?\s*(?::[^=\n]+)?[-+*/|&^%]*=(?!=)|setattr\([^,\n]*,\s*['\"](\w+)")
#: What has rules of its own: where standard output goes, what can be imported.
_OTHERS = ("sublet", "sys", "builtins", "__main__")
_FOUND_BY_NAME = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def names_set(codes: Iterable[types.CodeType], files: Iterable[str | None]) -> frozenset[str]:
    """Names of attributes that a program may set: by its code where it is at hand, by its text elsewhere."""
    found = {name for code in codes for name in _set_in(code)}
    for path in files:
        with contextlib.suppress(OSError, UnicodeDecodeError, TypeError):
            found |= {one or other for one, other in _SETS.findall(Path(str(path)).read_text())}
    return frozenset(name for name in found if not name.startswith("__"))


def _set_in(code: types.CodeType) -> Iterator[str]:
    by_text = "setattr" in code.co_names
    yield from (at.argval for at in dis.get_instructions(code) if at.opname == "STORE_ATTR")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _set_in(constant)
        elif by_text and isinstance(constant, str):
            yield constant


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from (*code.co_names, *code.co_varnames, *code.co_cellvars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


@cache
def _spoken_of(module: str) -> frozenset[str] | None:
    """Names in the code of a library's module. None if it has no code that can be read, as one of C."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    with contextlib.suppress(Exception):  # a loader of any kind
        code = spec.loader.get_code(spec.name) if spec is not None else None
        return frozenset(_names_in(code)) if code is not None else None
    return None


def added(module: str, there: Mapping[str, Any], names: frozenset[str]) -> list[str]:
    """The attributes in this place that are the program's. Those that are found by their name are not."""
    if module.startswith(_OTHERS):
        return []
    found = [
        name
        for name in sorted(names & there.keys())
        if not issubclass(type(there[name]), _FOUND_BY_NAME) and not hasattr(type(there[name]), "__get__")
    ]
    spoken_of = _spoken_of(module) if found else None
    return [name for name in found if name not in spoken_of] if spoken_of is not None else []
