"""From one version of the schema to the next: an older ledger must be migrated first, and nothing of it is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import pytest

from sublet.core.errors import SchemaMismatch
from sublet.core.leasing.lease import EndReason, Holder, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.progress.effect import Committed
from sublet.ledger.engines.sqlite import engine as sqlite_engine
from sublet.ledger.schema import versions
from sublet.ports.ledger import FoundDevice
from sublet.ports.processes import Receipt
from sublet.processes.clock import HostClock
from sublet.testing.clock import VirtualClock
from tests.ledger.conftest import make_next_release
from tests.ledger.rig import PostgresSchema, Rig


def _sqlite_schema(path: Path) -> list[tuple[Any, ...]]:
    db = apsw.Connection(str(path))
    found = db.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY type, name").fetchall()
    db.close()
    return found


def test_an_older_ledger_is_refused_until_it_is_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ledger of this release, with a lease in it, meets the next one: told what to do, migrated, nothing lost."""
    url, clock = f"sqlite:{tmp_path}/old.db", VirtualClock()
    old = sqlite_engine.open_ledger(url, clock)
    old.add_tenant(Tenant(name="t"), actor="test")
    device = FoundDevice(id="d", driver="host", ordinal=0, name="d", capacity_bytes=100)
    old.report_host("h", [device])
    request = Request(tenant="t", vram_bytes=10, ttl_us=60_000_000)
    old.acquire("L1", "s", request, Holder(host="h", pid=7, started=7))
    held = old.look("L1").lease
    old.close()
    make_next_release(monkeypatch, tmp_path / "schema")
    with pytest.raises(SchemaMismatch, match="has schema 1, this sublet needs 3") as raised:
        sqlite_engine.open_ledger(url, clock)
    assert "sublet migrate" in raised.value.remedy
    done = sqlite_engine.apply_migrations(tmp_path / "old.db", clock)
    assert done == ["0002 note", "0003 note_by_text"]
    assert sqlite_engine.apply_migrations(tmp_path / "old.db", clock) == []
    new = sqlite_engine.open_ledger(url, clock)
    assert new.look("L1").lease == held
    assert new.end("L1", held.epoch, reason=EndReason.HOLDER_LOST, detail="gone")
    assert new.settle("L1", held.epoch, Receipt(proven=True, ladder="gone", containment="none"))
    assert [t.lease_id for t in new.receipts()] == ["L1"]
    assert not new.verify().faults
    new.close()
    sqlite_engine.open_ledger(f"sqlite:{tmp_path}/new.db", clock).close()
    assert _sqlite_schema(tmp_path / "old.db") == _sqlite_schema(tmp_path / "new.db")


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_the_versions_are_numbered_without_a_gap(engine: str) -> None:
    assert [m.number for m in versions.migrations(engine)] == list(range(1, versions.newest(engine) + 1))


def test_hot_verbs_go_on_after_the_schema_grew(
    postgres: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database in use is migrated under a connection that has its functions prepared."""
    from sublet.ledger.engines.postgres import engine

    old: PostgresSchema = postgres.schema  # type: ignore[attr-defined]
    postgres.tenant()
    postgres.device()
    held = postgres.ask(lease_id="holder", ttl_us=60_000_000)
    for step in range(1, 8):  # often enough for the connection to prepare the call
        assert postgres.commit(held, step) == Committed(step)
    make_next_release(monkeypatch, tmp_path)
    assert engine.apply_migrations(old.url) == ["0002 note", "0003 note_by_text"]
    assert postgres.commit(held, 8) == Committed(8)
    ledger = engine.open_ledger(old.url, HostClock())
    found = ledger.versions("train")
    assert (found.head.version, found.head.floor, found.head.sweeps) == (8, 0, 0)
    assert (len(ledger.identity().id), ledger.identity().heads_current) == (32, True)
    ledger.close()
    new = PostgresSchema(old.server_url)
    try:
        engine.open_ledger(new.url, HostClock()).close()
        assert new.structure() == old.structure()
    finally:
        new.drop()
