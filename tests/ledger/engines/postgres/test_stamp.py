"""I5 on PostgreSQL: what a host knows to have been granted, a database that went back in time does not grant again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sublet.core.errors import LedgerFromThePast
from sublet.ledger.ledger import SqlLedger
from tests.ledger.rig import Rig

#: All that a grant changes, and what else the restore of a dump brings back.
PARTS = ("pool", "tenant", "device", "lease", "slice", "journal")


@pytest.fixture
def ready(postgres: Rig) -> Rig:
    postgres.tenant()
    postgres.device("gpu0", 1000)
    return postgres


def at_host(ready: Rig, home: Path) -> SqlLedger:
    ledger = ready.open()
    ledger.keep_stamp(home)
    return ledger


def dumped(ready: Rig) -> dict[str, list[tuple[object, ...]]]:
    return {part: ready.sql(f"SELECT * FROM {part}") for part in PARTS}


def put_back(ready: Rig, dump: dict[str, list[tuple[object, ...]]]) -> None:
    for part, rows in dump.items():
        ready.sql(f"DELETE FROM {part}")
        for row in rows:
            ready.sql(f"INSERT INTO {part} VALUES ({', '.join('?' * len(row))})", *row)


def granted(ready: Rig, ledger: SqlLedger) -> int:
    return ready.ask(1, ledger=ledger).lease.epoch


def test_a_restored_database_grants_nothing_until_somebody_says_so(ready: Rig, tmp_path: Path) -> None:
    """I5: by the quick way of a grant and by every other; another process of the host, begun later, refuses too."""
    ledger = at_host(ready, tmp_path / "home")
    held = ready.ask(1, ledger=ledger)
    dump = dumped(ready)
    highest = max(granted(ready, ledger) for _ in range(3))
    put_back(ready, dump)
    for mine in (ledger, at_host(ready, tmp_path / "home")):
        refused: list[Callable[[], object]] = [
            lambda mine=mine: granted(ready, mine),  # type: ignore[misc]
            lambda mine=mine: ready.ask(1, count=2, ledger=mine),  # type: ignore[misc]
            mine.tick,
        ]
        for verb in refused:
            with pytest.raises(LedgerFromThePast, match=f"epoch {highest}"):
                verb()
        assert [a.lease.id for a in mine.leases()] == [held.lease.id], "it is read"
    assert ready.sql("SELECT epoch FROM pool") == [(held.lease.epoch,)]
    ledger.mark_restored(actor="root")
    assert granted(ready, ledger) > highest
    assert granted(ready, at_host(ready, tmp_path / "home")) > highest
    assert ready.faults() == []


def test_a_restore_said_on_one_host_is_good_for_all(ready: Rig, tmp_path: Path) -> None:
    """I5: the other host knows a lower epoch than the restored database grants."""
    one, other = at_host(ready, tmp_path / "one"), at_host(ready, tmp_path / "other")
    dump = dumped(ready)
    highest = max(granted(ready, ledger) for ledger in (one, other, one, other))
    put_back(ready, dump)
    one.mark_restored(actor="root")
    assert granted(ready, other) > highest


def test_a_host_that_knows_nothing_takes_the_database_as_it_is(ready: Rig, tmp_path: Path) -> None:
    """A new host, and one whose home cannot be written: they cannot know, and are not held up."""
    granted(ready, at_host(ready, tmp_path / "old"))
    assert granted(ready, at_host(ready, tmp_path / "new")) > 0
    (tmp_path / "file").write_text("")
    assert granted(ready, at_host(ready, tmp_path / "file")) > 0
