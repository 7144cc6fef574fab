"""Large memory, worked through by two threads: one core copies or reads it no faster than half of what the memory could give.

Rules of this file:
- What is called releases the interpreter for most of its time, else two threads are no faster than one.
- Nobody returns while the other half is still being worked on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

#: Below it a thread costs more than it saves.
WORTH_IT_BYTES = 8 << 20


def in_halves(size: int, work: Callable[[int, int], None]) -> None:
    """`work(from, to)` for both halves of a range, at once. It must not raise."""
    middle = size // 2
    other = threading.Thread(target=work, args=(0, middle), name="sublet-other-half", daemon=True)
    other.start()
    try:
        work(middle, size)
    finally:
        other.join()
