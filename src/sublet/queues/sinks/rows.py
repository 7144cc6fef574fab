"""The form of a result in a table: its columns, its texts, and the table's name.

Rules of this file:
- A table's name is taken from the address, so it is checked as an identifier and always quoted: nothing of it
  is ever SQL.
- Rows go in by key. Two writers whose batches overlap then take the same locks in the same order, and none
  waits for the other in a circle.
- Body and result are JSON text. A NUL in a text is an escape there, so every database can hold it. What UTF-8
  cannot carry, half a surrogate pair, is escaped too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from sublet.core.errors import BadInput
from sublet.ports.sink import Made

T = TypeVar("T")

COLUMNS = ("key", "queue", "item", "item_key", "delivery", "body", "result", "stored_at")
DEFAULT_TABLE = "results"
#: The most keys in one query: some databases take no more than a thousand values.
KEYS_AT_ONCE = 500
#: In one statement: far below what servers take, far above what a batch usually is.
BYTES_AT_ONCE = 16 << 20
ROWS_AT_ONCE = 2000
_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]{0,62}"

#: Every column but `stored_at`, which the database's own clock fills.
Row = tuple[str, str, int, str, int, str, str]


@dataclass(frozen=True, slots=True)
class TableName:
    schema: str  # '' for the one the database takes
    name: str

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name

    @property
    def quoted(self) -> str:
        return f'"{self.schema}"."{self.name}"' if self.schema else f'"{self.name}"'


def table_name(text: str) -> TableName:
    found = re.fullmatch(rf"(?:({_IDENTIFIER})\.)?({_IDENTIFIER})", text, re.ASCII)
    if found is None:
        raise BadInput(
            f"table={text[:40]!r} is not a table's name; nothing was opened",
            remedy="write ?table=NAME or ?table=SCHEMA.NAME with letters, digits and _, at most 63 of "
            "them each",
        )
    return TableName(found.group(1) or "", found.group(2))


def split_table(url: str) -> tuple[str, TableName]:
    """The address without our `table=`, and the table."""
    address, mark, query = url.partition("?")
    table, others = DEFAULT_TABLE, []
    for part in query.split("&") if mark else ():
        if part.startswith("table="):
            table = part.removeprefix("table=")
        else:
            others.append(part)
    return address + ("?" + "&".join(others) if others else ""), table_name(table)


def json_text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def newest(results: Sequence[Made]) -> list[Made]:
    """Each key once, by its highest delivery, in the order of the keys."""
    best: dict[str, Made] = {}
    for made in results:
        there = best.get(made.key)
        if there is None or made.delivery > there.delivery:
            best[made.key] = made
    return [best[key] for key in sorted(best)]


def rows_of(results: Sequence[Made]) -> list[Row]:
    for made in results:
        try:
            (made.key + made.queue + made.item_key).encode()
        except UnicodeEncodeError:
            raise BadInput(
                f"the name of item {made.item} holds half a surrogate pair, which no table takes; nothing "
                "was stored",
                remedy="publish it under another key",
            ) from None
    return [
        (m.key, m.queue, m.item, m.item_key, m.delivery, json_text(m.body), json_text(m.result))
        for m in newest(results)
    ]


def pieces(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """As many rows as go into one statement, at least one."""
    piece: list[Row] = []
    size = 0
    for row in rows:
        bytes_of_row = len(row[5]) + len(row[6])
        if piece and (size + bytes_of_row > BYTES_AT_ONCE or len(piece) >= ROWS_AT_ONCE):
            yield piece
            piece, size = [], 0
        piece.append(row)
        size += bytes_of_row
    if piece:
        yield piece


def batches(values: Iterable[T], most: int = KEYS_AT_ONCE) -> Iterator[list[T]]:
    rest = iter(values)
    while batch := list(islice(rest, most)):
        yield batch


def wrong_shape(table: TableName, why: str, statement: str) -> BadInput:
    """An existing table that cannot hold results."""
    return BadInput(
        f"the table {table} cannot take results: {why}",
        remedy=f"name another with ?table=NAME, or give it the columns of: {statement}",
    )


def missing_columns(table: TableName, there: Iterable[str], statement: str) -> None:
    folded = {name.lower() for name in there}
    missing = [name for name in COLUMNS if name not in folded]
    if missing:
        raise wrong_shape(table, f"it has no column {', '.join(missing)}", statement)
