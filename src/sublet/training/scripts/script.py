"""`__sublet__` in a running script: where its steps end, and the whole of it as one part of its run's state.

Rules of this file:
- The script's beginning runs at each start, up to its first training loop. Then, if there is a save,
  everything is put back as it was, and the script goes on from there. It never comes back to where it stood.
- A step is a turn of a training loop, or a step of an optimizer where the loop is a library's.
- Nothing is raised in the script to make it leave: it is saved between two steps, and the process ends. What
  the script would do on an exception, it has done, or will do when it goes on.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

from sublet.core.errors import BadInput, SubletError
from sublet.core.notice import Notice
from sublet.core.runs.exits import DRAINED_CODE
from sublet.core.values import SECOND_US
from sublet.machine.run_folder import replace_file
from sublet.training.loop import Preempted, Run
from sublet.training.program_state.anchors import UnknownPart
from sublet.training.program_state.call_stack import offset_of
from sublet.training.program_state.comparing import Difference, differences
from sublet.training.program_state.pickling import CannotBeSaved, Taken
from sublet.training.program_state.process_state import running_threads
from sublet.training.program_state.program import Program
from sublet.training.resume_check import RepeatOnceMore
from sublet.training.scripts.ending import end_process, leave_process, run_to_the_end
from sublet.training.scripts.event_writers import flush_event_writers
from sublet.training.scripts.file_history import FileHistory
from sublet.training.scripts.file_kind import FILE, is_file
from sublet.training.scripts.identity import changes, digest_of_identity, identity_of
from sublet.training.scripts.importing import OwnModules
from sublet.training.scripts.library_loops import GraphsThatWait
from sublet.training.scripts.output import PrintedOnce
from sublet.training.scripts.rehearsal import (
    RehearsalPlan,
    RememberedVersion,
    Repetition,
    digests_of,
    judged,
    state_to_compare,
    to_compare,
)
from sublet.training.scripts.tracing import is_traced

FORMAT = 2
#: Before a deadline a process that has not come to the end of its step is ended without it.
MARGIN_SECONDS = 1.0
#: A script in which no loop was found is told so after this, if no step of a library was seen either.
TOLD_AFTER_SECONDS = 20.0
#: Numbers that came out differently are repeated so often before they are taken for lost.
MOST_TIMES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions:
    """How the user wants it run."""

    ignored: frozenset[str] = frozenset()
    rehearse: bool = True
    changed_ok: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What would be saved when the training loop begins."""

    modules: list[str]
    functions: list[tuple[str, list[str]]]  # that are running, each with its variables
    objects: int
    bytes: int
    blocks: list[tuple[str, int]]  # of memory, the largest first
    ignored: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What a script needs of whoever runs it."""

    path: Path
    arguments: tuple[str, ...]
    ends_at: CodeType  # of the frame below the script's first
    memory: Path  # a folder of this host
    say: Callable[[str], None]
    fail: Callable[[SubletError], NoReturn]
    restart: Callable[[], NoReturn]
    explain: Callable[[Inventory], None] | None = None
    began: float = field(default_factory=time.monotonic)


class Script:
    """One running script."""

    def __init__(self, own: OwnModules, around: Around, options: ScriptOptions) -> None:
        self._own = own
        self._around = around
        self._options = options
        self._run: Run | None = None
        self._program: Program | None = None
        self._numbering = b""
        self._environment = dict(os.environ)
        self._identity: dict[str, Any] = {}
        self._began: dict[str, str] = {}
        self._version: RememberedVersion | None = None
        self._plan: RehearsalPlan | None = None
        self._saved: dict[str, Any] | None = None  # to be put back; None once it is
        self._frame: FrameType | None = None  # of the script, while a state may be taken
        self._inside = False  # a training loop of the script's own
        self.graphs = GraphsThatWait()
        self.is_over = False  # it was saved at its end: nothing is left to be done
        self._was_told = False  # that nothing is saved
        self.was_changed = False  # since it was saved, and goes on all the same
        self._beginning_us = 0  # what the script's beginning took
        self._kinds: frozenset[str] = frozenset()  # of what was saved last
        self._output: PrintedOnce | None = None
        self._files: FileHistory | None = None
        self._positions: list[tuple[int, int]] = []  # step, and position in the history of the files
        self._busy = threading.Lock()  # held while the main thread is in here

    def belongs_to(self, run: Run) -> None:
        self._run = run
        run.on_notice(self._hear)

    def keeps_files(self, history: FileHistory) -> None:
        """From now on, what the script does to files can be undone. Its beginning finds them as it did the
        first time."""
        self._files = history
        for words in history.rewind():  # also when an earlier start was killed before its first save
            self._around.say(words)
        history.watch()

    def says_if_no_step_comes(self) -> None:
        """Whoever waits for a save is to know early that there will be none."""
        threading.Thread(target=self._look_for_steps, name="sublet-looks", daemon=True).start()

    def cannot_save(self, why: str) -> None:
        """A library begins to train what cannot be saved. Said once, and only if nothing else is saved."""
        if self._program is None and self._saved is None and not self._was_told:
            self._was_told = True
            self._around.say(
                f"{why}. Nothing is saved until a training loop of the script begins: a start begins anew, "
                "with its files as they were"
            )

    def _look_for_steps(self) -> None:
        time.sleep(TOLD_AFTER_SECONDS)
        if self._program is None and self._saved is None and not self._was_told:
            self._was_told = True
            self._around.say(
                f"no training step was seen in the first {TOLD_AFTER_SECONDS:.0f} s. Until one is, nothing "
                "is saved, and a start begins anew with its files as they were; --loop LINE names a loop of "
                "the script"
            )

    def prints_once(self, file: Path) -> None:
        """From now on, what the script prints is counted; `file` remembers how much it was."""
        anew = digest_of_identity(self._identity_now()) if self._saved is None else ""
        self._output = PrintedOnce(file, anew=anew)

    @property
    def run(self) -> Run:
        assert self._run is not None
        return self._run

    # what the script calls

    def begin(self) -> None:
        """A training loop begins."""
        if is_traced():
            return
        self._arrive(sys._getframe(1))
        self._inside = True

    def step(self) -> None:
        """A turn has come to its end."""
        if self._program is not None and sys.exc_info()[0] is None and not is_traced():
            self._between_steps(sys._getframe(1))

    def after(self) -> None:
        """All loops around a training loop are behind: what follows may take long, so everything is saved."""
        if is_traced():
            return
        self._inside = False
        if self._program is None or sys.exc_info()[0] is not None:
            return
        if self.run.step == self.run.committed and not self.run.repeats:
            return  # what is repeated may have been saved right here
        with self._busy:
            self._frame = sys._getframe(1)
            self._or_leave(self.run.save_now)
            self._frame = None

    def before_optimizer(self, *_: Any) -> None:
        """An optimizer is about to step. If the loop is a library's, this is where the training begins."""
        if not self._inside and threading.current_thread() is threading.main_thread():
            self._arrive(sys._getframe(1))

    def after_optimizer(self, *_: Any) -> None:
        """An optimizer has stepped."""
        frame, is_ours = sys._getframe(1), self._program is not None and not self._inside
        if is_ours and sys.exc_info()[0] is None and not self.graphs.are_there(frame):
            self._between_steps(frame)

    # beginning

    def _arrive(self, frame: FrameType) -> None:
        """The first time: number what is there; put back what was saved, and go on from it."""
        if self._program is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            self._around.fail(self._refusal("it trains in a thread of its own", "train in the main thread"))
        with self._busy:
            self._beginning_us = int((time.monotonic() - self._around.began) * SECOND_US)
            _import_ahead()
            saved, self._saved = self._saved, None
            program = Program(self._own.is_own, self._around.ends_at, [(is_file, FILE)])
            if saved is None:
                self._begin_anew(program, frame)
                return
            try:
                go_on = self._put_back(program, frame, saved)
            except SubletError as error:
                self.run.close(finished=False)
                self._around.fail(error)
        end_process(self.run_to_the_end(lambda: go_on(self._goes_on)))

    def _put_back(
        self, program: Program, frame: FrameType, saved: dict[str, Any]
    ) -> Callable[[Callable[[], None]], Any]:
        self._numbering = bytes(saved["numbering"])
        program.begin(frame, pickle.loads(self._numbering))
        self._began = program.measure(saved["began"])
        self._identity, self._program = self._identity_now(), program
        self._version = self._remembered().read()
        self._inside = bool(saved["inside"])
        self.graphs.are_waited_for = bool(saved.get("graphs wait"))
        self._put_files_back(int(saved["files"]))
        go_on = program.put(_taken_from(saved))
        if self._output is not None:
            self._output.go_on_at(int(saved["printed"]))
        return go_on

    def _put_files_back(self, position: int) -> None:
        if self._files is not None:
            with contextlib.suppress(OSError, ValueError):
                moved = json.loads(self._places_of_files().read_text())
                position = int(moved.get(str(position), position))
            for words in self._files.undo(position):
                self._around.say(words)

    def _begin_anew(self, program: Program, frame: FrameType) -> None:
        unknown = program.begin(frame)
        self._identity = self._identity_now()
        self._check(unknown, frame, program)
        self._program = program
        self._numbering = pickle.dumps(program.numbering(), protocol=5)
        self._version = self._remembered().read()
        self._began = program.measure()
        if self._version.rehearsed:
            program.made_alike()
        if self._around.explain is not None:
            self._around.explain(self._inventory(program, frame))
            self.run.close(finished=False)
            leave_process(0)
        if self._options.rehearse and not self._version.rehearsed:
            self._plan = RehearsalPlan(self._beginning_us)
        self._frame = frame
        self._goes_on()
        self._frame = None

    def _inventory(self, program: Program, frame: FrameType) -> Inventory:
        taken = program.take(frame)
        blocks = [(program.words(int(name[1:])), size) for name, size in taken.sizes.items()]
        frames = [at for at in program.frames(frame) if at.f_code.co_flags & CO_OPTIMIZED]
        return Inventory(
            modules=program.own_modules(),
            functions=[(at.f_code.co_qualname, list(at.f_locals)) for at in frames],
            objects=program.objects,
            bytes=len(taken.data),
            blocks=sorted(blocks, key=lambda pair: -pair[1]),
            ignored=sorted(self._options.ignored),
        )

    def _goes_on(self) -> None:
        self._or_leave(self.run.begin)
        self._or_leave(self.run.begin_step)

    def _check(self, unknown: list[UnknownPart], frame: FrameType, program: Program) -> None:
        """Refuse, before the first step, what could not be saved after it."""
        if threads := running_threads():
            self._around.fail(
                self._refusal(
                    f"{threads[0]} is running, and what it does between two steps cannot be saved",
                    "end it before the loop, or do its work in the loop",
                )
            )
        found = [part for part in unknown if part.path not in self._options.ignored]
        if found:
            self._around.fail(self._cannot([(part.path, part.thing, part.why) for part in found]))
        try:
            if self._files is not None:
                self._check_descriptors(self._files)
            program.take(frame)
        except CannotBeSaved as error:
            self._around.fail(self._cannot(error.found))
        except SubletError as error:
            self._around.fail(error)

    def _check_descriptors(self, files: FileHistory) -> None:
        if held := files.held_by_number:
            raise self._refusal(
                f"{held[0]}, is read or written by its number, which is another in the next process",
                "open it with open(), or close it before the loop",
            )

    def _cannot(self, found: list[tuple[str, Any, str]]) -> BadInput:
        path, thing, why = found[0]
        kind = type(thing)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        more = f" (and {len(found) - 1} more: {', '.join(p for p, _, _ in found[1:6])})" if found[1:] else ""
        return self._refusal(
            f"{path} is a {name}, which cannot be saved{f': {why}' if why else ''}{more}",
            f"leave it out with --ignore {path} if no step depends on what it holds, or make it inside the "
            "step that uses it",
        )

    def _refusal(self, what: str, remedy: str) -> BadInput:
        done = f"; step {self.run.committed} is committed" if self.run.committed else "; no step was made"
        return BadInput(f"{what}{done}", remedy=remedy)

    # between two steps

    def _between_steps(self, frame: FrameType) -> None:
        with self._busy:
            self._frame = frame
            self._or_leave(self.run.end_step)
            if self._plan is None and self._kinds:
                self._plan = self._plan_for_new_kinds()
            if self._plan is not None:
                self._rehearse(self._plan)
            self._frame = None
            self._or_leave(self.run.begin_step)

    def _or_leave(self, act: Callable[[], None]) -> None:
        """Nothing of ours is raised in the script, which might catch it."""
        try:
            act()
        except Preempted as leaving:
            leave_process(int(leaving.code or 0))
        except RepeatOnceMore:
            self._start_again()
        except CannotBeSaved as error:
            self.run.close(finished=False)
            self._around.fail(self._cannot(error.found))
        except SubletError as error:
            self.run.close(finished=False)
            self._around.fail(error)

    # rehearsing

    def _rehearse(self, plan: RehearsalPlan) -> None:
        now = int(time.monotonic() * SECOND_US)
        decided = plan.after(self.run.step, now, now - int(self._around.began * SECOND_US))
        if decided:
            self._or_leave(self.run.save_now)
        if decided == "save":
            plan.first_version = self.run.version
        elif decided == "restart":
            self.run.repeat_from(plan.first_version, plan.why)
            self._around.say(
                f"step {self.run.committed:,} is saved; it is started again once, to see that it goes on "
                "exactly"
            )
            self._start_again()

    def _plan_for_new_kinds(self) -> RehearsalPlan | None:
        kinds, self._kinds = self._kinds, frozenset()
        if not self._options.rehearse or self._version is None or self.run.repeats:
            return None
        lasted_us = int((time.monotonic() - self._around.began) * SECOND_US)
        return self._version.plan_for(kinds, self._beginning_us, lasted_us)

    def _start_again(self) -> NoReturn:
        self.run.close()
        self._around.restart()

    def _remembered(self) -> RememberedVersion:
        return RememberedVersion(self._around.memory / f"{digest_of_identity(self._identity)}.json")

    def differences(self, before: Any, now: Any) -> list[Difference]:
        """Of two saved states: what is lost by a resume. Nothing, if it is exact."""
        assert self._version is not None
        mine, saved = state_to_compare(now, self._words), state_to_compare(before, self._words)
        found = self._version.telling(differences(saved, mine))
        repetition = Repetition(self._around.memory / f"{self.run.name}.repeated")
        if found:
            earlier = repetition.take()
            if earlier is None:
                repetition.keep((now["data"].tobytes(), digests_of(now), 1))
                raise RepeatOnceMore("what was repeated came out differently, and is repeated once more")
            data, digests, times = earlier
            again = to_compare(data, self._words, digests)
            by_itself = differences(again, to_compare(now["data"].tobytes(), self._words, digests_of(now)))
            found, varies = judged(found, by_itself)
            if found and times < MOST_TIMES and all(part.sort == "number" for part in found):
                # Two durations may be alike to the last digit that is kept.
                repetition.keep((now["data"].tobytes(), digests_of(now), times + 1))
                raise RepeatOnceMore("numbers came out differently, and are repeated once more")
            if found:
                kept = Repetition(self._around.memory / f"{self.run.name}.differs")
                kept.keep((now["data"].tobytes(), digests_of(now), self._numbering))
            if not found:
                self._version.varies |= varies
                named = ", ".join(sorted(varies)[:6])
                self._around.say(f"not compared, because it differs from run to run by itself: {named}")
        if not found:
            self._version.saw(before, now)
            self._same_place_in_files(before["files"], now["files"])
        return found

    def _same_place_in_files(self, before: int, now: int) -> None:
        """What was repeated changed the files again: the last save has another place in their history."""
        replace_file(self._places_of_files(), json.dumps({str(before): now}).encode())

    def _places_of_files(self) -> Path:
        return self._around.memory / f"{self.run.name}.places"

    def is_where(self, saved: dict[str, Any]) -> bool:
        return bool(saved.get("place") == self._place())

    def _place(self) -> str:
        """Where in the script it is: a step may be saved where it ends, and behind the loops."""
        frame = self._frame
        return f"{frame.f_code.co_qualname} {offset_of(frame)}" if frame is not None else ""

    def _words(self, number: int) -> str:
        assert self._program is not None
        return self._program.words(number)

    # as a part of the state

    def state_dict(self) -> dict[str, Any]:
        if self._frame is None:
            return {"format": FORMAT, "identity": self._identity_now(), "over": True}  # it came to its end
        assert self._program is not None
        flush_event_writers()
        taken = self._program.take(self._frame)
        self._kinds = self._kinds_in(taken)
        position = self._file_position()
        return {
            "format": FORMAT,
            "data": _as_array(taken.data),
            "recipes": _as_array(taken.recipes),
            "numbering": _as_array(self._numbering),
            "blocks": taken.blocks,
            "sizes": taken.sizes,
            "same": taken.same,
            "shown": taken.shown,
            "began": self._began,
            "identity": self._identity_now(),
            "inside": self._inside,
            "graphs wait": self.graphs.are_waited_for,
            "place": self._place(),
            "kinds": sorted(self._kinds),
            "files": position,
            "printed": self._output.count() if self._output is not None else 0,
        }

    def _kinds_in(self, taken: Taken) -> frozenset[str]:
        """What the state is made of: the types of its objects, and the functions that are running."""
        assert self._program is not None
        assert self._frame is not None
        running = (frame.f_code.co_qualname for frame in self._program.frames(self._frame))
        return frozenset({*(f"{kind.__module__}.{kind.__qualname__}" for kind in taken.kinds), *running})

    def _file_position(self) -> int:
        """Where the history of the files stands. What older saves than the last two need is forgotten."""
        if self._files is None:
            return 0
        self._check_descriptors(self._files)
        position = self._files.position()
        self._files.sync()
        self._positions.append((self.run.step, position))
        committed = [at for step, at in self._positions if step <= self.run.committed]
        if self._plan is None and len(committed) > 2:
            self._files.forget(committed[-2])
            self._positions = [pair for pair in self._positions if pair[1] >= committed[-2]]
        return position

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved.get("format") != FORMAT:
            raise BadInput(
                "what is saved under this name is not of a script that the shim runs",
                remedy="run it under another --name",
            )
        if self._around.explain is not None:
            return  # the beginning is what is to be explained
        self.is_over = bool(saved.get("over"))
        self._saved = None if self.is_over else saved
        before = saved["identity"]
        files = {shown: code["path"] for shown, code in before["code"].items()}
        found = changes(
            before,
            identity_of(files, self._around.arguments, self._environment) | {"versions": before["versions"]},
        )
        more = f" (and {len(found) - 4} more)" if len(found) > 4 else ""
        what = f"the script is not what it was when it was saved: {'; '.join(found[:4])}{more}"
        if found and self._options.changed_ok and not self.was_changed:
            self.was_changed = True
            self._around.say(
                f"{what}. It goes on all the same: functions that are called from now on are the new ones; "
                "those that were running, and all values, are as they were saved"
            )
        if found and not self._options.changed_ok:
            raise BadInput(
                f"{what}; nothing was run",
                remedy="undo the change, begin a new job with another --name, or go on with the changed one: "
                "--changed-ok",
            )

    def _identity_now(self) -> dict[str, Any]:
        own = self._own.files()
        if self._files is not None:  # code that the script writes and imports is what it does, not what it is
            own = {name: path for name, path in own.items() if not self._files.has_made(path)}
        files = {self._around.path.name: str(self._around.path), **own}
        return identity_of(files, self._around.arguments, self._environment)

    # leaving

    def _hear(self, notice: Notice) -> None:
        """Called by a thread of the notice bus."""
        threading.Thread(
            target=self._leave_in_time, args=(notice,), name="sublet-leaves", daemon=True
        ).start()

    def _leave_in_time(self, notice: Notice) -> None:
        """A script that comes to no end of its step leaves without it; it is done again."""
        run = self.run
        while True:
            left = run.seconds_to(notice)
            idle = self._program is not None and not self._inside and run.step == run.committed
            if (idle or left < MARGIN_SECONDS) and self._busy.acquire(blocking=False):
                run.close(finished=False)
                leave_process(DRAINED_CODE)
            time.sleep(min(0.05, max(0.005, left / 4)))

    def run_to_the_end(self, go_on: Callable[[], Any]) -> int:
        """Run the script, or the rest of it, and commit its end. Returns the exit code."""
        code = run_to_the_end(go_on, str(self._around.path), self.run, self._around.fail)
        if self._saved is not None:  # it ended before it came to where it was saved: files are as they were
            self._put_files_back(int(self._saved["files"]))
        self._ended(code)
        return code

    def _ended(self, code: int) -> None:
        """One that failed goes on at its last save, with files as they were then."""
        if self._files is not None and code == 0:
            self._files.clear()
        if self._output is not None:
            self._output.is_over(forget=self._program is None and code != 0)
        if self._program is None:
            then = "is finished" if code == 0 else "begins anew, with its files as they were"
            self._around.say(
                f"no training step was seen, so nothing was saved on the way: started again, it {then}. "
                "--loop LINE names a loop of the script"
            )


def _as_array(data: bytes) -> Any:
    return import_module("numpy").frombuffer(data, dtype="uint8")


def _import_ahead() -> None:
    """Import what saving needs. Between two steps it would be a change of the script's process (its warnings,
    for one) that a resume has earlier. Before the script begins it would be too early: a script may choose by
    its environment how many threads a library has."""
    for name in ("numpy", "numpy.random"):
        with contextlib.suppress(ImportError):
            import_module(name)


def _taken_from(saved: dict[str, Any]) -> Taken:
    blocks, sizes = dict(saved["blocks"]), dict(saved["sizes"])
    return Taken(bytes(saved["data"]), bytes(saved["recipes"]), blocks, sizes, dict(saved["same"]))
