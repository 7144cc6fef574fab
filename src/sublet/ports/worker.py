"""A leased worker, as the process that asked for it sees it.

Rules of this port:
- A worker is started before its lease is asked for, because the lease names it as its holder. It runs nothing until `begin`.
- A worker that is gone raises `WorkerLost` from whatever is asked of it; `ending` says why, in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sublet.core.lease import Holder

#: Arguments of one call.
Call = tuple[Sequence[Any], Mapping[str, Any]]


class Worker(Protocol):
    @property
    def holder(self) -> Holder: ...

    @property
    def containment(self) -> str: ...

    @property
    def ending(self) -> str:
        """Why it ended; '' while it lives."""

    def begin(self, lease_id: str, epoch: int, environment: Mapping[str, str]) -> None:
        """Called once, after the lease was granted and armed."""

    def arm(self, stop_us: int, kill_us: int, *, confirm: bool = False) -> None:
        """No new device work after the first, no process after the second. Called at the grant and at every renewal."""

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run it there; what it prints appears here, what it raises is raised here."""

    def call_many(self, function: Callable[..., Any], calls: Sequence[Call]) -> list[tuple[bool, Any]]:
        """Several calls in one trip: (True, result) or (False, exception) each."""

    def end(self, why: str) -> None:
        """Returns when it is gone, or has been told and did not answer in time."""


class Workers(Protocol):
    def start(self) -> Worker:
        """Called when a lease is about to be asked for that a worker will hold."""
