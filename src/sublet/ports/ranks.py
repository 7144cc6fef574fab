"""The processes that train one job together. Alone, there is one.

Rules of this port:
- Every rank calls each verb the same number of times, in the same order. What a verb returns is the same on all of them, or for rank 0.
- Rank 0 holds the lease, owns the job and commits for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Ranks(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def agree(self, flags: Sequence[int]) -> tuple[int, ...]:
        """The largest of each, over all ranks. Called once at every step boundary."""

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, by rank, on rank 0; elsewhere an empty list. Called at a save."""

    def share(self, value: Any) -> Any:
        """What rank 0 gave. Called at a resume."""


class Alone:
    """One process."""

    rank = 0
    world = 1

    def agree(self, flags: Sequence[int]) -> tuple[int, ...]:
        return tuple(flags)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def share(self, value: Any) -> Any:
        return value
