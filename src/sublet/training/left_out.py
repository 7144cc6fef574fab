"""What a loop changes and `state=` does not hold: said once, because a resume begins with it anew.

Rules of this file:
- It looks at the program between steps and changes nothing. It keeps digests, never the program's objects.
- A name counts if it carries something from step to step (`core.progress.loop_body`). An object counts if the
  body uses it, `state=` does not reach it, and it has changed.
- It is an advice, not a proof: what it cannot look into is left out. Whether a resume is exact is
  `training.resume_check`'s to say.
"""

from __future__ import annotations

import contextlib
import dis
import gc
import linecache
import operator
import random
import sys
import sysconfig
import warnings
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from sublet.core.progress.loop_body import LoopBody, body_around
from sublet.training.program_state.call_stack import check_interpreter
from sublet.training.program_state.cpython.frame_memory import NotResumable, variables

#: Before which steps of this process it looks again, beside the end of the loop.
LOOKS_BEFORE = (2, 3, 10, 100)
#: So many objects are looked at, and so many in a state.
MOST = 5_000
MOST_IN_STATE = 200_000
DEEPEST = 5
#: Members of a container, from each of its ends.
MEMBERS = 20
SAMPLE_BYTES = 1 << 20
SAMPLE_NUMBERS = 4096
#: What comes from there is of the process, or of whoever watches it.
_OWN = "sublet"
_NOT_LOOKED_INTO = {
    _OWN,
    *(
        "io",
        "_io",
        "logging",
        "threading",
        "_thread",
        "weakref",
        "concurrent",
        "multiprocessing",
        "subprocess",
    ),
    *("socket", "queue", "_queue", "pathlib", "argparse"),
    *("tqdm", "rich", "tensorboard", "tensorboardX", "wandb", "mlflow", "matplotlib"),
}
_LIBRARIES = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})
_Step = TypeVar("_Step")
_Digests = dict[str, dict[str, Any]]  # by what the program calls it: each place in it, and what is there


def looking_at_the_loop(steps: Iterator[_Step], state: Any, job: str) -> Iterator[_Step]:
    """The same steps. Warns of what their loop changes and `state` does not hold."""
    look = _Look(state, job)
    number = 0
    for number, step in enumerate(steps, 1):
        if number == 1:
            look.begin(sys._getframe(1))
        elif number in LOOKS_BEFORE:
            look.again(sys._getframe(1))
        yield step
    if number > 1:
        look.again(sys._getframe(1))


class _Look:
    """Holds no frame: one that is left must end, and its generators with it."""

    def __init__(self, state: Any, job: str) -> None:
        self._state, self._job = state, job
        self._body: LoopBody | None = None
        self._at_first: _Digests = {}
        self._told: set[str] = set()

    def begin(self, caller: FrameType | None) -> None:
        frame = _program_frame(caller)
        with contextlib.suppress(NotResumable):
            check_interpreter()  # or its variables cannot be read without a trace
            self._body = _body_of(frame) if frame is not None else None
        if frame is not None and self._body is not None:
            self._at_first = self._digests(frame, self._body)

    def again(self, caller: FrameType | None) -> None:
        frame = _program_frame(caller)
        if frame is None or self._body is None:
            return
        before, now = self._at_first, self._digests(frame, self._body)
        carried = self._body.carried
        found = {
            name
            for name, digest in now.items()
            if name in before and name not in self._told and (name in carried or digest != before[name])
        }
        if found:
            self._told |= found
            said = _words(self._job, sorted(found))
            warnings.warn_explicit(said, RuntimeWarning, frame.f_code.co_filename, frame.f_lineno)

    def _digests(self, frame: FrameType, body: LoopBody) -> _Digests:
        """Of all that the body uses and `state` does not reach."""
        held = _Walk(MOST_IN_STATE, whole=True)
        try:
            held.see("", self._state, DEEPEST * 4)
        except _TooMuch:
            return {}
        return _digests_of(_used(frame, body), body, held)


def _words(job: str, names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:12])
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    change, them, are = ("changes", "it", "is") if len(names) == 1 else ("change", "them", "are")
    return (
        f"job {job}: {shown}{more} {change} in the loop and {are} not in state=. A resume begins with "
        f"{them} as the program makes {them}. If what follows depends on {them}, put {them} into state= (a "
        "number or an array that is set anew: as a member of a dict that is in state=)"
    )


def _program_frame(frame: FrameType | None) -> FrameType | None:
    """Of whoever asks for steps; None if that is not a program's own loop but one of our adapters'."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == _OWN:
            return None
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return frame
        frame = frame.f_back
    return None


def _body_of(frame: FrameType) -> LoopBody | None:
    return body_around("".join(linecache.getlines(frame.f_code.co_filename)), frame.f_lineno)


# --- what it uses, in the process ---------------------------------------------------------------------------


def _used(frame: FrameType, body: LoopBody) -> dict[str, Any]:
    """What the body reads, and what the program's own functions that it calls read in turn."""
    here = dict(variables(frame))
    space, file = frame.f_globals, frame.f_code.co_filename
    found = {name: here.get(name, space.get(name)) for name in body.read if name in here or name in space}
    functions = list(_own_functions(found.values(), file))
    seen: set[CodeType] = set()
    while functions and len(seen) < 100:
        function = functions.pop()
        if function.__code__ in seen:
            continue
        seen.add(function.__code__)
        names = {
            at.argval: function.__globals__[at.argval]
            for at in dis.get_instructions(function.__code__)
            if at.opname == "LOAD_GLOBAL" and at.argval in function.__globals__
        }
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):
                names[name] = cell.cell_contents
        functions += _own_functions(names.values(), file)
        found = {**names, **found}
    return found


def _own_functions(things: Iterable[Any], file: str) -> Iterator[FunctionType]:
    for thing in things:
        function = thing.__func__ if isinstance(thing, MethodType) else thing
        if isinstance(function, FunctionType) and function.__code__.co_filename == file:
            yield function


def _digests_of(used: dict[str, Any], body: LoopBody, held: _Walk) -> _Digests:
    found: _Digests = {}
    numbers = set(held.found.values())
    for name, thing in used.items():
        if id(thing) in held.seen or _memory_of(thing) in held.memory or not _is_looked_into(thing):
            continue
        walk = _Walk(MOST, held)
        with contextlib.suppress(_TooMuch):
            walk.see("", thing, DEEPEST)
        if name in body.made:
            # What each step makes anew is of no interest; nor is a number that the state holds as well.
            if name in body.carried and not (walk.found.keys() == {""} and walk.found[""] in numbers):
                found[name] = {}
        elif name == "self":  # the loop is in a method: the reader knows its attributes
            for place, digest in walk.found.items():
                attribute = place.removeprefix(".").partition(".")[0].partition("[")[0]
                found.setdefault(f"self.{attribute}", {})[place] = digest
        else:
            found[name] = walk.found
    return found


def _is_looked_into(thing: Any) -> bool:
    if isinstance(thing, (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, CodeType)):
        return False
    return type(thing).__module__.partition(".")[0] not in _NOT_LOOKED_INTO


class _TooMuch(Exception):
    """More objects than a look may take."""


class _Walk:
    """Through objects, each once. Keeps what they were, by place."""

    def __init__(self, most: int, beside: _Walk | None = None, *, whole: bool = False) -> None:
        self.found: dict[str, Any] = {}
        self.seen: set[int] = set(beside.seen) if beside is not None else set()
        #: Where the arrays of a state are: a view of one is in it too.
        self.memory: set[int] = set(beside.memory) if beside is not None else set()
        self._left = most
        self._whole = whole  # all members of containers, and no digest of what arrays hold
        self._held: list[Any] = []  # made by looking: no other may be where one was

    def see(self, place: str, thing: Any, depth: int) -> None:
        if thing is None or isinstance(thing, (bool, int, float, complex, str, bytes)):
            long = isinstance(thing, (str, bytes)) and len(thing) > 100
            self.found[place] = hash(thing) if long else repr(thing) if type(thing) is float else thing
            return
        if id(thing) in self.seen or not _is_looked_into(thing):
            return
        self._left -= 1
        if self._left < 0:
            raise _TooMuch
        self.seen.add(id(thing))
        self._held.append(thing)
        if (at := _memory_of(thing)) is not None:
            if at in self.memory:
                return
            self.memory.add(at)
            if self._whole:
                return
        if (digest := _digest(thing)) is not None:
            self.found[place] = digest
        elif isinstance(thing, Iterator):
            if self.seen.isdisjoint(map(id, gc.get_referents(thing))):  # or it goes over what the state holds
                self.found[place] = _position(thing, alone=not place)
        elif depth > 0:
            for name, member in self._members(thing):
                self.see(f"{place}{name}", member, depth - 1)

    def _members(self, thing: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, dict):
            yield "[#]", len(thing)
            for number, key in self._few(list(thing)):
                yield f"[{key!r}]" if isinstance(key, (str, int)) else f"[{number}]", thing[key]
        elif isinstance(thing, (list, tuple, deque)):
            yield "[#]", len(thing)
            for number, member in self._few(thing):
                yield f"[{number}]", member
        elif isinstance(thing, (set, frozenset)):
            yield "[#]", len(thing)
        else:
            for name, value in _attributes(thing):
                yield f".{name}", value

    def _few(self, members: Any) -> Iterator[tuple[int, Any]]:
        """Of a long one, those at its ends."""
        for number in range(len(members)):
            if self._whole or number < MEMBERS or number >= len(members) - MEMBERS:
                yield number, members[number]


def _attributes(thing: Any) -> Iterator[tuple[str, Any]]:
    own = getattr(thing, "__dict__", None)
    if isinstance(own, dict):
        yield from list(own.items())
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                with contextlib.suppress(AttributeError):
                    yield name, getattr(thing, name)


def _memory_of(array: Any) -> int | None:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        with contextlib.suppress(RuntimeError, NotImplementedError):  # it has no memory of its own
            return int(array.untyped_storage().data_ptr()) or None
    if numpy is not None and isinstance(array, numpy.ndarray):
        while isinstance(array.base, numpy.ndarray):
            array = array.base
        return int(array.__array_interface__["data"][0])
    return None


def _digest(thing: Any) -> Any:
    """Of an array or a generator of random numbers; None for anything else."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(thing, torch.Tensor):
        return (
            str(thing.shape),
            0 if thing.is_inference() else getattr(thing, "_version", 0),
            _sample(thing),
        )
    if numpy is not None and isinstance(thing, numpy.ndarray):
        if thing.dtype.hasobject or not thing.size:
            return str(thing.shape)
        few = (
            thing.reshape(-1)[:: max(1, thing.nbytes // SAMPLE_BYTES)] if thing.flags.c_contiguous else thing
        )
        return (str(thing.shape), zlib.crc32(few.tobytes()))
    if isinstance(thing, random.Random):
        return hash(thing.getstate())
    if numpy is not None and isinstance(thing, numpy.random.Generator):
        return repr(thing.bit_generator.state)
    if numpy is not None and isinstance(thing, numpy.random.RandomState):
        return repr(thing.get_state(legacy=False))
    if torch is not None and isinstance(thing, torch.Generator):
        return zlib.crc32(thing.get_state().numpy().tobytes())
    return None


def _sample(tensor: Any) -> int:
    """Its version does not tell what was written to it by way of `.data`."""
    with contextlib.suppress(Exception):  # sparse, quantized, without memory: its version has to do
        few = tensor.detach().view(-1)[:: max(1, tensor.numel() // SAMPLE_NUMBERS)]
        return zlib.crc32(few.cpu().contiguous().view(sys.modules["torch"].uint8).numpy().tobytes())
    return 0


def _position(iterator: Iterator[Any], *, alone: bool) -> Any:
    """Where it is; of one that does not say so and that the body itself uses: not where it was."""
    if isinstance(iterator, count):
        return repr(iterator)
    if type(iterator).__module__ == "builtins" and hasattr(iterator, "__length_hint__"):
        return operator.length_hint(iterator)
    return object() if alone else None
