"""The live picture of `sublet queue stats --watch` on a terminal: how far a queue is, how fast, and who works
on it."""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sublet.cli.queues.view import WORKER_COLUMNS, eta_of, look, oldest_of, rate_of, work_of, worker_row
from sublet.core.errors import Disconnected
from sublet.ports.items import ConsumerRecord, QueueRecord, QueueStats
from sublet.queues.queue import Queue

#: The most workers that are drawn; the others are counted.
SHOWN = 12
_STYLES = {"ready": "", "delayed": "yellow", "leased": "cyan", "done": "green", "dead": "bold red"}


def draw(found: Queue, pause_us: int, until_empty: bool) -> None:
    """Until Ctrl-C, or until nothing is left to do. The last picture stays."""
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            seen = look(found)
            live.update(_drawn(found.name, seen), refresh=True)
            if until_empty and not isinstance(seen, Disconnected) and not seen[1].depth:
                return
            time.sleep(pause_us / 1e6)


def _drawn(
    name: str, seen: tuple[QueueRecord, QueueStats, list[tuple[ConsumerRecord, int]]] | Disconnected
) -> RenderableType:
    if isinstance(seen, Disconnected):
        return Panel(Text(seen.message, style="yellow"), title=f"queue {name}")
    record, now, workers = seen
    parts: list[RenderableType] = [_progress(now), _counts(now), _facts(now)]
    if workers:
        parts.append(_workers(workers))
    state = " · PAUSED" if record.paused else ""
    return Panel(Group(*parts), title=f"queue {record.name}{state}", expand=True)


def _progress(now: QueueStats) -> Table:
    ended = now.done + now.dead
    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True)
    bar = ProgressBar(total=max(1, ended + now.depth), completed=ended)
    row.add_row(bar, f"{ended}/{ended + now.depth}")
    return row


def _counts(now: QueueStats) -> Text:
    line = Text()
    for state, style in _STYLES.items():
        count = getattr(now, state)
        line.append(f"{count} {state}   ", style=style if count else "dim")
    return line


def _facts(now: QueueStats) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("rate", f"{rate_of(now)} by {now.workers} worker{'s' * (now.workers != 1)}")
    grid.add_row("eta", eta_of(now))
    grid.add_row("oldest", oldest_of(now))
    grid.add_row("failures", f"{now.failed}; {now.stale} late results refused")
    grid.add_row("work", work_of(now))
    return grid


def _workers(workers: list[tuple[ConsumerRecord, int]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for column in WORKER_COLUMNS:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for worker in workers[:SHOWN]:
        table.add_row(*map(str, worker_row(*worker)))
    if len(workers) > SHOWN:
        table.add_row(f"… and {len(workers) - SHOWN} more")
    return table
