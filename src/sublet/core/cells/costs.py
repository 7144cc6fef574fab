"""What the cells of a notebook cost, in lines that add up to the ledger's usage.

Rules of this file:
- The lines of a lease tile it: the first begins at the grant, each begins where the one before it ended, the
  last ends where the ledger says the lease ended (T4). So the GPU time of a lease's lines is the ledger's
  usage, to the microsecond.
- A clock reading never moves a line back, before the grant, or past the recorded end: it is clipped. When a
  line was written before the end became known, and reached past it, it is cut there.
- Time held warm before a cell is the cell's: somebody kept the GPU for it. What is left when the lease ends
  is a line of its own.
- Prices are rounded once, on the sum: a line costs what the sum so far costs with it, less what it cost
  without it. So printed prices add up to the printed total, and each is within one millionth of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sublet.core.errors import InvariantBroken
from sublet.core.values import HOUR_US


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCost:
    """One line under a cell, or the time a lease was held warm without a cell behind it."""

    lease_id: str
    cell: int  # the execution count; 0 for warm time
    device: str
    devices: int
    vram_bytes: int
    from_at: int
    to_at: int
    busy_us: int  # of it, how long the cell ran
    launches: int = 0
    checkpoint_bytes: int = 0

    @property
    def gpu_us(self) -> int:
        return (self.to_at - self.from_at) * self.devices


def price_micro(gpu_us: int, per_hour_micro: int) -> int:
    """In millionths, rounded half up, once."""
    return (gpu_us * per_hour_micro * 2 + HOUR_US) // (HOUR_US * 2)


class NotebookCosts:
    """The lines of one notebook, in the order in which they were written."""

    def __init__(self) -> None:
        self._leases: dict[str, CellCost] = {}  # an empty line at the grant: what every line begins as
        self._reached: dict[str, int] = {}  # where the last line of a lease ended
        self._ended: dict[str, int] = {}
        self._lines: list[CellCost] = []

    def begin(self, lease_id: str, granted_at: int, device: str, devices: int, vram_bytes: int) -> None:
        first = CellCost(
            lease_id=lease_id,
            cell=0,
            device=device,
            devices=devices,
            vram_bytes=vram_bytes,
            from_at=granted_at,
            to_at=granted_at,
            busy_us=0,
        )
        if self._leases.setdefault(lease_id, first) != first:
            raise InvariantBroken(f"lease {lease_id} began twice, differently")
        self._reached.setdefault(lease_id, granted_at)

    def cell_ended(
        self,
        lease_id: str,
        at: int,
        *,
        cell: int,
        busy_us: int,
        launches: int = 0,
        checkpoint_bytes: int = 0,
    ) -> CellCost:
        """Everything since the line before it, or since the grant."""
        line = replace(
            self._next(lease_id, at), cell=cell, launches=launches, checkpoint_bytes=checkpoint_bytes
        )
        line = replace(line, busy_us=min(max(0, busy_us), line.to_at - line.from_at))
        self._write(line)
        return line

    def lease_ended(self, lease_id: str, ended_at: int) -> CellCost | None:
        """The time since the last line, if there is any. `ended_at` is what the ledger recorded."""
        ended_at = max(self._lease(lease_id).from_at, ended_at)
        if self._ended.setdefault(lease_id, ended_at) != ended_at:
            raise InvariantBroken(
                f"lease {lease_id} ended twice, at {self._ended[lease_id]} and at {ended_at}"
            )
        if self._reached[lease_id] > ended_at:
            self._lines = [
                _cut(line, ended_at) if line.lease_id == lease_id else line for line in self._lines
            ]
            self._reached[lease_id] = ended_at
        rest = self._next(lease_id, ended_at)
        if rest.from_at == rest.to_at:
            return None
        self._write(rest)
        return rest

    def leases(self) -> tuple[str, ...]:
        return tuple(self._leases)

    def is_settled(self, lease_id: str) -> bool:
        """Whether the ledger has recorded its end, so that its lines are complete."""
        return lease_id in self._ended

    def line(self, lease_id: str, cell: int) -> CellCost | None:
        """The line of a cell as it is now: the end of its lease may have cut it since it was written."""
        return next((item for item in self.lines(lease_id) if item.cell == cell), None)

    def lines(self, lease_id: str | None = None) -> tuple[CellCost, ...]:
        return tuple(line for line in self._lines if lease_id in (None, line.lease_id))

    def gpu_us(self, lease_id: str | None = None) -> int:
        return sum(line.gpu_us for line in self.lines(lease_id))

    def prices(self, per_hour_micro: int) -> tuple[int, ...]:
        """The price of each of `lines()`. Their sum is the price of the sum."""
        found: list[int] = []
        gpu_us = 0
        for line in self._lines:
            before = price_micro(gpu_us, per_hour_micro)
            gpu_us += line.gpu_us
            found.append(price_micro(gpu_us, per_hour_micro) - before)
        return tuple(found)

    def price_micro(self, per_hour_micro: int, lease_id: str | None = None) -> int:
        """The sum over all lines, or over those of one lease."""
        priced = zip(self._lines, self.prices(per_hour_micro), strict=True)
        return sum(price for line, price in priced if lease_id in (None, line.lease_id))

    def _lease(self, lease_id: str) -> CellCost:
        try:
            return self._leases[lease_id]
        except KeyError:
            raise InvariantBroken(f"lease {lease_id} has no account: it never began") from None

    def _next(self, lease_id: str, at: int) -> CellCost:
        first, reached = self._lease(lease_id), self._reached[lease_id]
        until = min(at, self._ended.get(lease_id, at))
        return replace(first, from_at=reached, to_at=max(reached, until))

    def _write(self, line: CellCost) -> None:
        self._lines.append(line)
        self._reached[line.lease_id] = line.to_at


def _cut(line: CellCost, ended_at: int) -> CellCost:
    from_at, to_at = min(line.from_at, ended_at), min(line.to_at, ended_at)
    return replace(line, from_at=from_at, to_at=to_at, busy_us=min(line.busy_us, to_at - from_at))
