"""TensorBoard's writers, whose threads write what a script logged a moment ago.

Before a script is saved, what it logged is in the file: the writers' queues are empty, and each event is
there once.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from typing import Any

#: Where the class with the queue is, in TensorBoard and in tensorboardX.
MODULES = ("tensorboard.summary.writer.event_file_writer", "tensorboardX.event_file_writer")
_writers: weakref.WeakSet[Any] = weakref.WeakSet()


def know_event_writers(module: str) -> None:
    """Called when the module is there."""
    cls: Any = vars(sys.modules[module]).get("EventFileWriter")
    if cls is None:
        return
    plain = cls.__init__

    @functools.wraps(plain)
    def begin(self: Any, *args: Any, **keywords: Any) -> None:
        plain(self, *args, **keywords)
        _writers.add(self)

    cls.__init__ = begin


def flush_event_writers() -> None:
    for writer in list(_writers):
        with contextlib.suppress(OSError, ValueError, AssertionError):  # it was closed
            writer.flush()
