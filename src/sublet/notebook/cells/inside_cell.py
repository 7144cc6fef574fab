"""One cell, inside the leased worker.

Rules of this file:
- The worker's `__main__` is the cell's namespace. The notebook's values are put there first; what the cell
  bound or changed is found by comparing before with after, and travels back in one pickle.
- A value that cannot travel stays in the worker under its name for the next cell, and the notebook is told.
- A point (`sublet.keep()`, or the start of an iteration of one of the cell's outermost loops) is where the
  kept names agree with each other. They are saved only there, and only there is the cell stopped when the GPU
  goes.
"""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from sublet.core.cells.stop_points import POINT, StopPoints
from sublet.core.errors import NotDurable
from sublet.machine import lease_environment
from sublet.notebook.cells import process_state
from sublet.notebook.cells.aliasing import changeable, ties, together
from sublet.notebook.cells.content_digest import mark, packed, unpacked
from sublet.notebook.cells.messages import (
    RESULT,
    CellFailure,
    CellOrder,
    CellReport,
    Packed,
    SaveAnswer,
    Snapshot,
    is_users,
)
from sublet.notebook.cells.process_state import follow
from sublet.notebook.cells.source import take_texts
from sublet.notebook.cells.worker_shell import CellShell, shell
from sublet.processes.channel.pickling import (
    Seen,
    main_globals,
    pack,
    pack_seen,
    pack_whole,
    unpack,
    unpack_whole,
)
from sublet.processes.worker import worker


class CellStopped(BaseException):
    """The GPU goes, and everything kept is saved. Not an `Exception`, so that the cell does not swallow it by
    accident."""


class _CellKeeping:
    """The names that the running cell keeps, and when they were last saved."""

    def __init__(self, names: tuple[str, ...], every_us: int) -> None:
        self._names = names
        self._every_us = every_us
        self._saved_at = _now_us()
        self._by_hand = False
        self._thread = threading.get_ident()
        self.stopped = ""

    def automatic(self) -> None:
        if not self._by_hand:
            self._point()

    def by_hand(self) -> bool:
        self._by_hand = True
        return self._point()

    def _point(self) -> bool:
        process_lease = lease_environment.process_lease()
        warned = process_lease is not None and process_lease.warned
        if not self._names or threading.get_ident() != self._thread:
            return False
        if not warned and _now_us() - self._saved_at < self._every_us:
            return False
        space = main_globals()
        if any(name not in space for name in self._names):
            return False
        kept = {name: space[name] for name in self._names}
        try:
            values = packed(pack(kept, snapshot=True))
        except Exception as e:
            raise NotDurable(f"what --keep names could not be saved: {_culprit(kept) or e}") from e
        answer: SaveAnswer = worker.ask_caller(
            Snapshot(values=values, random=process_state.take_random_states())
        )
        self._saved_at = _now_us()
        if answer.failed:
            raise NotDurable(answer.failed)
        if answer.stop:
            self.stopped = answer.stop
            raise CellStopped(answer.stop)
        return True


_keeping: _CellKeeping | None = None


def point() -> bool:
    """See `sublet.keep`."""
    return _keeping.by_hand() if _keeping is not None else False


def run(order: CellOrder) -> CellReport:
    """Called in the worker, once per cell."""
    global _keeping
    space = main_globals()
    here = shell(order.front, order.colors)
    if order.moved is not None:
        follow(order.moved)  # first: what is unpacked may have to be imported from there
    for name in order.forget:
        space.pop(name, None)
    space.update(unpack(unpacked(order.values)))
    if order.random is not None:
        process_state.put_random_states(order.random)
    drawn = process_state.take_random_states()
    before = dict(space)
    marks = {name: _mark_before(name, space[name]) for name in order.watch if name in space}
    _keeping = _CellKeeping(order.keep, order.every_us)
    setattr(builtins, POINT, _keeping.automatic)
    points = StopPoints()
    if order.keep:
        here.ast_transformers.append(points)
    launched = lease_environment.launches()
    try:
        error = _execute(here, order)
    finally:
        stopped = _keeping.stopped
        _keeping = None
        if order.keep:
            here.ast_transformers.remove(points)
    if isinstance(error, worker.LeaseEnding):
        raise error
    failure = None if error is None or stopped else _failure(here, error)
    found, gone = _found(space, before, marks, order)
    stayed: dict[str, str] = {}
    modules = {name: value.__name__ for name, value in found.items() if type(value) is ModuleType}
    found = {name: value for name, value in found.items() if name not in modules}
    if here.has_result and failure is None and not stopped:
        found[RESULT] = here.result
    values = _travelling(found, stayed)
    result = RESULT in found and RESULT not in stayed
    stayed.pop(RESULT, None)
    here.result = None
    here.frames.flush()
    random = process_state.take_random_states()
    return CellReport(
        values=values,
        names=tuple(name for name in found if name != RESULT),
        gone=gone,
        stayed=stayed,
        modules=modules,
        result=result,
        failure=failure,
        stopped=stopped,
        launches=lease_environment.launches() - launched,
        random=random if order.keep or random != drawn else None,
    )


def _execute(here: CellShell, order: CellOrder) -> BaseException | None:
    here.execution_count = order.count
    take_texts(here.compile, order.texts)
    here.compile.begin(order.name, order.header)  # type: ignore[attr-defined]
    done = here.run_cell(order.source)
    error: BaseException | None = done.error_before_exec or done.error_in_exec
    return error


def _found(
    space: Mapping[str, Any], before: Mapping[str, Any], marks: Mapping[str, bytes], order: CellOrder
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values that come back by name, and the names that the cell deleted."""
    _marked_last.clear()
    gone = tuple(sorted(name for name in before if name not in space and is_users(name)))
    if order.out is not None:
        wanted: Iterable[str] = dict.fromkeys((*order.out, *order.keep))
        return {name: space[name] for name in wanted if name in space}, gone
    found = {
        name: value
        for name, value in space.items()
        if is_users(name) and (name not in before or before[name] is not value)
    }
    same: dict[str, Seen] = {}
    for name, known in marks.items():
        if name in space and name not in found:
            now, seen = _marked(space[name])
            if now != known:
                found[name] = space[name]
            else:
                same[name] = seen
            _marked_last[name] = (space[name], now)
    _add_tied(space, found, same)
    return found, gone


def _add_tied(space: Mapping[str, Any], found: dict[str, Any], same: dict[str, Seen]) -> None:
    """Adds values that share objects with those that come back, or they would be left with the old
    objects."""
    places = {name: changeable(seen) for name, seen in same.items()}
    alive = list(same.values())  # so that no id is another's now
    for name, value in found.items() if same else ():
        _, seen = _marked(value)
        alive.append(seen)
        places[name] = changeable(seen)
    for name in together(list(found), ties(places)):
        found.setdefault(name, space[name])


#: The values the last cell used, as it left them: the next cell finds these unless they are sent again.
_marked_last: dict[str, tuple[Any, bytes]] = {}


def _mark_before(name: str, value: Any) -> bytes:
    last = _marked_last.get(name)
    return last[1] if last is not None and last[0] is value else _marked(value)[0]


def _marked(value: Any) -> tuple[bytes, Seen]:
    try:
        parts, seen = pack_seen(value)
        return mark(parts), seen
    except Exception:
        return b"", {}  # it cannot travel back either


def _travelling(found: dict[str, Any], stayed: dict[str, str]) -> Packed:
    """Packs all values in one pickle, without those that cannot be pickled."""
    try:
        return packed(pack(found))
    except Exception as together:
        alone = dict(found)
        for name, value in alone.items():
            try:
                pack({name: value})
            except Exception as e:
                stayed[name] = _text(e)
                del found[name]
        if len(found) == len(alone):
            stayed.update(dict.fromkeys(found, _text(together)))
            found.clear()
        return packed(pack(found))


def _culprit(values: Mapping[str, Any]) -> str:
    for name, value in values.items():
        try:
            pack(value)
        except Exception as e:
            return f"{name}: {e}"
    return ""


def _failure(here: CellShell, error: BaseException) -> CellFailure:
    trace = here.trace or (f"{type(error).__name__}: {error}",)
    here.trace = ()
    bare = error.with_traceback(None)
    bare.__context__ = None
    pickled = b""
    try:
        pickled = pack_whole(bare)
        unpack_whole(pickled)
    except Exception:
        pickled = b""
    return CellFailure(kind=type(error).__name__, text=_text(error), pickled=pickled, trace=trace)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:10_000]
    except Exception:
        return "its message cannot be shown"


def _now_us() -> int:
    return time.monotonic_ns() // 1000
