"""What code under a lease may ask of it: `sublet.lease()` and `sublet.keep()`, inside a `%%gpu` cell or an `on_gpu` function.

Rules of this file:
- Both work in the leased worker, without the ledger. Elsewhere `lease()` says where it belongs, and `keep()` does nothing: a function
  that calls it also runs in a plain script.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sublet import inside
from sublet.core.errors import BadInput
from sublet.drivers.opening import Opening, open_device
from sublet.ports.session import Session

_openings: tuple[Opening, ...] = ()


def move_in(openings: Sequence[Opening]) -> None:
    """Called in the worker before its first cell: how its devices are opened."""
    global _openings
    _openings = tuple(openings)


class CurrentLease:
    """The lease this code runs under."""

    def __init__(self, tenancy: inside.Tenancy) -> None:
        self._tenancy = tenancy

    @property
    def id(self) -> str:
        return self._tenancy.id

    @property
    def epoch(self) -> int:
        return self._tenancy.epoch

    @property
    def seconds_left(self) -> float:
        """Until it must have been renewed."""
        return self._tenancy.seconds_left

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(opening.device_id for opening in _openings)

    @property
    def vram_bytes(self) -> int:
        """Per device."""
        return _openings[0].quota_bytes if _openings else 0

    @property
    def warned(self) -> bool:
        """Whether it was said to go soon: save now."""
        return self._tenancy.warned

    def open(self, device: int = 0) -> Session:
        """A GpuSession on one of its devices."""
        if not 0 <= device < len(_openings):
            raise BadInput(f"device {device} is not one of this lease's {len(_openings)}")
        return open_device(_openings[device], self._tenancy)

    def __repr__(self) -> str:
        return f"<lease {self.id} on {', '.join(self.devices)}, {self.seconds_left:.0f} s left>"


def lease() -> CurrentLease:
    """The lease this code runs under: `with sublet.lease().open() as gpu: ...` inside a `%%gpu` cell."""
    tenancy = inside.tenancy()
    if tenancy is None:
        raise BadInput(
            "this code does not run under a lease",
            remedy="call it inside a %%gpu cell, or lease one here: with sublet.gpu(...) as lease: ...",
        )
    return CurrentLease(tenancy)


def keep() -> bool:
    """Here everything the `%%gpu` cell keeps belongs together: save it, if it is time. Whether it was taken.

    In a function that trains, called by a cell with --keep. Without it the starts of the iterations of the cell's own loops are
    taken for such points; with it, only these. Elsewhere it does nothing."""
    cell = sys.modules.get("sublet.notebook.inside_cell")
    return bool(cell is not None and cell.point())
