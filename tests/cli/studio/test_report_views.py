"""`sublet report --by session` and `--neighbours`, over a real ledger."""

from __future__ import annotations

import csv
import io

import pytest

from sublet.core.leasing.lease import Holder, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.studio.session import job_of
from sublet.core.values import SECOND_US
from sublet.ports.ledger import Ledger
from sublet.wiring import open_ledger
from tests.cli.test_commands import as_json, home, sublet  # noqa: F401
from tests.homes import Home

ONE, TWO = "S" + "0" * 19 + "1", "S" + "0" * 19 + "2"


def session(ledger: Ledger, session_id: str, tenant: str) -> str:
    """Open, with a lease of its own."""
    [host] = {device.host for device in ledger.devices()}
    request = Request(
        tenant=tenant, vram_bytes=1 << 30, ttl_us=60 * SECOND_US, job=job_of(tenant, session_id), host=host
    )
    ledger.open_session(
        session_id, tenant, request=request, warm_us=SECOND_US, name="a look", checkpoint="", host=host
    )
    lease_id = f"of-{session_id}"
    ledger.bind_session(session_id, number=1, lease_id=lease_id)
    ledger.acquire(lease_id, "secret", request, Holder(host=host))
    return lease_id


@pytest.fixture
def studio(home: Home) -> Home:  # noqa: F811
    as_json(home, "gpus")
    as_json(
        home, "lease", "acquire", "--vram", "1MiB", "--ttl", "1s"
    )  # so that the host has told its devices
    ledger = open_ledger(home.settings)
    for tenant in ("ada", "bob"):
        ledger.add_tenant(Tenant(name=tenant), actor="test")
    lease = session(ledger, ONE, "ada")
    session(ledger, TWO, "bob")
    ledger.note_session(ONE, calls=30, errors=10, launches=400, checkpoint_bytes=1 << 20)
    ledger.release(lease, "secret")
    ledger.end_session(ONE, "ada", detail="done", actor="ada")
    return home


def test_sessions_with_what_they_used(studio: Home) -> None:
    found = as_json(studio, "report", "--by", "session")
    assert found["by"] == "session"
    rows = {row["session_id"]: row for row in found["rows"]}
    used = open_ledger(studio.settings).session_usage(session_id=ONE)[0]
    assert (rows[ONE]["gpu_seconds"], rows[ONE]["calls"], rows[ONE]["errors"]) == (used.gpu_us / 1e6, 30, 10)
    assert (rows[ONE]["launches"], rows[ONE]["checkpoint_bytes"], rows[ONE]["leases"]) == (400, 1 << 20, 1)
    assert rows[ONE]["cost"] is None
    assert rows[TWO]["ended_at"] is None
    assert rows[ONE]["ended_at"] > 0
    assert [
        row["tenant"] for row in as_json(studio, "report", "--by", "session", "--tenant", "bob")["rows"]
    ] == ["bob"]
    priced = as_json(studio, "report", "--by", "session", "--tenant", "ada", "--price", "3600")["rows"]
    assert priced[0]["cost"] == pytest.approx(used.gpu_us / SECOND_US, abs=1e-6)
    table = sublet(studio, "report", "--by", "session").stdout
    assert "a look" in table
    assert "1MiB" in table
    lines = list(csv.DictReader(io.StringIO(sublet(studio, "report", "--by", "session", "--csv").stdout)))
    assert {line["session_id"]: line["launches"] for line in lines} == {ONE: "400", TWO: "0"}


def test_neighbours_are_named_with_their_reason(studio: Home) -> None:
    rows = {row["tenant"]: row for row in as_json(studio, "report", "--neighbours")["rows"]}
    assert (rows["ada"]["noisy"], rows["ada"]["reason"]) == (True, "10 of its 30 calls failed")
    assert (rows["bob"]["noisy"], rows["bob"]["reason"]) == (False, "")
    assert sum(row["held_share"] for row in rows.values()) == pytest.approx(1, abs=1e-5)
    assert "10 of its 30 calls failed" in sublet(studio, "report", "--neighbours").stdout


def test_what_does_not_go_together_is_refused(studio: Home) -> None:
    for words in (
        ["--neighbours", "--csv"],
        ["--neighbours", "--job", "x"],
        ["--by", "session", "--job", "x"],
    ):
        done = sublet(studio, "report", *words)
        assert (done.returncode, "Error: --" in done.stderr) == (2, True)
