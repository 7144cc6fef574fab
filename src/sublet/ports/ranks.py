"""The processes that train one job together. Alone, there is one.

Rules of this port:
- Every rank calls each verb the same number of times, in the same order. What a verb returns is the same on all of them, or for rank 0.
- Rank 0 holds the lease, owns the job and commits for all.
- A verb ends: with the others' word, or with `RankLost` when one of them is gone or silent for too long.
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

    def share(self, value: Any, *, patient: bool = False) -> Any:
        """What rank 0 gave. Called at a resume (`patient`: rank 0 may have to wait for its lease first) and when the run leaves."""

    def close(self) -> None:
        """Called when this rank leaves the run, for whatever reason: others that still wait for it raise `RankLost`."""


class Alone:
    """One process."""

    rank = 0
    world = 1

    def agree(self, flags: Sequence[int]) -> tuple[int, ...]:
        return tuple(flags)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def share(self, value: Any, *, patient: bool = False) -> Any:
        return value

    def close(self) -> None:
        pass
