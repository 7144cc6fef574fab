"""What appears in a notebook or a terminal: a cell's output and errors, lines and tables, the wait for a GPU.

Rules of this file:
- The worker's output appears as if it had been made here: same streams, same displays, same `Out[…]`. A
  cell's error is raised with the traceback the worker made: the cell's own lines, and none of ours.
- Everything of ours is drawn as text and as HTML. The HTML has no script, colour or address of its own: it
  looks right on light and on dark, in an untrusted notebook, and without a network.
- An offer is held only for a moment: a user who does not answer in time keeps the place in the waitlist.
"""

from __future__ import annotations

import contextlib
import html
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sublet.core.errors import CallFailed, SubletError
from sublet.core.scheduling.admission import Wait
from sublet.core.values import format_size
from sublet.notebook.cells.messages import CellFailure
from sublet.ports.ledger import Answer
from sublet.processes.channel.pickling import unpack_whole

QUIET = "font-size:.85em;opacity:.75"
_CELL = "padding:.15em .9em .15em 0;text-align:{side};vertical-align:top;white-space:{wrap}"
#: Texts longer than this may be broken.
_LONG = 40
#: Time for an answer at the last moment to reach the ledger.
ANSWER_MARGIN_US = 1_000_000
#: How late an interrupt may be noticed that came just before a look at the terminal.
LOOK_SECONDS = 0.2


class Frontend:
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
        """Stores the value as `_` and `Out[…]`."""
        self.shell.displayhook.update_user_ns(value)

    # asking

    def can_ask(self) -> bool:
        if self.kind == "notebook":
            return bool(getattr(self.shell.kernel, "_allow_stdin", False))
        return sys.stdin is not None and sys.stdin.isatty()


def cell_error(failure: CellFailure) -> BaseException:
    """The exception to raise for the cell's failure, shown with the worker's traceback."""
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
    """A look-alike of `SyntaxError`, because IPython redraws the real one from the frames it passed, which
    are ours."""
    return rendered(type("SyntaxError", (Exception,), {})(text), lines)


def rendered(error: BaseException, lines: tuple[str, ...]) -> BaseException:
    """Makes IPython show these lines; `_render_traceback_` is its hook for exceptions that draw
    themselves."""
    with contextlib.suppress(AttributeError):
        error._render_traceback_ = lambda: list(lines)  # type: ignore[attr-defined]
    return error


def brief(error: SubletError) -> BaseException:
    """The error with its message and remedy, but without a traceback into our own files."""
    name = type(error).__name__
    # What was saved goes on a line of its own: a page breaks a long line anywhere, even inside a word.
    message = error.message.replace("to reacquire. ", "to reacquire.\n  ", 1)
    return rendered(error, (f"\x1b[31m{name}\x1b[0m: {message}", f"  → {error.remedy}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    text: str
    html: str

    def __add__(self, other: Rendering) -> Rendering:
        return Rendering(text=f"{self.text}\n{other.text}", html=self.html + other.html)

    @property
    def data(self) -> dict[str, str]:
        """The data of a Jupyter display."""
        return {"text/plain": self.text, "text/html": self.html}


def line(text: str) -> Rendering:
    return Rendering(text=text, html=f'<div style="{QUIET}">{html.escape(text)}</div>')


def title(text: str) -> Rendering:
    return Rendering(
        text=text, html=f'<div style="font-weight:600;margin-top:.3em">{html.escape(text)}</div>'
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, total: Sequence[str] = ()) -> Rendering:
    """Draws a table. Columns of figures are right-aligned; `total` is a last row, set apart."""
    body = [*rows, total] if total else list(rows)
    figures = [all(_is_figure(row[i]) for row in body) for i in range(len(columns))]
    widths = [max(len(row[i]) for row in [columns, *body]) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if figure else cell.ljust(width)
            for cell, width, figure in zip(row, widths, figures, strict=True)
        ).rstrip()
        for row in [columns, *body]
    ]
    head = "".join(_cell("th", column, figure) for column, figure in zip(columns, figures, strict=True))
    drawn = [f"<tr>{head}</tr>"]
    for number, row in enumerate(body):
        apart = ' style="border-top:1px solid currentColor"' if total and number == len(rows) else ""
        cells = "".join(_cell("td", cell, figure) for cell, figure in zip(row, figures, strict=True))
        drawn.append(f"<tr{apart}>{cells}</tr>")
    style = "font-size:.9em;border-collapse:collapse;font-variant-numeric:tabular-nums;margin:.2em 0"
    return Rendering(text="\n".join(lines), html=f'<table style="{style}">{"".join(drawn)}</table>')


def _cell(tag: str, text: str, figure: bool) -> str:
    style = _CELL.format(side="right" if figure else "left", wrap="normal" if len(text) > _LONG else "nowrap")
    return f'<{tag} style="{style}">{html.escape(text)}</{tag}>'


def _is_figure(text: str) -> bool:
    return text in ("", "-") or text[0].isdigit()


def fields(pairs: Sequence[tuple[str, str]]) -> Rendering:
    width = max(len(name) for name, _ in pairs)
    text = "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs)
    rows = "".join(f"<tr>{_cell('th', name, False)}{_cell('td', value, False)}</tr>" for name, value in pairs)
    return Rendering(text=text, html=f'<table style="font-size:.9em;border-collapse:collapse">{rows}</table>')


def countdown(left_s: float, whole_s: float) -> Rendering:
    """A bar that empties by itself (CSS), and the time that is left."""
    text = f"{_clock(left_s)} left of {_clock(whole_s)}"
    part = 100 * min(1.0, left_s / whole_s) if whole_s > 0 else 0.0
    name = f"sublet-{secrets.token_hex(4)}"  # styles are the page's: two panels must not share one
    seconds = int(left_s)
    css = (
        f"@property --{name}{{syntax:'<integer>';inherits:false;initial-value:0}}"
        f"@keyframes {name}-bar{{from{{width:{part:.2f}%}}to{{width:0}}}}"
        f"@keyframes {name}-count{{from{{--{name}:{seconds}}}to{{--{name}:0}}}}"
        f".{name}-bar{{height:100%;width:0;background:currentColor;opacity:.55;"
        f"animation:{name}-bar {left_s:.1f}s linear}}"
        f".{name}-left::after{{content:counter(sublet);counter-reset:sublet var(--{name});"
        f"animation:{name}-count {seconds}s linear}}"
    )
    track = "height:.35em;border:1px solid currentColor;border-radius:.2em;max-width:24em;margin:.2em 0"
    drawn = (
        f"<style>{css}</style>"
        f'<div role="timer" aria-label="{text}" style="font-size:.9em;font-variant-numeric:tabular-nums">'
        f'<span class="{name}-left"></span> s left of {int(whole_s)} s'
        f'<div aria-hidden="true" style="{track}"><div class="{name}-bar"></div></div></div>'
    )
    return Rendering(text=text, html=drawn)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def _eta(wait: Wait) -> str:
    """The latest time the GPU may become free, in round words; most become free sooner."""
    if wait.eta_us is None:
        return ""
    seconds = round(wait.eta_us / 1e6)
    if seconds < 1:
        return "any moment"
    if seconds < 90:
        return f"in about {seconds} s"
    minutes = round(seconds / 60)
    return f"in about {minutes} min" if minutes < 90 else f"in about {round(minutes / 60)} h"


class WaitDisplay:
    """The display that is shown from the first wait to the grant."""

    def __init__(self, front: Frontend) -> None:
        self._front = front
        self._id = f"sublet-wait-{secrets.token_hex(4)}"
        self._shown = False
        self._last = ""
        self._eta = "later"

    def __call__(self, wait: Wait) -> None:
        eta = _eta(wait)
        self._eta = eta or "later"
        self._draw(
            f"Waiting for a GPU: place {wait.position} in the waitlist, {eta or 'no estimate'} "
            f"({wait.reason}). "
            "Interrupt to leave."
        )

    def offered(self, answer: Answer) -> bool:
        """Asks whether to take the smaller slice that is held."""
        row = answer.lease
        now, wanted = format_size(row.slices[0].vram_bytes), format_size(row.request.vram_bytes)
        # A question is shown no longer than the user said they would wait.
        until = min(row.offer_until - ANSWER_MARGIN_US, row.wait_until or row.offer_until)
        seconds = (until - answer.at) / 1e6
        self._draw(
            f"{now} is free now, and held for you for {seconds:.0f} s; {wanted} {self._eta}. "
            "Without an answer you keep your place."
        )
        question = f"{now} now, or {wanted} {self._eta}. Take {now} now? [y/N] "
        reply = ask(question, seconds, terminal=self._front.kind == "terminal")
        if not reply:
            self._take_back_the_question()
        return reply.strip().lower() in ("y", "yes")

    def _take_back_the_question(self) -> None:
        """Clears a question that was not answered in time, because a page would keep it open."""
        if self._front.kind == "notebook":
            self._front.show({"what": "clear", "wait": False})
            self._shown, self._last = False, ""

    def over(self) -> None:
        if self._shown and self._front.kind == "notebook":
            self._front.publish({"text/plain": ""}, transient={"display_id": self._id}, update=True)

    def _draw(self, text: str) -> None:
        if text == self._last:
            return
        self._last = text
        if self._front.kind == "terminal":
            self._front.text("stderr", f"{text}\n")
            return
        self._front.publish(line(text).data, transient={"display_id": self._id}, update=self._shown)
        self._shown = True


def ask(question: str, seconds: float, *, terminal: bool) -> str:
    """The user's answer, or '' when nobody answers in time."""
    if seconds <= 0:
        return ""
    try:
        return _asked_in_a_terminal(question, seconds) if terminal else _asked_in_a_page(question, seconds)
    except Exception:  # a front end that cannot be asked
        return ""


def _asked_in_a_terminal(question: str, seconds: float) -> str:
    """Asks without `input()`, which notices an interrupt between its question and its read only at the next
    line."""
    print(question, end="", flush=True)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], min(left, LOOK_SECONDS))[0]:
            return sys.stdin.readline().rstrip("\n")
    print()
    return ""


def _asked_in_a_page(question: str, seconds: float) -> str:
    given_up = threading.Event()
    try:
        with _given_up_after(seconds, given_up):
            return input(question)
    except KeyboardInterrupt:
        if given_up.is_set():
            return ""
        raise


@contextlib.contextmanager
def _given_up_after(seconds: float, given_up: threading.Event) -> Iterator[None]:
    """Interrupts a kernel's `input()` after so many seconds; nothing else ends it."""
    answered, over, asking = threading.Lock(), False, threading.get_ident()

    def give_up() -> None:
        with answered:
            if not over:
                given_up.set()
                signal.pthread_kill(asking, signal.SIGINT)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with answered:
            over = True
        timer.cancel()
