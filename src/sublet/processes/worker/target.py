"""The user's function or class, in the process in which it runs: the leased worker, or this one where nothing
is leased.

Rules of this file:
- It is loaded once and stays: what a class sets up lives as long as the lease that owns the process.
- Whatever the user's code raises comes back as the text of its traceback, without our own frames. Nothing of
  it is lost because it cannot be pickled.
- Results leave as JSON, each checked by itself: one that cannot be written spoils no other.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from sublet.core.errors import BadInput, NotJson, TooLarge
from sublet.core.queues.items import to_text

HOW = "write module:function, module:Class, or path/to/file.py:name"


class TargetNotReady(BadInput):
    """The function or class that works on the items could not be loaded; no item was touched."""

    code = "target_not_ready"
    remedy = "correct it and start again: every item is where it was"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why it could not be loaded."""

    sentence: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Processed:
    """The outcome of a batch: each item's result as JSON, or what was wrong with that result; or the
    traceback of the whole batch."""

    results: list[tuple[bool, str]]
    raised: str = ""


class _Ready:
    """What was loaded, in this process."""

    def __init__(
        self, process: Callable[[Any], Any], teardown: Callable[[], Any] | None, batched: bool
    ) -> None:
        self.process = process
        self.teardown = teardown
        self.batched = batched


_ready: _Ready | None = None


# --- before anything is leased ---


def check_target(text: str) -> str:
    """Check what can be checked without importing the target. A file is named by its full path from here
    on."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not all(part.isidentifier() for part in name.split(".")):
        raise BadInput(f"{text[:200]!r} does not name a function or class", remedy=HOW)
    if _is_file(where):
        path = Path(where).absolute()
        if not path.is_file():
            raise BadInput(f"there is no file {where[:200]!r}; nothing was leased", remedy=HOW)
        return f"{path}:{name}"
    if not all(part.isidentifier() for part in where.split(".")):
        raise BadInput(f"{where[:200]!r} is not the name of a module", remedy=HOW)
    _see_this_folder()
    try:
        found = importlib.util.find_spec(where.partition(".")[0])
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise BadInput(
            f"there is no module {where[:200]!r} here; nothing was leased",
            remedy=f"start it in the folder the module is in, or set PYTHONPATH; or {HOW}",
        )
    return text


def _is_file(where: str) -> bool:
    return where.endswith(".py") or "/" in where


def _see_this_folder() -> None:
    """Add the current folder to the path, as `python -m` does; an installed command does not."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


# --- where the items are worked on ---


def load(text: str, batched: bool) -> Trouble | None:
    """Import it, make an instance if it is a class, and set that up."""
    global _ready
    unload()
    where, _, name = text.rpartition(":")
    try:
        found: Any = _imported(where)
        for part in name.split("."):
            if not hasattr(found, part):
                return Trouble(f"{where} has no {name}")
            found = getattr(found, part)
    except (Exception, SystemExit) as e:
        return Trouble(f"{where} could not be imported: {_in_short(e)}", told(e))
    if not isinstance(found, type):
        if not callable(found):
            return Trouble(f"{text} is neither a function nor a class")
        if inspect.iscoroutinefunction(found):
            return Trouble(_no_coroutine(text))
        _ready = _Ready(found, None, batched)
        return None
    process: Any = getattr(found, "process", None)
    if not callable(process):
        return Trouble(f"the class {text} has no method process(self, …)")
    if inspect.iscoroutinefunction(process):
        return Trouble(_no_coroutine(f"{text}.process"))
    try:
        made: Any = found()
        setup = getattr(made, "setup", None)
        if setup is not None:
            setup()
    except (Exception, SystemExit) as e:
        return Trouble(f"{text} could not be set up: {_in_short(e)}", told(e))
    _ready = _Ready(made.process, getattr(made, "teardown", None), batched)
    return None


def _imported(where: str) -> ModuleType:
    if not _is_file(where):
        _see_this_folder()
        return importlib.import_module(where)
    path = Path(where)
    # As for a script, modules beside it can be imported.
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem
    known = sys.modules.get(name)
    if known is not None:
        if getattr(known, "__file__", None) == str(path):
            return known
        name = f"sublet_target_{name}"  # a file called random.py must not take random's place
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _no_coroutine(text: str) -> str:
    return f"{text} is async, and items are worked on one batch after the other: make it a plain function"


def process(bodies: list[Any]) -> Processed:
    """Work on a batch. Everything comes back as an answer, except what ends the process itself."""
    assert _ready is not None, "nothing was loaded"
    try:
        results = (
            _as_many(_ready.process(bodies), len(bodies)) if _ready.batched else [_ready.process(bodies[0])]
        )
    except (Exception, SystemExit) as e:
        return Processed([], told(e))
    return Processed([_written(result) for result in results])


def _as_many(results: Any, wanted: int) -> list[Any]:
    if isinstance(results, Iterator):
        results = list(results)
    if not isinstance(results, list | tuple):
        raise BadInput(
            f"with --batch, process returns a list of as many results as it was given items; "
            f"it returned {type(results).__name__} for {wanted}"
        )
    if len(results) != wanted:
        raise BadInput(
            "with --batch, process returns as many results as it was given items; "
            f"it returned {len(results)} for {wanted}"
        )
    return list(results)


def _written(result: Any) -> tuple[bool, str]:
    try:
        return True, to_text(result, what="the result")
    except (NotJson, TooLarge) as e:
        return False, f"{type(e).__name__}: {e.message}; {e.remedy}"
    except Exception as e:  # somebody's __str__ or __iter__
        return False, told(e)


def unload() -> str:
    """Take down what was set up; the traceback if that failed."""
    global _ready
    was, _ready = _ready, None
    if was is None or was.teardown is None:
        return ""
    try:
        was.teardown()
    except (Exception, SystemExit) as e:
        return told(e)
    return ""


def told(error: BaseException) -> str:
    # Frames of this file are of no use to the reader.
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _in_short(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except Exception:
        return type(error).__name__
