"""What is asked for with a cell, the cell itself, and what became of it.

Rules of this file:
- Records only: `notebook/` fills them in and shows them, `runtime/cell.py` runs what is between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sublet.core.cell_account import Line
from sublet.core.errors import SubletError
from sublet.ports.cell import CellReport
from sublet.runtime.cell_keep import Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a `%%gpu` line asks for, checked."""

    vram: str = "1GiB"
    ttl: str = "5m"
    warm_us: int | None = None  # the ttl, if the line says one: it counts for a warm lease too
    tier: str = "interactive"
    count: int = 1
    exclusivity: str = "shared"
    tenant: str = ""
    wait: str = ""
    least: str = ""
    takes: tuple[str, ...] | None = None  # --in
    gives: tuple[str, ...] | None = None  # --out
    keep: tuple[str, ...] = ()
    every_us: int = 30_000_000
    release: bool = False

    @property
    def by_name(self) -> bool:
        """Exactly what is named goes there or comes back."""
        return self.takes is not None or self.gives is not None

    @property
    def place(self) -> tuple[object, ...]:
        """What a lease must be like to serve this cell."""
        return (self.vram, self.tier, self.count, self.exclusivity, self.tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A cell as the notebook has it."""

    body: str
    header: str
    count: int
    reads: tuple[str, ...]
    front: str
    name: str
    texts: Callable[[Iterable[str]], Mapping[str, tuple[int, str]]]  # of the notebook's cells, by file name
    colors: str = ""


@dataclass(slots=True, kw_only=True)
class Ran:
    """What became of a cell, for whoever shows it."""

    report: CellReport | None = None
    line: Line | None = None
    kept: Kept | None = None
    result: Any = None
    stayed: dict[str, str]
    before: str = ""  # why the session before it ended, when this cell had to take a new one
    error: SubletError | None = None  # lost, or not saved; what the cell itself raised is in the report
