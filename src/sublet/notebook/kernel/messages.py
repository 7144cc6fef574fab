"""What both sides of a leased kernel agree on: what the user reads when the GPU goes, and the kernel's link.

Rules of this file:
- A leased kernel dies with its lease, and its variables with it: the messages say so, and what is safe.
- Texts only. Before the end `in_kernel.py` shows them; after it `lease.py` has the next kernel show them.
"""

from __future__ import annotations

import math
import signal

#: The variables with the descriptor of the kernel's end of the socket, and with the message to show first.
LINK_VARIABLE = "SUBLET_KERNEL_LINK"
WORDS_VARIABLE = "SUBLET_KERNEL_WORDS"
MESSAGE_BYTES = 1 << 16

SAFE = (
    "What was saved (files, checkpoints, committed steps of sublet.train) is safe; variables that "
    "were not are gone."
)


def ending(reason: str, seconds: float, *, final: bool) -> str:
    """The text of a notice. One that is not final is withdrawn when work begins or the ledger answers
    again."""
    said = f"GPU session ends in {math.ceil(seconds)} s ({reason})."
    if final:
        return f"{said} This kernel ends with it: save what you need now."
    unless = "a cell is run" if reason.startswith("idle") else "it can be renewed"
    return f"{said} This kernel ends with it, unless {unless} before that."


def ended(reason: str) -> str:
    """The last message of the old kernel."""
    return f"GPU session ended ({reason}). This kernel ends with it. {SAFE}"


def restarted(reason: str) -> str:
    """The message in the first cell of the next kernel."""
    return (
        f"GPU session ended ({reason}). The kernel was restarted: run your cells again, they reacquire a "
        f"GPU. {SAFE}"
    )


def crashed(code: int | None, *, leased: bool) -> str:
    """The message in the first cell of the next kernel, when the lease did not cause the end."""
    how = "its supervisor was killed"
    if code is not None:
        try:
            how = f"killed by {signal.Signals(code - 128).name}"
        except ValueError:
            how = f"exit code {code}"
    gpu = ", and its GPU was given back" if leased else ""
    return f"The kernel died ({how}){gpu}. It was restarted: run your cells again. {SAFE}"
