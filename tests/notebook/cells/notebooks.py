"""A notebook's variables and its `%%gpu` cells, with everything real that they pass through but the ledger:
the order, the pickles, the worker, the shell in it, and the way back.

A normal cell is `here(source)`, a `%%gpu` cell `there(source)`. Both run as `__main__` would.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from sublet.core.cells.names import names_of
from sublet.core.errors import WorkerLost
from sublet.core.leasing.lease import LeaseState
from sublet.notebook.cells import inside_cell
from sublet.notebook.cells.messages import CellOrder
from sublet.notebook.cells.notebook_lease import CellOutcome, CellSource, NotebookLease
from sublet.notebook.cells.variable_sync import unpack_values
from sublet.notebook.options import CellOptions
from sublet.processes.clock import HostClock
from sublet.processes.worker.local import LocalWorker
from tests.processes.worker.test_screen import Seen


@dataclass
class HeldLease:
    """What `NotebookLease` asks of a lease, on a worker that is just there."""

    id: str
    worker: LocalWorker
    status: str = "active"
    devices: Sequence[str] = ("device-0",)
    vram_bytes: int = 1
    notice: Any = None
    orders: list[dict[str, Any]] = field(default_factory=list)
    before_cell: Callable[[], None] = lambda: None
    granted_at: int = 0
    here: bool = True

    def on_notice(self, callback: Any) -> None:
        pass

    def keep_warm(self, then: Any) -> None:
        pass

    def run_shown(self, function: Any, args: tuple[CellOrder], screen: Any, answer: Any) -> Any:
        self.before_cell()
        self.orders.append(dict.fromkeys(unpack_values(args[0].values)))
        return self.worker.call_shown(function, args, screen, answer)

    def release(self, *, patience_us: int = 0) -> None:
        self.status = "ended"


def look(lease_id: str, *, patience_us: int | None = 0) -> Any:
    row = SimpleNamespace(state=LeaseState.ACTIVE, ended_at=0, reason=None, detail="")
    return SimpleNamespace(lease=row, at=1)


class NothingKept:
    """No `--keep` here."""

    last = None
    bytes_written = 0
    job = "notebook"

    def settle(self, seconds: float | None = None) -> str:
        return ""


def empty_the_worker() -> None:
    """As if it were another one."""
    space = sys.modules["__main__"].__dict__
    for name in [name for name in space if not name.startswith("__")]:
        del space[name]


class Notebook:
    def __init__(self, worker: LocalWorker) -> None:
        self.worker = worker
        self.main = types.ModuleType("__main__")
        self.space = self.main.__dict__
        self.screen = Seen()
        self._leases = 0
        self._cells = NotebookLease(
            self._take,  # type: ignore[arg-type]
            look,
            HostClock(),
            NothingKept(),  # type: ignore[arg-type]
            inside_cell.run,
        )

    def _take(self, wish: CellOptions) -> HeldLease:
        self._leases += 1
        self.worker.call(empty_the_worker, (), {})
        return HeldLease(f"lease-{self._leases}", self.worker)

    @property
    def lease(self) -> HeldLease:
        found: Any = self._cells.lease
        assert isinstance(found, HeldLease)
        return found

    def here(self, source: str) -> None:
        exec(compile(source, "<notebook>", "exec"), self.space)

    def there(self, source: str, **wish: Any) -> CellOutcome:
        made = CellSource(
            body=source,
            header="%%gpu",
            count=1,
            reads=names_of(source).reads,
            front="notebook",
            name="<cell>",
            texts=lambda files: {},
        )
        ran = self._cells.run(CellOptions(**wish), made, self.space, self.screen)
        assert ran.report is not None, ran.error
        if ran.report.failure is not None:
            raise CellRaised(ran.report.failure.kind, ran.report.failure.text)
        return ran

    @property
    def sent(self) -> set[str]:
        """What went along with the last cell."""
        return set(self.lease.orders[-1])

    def lose_the_worker(self) -> None:
        """Between two cells."""
        self._cells.release()

    def fail_before_the_next_cell(self) -> None:
        """Its payload is packed, and it never gets there."""

        def fail() -> None:
            self.lease.before_cell = lambda: None
            raise WorkerLost("it was not begun", begun=False)

        self.lease.before_cell = fail

    def only_there(self) -> set[str]:
        return set(self._cells.only_there)


class CellRaised(Exception):
    """By the cell's own code: its kind and its text."""
