"""`sublet queue results`: what became of the items, as JSON lines or CSV.

Rules of this file:
- Results are written as they are read: never more than a page of them is in memory.
- A file appears whole or not at all. The ledger keeps the results either way.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import click

from sublet.cli.output import json_option, print_json
from sublet.cli.progress import progress_bar
from sublet.core.errors import BadInput
from sublet.core.queues.items import from_text
from sublet.queues.opening import queue as open_queue
from sublet.queues.queue import Queue
from sublet.store.load.weights import whole_file

WRITTEN_AT_ONCE = 1 << 18
TOLD_EVERY = 1000

RESULT_COLUMNS = ("id", "key", "body", "result", "done_at", "work_seconds", "delivery")
DEAD_COLUMNS = ("id", "key", "body", "error", "died_at", "failures", "losses", "delivery")


@click.command(epilog="Example:  sublet queue results images --format csv --output results.csv")
@click.argument("name", metavar="QUEUE")
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv"]),
    default="jsonl",
    show_default=True,
    help="A JSON object a line; or CSV with a header, quoted as RFC 4180 says.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=None,
    help="To this file, which appears when all is written. Without it: standard output.",
)
@click.option("--after", type=click.IntRange(min=0), default=0, help="Only items with a higher number.")
@click.option("--dead", is_flag=True, help="The dead-letter list instead, each with its last error.")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@json_option
def results(
    name: str, form: str, output: Path | None, after: int, dead: bool, force: bool, as_json: bool
) -> None:
    """Write every stored result, in the order of the items' numbers. Nothing is taken out of the queue.

    Columns: id, key, body, result, done_at, work_seconds, delivery; with --dead: id, key, body, error,
    died_at, failures, losses, delivery. Times are UTC. In CSV a text is written as it is, null is an empty
    field, and everything else is JSON. --after goes by the number, not by when an item was done: one that was
    done late may have a low number.
    """
    if as_json and output is None and form == "csv":
        raise BadInput("--json and --format csv cannot both go to standard output", remedy="say --output F")
    found = open_queue(name)
    columns = DEAD_COLUMNS if dead else RESULT_COLUMNS
    rows = _dead_rows(found, after) if dead else _result_rows(found, after)
    total = found.stats().dead if dead else found.stats().done
    with progress_bar(rate=True) as progress:
        counted = _Counted(rows, lambda n: progress(f"writing {name}", n, max(n, total)))
        if output is None:
            _write(sys.stdout.buffer, form, columns, counted)
        else:
            target = _free(output, force)
            kept = "the results are in the ledger as before"
            with whole_file(target, kept=kept) as draft, draft.open("wb") as stream:
                _write(stream, form, columns, counted)
    if output is None:
        return
    if as_json:
        print_json({"queue": name, "file": str(output), "count": counted.count, "last_id": counted.last})
        return
    what = "dead items" if dead else "results"
    click.echo(f"{counted.count} {what} of {name} in {output}; the last is item {counted.last or after}")


def _free(file: Path, force: bool) -> Path:
    target = file.absolute()
    if not target.parent.is_dir():
        raise BadInput(f"there is no folder {target.parent}", remedy="make it first")
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(target).st_mode):
            raise BadInput(
                f"{file} is not a file that could be replaced", remedy="leave --output out and use '>'"
            )
        if not force:
            raise BadInput(f"{file} is there already", remedy="choose another name, or say --force")
    return target


# --- rows ---------------------------------------------------------------------------------------------------


def _moment(us: int) -> str:
    return datetime.fromtimestamp(us / 1e6, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _result_rows(found: Queue, after: int) -> Iterator[tuple[Any, ...]]:
    for one in found.results(after=after):
        done_at, seconds = _moment(one.done_at), one.work_us / 1e6
        yield one.id, one.key, one.body, one.value, done_at, seconds, one.delivery


def _dead_rows(found: Queue, after: int) -> Iterator[tuple[Any, ...]]:
    for one in found.dead(after=after):
        died_at = _moment(one.visible_at)
        yield one.id, one.key, from_text(one.body), one.error, died_at, one.failures, one.losses, one.delivery


class _Counted:
    """Rows on their way, and how many have passed."""

    def __init__(self, rows: Iterator[tuple[Any, ...]], tell: Callable[[int], None]) -> None:
        self._rows, self._tell = rows, tell
        self.count = self.last = 0

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        for row in self._rows:
            self.count, self.last = self.count + 1, row[0]
            if self.count % TOLD_EVERY == 0:
                self._tell(self.count)
            yield row


# --- writing ------------------------------------------------------------------------------------------------


def _write(stream: BinaryIO, form: str, columns: tuple[str, ...], rows: _Counted) -> None:
    text = io.StringIO()
    put = _csv_writer(text, columns) if form == "csv" else _jsonl_writer(text, columns)
    for row in rows:
        put(row)
        if text.tell() >= WRITTEN_AT_ONCE:
            stream.write(_bytes(text.getvalue()))
            text.seek(0)
            text.truncate()
    stream.write(_bytes(text.getvalue()))
    stream.flush()  # a full disk is an error here, not silence at the end


def _jsonl_writer(text: io.StringIO, columns: tuple[str, ...]) -> Callable[[tuple[Any, ...]], object]:
    encode = json.JSONEncoder(separators=(",", ":")).encode
    return lambda row: text.write(f"{encode(dict(zip(columns, row, strict=True)))}\n")


def _csv_writer(text: io.StringIO, columns: tuple[str, ...]) -> Callable[[tuple[Any, ...]], object]:
    writer = csv.writer(text)  # CRLF, and quotes where a comma, a quote or a line break needs them
    writer.writerow(columns)
    return lambda row: writer.writerow(map(_cell, row))


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _bytes(text: str) -> bytes:
    """File names that are no UTF-8 come out as the bytes they were."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")
