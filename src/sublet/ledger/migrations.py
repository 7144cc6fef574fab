"""Schemas in order. A new ledger is made whole; an old one says so; a newer one is refused untouched."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from sublet.core.errors import SchemaMismatch


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    sql: str


def migrations(engine: str) -> list[Migration]:
    folder = files("sublet.ledger") / "sql" / engine
    found = [
        Migration(int(entry.name[:4]), entry.name[5:-4], entry.read_text())
        for entry in folder.iterdir()
        if entry.name.endswith(".sql") and entry.name[:4].isdigit()
    ]
    return sorted(found, key=lambda m: m.number)


def newest(engine: str) -> int:
    return migrations(engine)[-1].number


def check_version(engine: str, found: int) -> None:
    wanted = newest(engine)
    if found > wanted:
        raise SchemaMismatch(
            f"the ledger has schema {found}, this sublet knows up to {wanted}",
            remedy="upgrade sublet on this machine; the ledger was not touched",
        )
    if found < wanted:
        raise SchemaMismatch(
            f"the ledger has schema {found}, this sublet needs {wanted}",
            remedy="stop its wardens, back it up, then run 'sublet migrate'",
        )
