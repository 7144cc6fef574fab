"""The notebook or terminal a cell's output appears in, through the IPython that runs there.

Rules of this file:
- What the worker shows is shown here as if it had been made here: same streams, same displays, same `Out[…]`.
- An error of a cell is raised with the traceback the worker made: the cell's own lines, nothing of ours.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from sublet.core.errors import CallFailed, SubletError
from sublet.hosting.pickling import unpack_whole
from sublet.ports.cell import CellFailure


class Front:
    """Implements `ports.worker.Screen`."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.kind = "notebook" if getattr(shell, "kernel", None) is not None else "terminal"

    # what the worker shows

    def text(self, stream: str, text: str) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr
        target.write(text)
        if self.kind == "terminal":
            target.flush()

    def show(self, what: Mapping[str, Any]) -> None:
        kind = what["what"]
        if kind == "clear":
            self.shell.display_pub.clear_output(what["wait"])
        elif kind == "result":
            self._result(what["data"], what["metadata"])
        else:
            self.publish(what["data"], what["metadata"], transient=what["transient"], update=what["update"])

    def publish(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        *,
        transient: Mapping[str, Any] | None = None,
        update: bool = False,
    ) -> None:
        self.shell.display_pub.publish(
            dict(data), dict(metadata or {}), transient=dict(transient or {}), update=update
        )

    def _result(self, data: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
        hook = self.shell.displayhook
        hook.start_displayhook()
        try:
            hook.write_output_prompt()
            hook.write_format_data(dict(data), dict(metadata))
        finally:
            hook.finish_displayhook()

    def remember_result(self, value: Any) -> None:
        """As `_` and `Out[…]`."""
        self.shell.displayhook.update_user_ns(value)

    # asking

    def can_ask(self) -> bool:
        if self.kind == "notebook":
            return bool(getattr(self.shell.kernel, "_allow_stdin", False))
        return sys.stdin is not None and sys.stdin.isatty()


def cell_error(failure: CellFailure) -> BaseException:
    """The exception to raise for what the cell raised, shown as the worker showed it."""
    error: BaseException | None = None
    if failure.pickled:
        with contextlib.suppress(Exception):
            revived = unpack_whole(failure.pickled)
            if isinstance(revived, BaseException) and not isinstance(revived, BaseExceptionGroup):
                error = revived
    if failure.kind in ("SyntaxError", "IndentationError", "TabError"):
        return syntax_error(failure.text, failure.trace)
    if error is None:
        error = CallFailed(f"{failure.kind}: {failure.text}")
    return rendered(error, failure.trace)


def syntax_error(text: str, lines: tuple[str, ...]) -> BaseException:
    """IPython draws a `SyntaxError` anew from the frames it was raised through, which are ours: another of that name is left alone."""
    return rendered(type("SyntaxError", (Exception,), {})(text), lines)


def rendered(error: BaseException, lines: tuple[str, ...]) -> BaseException:
    """Shown by IPython as these lines."""
    with contextlib.suppress(AttributeError):
        error._render_traceback_ = lambda: list(lines)  # type: ignore[attr-defined]
    return error


def brief(error: SubletError) -> BaseException:
    """An error of ours, without a traceback into our own files: what happened, and what to do."""
    name = type(error).__name__
    # What was saved on a line of its own: a page breaks a long line anywhere, in the middle of a word too.
    message = error.message.replace("to reacquire. ", "to reacquire.\n  ", 1)
    return rendered(error, (f"\x1b[31m{name}\x1b[0m: {message}", f"  → {error.remedy}"))
