"""What a process knows of the lease it works under, when it is a leased worker.

Rules of this file:
- `hosting/worker.py` fills it once, before any user code runs; everywhere else it is only read.
- The deadline lies in a page shared with the process that renews: no message is needed to see that it moved.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from sublet.core.errors import LeaseLost

PAGE_BYTES = 4096
_DEADLINE = struct.Struct("<q")


def write_deadline(page: mmap.mmap, deadline_us: int) -> None:
    _DEADLINE.pack_into(page, 0, deadline_us)


@dataclass(frozen=True, slots=True)
class Tenancy:
    """Has what a GpuSession asks of a lease."""

    id: str
    epoch: int
    page: mmap.mmap

    def check(self) -> None:
        (deadline_us,) = _DEADLINE.unpack_from(self.page, 0)
        if time.monotonic_ns() // 1000 >= deadline_us:
            raise LeaseLost(f"lease {self.id} has ended: it was not renewed in time")

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """The call this happens in is work already."""
        yield


_current: Tenancy | None = None


def move_in(tenancy: Tenancy) -> None:
    global _current
    _current = tenancy


def tenancy() -> Tenancy | None:
    """The lease this process is a worker of, or None."""
    return _current
