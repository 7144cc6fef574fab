"""The versions of the schema: `ENGINE.sql` is version 1, `migrations/ENGINE/0002_name.sql` the next.

A new ledger gets all of them at once, an older one must be migrated first, a newer one is refused untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from sublet.core.errors import SchemaMismatch

FOLDER = files("sublet.ledger.schema")


@dataclass(frozen=True, slots=True)
class Migration:
    number: int
    name: str
    sql: str


def migrations(engine: str) -> list[Migration]:
    found = [Migration(1, "schema", (FOLDER / f"{engine}.sql").read_text())]
    later = FOLDER / "migrations" / engine
    if later.is_dir():
        found += [
            Migration(int(entry.name[:4]), entry.name[5:-4], entry.read_text())
            for entry in later.iterdir()
            if entry.name.endswith(".sql")
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
