"""The IPython shell inside a leased worker: it makes a cell's magics, displays and tracebacks.

Rules of this file:
- Everything a cell shows goes into one stream of frames (`processes/worker/screen.py`), so it appears in the
  order it was made.
- The shell never prints a traceback: it keeps it, and the notebook shows it as the cell's own.
- Questions cannot be answered in a worker, and widgets cannot be reached. Both raise an error that says so.
"""

from __future__ import annotations

import builtins
import getpass
import itertools
import os
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import StdinNotImplementedError, UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from sublet.notebook.cells.source import show_header
from sublet.processes.worker import worker
from sublet.processes.worker.screen import WorkerScreen, installed

Trace = tuple[str, ...]


class _Compiler(CachingCompiler):
    """Compiles a cell under the notebook's name for it."""

    _name = _header = ""

    def begin(self, name: str, header: str) -> None:
        self._name, self._header = name, header

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        name, self._name = self._name, ""  # what the cell itself runs later has names of its own
        return name or super().get_code_name(raw_code, transformed_code, number)

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        name = super().cache(transformed_code, number, raw_code)
        show_header(name, self._header)
        return name


class _Publisher(DisplayPublisher):
    shell: Any

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        source: Any = None,
        *,
        transient: dict[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        self._validate_data(data, metadata)  # type: ignore[no-untyped-call]
        _flush()
        self.shell.frames.show(
            {
                "what": "display",
                "data": data,
                "metadata": metadata or {},
                "transient": transient or {},
                "update": update,
            }
        )

    def clear_output(self, wait: bool = False) -> None:
        _flush()
        self.shell.frames.show({"what": "clear", "wait": wait})


class _Hook(DisplayHook):
    """Sends the value of the last expression as a display that is marked as the cell's result."""

    shell: Any

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: dict[str, Any], md_dict: dict[str, Any] | None = None) -> None:
        _flush()
        self.shell.frames.show({"what": "result", "data": format_dict, "metadata": md_dict or {}})

    def update_user_ns(self, result: Any) -> None:
        self.shell.result = result
        self.shell.has_result = True

    def log_output(self, format_dict: dict[str, Any]) -> None:
        pass

    def finish_displayhook(self) -> None:
        self._is_active = False

    def quiet(self) -> bool:
        return bool(self.semicolon_at_end_of_expression(self.shell.source))  # type: ignore[no-untyped-call]


class CellShell(InteractiveShell):
    displayhook_class = Type(_Hook)
    display_pub_class = Type(_Publisher)
    compiler_class = Type(_Compiler)

    frames: WorkerScreen
    source = ""
    result: Any = None
    has_result = False
    trace: Trace = ()

    def init_virtualenv(self) -> None:
        pass  # the worker runs in the notebook's own

    def run_cell(self, raw_cell: str, *_: Any, **__: Any) -> Any:
        """Runs the cell without the copy of its output that IPython would keep for its history."""
        self.source, self.trace = raw_cell, ()
        self.result, self.has_result = None, False
        done = None
        try:
            done = self._run_cell(raw_cell, False, False, True, "", None)
        finally:
            self.events.trigger("post_execute")
            self.events.trigger("post_run_cell", done)
        return done

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        kind, value, trace = self._get_exc_info(exc_tuple)  # type: ignore[no-untyped-call]
        if _has_group(value) and not issubclass(kind, SyntaxError):
            # IPython leaves these to Python, which prints them.
            inner = trace.tb_next if trace is not None else None
            self.trace = tuple(traceback.format_exception(kind, value, inner))
            return
        super().showtraceback(exc_tuple, *args, **kwargs)

    def _showtraceback(self, etype: type[BaseException], evalue: BaseException, stb: list[str]) -> None:
        self.trace = tuple(stb)

    def show_usage_error(self, exc: UsageError) -> None:
        self.trace = (f"UsageError: {exc}",)

    def enable_gui(self, gui: Any = None) -> None:
        if gui is not None:
            raise UsageError(f"there is no window system in a GPU worker for {gui}: use %matplotlib inline")

    def ask_exit(self) -> NoReturn:
        raise SystemExit


def _has_group(value: BaseException | None) -> bool:
    return value is not None and (isinstance(value, BaseExceptionGroup) or _has_group(value.__context__))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # whatever the cell put there
            continue


_shell: CellShell | None = None


def shell(front: str, colors: str) -> CellShell:
    """This worker's shell, created for its first cell."""
    global _shell
    if _shell is None:
        _shell = _made(front)
    if colors:
        _shell.colors = colors
    return _shell


def _made(front: str) -> CellShell:
    frames = installed(worker.screen_fd)
    for module, name in ((builtins, "input"), (getpass, "getpass")):
        setattr(module, name, _refuse_input)
    sys.breakpointhook = _refuse_breakpoint
    sys.modules["ipywidgets"] = _NoWidgets("ipywidgets")
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.cache_size = 0
    # Libraries ask for the name of the shell's class to learn whether HTML is shown.
    name = "ZMQInteractiveShell" if front == "notebook" else "TerminalInteractiveShell"
    kind: Any = type(name, (CellShell,), {"frames": frames, "__module__": __name__})
    main = sys.modules["__main__"]
    made: CellShell = kind.instance(config=config, user_module=main, user_ns=main.__dict__)
    made.builtin_trap.activate()
    return made


def _refuse_input(prompt: object = "", *_: Any, **__: Any) -> NoReturn:
    raise StdinNotImplementedError(
        "input() cannot be answered inside a %%gpu cell: ask in a normal cell, and use the variable here"
    )


def _refuse_breakpoint(*_: Any, **__: Any) -> NoReturn:
    raise StdinNotImplementedError(
        "breakpoint() needs somebody to answer it, and nobody can inside a %%gpu cell: print what you "
        "want to see, or take %%gpu away "
        "to run the cell in the notebook's own process"
    )


class _NoWidgets(types.ModuleType):
    """Widgets talk to the notebook's own process. Of all of them only `Output` can be a plain display, which
    is what `rich` draws its progress bars with."""

    @property
    def Output(self) -> type[_Output]:
        return _Output

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(
            f"ipywidgets.{name} needs the notebook's own process: make widgets in a normal cell, not under "
            "%%gpu"
        )


_output_numbers = itertools.count(1)


class _Output:
    """A display that is redrawn in place."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._id = f"sublet-output-{os.getpid()}-{next(_output_numbers)}"
        self._shown = False
        self._publish: Callable[..., None] | None = None

    def _ipython_display_(self) -> None:
        pass  # it appears with its content

    def clear_output(self, wait: bool = False) -> None:
        pass  # the next drawing replaces this one

    def __enter__(self) -> _Output:
        assert _shell is not None
        publisher: Any = _shell.display_pub
        self._publish = publisher.publish
        publisher.publish = self._draw
        return self

    def _draw(self, data: Mapping[str, Any], metadata: Any = None, **_: Any) -> None:
        assert self._publish is not None
        self._publish(data, metadata, transient={"display_id": self._id}, update=self._shown)
        self._shown = True

    def __exit__(self, *_: object) -> None:
        assert _shell is not None
        del _shell.display_pub.publish
        self._publish = None

    def close(self) -> None:
        assert _shell is not None
        if self._shown:
            _shell.display_pub.publish({"text/plain": ""}, transient={"display_id": self._id}, update=True)
