"""What is said and asked while a cell waits for its GPU. In a page it is seen by `test_lab.py`; here, a
terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pexpect
import pytest

from sublet.core.scheduling.admission import Wait
from sublet.core.values import HOUR_US, MINUTE_US, SECOND_US
from sublet.notebook.screen import WaitDisplay

_ASKS = """
from sublet.notebook.screen import ask
print('asked', repr(ask('take it? ', {seconds}, terminal=True)))
"""


@pytest.fixture
def terminal() -> Iterator[Any]:
    """Starts Python in a real one."""
    started = []

    def start(code: str) -> Any:
        started.append(pexpect.spawn(sys.executable, ["-c", code], env=dict(os.environ), encoding="utf-8"))
        return started[-1]

    yield start
    for child in started:
        child.close(force=True)


def test_a_question_nobody_answers_in_a_terminal_is_given_up(terminal: Any) -> None:
    child = terminal(_ASKS.format(seconds=0.3))
    child.expect_exact("take it? ", timeout=30)
    child.expect_exact("asked ''", timeout=30)


def test_an_answer_in_a_terminal_counts(terminal: Any) -> None:
    child = terminal(_ASKS.format(seconds=60))
    child.expect_exact("take it? ", timeout=30)
    child.sendline("y")
    child.expect_exact("asked 'y'", timeout=30)


def test_an_interrupt_of_the_user_s_own_is_no_answer(terminal: Any) -> None:
    child = terminal(_ASKS.format(seconds=60))
    child.delaybeforesend = None  # also one that comes before the terminal is read
    child.expect_exact("take it? ", timeout=30)
    child.sendintr()
    child.expect_exact("KeyboardInterrupt", timeout=30)


class Screen:
    kind = "terminal"

    def __init__(self) -> None:
        self.lines: list[str] = []

    def text(self, _: str, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize(
    ("eta_us", "words"),
    [
        (None, "no estimate"),
        (400_000, "any moment"),
        (12 * SECOND_US, "in about 12 s"),
        (30 * MINUTE_US - 2 * SECOND_US, "in about 30 min"),
        (3 * HOUR_US - SECOND_US, "in about 3 h"),
    ],
)
def test_the_place_is_told_with_a_rough_estimate(eta_us: int | None, words: str) -> None:
    screen: Any = Screen()
    waiting = WaitDisplay(screen)
    for _ in range(2):
        waiting(Wait(position=2, eta_us=eta_us, reason="resources: needs 8GB, nothing is free"))
    assert screen.lines == [
        f"Waiting for a GPU: place 2 in the waitlist, {words} (resources: needs 8GB, nothing is free). "
        "Interrupt to leave.\n"
    ]
