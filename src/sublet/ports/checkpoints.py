"""What a run asks of the checkpoint store. Implemented by `store.checkpoints.CheckpointStore`.

Rules of this port:
- A save that returned, or whose `result()` returned, is durable and committed; one that raised moved no head (C6).
- One save at a time: the next one, and `settle`, wait for the one under way and raise what went wrong with it, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sublet.core.checkpoint import Away
from sublet.core.effect import Steps
from sublet.ports.ledger import LeaseKey


class Fence(Protocol):
    """What a save asks of a lease."""

    @property
    def key(self) -> LeaseKey: ...
    def check(self) -> None: ...


class SavedState(Protocol):
    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...
    @property
    def bytes_written(self) -> int: ...
    @property
    def bytes_shared(self) -> int: ...


class SaveUnderWay(Protocol):
    @property
    def seconds(self) -> float:
        """How long it took, once it is done."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def result(self, timeout: float | None = None) -> SavedState: ...


class Checkpoints(Protocol):
    def save(
        self, name: str, state: Any, *, expected_version: int, lease: Fence, steps: Steps | None = None
    ) -> SavedState:
        """Called at a drain, and by a single step."""

    def save_behind(
        self,
        name: str,
        state: Any,
        *,
        expected_version: int,
        lease: Fence,
        steps: Steps | None = None,
        overlap: Any = None,
    ) -> SaveUnderWay:
        """Called by a training loop when a save is due: the state may change as soon as it returns."""

    def settle(self) -> None:
        """Called before the state of a save under way is counted on."""

    def load(self, name: str, *, version: int | str | None = None, keys: Sequence[str] | None = None) -> Any:
        """Called at a resume, and to give a duplicate its stored result."""

    @property
    def away(self) -> Away | None:
        """Called between steps: which replicas have not answered for some seconds, or None."""

    def give_up(self) -> None:
        """Called, from any thread, when the process must leave: a save under way fails now, and its head does not move (C6). The next save
        is made as if nothing had been."""

    def close(self) -> None: ...
