"""Which samples each batch of an epoch has, and which of them each rank gets.

Rules of this file:
- Every sample is in one batch of one rank, once an epoch; with `drop_last` the few behind the last full batch
  are in none.
- Every rank gets the same number of batches, and none of them is empty: ranks that train together wait for
  each other at every step.
- No batch has more than `batch_size` samples on a rank. So when fewer samples are left than there are ranks,
  the last two batches share what they have.
"""

from __future__ import annotations

from dataclasses import dataclass

from sublet.core.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The batches of one epoch over all ranks, as positions in its order, not as samples."""

    samples: int
    batch_size: int  # on each rank
    world: int = 1
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise BadInput(f"batch_size={self.batch_size} is no batch: use 1 or more")
        if self.world < 1:
            raise BadInput(f"world={self.world} is no number of ranks")
        if self.count == 0:
            raise BadInput(
                f"{self.samples} samples are not one full batch of {self.batch_size} on {self.world} "
                f"rank{'s' if self.world != 1 else ''}",
                remedy="use drop_last=False, or a smaller batch_size",
            )
        if (
            not self.drop_last
            and self._left
            and self._left < self.world
            and self.count * self.world > self.samples
        ):
            raise BadInput(
                f"{self.samples} samples cannot be shared by {self.world} ranks in batches of "
                f"{self.batch_size} so that each rank has one in every batch",
                remedy="use a larger batch_size, or drop_last=True",
            )

    @property
    def _whole(self) -> int:
        return self.batch_size * self.world

    @property
    def _left(self) -> int:
        return self.samples % self._whole

    @property
    def count(self) -> int:
        """The number of batches in an epoch, the same on every rank."""
        full = self.samples // self._whole
        return full if self.drop_last or not self._left else full + 1

    def bounds(self, batch: int) -> tuple[int, int]:
        """Where a batch begins and ends, over all ranks."""
        if not 0 <= batch <= self.count:
            raise BadInput(f"there is no batch {batch} in an epoch of {self.count}")
        return self._begin(batch), self._begin(batch + 1) if batch < self.count else self._begin(batch)

    def _begin(self, batch: int) -> int:
        if self.drop_last:
            return batch * self._whole
        if batch >= self.count:
            return self.samples
        if batch == self.count - 1 and 0 < self._left < self.world:
            return self.samples - self.world
        return batch * self._whole

    def share(self, batch: int, rank: int) -> tuple[int, int]:
        """Where a rank's part of a batch begins and ends."""
        begin, end = self.bounds(batch)
        size = end - begin
        return begin + size * rank // self.world, begin + size * (rank + 1) // self.world
