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

from sublet import under_lease
from sublet.borrowing import _disabled, ensure_tenant, gpu
from sublet.core.allowance import Allowance
from sublet.core.errors import SubletError
from sublet.core.policy import Policy
from sublet.core.tenancy import Tenant
from sublet.hosting.in_step import Travel
from sublet.notebook import inside_cell
from sublet.notebook.front import Front
from sublet.notebook.waiting import Waiting
from sublet.runtime.cell import Cells
from sublet.runtime.cell_keep import KeptState
from sublet.runtime.cell_wish import Ran, Source, Wish
from sublet.runtime.holding import WATCHDOG_US, Lease
from sublet.settings import Settings, load_settings
from sublet.wiring import CLOCK, checkpoints, ensure_warden, open_ledger, opening_of, workers


class Workbench:
    def __init__(self, front: Front) -> None:
        self._front = front
        kept = KeptState(_job_name(front), lambda: checkpoints(settings=self.settings), self._version)
        self.cells = Cells(
            self._take, lambda: open_ledger(self.settings), CLOCK, kept, Travel(), inside_cell.run
        )
        atexit.register(self.close)

    @functools.cached_property
    def settings(self) -> Settings:
        return load_settings()

    def plainly(self) -> bool:
        return _disabled()

    def warm_up(self) -> None:
        """Behind the user's back: the first cell then finds the ledger, the warden and a worker ready."""

        def warm() -> None:
            with contextlib.suppress(SubletError, OSError):
                open_ledger(self.settings)
                ensure_warden(self.settings, wait=False)
                workers(self.settings).warm()  # type: ignore[attr-defined]

        if not self.plainly():
            threading.Thread(target=warm, name="sublet-warms-up", daemon=True).start()

    def run(self, wish: Wish, source: Source, space: MutableMapping[str, Any]) -> Ran:
        return self.cells.run(wish, source, space, self._front)

    def release(self) -> Lease | None:
        lease = self.cells.lease
        self.cells.release()
        return lease

    def restore(self, space: dict[str, Any], job: str) -> tuple[str, ...]:
        return self.cells.kept.restore(space, job)

    def tenant(self) -> tuple[Tenant, Policy, int]:
        """Whose GPU time this is, by which rules, and the ledger's clock."""
        ledger = open_ledger(self.settings)
        lease = self.cells.lease
        name = lease.tenant if lease is not None else self.settings["tenant"]
        ensure_tenant(self.settings, ledger, name)
        return ledger.tenant(name), ledger.policy(), ledger.now()

    def allowance(self, tenant: str) -> Allowance:
        return open_ledger(self.settings).allowance(tenant)

    def _take(self, wish: Wish) -> Lease:
        waiting = Waiting(self._front)
        try:
            lease = gpu(
                wish.vram,
                wish.ttl,
                count=wish.count,
                exclusivity=wish.exclusivity,
                tier=wish.tier,
                wait=wish.wait or None,
                least=wish.least or None,
                tenant=wish.tenant or None,
                job=self.cells.kept.job,
                holder="worker",
                on_wait=waiting,
                on_offer=waiting.offered if self._front.can_ask() and not wish.least else None,
                settings=self.settings,
            )._keep()
        finally:
            waiting.over()
        openings = [opening_of(self.settings, lease, i, WATCHDOG_US) for i in range(len(lease.devices))]
        lease.run(under_lease.move_in, openings)
        return lease

    def _version(self, job: str) -> int:
        head = open_ledger(self.settings).head(job)
        return head.version if head is not None else 0

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
