"""Tracebacks of exceptions that a program keeps, and the frames that they lead to.

Rules of this file:
- A frame of the program's own code that has ended is kept with its variables. Of a library's frames, and of
  those that still run, a traceback keeps what it shows: the code and the line.
- A frame is made by the interpreter's own function for it, and its variables are put in their places.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable
from typing import Any

from sublet.training.program_state import functions
from sublet.training.program_state.cpython import frame_memory
from sublet.training.program_state.cpython.code_objects import OPTIMIZED, original
from sublet.training.program_state.kinds import InstanceKind, Kind, Parts, Unknown


class TracebackKind(Kind):
    """All of it, from one on inwards."""

    has_identity = False
    is_passed_through = True

    def __init__(self, is_own: Callable[[str], bool]) -> None:
        self._is_own = is_own

    def parts(self, thing: types.TracebackType) -> Parts:
        for at, (_, _, frame) in enumerate(self.content(thing)):
            if isinstance(frame, types.FrameType):
                yield from ((f"<{at}>{edge}", value) for edge, value in FRAME.parts(frame))

    def content(self, thing: types.TracebackType) -> Any:
        found: list[tuple[int, int | None, Any]] = []
        at: types.TracebackType | None = thing
        while at is not None:
            frame, moved = at.tb_frame, original(at.tb_frame.f_code)[1]
            shown = frame if self._is_kept(frame) else _code_and_module(frame)
            found.append((max(0, at.tb_lasti - moved), at.tb_lineno, shown))
            at = at.tb_next
        return found

    def _is_kept(self, frame: types.FrameType) -> bool:
        name = frame.f_globals.get("__name__") or ""
        own = name == "__main__" or self._is_own(name)
        return own and frame_memory.has_ended(frame) and bool(FRAME.content(frame)[0])

    def bare(self, thing: types.TracebackType) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return new_traceback, (thing.tb_lasti - original(thing.tb_frame.f_code)[1], thing.tb_lineno)

    @staticmethod
    def fill(thing: types.TracebackType, content: Any) -> None:
        for number, (lasti, lineno, shown) in enumerate(content):
            if isinstance(shown, types.FrameType):
                frame = shown
            else:
                code, module = shown
                frame = new_frame(code, module, lasti)
            if number:
                made = types.TracebackType(None, frame, lasti, lineno)
                thing.tb_next = made
                thing = made
            else:
                frame_memory.replace_pointer(id(thing) + _FRAME_IN_TRACEBACK, frame)


#: Where CPython's traceback has its frame: behind its head and the next one.
_FRAME_IN_TRACEBACK = 3 * ctypes.sizeof(ctypes.c_void_p)


def _code_and_module(frame: types.FrameType) -> tuple[types.CodeType, Any]:
    return original(frame.f_code)[0], functions.module_of(frame.f_globals)


def new_traceback(lasti: int, lineno: int) -> types.TracebackType:
    code = new_traceback.__code__  # until it is filled
    return types.TracebackType(None, frame_memory.ended_frame(code, {}, None, 0), max(0, lasti), lineno)


class FrameKind(Kind):
    """One that has ended. It can be seen by tracebacks, and by whoever asked for it."""

    has_identity = False
    is_passed_through = True

    def parts(self, thing: types.FrameType) -> Parts:
        variables, space = self.content(thing)
        yield from ((f".{name}", value) for name, value in variables.items())
        if space is not None:
            yield ".f_locals", space

    def content(self, thing: types.FrameType) -> Any:
        if not frame_memory.has_ended(thing):
            raise Unknown(thing, "a frame that is running")
        if thing.f_code.co_flags & OPTIMIZED:
            return frame_memory.slots_by_number(thing), None
        space = thing.f_locals
        return {}, None if space is thing.f_globals else space

    def bare(self, thing: types.FrameType) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        moved = original(thing.f_code)[1]
        return new_frame, (*_code_and_module(thing), max(0, thing.f_lasti - moved))

    @staticmethod
    def fill(thing: types.FrameType, content: Any) -> None:
        variables, space = content
        frame_memory.put_slots(thing, variables)
        if space is not None:
            thing.f_locals.update(space)


def new_frame(code: types.CodeType, module: Any, lasti: int) -> types.FrameType:
    space = functions.namespace_of(module)
    local = None if code.co_flags & OPTIMIZED else space if code.co_name == "<module>" else {}
    return frame_memory.ended_frame(code, space, local, lasti)


class GroupKind(InstanceKind):
    """An exception group: what it holds is given when it is made."""

    def bare(self, thing: BaseExceptionGroup[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return new_group, (type(thing), thing.message, thing.exceptions)


def new_group(cls: type[BaseExceptionGroup[Any]], message: str, members: tuple[Any, ...]) -> Any:
    return BaseExceptionGroup.__new__(cls, message, members)


FRAME = FrameKind()
