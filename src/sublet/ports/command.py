"""A command that works under a lease, as the run that started it sees it.

Rules of this port:
- One of this machine is started before its lease is asked for, because its supervisor is the lease's holder; one that is placed elsewhere
  after the grant, on the host of its devices. It runs nothing until `begin`.
- Its supervisor enforces every deadline it was told, alone. The one who waits here may be stopped or killed; the command still ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sublet.core.notice import Notice
from sublet.ports.ledger import LeaseKey
from sublet.ports.worker import Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """How a command ended."""

    code: int | None  # as a shell shows it: 128 + the signal; None: nobody saw it
    why: str = ""  # what its supervisor ended it for; '' when it left by itself
    killed: bool = False  # at a deadline, because it had not left
    lease_over: bool = False  # that deadline was its lease's; or its host is gone, and its lease with it


class Command(Worker, Protocol):
    def entrust(self, key: LeaseKey) -> None:
        """Called after the grant, before `begin`: the right to commit, where the command finds it."""

    def drain(self, notice: Notice) -> None:
        """Called when the notice has been written here: TERM to its main process now, to the rest later, KILL to everything at the deadline.
        One on another machine finds the notice written there, too."""

    def left(self) -> Left | None:
        """None while it runs. Called whenever `fileno` is readable."""

    def fileno(self) -> int: ...

    def steps(self) -> tuple[int, int]:
        """The step it worked on last, and the last one it committed; zeros for a command that never said."""
