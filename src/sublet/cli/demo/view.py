"""What the demo shows: a line per event, and on a terminal, below them, the leases, steps, commits and
receipts as they are now.

Rules of this file:
- It only reads the ledger. Everything on the screen can be looked up there.
- Without a terminal there are the lines alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sublet.core.errors import SubletError
from sublet.core.leasing.lease import LeaseState
from sublet.core.progress.effect import Head
from sublet.core.values import format_duration, format_size
from sublet.ports.ledger import Ledger
from sublet.ports.processes import Receipt

_STYLES = {"dim": "dim", "loss": "yellow", "good": "green", "bad": "bold red", "head": "bold", "": ""}
_SHOWN = 7


class DemoView:
    def __init__(self, ledger: Ledger, job: str, steps: int) -> None:
        self._ledger = ledger
        self._job = job
        self._steps = steps
        self._begun = time.monotonic()
        self._console = Console(highlight=False, soft_wrap=True)
        self._live: Live | None = None

    def say(self, mark: str, text: str, style: str = "") -> None:
        at = f"{time.monotonic() - self._begun:5.1f}s"
        self._console.print(Text(f"{at}  {mark:<9} {text}", style=_STYLES[style]))

    @contextmanager
    def live(self) -> Iterator[None]:
        """The picture below the lines, drawn anew several times a second, on a terminal."""
        if not sys.stdout.isatty():
            yield
            return
        with Live(
            console=self._console, get_renderable=self._drawn, refresh_per_second=8, transient=True
        ) as live:
            self._live = live
            try:
                yield
            finally:
                self._live = None

    def _drawn(self) -> Panel:
        try:
            head = self._ledger.head(self._job)
            return Panel(Group(self._progress(head), self._leases()), title=f"job {self._job}", expand=True)
        except SubletError as e:
            return Panel(e.message)

    def _progress(self, head: Head | None) -> Table:
        step = head.step if head is not None else 0
        row = Table.grid(padding=(0, 1))
        committed = (
            f"version {head.version}, {_ago(self._ledger.now() - head.committed_at)}"
            if head
            else "nothing yet"
        )
        row.add_row(
            "committed",
            ProgressBar(total=self._steps, completed=step, width=40),
            f"step {step}/{self._steps}",
            Text(committed, style="dim"),
        )
        return row

    def _leases(self) -> Table:
        table = Table(expand=True, box=None, padding=(0, 1))
        for column in ("EPOCH", "LEASE", "STATE", "HELD", "LAST COMMIT", "RECEIPT"):
            table.add_column(column, no_wrap=True, overflow="ellipsis")
        now = self._ledger.now()
        receipts = {t.lease_id: t.receipt for t in self._ledger.receipts(limit=50)}
        mine = [
            a.lease
            for a in self._ledger.leases(live_only=False, limit=50)
            if a.lease.request.job == self._job
        ]
        for lease in mine[:_SHOWN]:
            over = lease.state is LeaseState.ENDED
            state = (
                f"{lease.state.value}: {lease.reason.value}"
                if lease.reason is not None
                else lease.state.value
            )
            receipt = receipts.get(lease.id)
            table.add_row(
                str(lease.epoch),
                lease.id[:12],
                Text(state, style="dim" if over else "yellow" if lease.reason else "green"),
                format_duration((lease.ended_at if over else now) - lease.granted_at),
                _ago(now - lease.committed_at) if lease.committed_at else "-",
                _short(receipt),
            )
        return table


def _short(receipt: Receipt | None) -> str:
    if receipt is None:
        return ""
    freed = f", {format_size(receipt.freed_bytes)} back" if receipt.freed_bytes else ""
    return f"{len(receipt.pids)} processes gone ({receipt.ladder}){freed}"


def _ago(us: int) -> str:
    return f"{max(0, us) / 1e6:.1f}s ago"
