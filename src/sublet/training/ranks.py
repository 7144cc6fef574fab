"""The ranks of a run under torchrun, over torch.distributed.

Rules of this file:
- Groups of our own, on gloo: what the run says between ranks goes through host memory, beside whatever the
  model uses (NCCL, gloo).
- A rank that leaves without finishing closes its side, and the kernel closes that of one that was killed: the
  others learn it at their next exchange and raise `RankLost`. A rank that neither speaks nor ends is waited
  for, for `timeout`.
- Only the first exchange of a run is waited for longer: rank 0 may be on the waitlist for its lease.
- Messages between ranks are pickled within one job and never stored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any, Protocol, TypeVar

from sublet.core.errors import BadInput, RankLost
from sublet.core.values import SECOND_US, format_duration

#: How long a rank that says nothing is waited for.
TIMEOUT_US = 600 * SECOND_US
#: How long rank 0 may wait for its lease while the others wait for it.
PATIENCE = timedelta(days=7)

T = TypeVar("T")


class Ranks(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def agree(self, flags: Sequence[int]) -> tuple[int, ...]:
        """Return the largest of each, over all ranks. Called once at every step boundary."""

    def gather(self, value: Any) -> list[Any]:
        """What every rank gave, by rank, on rank 0; elsewhere an empty list. Called at a save."""

    def share(self, value: Any, *, patient: bool = False) -> Any:
        """What rank 0 gave. Called at a resume (`patient`: rank 0 may have to wait for its lease first) and
        when the run leaves."""

    def close(self) -> None:
        """Called when this rank leaves the run, for whatever reason: others that still wait for it raise
        `RankLost`."""


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


def find_ranks(timeout_us: int = TIMEOUT_US) -> Ranks:
    """Return the ranks of torch.distributed if it is initialised with more than one; else `Alone`."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return TorchRanks(timeout_us) if distributed.get_world_size() > 1 else Alone()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdigit() and world.isdigit() and int(world) > 1:
        raise BadInput(
            f"this is rank {rank} of {world}, and torch.distributed is not initialised: each rank would "
            "train the job alone",
            remedy="call torch.distributed.init_process_group('nccl') (or 'gloo') before sublet.train, or "
            "unset RANK and WORLD_SIZE if this process is alone",
        )
    return Alone()


class TorchRanks:
    def __init__(self, timeout_us: int = TIMEOUT_US) -> None:
        self._torch: Any = import_module("torch")
        self._distributed: Any = import_module("torch.distributed")
        self._timeout_us = timeout_us
        self.rank: int = self._distributed.get_rank()
        self.world: int = self._distributed.get_world_size()
        self._group = self._new_group(timedelta(microseconds=timeout_us))
        self._patient = self._new_group(PATIENCE)

    def _new_group(self, timeout: timedelta) -> Any:
        return self._said(lambda: self._distributed.new_group(backend="gloo", timeout=timeout))

    def agree(self, flags: Sequence[int]) -> tuple[int, ...]:
        said = self._torch.tensor(flags, dtype=self._torch.int64)
        largest = self._distributed.ReduceOp.MAX
        self._said(lambda: self._distributed.all_reduce(said, op=largest, group=self._group))
        return tuple(said.tolist())

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] | None = [None] * self.world if self.rank == 0 else None
        there = self._on_host(value)
        self._said(lambda: self._distributed.gather_object(there, found, dst=0, group=self._group))
        return found or []

    def share(self, value: Any, *, patient: bool = False) -> Any:
        said = [value if self.rank == 0 else None]
        group = self._patient if patient else self._group
        self._said(lambda: self._distributed.broadcast_object_list(said, src=0, group=group))
        return said[0]

    def close(self) -> None:
        """The others learn of it at their next exchange."""
        groups = (self._group, self._patient)
        self._group = self._patient = None
        for group in groups:
            # The default group may have been destroyed before, and ours with it.
            if group is not None and self._distributed.is_initialized():
                self._distributed.destroy_process_group(group)

    def _said(self, word: Callable[[], T]) -> T:
        try:
            return word()
        except (RuntimeError, ValueError) as e:
            raise RankLost(
                f"rank {self.rank} of {self.world} could not reach the others ({str(e).strip()[:200]}): one "
                "of them has ended, or "
                f"said nothing for {format_duration(self._timeout_us)}; what is committed is not lost",
            ) from e

    def _on_host(self, value: Any) -> Any:
        """A tensor of another rank's device could not be put anywhere here."""
        if isinstance(value, self._torch.Tensor):
            return value.detach().cpu()
        if isinstance(value, dict):
            return {name: self._on_host(member) for name, member in value.items()}
        if isinstance(value, list):
            return [self._on_host(member) for member in value]
        if type(value) is tuple:
            return tuple(self._on_host(member) for member in value)
        return value
