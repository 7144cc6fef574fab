"""What stands behind a notebook's magics: its settings, its lease, what it keeps.

Rules of this file:
- One per kernel, made when the extension is loaded; everything that costs time is made when it is first needed, or warmed up behind
  the user's first cells.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import secrets
import threading
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from sublet.borrowing import _disabled
from sublet.core.errors import SubletError
from sublet.hosting.in_step import Travel
from sublet.notebook import inside_cell
from sublet.notebook.front import Front
from sublet.notebook.places import Place, Quota, place_of
from sublet.notebook.waiting import Waiting
from sublet.ports.held import HeldLease
from sublet.ports.ledger import Answer
from sublet.runtime.cell import Cells
from sublet.runtime.cell_keep import KeptState
from sublet.runtime.cell_wish import Ran, Source, Wish
from sublet.settings import Settings, load_settings
from sublet.wiring import CLOCK


class Workbench:
    def __init__(self, front: Front) -> None:
        self._front = front
        kept = KeptState(_job_name(front), lambda: self.place.store(), lambda job: self.place.version(job))
        self.cells = Cells(self._take, self._look, CLOCK, kept, Travel(), inside_cell.run)
        atexit.register(self.close)

    @functools.cached_property
    def settings(self) -> Settings:
        return load_settings()

    @functools.cached_property
    def place(self) -> Place:
        """This machine, or the studio that SUBLET_URL named when the first cell ran."""
        return place_of(self.settings)

    def plainly(self) -> bool:
        return _disabled()

    def warm_up(self) -> None:
        """Behind the user's back: the first cell then finds the ledger, the warden and a worker ready, or the studio."""

        def warm() -> None:
            with contextlib.suppress(SubletError, OSError):
                self.place.warm_up()

        if not self.plainly():
            threading.Thread(target=warm, name="sublet-warms-up", daemon=True).start()

    def run(self, wish: Wish, source: Source, space: MutableMapping[str, Any]) -> Ran:
        return self.cells.run(wish, source, space, self._front)

    def release(self) -> HeldLease | None:
        lease = self.cells.lease
        self.cells.release()
        return lease

    def restore(self, space: dict[str, Any], job: str) -> tuple[str, ...]:
        return self.cells.kept.restore(space, job)

    def quota(self) -> Quota:
        """Whose GPU time this is, and how much of it there is."""
        return self.place.quota(self.cells.lease)

    def _look(self, lease_id: str, *, patience_us: int | None = None) -> Answer:
        return self.place.look(lease_id, patience_us=patience_us)

    def _take(self, wish: Wish) -> HeldLease:
        waiting = Waiting(self._front)
        asks = self._front.can_ask() and not wish.least
        try:
            return self.place.take(wish, self.cells.kept.job, waiting, waiting.offered if asks else None)
        finally:
            waiting.over()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.cells.release()
            self.cells.kept.close()


def _job_name(front: Front) -> str:
    """What the checkpoints of this kernel are called: after the notebook, and no other kernel's."""
    space = front.shell.user_ns
    path = os.environ.get("JPY_SESSION_NAME") or str(space.get("__vsc_ipynb_file__", "")) or front.kind
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).stem)[:40].strip("-._") or "notebook"
    return f"{stem}-{secrets.token_hex(3)}"
