"""What the maker of a sealed call does with what comes back.

Rules of this file:
- Nothing between the caller and the worker opens a call; here, at the caller's end, an answer is unpickled
  and a display is decoded.
- An answer is a pickle, or one JSON object when the call could not even begin.
- Plain Python: a client of a studio uses it wherever it runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sublet.core.errors import BadInput, CallFailed
from sublet.ports.worker import Part, Screen
from sublet.processes.channel.pickling import pack, unpack
from sublet.processes.worker.remote_exception import Failure, RemoteTraceback, revived
from sublet.processes.worker.screen import PlainScreen, opened_display

_PICKLE = 0x80  # what a pickle begins with, and no JSON does


class ScreenListener:
    """Implements `ports.worker.CallSink`: output to a screen, questions to whoever answers them."""

    interrupted = False

    def __init__(self, screen: Screen, answer: Callable[[Any], Any] | None = None) -> None:
        self._screen = screen
        self._answer = answer

    def text(self, stream: str, text: str) -> None:
        self._screen.text(stream, text)

    def show(self, display: bytes) -> None:
        try:
            what = opened_display(display)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as e:
            self._screen.text("stderr", f"A display cannot be shown here: {type(e).__name__}: {e}\n")
            return
        self._screen.show(what)

    def ask(self, head: Mapping[str, Any], parts: Sequence[Part]) -> tuple[bool, Sequence[Part]]:
        """Return (False, ()) when nobody answers; the call is then interrupted."""
        if head.get("ask") != "pickled" or self._answer is None:
            return False, ()
        return True, pack(self._answer(unpack([memoryview(part) for part in parts])))


class SilentSink:
    """Implements `ports.worker.CallSink` for calls of our own, which print nothing and ask nothing."""

    interrupted = False

    def text(self, stream: str, text: str) -> None:
        pass

    def show(self, display: bytes) -> None:
        pass

    def ask(self, head: Mapping[str, Any], parts: Sequence[memoryview]) -> tuple[bool, Sequence[Part]]:
        return False, []


def plain_screen() -> PlainScreen:
    """Return a screen that writes to this process's own streams, looked up when something is shown."""
    return PlainScreen({"stdout": lambda: sys.stdout, "stderr": lambda: sys.stderr})


def is_pickle(parts: Sequence[Part]) -> bool:
    return bool(parts) and memoryview(parts[0])[:1] == bytes([_PICKLE])


def opened_answer(fine: bool, parts: Sequence[Part]) -> tuple[bool, Any]:
    """Return the result, a `Failure`, or the exception for a call that could not even begin."""
    if not fine and not is_pickle(parts):
        return False, error_of_failure(failure_of(parts))
    try:
        return fine, unpack([memoryview(part) for part in parts])
    except Exception as e:
        return (
            False,
            BadInput(
                f"what the call returned cannot be made here: {type(e).__name__}: {e}",
                remedy="install here what it is made of, or return something plainer",
            ),
        )


def result_of(fine: bool, value: Any, interrupted: bool) -> Any:
    if interrupted:
        raise KeyboardInterrupt
    if not fine:
        raise revived(value) if isinstance(value, Failure) else value
    return value


def taken(fine: bool, value: Any) -> bool:
    """Whether the worker has what the call's parcel brought: the call returned, or raised after it began."""
    return fine or (isinstance(value, Failure) and value.begun)


def failure_of(parts: Sequence[Part]) -> dict[str, str]:
    """Read what a sealed call raised, when its one part says so in JSON."""
    try:
        said = json.loads(bytes(parts[0])) if len(parts) == 1 else None
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise BadInput(
            "what the session answered cannot be read", remedy="use one version of sublet on both sides"
        )
    return {name: str(said.get(name, ""))[:100_000] for name in ("kind", "text", "trace")}


def error_of_failure(said: Mapping[str, str]) -> BaseException:
    error = CallFailed(f"{said['kind']}: {said['text']}")
    error.__cause__ = RemoteTraceback(said["trace"])
    return error
