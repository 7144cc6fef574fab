"""The progress of long work: a bar on a terminal's standard error, nothing anywhere else."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

Progress = Callable[[str, int, int], None]


@contextlib.contextmanager
def progress_bar(*, sizes: bool = False, rate: bool = False) -> Iterator[Progress]:
    """Give the work a function to call with what it does, how much of it is done, and how much there is (0:
    not known)."""
    if not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{task.speed:.0f}/s" if task.speed else "", style="progress.data.speed")

    counts: list[ProgressColumn] = (
        [DownloadColumn(), TransferSpeedColumn()] if sizes else [MofNCompleteColumn()]
    )
    if rate:
        counts.append(RateColumn())
    columns = [TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn()]
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, object] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done, total=total or None)  # type: ignore[arg-type]

        yield show
