"""How results leave the program: a table on a terminal, plain columns in a pipe, JSON when asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(command)


def archive_option(command: F) -> F:
    """Where the pruned part of the journal is."""
    return click.option(
        "--archive",
        "archived",
        type=click.Path(exists=True, path_type=Path),
        multiple=True,
        help="What 'sublet journal prune' wrote: its folder, or its files. Then everything is looked "
        "at, from the first row.",
    )(command)


def day(at_us: int) -> str:
    """The day in UTC, as sums of days use it."""
    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d")


def print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=None if not sys.stdout.isatty() else 2))


def on_terminal() -> bool:
    return sys.stdout.isatty()


_STYLES = {
    "R": "green",
    "PD": "yellow",
    "CG": "magenta",
    "ready": "green",
    "ok": "green",
    "quarantined": "red",
    "lost": "red",
    "taken": "red",
    "fail": "bold red",
    "warn": "yellow",
    "draining": "yellow",
}


#: A terminal with fewer columns than this is narrow.
NARROW = 80
_NOTHING = {"0", "-", "", "0.0/s"}


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str, optional: Collection[str] = ()
) -> None:
    """`optional` columns are left out of a narrow terminal if there is nothing in them."""
    found = [list(map(str, row)) for row in rows]
    if not found:
        click.echo(empty, err=not on_terminal())
        return
    if not on_terminal():
        widths = [max(len(c), *(len(r[i]) for r in found)) for i, c in enumerate(columns)]
        for row in [list(columns), *found]:
            cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
            click.echo("  ".join([*cells, row[-1]]))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if console.width < NARROW:
        kept = [i for i, c in enumerate(columns) if c not in optional or {r[i] for r in found} - _NOTHING]
        columns, found = [columns[i] for i in kept], [[row[i] for i in kept] for row in found]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, column in enumerate(columns):
        last = i == len(columns) - 1
        table.add_column(column, overflow="fold" if last else "ellipsis", no_wrap=not last)
    for row in found:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    pairs = list(fields)
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        click.echo(f"{name.ljust(width)}  {value}")


def instant(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6).strftime("%Y-%m-%d %H:%M:%S") if us else ""


def plain(text: str) -> str:
    """Remove what would steer a terminal, from texts that programs wrote, such as an error's."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def shortened(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
