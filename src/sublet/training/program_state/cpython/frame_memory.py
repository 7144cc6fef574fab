"""Frames and generators of CPython as they lie in memory: what is read there, and the little that is written.

Rules of this file:
- The layout of a frame is known for each version of CPython here, and compared with what Python itself says
  about the frame: another one is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from sublet.core.errors import BadInput
from sublet.training.program_state.cpython.code_objects import OPTIMIZED, slot_names

VERSION = sys.version_info[:2]
KNOWN_VERSIONS = ((3, 11), (3, 12), (3, 13))

_WORD = ctypes.sizeof(ctypes.c_void_p)
_FRAME_IN_OBJECT = 3 * _WORD
#: In CPython's frame: its code, the frame before it, who owns it, where it is, and its first variable.
_CODE, _PREVIOUS, _OWNER = (4 * _WORD, 6 * _WORD, 69) if VERSION == (3, 11) else (0, _WORD, 70)
_ENTRY = 68  # of 3.11: whether C called it
_SLOTS = 72
_INSTRUCTION = 56
_OWNED_BY_GENERATOR, _OWNED_BY_ITSELF, _OWNED_BY_C = 1, 2, 3
#: In CPython's generator: the exception that it handles.
_HANDLED = (6 if VERSION == (3, 11) else 5) * _WORD


class _Nothing:
    """In the place of a variable that is not bound, or of an empty place on the stack."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


class NotResumable(BadInput):
    """The place where the program stands cannot be taken up again."""

    remedy = (
        "let a function that is called plainly make the step, or say in the script what a step is: run = "
        "sublet.train(...), for step in run.steps(n)"
    )


def _word(at: int) -> int:
    return ctypes.c_void_p.from_address(at).value or 0


def _object(at: int) -> Any:
    there = _word(at)
    return ctypes.cast(there, ctypes.py_object).value if there else NOTHING


def _byte(at: int) -> int:
    return ctypes.c_ubyte.from_address(at).value


def address_of(frame: types.FrameType) -> int:
    at = _word(id(frame) + _FRAME_IN_OBJECT)
    if _word(at + _CODE) != id(frame.f_code):
        raise NotResumable("the frames of this build of Python are laid out in an unknown way")
    return at


def called_by_c(frame: types.FrameType) -> bool:
    """Whether C code stands between this frame and the one that it returns to."""
    at = address_of(frame)
    if VERSION == (3, 11):
        return bool(_byte(at + _ENTRY))
    before = _word(at + _PREVIOUS)
    return before == 0 or _byte(before + _OWNER) == _OWNED_BY_C


def slots_of(frame: types.FrameType) -> list[Any]:
    at = address_of(frame) + _SLOTS
    return [_object(at + _WORD * n) for n in range(len(slot_names(frame.f_code)))]


def variables(frame: types.FrameType) -> Iterator[tuple[str, Any]]:
    """Those of a function that are bound. To ask for `f_locals` would keep what they hold now for as long as
    the frame is there, which a program sees by its weak references."""
    code = frame.f_code
    if code.co_flags & OPTIMIZED:
        in_cells = {*code.co_cellvars, *code.co_freevars}
        for name, value in zip(slot_names(code), slots_of(frame), strict=True):
            if type(value) is types.CellType and name in in_cells:
                with contextlib.suppress(ValueError):
                    yield name, value.cell_contents
            elif value is not NOTHING:
                yield name, value


def slots_by_number(frame: types.FrameType) -> dict[int, Any]:
    return {n: value for n, value in enumerate(slots_of(frame)) if value is not NOTHING}


def put_slot(frame: types.FrameType, n: int, value: Any) -> None:
    replace_pointer(address_of(frame) + _SLOTS + _WORD * n, value)


def put_slots(frame: types.FrameType, values: Mapping[int, Any]) -> None:
    """Give a frame that has ended these variables and no others."""
    for n in range(len(slot_names(frame.f_code))):
        put_slot(frame, n, values.get(n, NOTHING))


def replace_pointer(at: int, value: Any) -> None:
    """Another object, or nothing, in a place that holds one."""
    place = ctypes.c_void_p.from_address(at)
    before = ctypes.cast(place.value, ctypes.py_object) if place.value else None
    if value is not NOTHING:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    place.value = None if value is NOTHING else id(value)
    if before is not None:
        ctypes.pythonapi.Py_DecRef(before)


def has_ended(frame: types.FrameType) -> bool:
    """Whether a frame is there only because somebody holds it."""
    return _byte(address_of(frame) + _OWNER) == _OWNED_BY_ITSELF


def ended_frame(
    code: types.CodeType, namespace: dict[str, Any], local: dict[str, Any] | None, lasti: int
) -> types.FrameType:
    """One that was never run, and looks as if it had ended there."""
    new = ctypes.pythonapi.PyFrame_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, *[ctypes.py_object] * 2, ctypes.c_void_p]
    state = ctypes.pythonapi.PyThreadState_Get
    state.restype = ctypes.c_void_p
    made: types.FrameType = new(state(), code, namespace, None if local is None else id(local))
    at = address_of(made)
    ctypes.c_void_p.from_address(at + _PREVIOUS).value = None
    instruction = ctypes.c_void_p.from_address(at + _INSTRUCTION)
    instruction.value = (instruction.value or 0) + lasti - made.f_lasti
    return made


def stack_of(frame: types.FrameType, depth: int) -> list[Any]:
    at = address_of(frame) + _SLOTS + _WORD * len(slot_names(frame.f_code))
    return [_object(at + _WORD * n) for n in range(depth)]


def owner_of(frame: types.FrameType) -> Any:
    """The generator that the frame is a part of; None for that of a call."""
    at = address_of(frame)
    if _byte(at + _OWNER) != _OWNED_BY_GENERATOR:
        return None
    return ctypes.cast(at - _frame_in_generator(), ctypes.py_object).value


@functools.cache
def _frame_in_generator() -> int:
    none: tuple[Any, ...] = ()
    known: Any = (one for one in none)
    return address_of(known.gi_frame) - id(known)


def handled_by(generator: types.GeneratorType[Any, Any, Any]) -> BaseException | None:
    """The exception that it is handling."""
    found = _object(id(generator) + _HANDLED)
    return None if found is NOTHING else found


def put_handled(generator: Any, error: BaseException) -> None:
    """Python puts it there when an `except` is entered, and takes it from there when it is left."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))
    ctypes.c_void_p.from_address(id(generator) + _HANDLED).value = id(error)
