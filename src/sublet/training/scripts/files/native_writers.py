"""What Python raises no event of, because native code does it: it is made to announce it.

A function of a library that is given a path raises Python's own event "open" before it goes on. So whoever
listens need not know of these libraries. A function of `os` that makes a number for what has no path (a pipe)
raises `MADE_NUMBER` with its name and what it made.

Rules of this file:
- A library is not imported for this. It is changed when the script imports it, or at once if it has.
- Each entry is tried in the tests where its library is installed. What is not here is not seen.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_OVER = os.O_RDWR | os.O_CREAT


@dataclass(frozen=True, slots=True)
class NativeWriter:
    module: str  # when this is imported
    holder: str  # the class or module that has the function, from there
    function: str
    path: str  # the name of its second argument
    mode: str = ""  # the name of its third, where that says how; a reader's is "r"


_SAFETENSORS = ("safetensors", "safetensors.torch", "safetensors.numpy", "safetensors.flax")
_WRITERS = (
    NativeWriter("torch", "_C.PyTorchFileWriter", "__init__", "file_name"),
    NativeWriter("torch", "_C.ScriptModule", "save", "filename"),
    *(NativeWriter(module, "", "serialize_file", "filename") for module in _SAFETENSORS),
    NativeWriter("tokenizers", "Tokenizer", "save", "path"),
    NativeWriter("h5py", "File", "__init__", "name", mode="mode"),
    NativeWriter("pyarrow.parquet.core", "ParquetWriter", "__init__", "where"),
)
_MARK = "__announces__"
MADE_NUMBER = "sublet.number_made"
_MAKERS = ("pipe", "pipe2", "dup", "memfd_create", "eventfd", "openpty", "pidfd_open", "timerfd_create")
_MODULES = frozenset(writer.module for writer in _WRITERS)


def make_them_announce() -> None:
    """Once per process."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in _MODULES & sys.modules.keys():
        _change(sys.modules[name])
    for name in _MAKERS:
        if hasattr(os, name):
            setattr(os, name, _announcing_numbers(getattr(os, name)))
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds nothing itself: it has the module changed when its own loader has filled it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _MODULES:
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                loader: Any = spec.loader
                fill = loader.exec_module

                def exec_module(module: ModuleType, fill: Callable[[ModuleType], None] = fill) -> None:
                    fill(module)
                    _change(module)

                loader.exec_module = exec_module
                return spec
        return None


def _change(module: ModuleType) -> None:
    for writer in _WRITERS:
        if writer.module != module.__name__:
            continue
        holder: Any = module
        for name in filter(None, writer.holder.split(".")):
            holder = getattr(holder, name, None)
        original = getattr(holder, writer.function, None)
        if original is not None and not hasattr(original, _MARK):
            setattr(holder, writer.function, _announcing(original, writer))


def _announcing_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **named: Any) -> Any:
        made = original(*args, **named)
        sys.audit(MADE_NUMBER, original.__name__, made)
        return made

    make.__module__ = "os"  # where a program finds it
    return make


def _announcing(original: Callable[..., Any], writer: NativeWriter) -> Callable[..., Any]:
    @functools.wraps(original)
    def write(*args: Any, **named: Any) -> Any:
        path = args[1] if len(args) > 1 else named.get(writer.path)
        if isinstance(path, str | bytes | os.PathLike):
            flags = _NEW
            if writer.mode:
                how = args[2] if len(args) > 2 else named.get(writer.mode, "r")
                flags = _NEW if how == "w" else os.O_RDONLY if how == "r" else _OVER
            sys.audit("open", os.fspath(path), None, flags)
        return original(*args, **named)

    setattr(write, _MARK, True)
    return write
