"""What both sides of a leased kernel must agree on: what the user reads when the GPU goes, and where the kernel finds its link.

Rules of this file:
- A leased kernel dies with its lease, and its variables with it: the words say so, and what is safe all the same.
- Words only. Before the end `in_kernel.py` says them, in the kernel; after it `kernel_lease.py` has the next kernel say them.
"""

from __future__ import annotations

import math
import signal

#: The descriptor of the kernel's end of the socket, and what it is to tell first.
LINK_VARIABLE = "SUBLET_KERNEL_LINK"
WORDS_VARIABLE = "SUBLET_KERNEL_WORDS"
MESSAGE_BYTES = 1 << 16

SAFE = "What was saved (files, checkpoints, committed steps of sublet.train) is safe; variables that were not are gone."


def ending(reason: str, seconds: float, *, final: bool) -> str:
    """A notice. One that is not final is taken back by work, or by a ledger that answers again."""
    said = f"GPU session ends in {math.ceil(seconds)} s ({reason})."
    if final:
        return f"{said} This kernel ends with it: save what you need now."
    unless = "a cell is run" if reason.startswith("idle") else "it can be renewed"
    return f"{said} This kernel ends with it, unless {unless} before that."


def ended(reason: str) -> str:
    """In the last moment of the old kernel."""
    return f"GPU session ended ({reason}). This kernel ends with it. {SAFE}"


def restarted(reason: str) -> str:
    """In the first cell of the next kernel."""
    return f"GPU session ended ({reason}). The kernel was restarted: run your cells again, they reacquire a GPU. {SAFE}"


def crashed(code: int | None, *, leased: bool) -> str:
    """In the first cell of the next kernel, when the lease was not to blame."""
    how = "its supervisor was killed"
    if code is not None:
        try:
            how = f"killed by {signal.Signals(code - 128).name}"
        except ValueError:
            how = f"exit code {code}"
    return (
        f"The kernel died ({how}), and its GPU was given back. It was restarted: run your cells again. {SAFE}"
    )
