"""How a script's process ends when its frames cannot be left in the usual way.

Rules of this file:
- A process that is told to leave is saved, says so with its exit code, and is gone. None of the script's own
  code runs in between, so nothing of it is done that will be done again.
- A script that went on from a save runs on top of the frames of its beginning, which are never returned to.
  When it is over, the process ends as an interpreter does: exit functions, threads, streams.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

from sublet.core.errors import SubletError
from sublet.core.runs.exits import DRAINED_CODE
from sublet.training.loop import Preempted, Run
from sublet.training.program_state import call_stack, process_state


@dataclass(frozen=True, slots=True)
class ProcessStart:
    """What a process is started with, and would pass on to the program that it becomes."""

    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: str = field(default_factory=os.getcwd)
    umask: int = field(default_factory=process_state.umask_now)
    ignored: frozenset[int] = field(default_factory=lambda: frozenset(_ignored()))
    blocked: frozenset[int] = field(
        default_factory=lambda: frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    )

    def again(self) -> NoReturn:
        """The same program anew: same pid, same command, same streams."""
        os.chdir(self.folder)
        os.umask(self.umask)
        for number in set(_ignored()) - self.ignored:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], self.environment)


def _ignored() -> list[int]:
    return [int(n) for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN]


#: The tag of the version with which a script came to its end.
FINISHED = "finished"


def leave_process(code: int) -> NoReturn:
    """At once: what was to be saved is saved."""
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            child.kill()
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def run_to_the_end(
    go_on: Callable[[], Any], path: str, run: Run, fail: Callable[[SubletError], NoReturn]
) -> int:
    """Run a script, or the rest of it, and commit its end. Returns the exit code."""
    code, done = 1, True
    try:
        go_on()
        code = 0
    except SystemExit as leaving:
        code = _code_of(leaving)
        if code == 0 and (type(leaving) is not SystemExit or run.notice is not None):
            # A library's way to leave when it is told to, such as Lightning's: that is not the script's end.
            run.close(finished=False)
            leave_process(DRAINED_CODE)
    except SubletError as error:
        run.close(finished=False)
        fail(error)
    except BaseException as error:
        trace = of_the_script(error.__traceback__, path)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code, done = 130 if isinstance(error, KeyboardInterrupt) else 1, False
    # One that failed behind a library's loop goes on from its last save: there is no place to save it at now.
    done = done and (code == 0 or run.step == run.committed)
    try:
        if done and run.step:
            run.finish()
            if code == 0 and run.committed:
                run.mark(FINISHED)
        elif done and code == 0:
            finish_as_one(run)
        run.close(finished=done)
    except Preempted as leaving:
        leave_process(int(leaving.code or 0))
    except SubletError as error:
        fail(error)
    return code


def finish_as_one(run: Run) -> None:
    """No step was seen, and it was done as it is: started again, it is not to do all of it twice."""
    with contextlib.suppress(SubletError):  # what could not be committed is done anew
        run.save(as_one=True)
        run.mark(FINISHED)


def end_process(code: int) -> NoReturn:
    """As an interpreter ends that has come to its last line."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    os._exit(code)


def let_go(names: Callable[[], Iterable[str]]) -> None:
    """What an interpreter does with a program's modules at its end, as far as the program sees it: the last
    references to its data are gone, in the order of the names, and finalizers run. For `atexit`, registered
    first."""
    spaces = [vars(sys.modules[name]) for name in names() if name in sys.modules]
    for space in spaces:
        for name in [name for name in space if not name.startswith("__")]:
            if not isinstance(space[name], _CODE):
                space[name] = None
    gc.collect()


_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def _code_of(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code
    print(leaving.code, file=sys.stderr)
    return 1


def of_the_script(trace: TracebackType | None, path: str) -> TracebackType | None:
    """Without the frames that run the script."""
    while trace is not None and (
        trace.tb_frame.f_code.co_filename != path or trace.tb_frame.f_code.co_filename == call_stack.__file__
    ):
        trace = trace.tb_next
    return trace
