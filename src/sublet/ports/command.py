"""A command that works under a lease, as the run that started it sees it.

Rules of this port:
- It is started before its lease is asked for, because its supervisor is the lease's holder. It runs nothing until `begin`.
- Its supervisor enforces every deadline it was told, alone. The one who waits here may be stopped or killed; the command still ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sublet.ports.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """How a command ended."""

    code: int | None  # as a shell shows it: 128 + the signal; None: nobody saw it
    why: str = ""  # what its supervisor ended it for; '' when it left by itself
    killed: bool = False  # at a deadline, because it had not left
    lease_over: bool = False  # that deadline was its lease's


class Command(Worker, Protocol):
    def drain(self, deadline_us: int) -> None:
        """Called when a Notice has been written: TERM to its main process now, to the rest later, KILL to everything at the deadline."""

    def left(self) -> Left | None:
        """None while it runs. Called whenever `fileno` is readable."""

    def fileno(self) -> int: ...

    def steps(self) -> tuple[int, int]:
        """The step it worked on last, and the last one it committed; zeros for a command that never said."""
