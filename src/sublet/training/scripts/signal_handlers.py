"""A script's own handlers of the signals that are warnings: they are not called.

What such a handler does (sets a flag that ends the loop, raises, saves in its own way) is for a program that
is about to end. Under the shim it does not end: it is saved between two steps and goes on later, and must not
find that it was told to stop.

Rules of this file:
- A script that asks for its handler gets the one it installed.
- A warning is heard by whoever heard it before the script came. Of SIGINT, only the first is one.
- A forked child is none of ours: its handlers are called.
"""

from __future__ import annotations

import functools
import os
import signal
from types import FrameType
from typing import Any

from sublet.notice_bus.bus import SIGNALS

_NUMBERS = frozenset(map(int, SIGNALS))


class HeldBack:
    """In the place of a script's handler."""

    def __init__(self, handler: Any, ours: Any) -> None:
        self.handler = handler
        self.ours = ours  # who hears of warnings
        self._pid = os.getpid()
        self._interrupts = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._pid != os.getpid() or self._interrupts > 1:
            if callable(self.handler):
                self.handler(number, frame)
        elif callable(self.ours):
            self.ours(number, frame)


def hold_handlers_back() -> None:
    """From now on. Called when our own handlers are in their place."""
    there = vars(signal)
    plain, plain_get = signal.signal, signal.getsignal
    ours = {number: plain_get(number) for number in _NUMBERS}

    @functools.wraps(plain)
    def install(signalnum: int, handler: Any, /) -> Any:
        if int(signalnum) not in _NUMBERS or not _is_the_scripts(handler):
            return _of_the_script(plain(signalnum, handler))
        return _of_the_script(plain(signalnum, HeldBack(handler, ours[int(signalnum)])))

    @functools.wraps(plain_get)
    def installed(signalnum: int, /) -> Any:
        return _of_the_script(plain_get(signalnum))

    there["signal"], there["getsignal"] = install, installed


def _is_the_scripts(handler: Any) -> bool:
    """A warning that is to be ignored, or to end the process, is left to the system."""
    module = getattr(handler, "__module__", "") or ""
    return (
        callable(handler) and handler is not signal.default_int_handler and not module.startswith("sublet.")
    )


def _of_the_script(handler: Any) -> Any:
    return handler.handler if isinstance(handler, HeldBack) else handler
