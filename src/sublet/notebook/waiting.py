"""While a cell waits for its GPU: the place in the waitlist, and the choice of a smaller one now.

Rules of this file:
- One display, drawn anew, gone when the GPU is there. The reason is the one admission gave.
- An offer is held only for a moment: who does not answer in time keeps the place in the waitlist.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator

from sublet.core.admission import Wait
from sublet.core.values import format_size
from sublet.notebook.drawing import line
from sublet.notebook.front import Front
from sublet.ports.ledger import Answer

#: An answer that comes at the last moment must still reach the ledger.
ANSWER_MARGIN_US = 1_000_000
#: How late an interrupt may be heard that came just before a look at the terminal.
LOOK_SECONDS = 0.2


def _eta(wait: Wait) -> str:
    """Roughly: it is when the GPU goes at the latest, and most go sooner."""
    if wait.eta_us is None:
        return ""
    seconds = round(wait.eta_us / 1e6)
    if seconds < 1:
        return "any moment"
    if seconds < 90:
        return f"in about {seconds} s"
    minutes = round(seconds / 60)
    return f"in about {minutes} min" if minutes < 90 else f"in about {round(minutes / 60)} h"


class Waiting:
    """Shown from the first wait to the grant."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._id = f"sublet-wait-{secrets.token_hex(4)}"
        self._shown = False
        self._last = ""
        self._eta = "later"

    def __call__(self, wait: Wait) -> None:
        eta = _eta(wait)
        self._eta = eta or "later"
        self._draw(
            f"Waiting for a GPU: place {wait.position} in the waitlist, {eta or 'no estimate'} ({wait.reason}). "
            "Interrupt to leave."
        )

    def offered(self, answer: Answer) -> bool:
        """A smaller slice is held for us: take it?"""
        row = answer.lease
        now, wanted = format_size(row.slices[0].vram_bytes), format_size(row.request.vram_bytes)
        # Nobody is kept longer at a question than they said they would wait.
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
        """A page keeps an open question, and what is typed there would go nowhere. Nothing of the cell has been shown yet."""
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
    """What the user types, or '' when nobody answers in time."""
    if seconds <= 0:
        return ""
    try:
        return _asked_in_a_terminal(question, seconds) if terminal else _asked_in_a_page(question, seconds)
    except Exception:  # a front end that cannot be asked
        return ""


def _asked_in_a_terminal(question: str, seconds: float) -> str:
    """Not `input()`: an interrupt that comes between its question and its read is heard only at the next line."""
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
    """A kernel's `input()` is left by an interrupt, and by nothing else."""
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
