"""A script's loops, resumed where they were: what the calls mean that `rewriting.inserting` puts around them.

Rules of this file:
- A step is one iteration of the training loop whose body came to its end, `continue` and `break` included. Who leaves it by an exception
  leaves it uncounted.
- An iterator cannot be saved. It is made again under the random states it was made under, and what was consumed is drawn again and thrown
  away; then everything is put back as it was between the two steps.
- A loop around the training loop begins its turn again: its random states and variables as they were at the top, then what stands before
  the training loop runs once more.
- Steps, saves and leaving are `runtime.train`'s.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from sublet.core.errors import BadInput
from sublet.core.exits import DRAINED_CODE
from sublet.core.notice import Notice
from sublet.rewriting.finding import Found, Scope
from sublet.runtime.capture import put_random, take_random
from sublet.runtime.scopes import Putting, Taking, What, bytes_in, is_loader
from sublet.runtime.train import Run

FORMAT = 1
#: Ends a wait of the main thread, so that it hears that it should leave. It means nothing to whoever has no handler for it.
WAKE = signal.SIGURG


class LeftAfterTheLoops(SystemExit):
    """Told to leave when all steps were committed: what follows the loops runs at the next start."""

    def __init__(self) -> None:
        super().__init__(DRAINED_CODE)


class Explained(SystemExit):
    """The training loop was reached, and that was all that was asked."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(slots=True)
class _Turn:
    """One loop, where it is. What it holds was copied when it was taken."""

    made: dict[str, Any] = field(default_factory=dict)  # random states when its iterator was made
    count: int = 0  # items drawn
    top: dict[str, Any] = field(default_factory=dict)  # random states and variables when this turn began

    def saved(self) -> dict[str, Any]:
        return {"made": self.made, "count": self.count, "top": self.top}


class Script:
    """`__sublet__` in the script, and the one part of its run's state."""

    def __init__(
        self,
        found: Found,
        path: str,
        *,
        ours: Callable[[type], bool],
        say: Callable[[str], None],
        explain: Callable[[Script], None] | None = None,
    ) -> None:
        self.found = found
        self._path = path
        self._ours = ours
        self._say = say
        self._explain = explain
        self._run: Run | None = None
        self._by_code = {(scope.name, scope.line): scope for scope in found.scopes[:-1]}
        self._turns = [_Turn() for _ in found.loops]
        self._saved: dict[str, Any] | None = None  # to be put back; None once it is
        self._frame: FrameType | None = None
        self._iterator: Iterator[Any] = iter(())
        self._begun = False  # a step's body is running
        self._left = False  # the training loop was left by break, this turn
        self._over = False
        self._after = False  # what follows the loops is running
        self._wakes = False  # by a signal; otherwise it hears of a notice when its wait is over
        self._told = False  # to leave
        self._entered = False
        self._looked = False
        self._values: dict[str, Any] = {}
        self._warned: set[str] = set()

    def belongs_to(self, run: Run) -> None:
        self._run = run

    @property
    def run(self) -> Run:
        assert self._run is not None
        return self._run

    # as a part of the state

    def state_dict(self) -> dict[str, Any]:
        assert self._frame is not None, "saved between two steps"
        taking = Taking(What.ALL, ours=self._ours, grads=self._grads(self._frame))
        scopes = self._take(taking, self._frame)
        self._warn(taking.left_alone)
        return {
            "format": FORMAT,
            "shape": self.found.shape,
            "turns": [turn.saved() for turn in self._turns],
            "left": self._left,
            "over": self._over,
            "scopes": scopes,
        }

    def inventory(self) -> tuple[list[tuple[str, str, int]], dict[str, str]]:
        """What would be saved now: names, types, bytes. And what is left alone, and why."""
        assert self._frame is not None
        taking = Taking(What.ALL, ours=self._ours, grads=self._grads(self._frame))
        found = []
        for scope, _, names in self._visible(self._frame):
            for name, taken in taking.scope(scope, names).items():
                if taken["is"] not in ("same", "loader"):
                    found.append((name, type(names[name]).__qualname__, bytes_in(taken)))
        return found, taking.left_alone

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved.get("format") != FORMAT or saved.get("shape") != self.found.shape:
            raise BadInput(
                f"what is saved under this name is of a script with other loops ({', '.join(saved.get('shape', []))}); "
                f"this one has {', '.join(self.found.shape)}",
                remedy="run the script as it was, or under another --name",
            )
        self._saved = saved

    # what is visible from where

    def _visible(self, frame: FrameType) -> list[tuple[Scope, FrameType | None, dict[str, Any]]]:
        found: list[tuple[Scope, FrameType | None, dict[str, Any]]] = []
        at: FrameType | None = frame
        while at is not None:
            if at.f_code.co_filename == self._path:
                scope = self._by_code.get((at.f_code.co_name, at.f_code.co_firstlineno))
                if scope is not None:
                    found.append((scope, at, at.f_locals))
            at = at.f_back
        return [*found, (self.found.scopes[-1], None, frame.f_globals)]

    def _take(self, taking: Taking, frame: FrameType) -> dict[str, Any]:
        return {scope.key: taking.scope(scope, names) for scope, _, names in self._visible(frame)}

    def _snapshot(self, what: What, frame: FrameType) -> dict[str, Any]:
        taking = Taking(what, ours=self._ours, copied=True)
        return {"random": take_random(), "scopes": self._take(taking, frame)}

    def _put(self, saved: dict[str, Any], frame: FrameType, *, copied: bool = False) -> None:
        """In place, and in the module; a function's own variables are bound by the statements that follow."""
        putting = Putting(copied=copied)
        self._values = {}
        for scope, at, names in self._visible(frame):
            found = putting.scope(scope, names, saved.get(scope.key, {}))
            bound = {name: value for name, value in found.items() if name in scope.stored}
            if at is None:
                names.update(bound)
            elif at is frame:
                self._values = bound

    def _grads(self, frame: FrameType) -> bool:
        if self.found.grads_carried:
            return True
        optim = sys.modules.get("torch.optim")
        if optim is None:
            return False
        seen = {
            id(value)
            for _, _, names in self._visible(frame)
            for value in names.values()
            if isinstance(value, optim.Optimizer)
        }
        return len(seen) > 1  # which of them each zero_grad() is for is not looked into

    def _warn(self, left_alone: dict[str, str]) -> None:
        carried = frozenset().union(*(scope.carried for scope in self.found.scopes))
        for name, why in left_alone.items():
            if name in carried and name not in self._warned:
                self._warned.add(name)
                self._say(
                    f"warning: {name} is {why}, which cannot be saved, and the training loop carries it from one iteration to "
                    f"the next: a resumed run begins with the one made before the loop"
                )

    # what the script calls

    def holds(self, name: str) -> bool:
        return name in self._values

    def value(self, name: str) -> Any:
        return self._values[name]

    def more(self) -> bool:
        """Asked by a `while` around the training loop: not if all was over before."""
        return self._saved is None or not self._saved["over"]

    def making(self, level: int) -> None:
        """An iterator will be made."""
        frame = sys._getframe(1)
        self._begun = self._left = False
        self._values = {}
        if level == 0:
            if self._entered:
                raise BadInput(
                    f"the training loop in line {self.found.training.line} was begun a second time, and which of the two a saved "
                    f"place is in is not known; step {self.run.committed} is committed",
                    remedy="train once per process, or change two lines: run = sublet.train(...), for step in run.steps(n)",
                )
            self._entered = True
        if self._saved is None:
            self._turns[level] = _Turn(made=self._snapshot(What.GENERATORS, frame))
        elif not self._saved["over"]:
            turn = self._saved["turns"][level]
            self._turns[level] = _Turn(turn["made"], turn["count"], turn["top"])
            self._put_snapshot(turn["made"], frame)

    def _put_snapshot(self, snapshot: dict[str, Any], frame: FrameType) -> None:
        self._put(snapshot["scopes"], frame, copied=True)  # later saves hold it again
        put_random(snapshot["random"])

    def rounds(self, level: int, iterable: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop around the training loop; the one it was in comes again."""
        if not self.more():
            return
        iterator = iter(iterable)
        turn = self._turns[level]
        if self._saved is not None and turn.count:
            self._skip(iterator, turn.count - 1, level)
            turn.count -= 1
        for item in iterator:
            turn = self._turns[level]
            turn.count += 1
            yield item

    def _skip(self, iterator: Iterator[Any], count: int, level: int) -> None:
        for drawn in range(count):
            try:
                next(iterator)
            except StopIteration:
                raise BadInput(
                    f"the loop in line {self.found.loops[level].line} ended after {drawn:,} items, and {count:,} were "
                    "consumed when it was saved; nothing was overwritten",
                    remedy="run it with the data and arguments it was begun with, or under another --name",
                ) from None

    def before(self, level: int) -> None:
        """A `while` is about to test: its variables are as they were in the turn it was in."""
        if self._saved is not None and self.more():
            self._put_snapshot(self._turns[level].top, sys._getframe(1))

    def top(self, level: int) -> None:
        """A turn of a loop around the training loop begins."""
        frame = sys._getframe(1)
        self._values = {}
        if self._saved is not None:
            self._put_snapshot(self._turns[level].top, frame)
        else:
            self._turns[level].top = self._snapshot(What.VARIABLES, frame)

    def make(self, iterable: Iterable[Any]) -> None:
        """The training loop begins, or begins again where it was."""
        frame = sys._getframe(1)
        self._frame = frame
        self._values = {}
        saved = self._saved
        if self._explain is not None:
            self._explain(self)
            raise Explained
        if saved is not None and saved["over"]:
            self._left, self._iterator = True, iter(())
            return
        if not self._looked:
            self._look(frame)
        if saved is None:
            self._iterator = iter(iterable)
        else:
            self._left = bool(saved["left"])
            self._iterator = iter(()) if self._left else iter(iterable)
            if not self._left and self.found.training.kind == "for":
                self._skip(self._iterator, self._turns[-1].count, -1)
            self._put(saved["scopes"], frame)
            self._saved = None
        self.run.begin()

    def _look(self, frame: FrameType) -> None:
        """Once, before the first step: what cannot be saved is said now rather than at the first save."""
        self._looked = True
        self._take(Taking(What.ALL, ours=self._ours, check=True), frame)
        for _, _, names in self._visible(frame):
            for name, value in names.items():
                if (
                    is_loader(value)
                    and getattr(value, "persistent_workers", False)
                    and name not in self._warned
                ):
                    self._warned.add(name)
                    self._say(
                        f"warning: {name} keeps its workers over epochs (persistent_workers=True). Their random states cannot be "
                        "saved: what they draw after a resume may differ from what a run nobody disturbed would have drawn"
                    )

    def batches(self) -> Iterator[Any]:
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.turn():
            raise StopIteration
        try:
            item = next(self._iterator)
        except StopIteration:
            self._begun = False
            raise
        self._turns[-1].count += 1
        return item

    def turn(self) -> bool:
        """Between two iterations: the one before counts, and the next may begin."""
        if self._begun:
            self._begun = False
            self.run.end_step()
        if self._left:
            return False
        self.run.begin_step()
        self._begun = True
        return True

    def leave(self) -> None:
        """`break`: the iteration counts, and the loop is left."""
        self._begun, self._left = False, True
        self.run.end_step()

    def over(self) -> None:
        """All loops are behind: everything is committed, and what follows runs under the same lease."""
        frame = sys._getframe(1)
        self._begun, self._over, self._frame, self._values = False, True, frame, {}
        if self._saved is not None and self._saved["over"]:
            self._put(self._saved["scopes"], frame)
            self._saved = None
            self.run.begin()
        self.run.finish()
        self._frame = None
        self._after = True
        free = signal.getsignal(WAKE) in (signal.SIG_DFL, signal.SIG_IGN)
        if free and threading.current_thread() is threading.main_thread():
            signal.signal(WAKE, self._woken)
            self._wakes = True
        self.run.on_notice(self._leave_soon)

    def _leave_soon(self, notice: Notice) -> None:
        """Nothing more is to be saved. Called by a thread of the alarms; raised in the script when it waits, or is back from C."""
        if not self._after:
            return
        self._told = True
        main = threading.main_thread().ident
        if self._wakes and main is not None:
            signal.pthread_kill(main, WAKE)
        else:
            _raise_in_main(LeftAfterTheLoops)

    def _woken(self, number: int, frame: FrameType | None) -> None:
        """The signal may be somebody else's."""
        if self._after and self._told:
            self._told = False
            raise LeftAfterTheLoops

    def ended(self) -> None:
        """The script has come to its end: from here on nothing interrupts it."""
        self._after = False
        _raise_in_main(None)
        if not self._entered:
            line = self.found.training.line
            self._say(
                f"the training loop in line {line} was never reached: nothing was saved, and nothing is resumed"
            )


def _raise_in_main(error: type[BaseException] | None) -> None:
    """None takes one back that was not raised yet."""
    main = threading.main_thread().ident
    if main is not None:
        what = ctypes.py_object(error) if error is not None else None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), what)
