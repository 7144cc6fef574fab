"""The one way in which a test waits: until something is true, and no longer.

It looks at once, and then less and less often, for a look may be a process. It is patient, because the machine may be crowded: what must
be quick is measured where it is asked for. When it gives up it says what it waited for: the words it was given, or its caller's line.
"""

from __future__ import annotations

import linecache
import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(fact: Callable[[], T], seconds: float = 60.0, *, what: str = "") -> T:
    """What `fact` gives as soon as it is true."""
    caller = sys._getframe(1)
    deadline = time.monotonic() + seconds
    pause = 0.004
    while not (found := fact()):
        if time.monotonic() >= deadline:
            line = linecache.getline(caller.f_code.co_filename, caller.f_lineno).strip()
            raise AssertionError(f"{seconds:.0f} s were not enough for this to become true: {what or line}")
        time.sleep(pause)
        pause = min(0.04, pause * 1.2)
    return found
