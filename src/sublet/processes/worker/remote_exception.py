"""A worker's exception, on its way to the caller and after it arrived.

Rules of this file:
- It arrives as itself where it can, with its traceback there as the cause. One that cannot travel is
  `CallFailed`, with the same cause.
- Plain Python: a client of a studio reads these wherever it runs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from sublet.core.errors import CallFailed
from sublet.processes.channel.pickling import unpack_whole


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way: itself if it can travel, and its traceback as text in any case."""

    pickled: bytes
    kind: str
    text: str
    trace: str
    begun: bool = True  # False: what the call needs could not be unpacked here; it is to be sent again


class RemoteTraceback(Exception):
    """Shown as the cause of an exception raised in a worker: where in the worker it was."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"in the leased worker:\n{self.text.rstrip()}"


def revived(failure: Failure) -> BaseException:
    if failure.pickled:
        with contextlib.suppress(Exception):
            error = unpack_whole(failure.pickled)
            if isinstance(error, BaseException):
                error.__cause__ = RemoteTraceback(failure.trace)
                return error
    lost = CallFailed(f"{failure.kind}: {failure.text}")
    lost.__cause__ = RemoteTraceback(failure.trace)
    return lost
