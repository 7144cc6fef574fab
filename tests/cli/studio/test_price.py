"""`sublet price …`, the quotas of sessions and storage, and a report at the prices that were valid."""

from __future__ import annotations

import secrets

import pytest

from sublet.cli.studio.price import money
from sublet.core.errors import QuotaReached
from sublet.core.leasing.lease import Request
from sublet.core.studio.session import job_of
from sublet.wiring import open_ledger
from tests.cli.test_commands import as_json, sublet
from tests.homes import Home


def test_prices_are_set_listed_and_removed(home: Home) -> None:
    assert "no prices" in sublet(home, "price", "ls").stderr
    said = sublet(home, "price", "set", "host", "2.50")
    assert (said.returncode, said.stdout) == (0, "host: 2.50 per GPU-hour from now on\n")
    made = as_json(home, "price", "set", "*", "0.125", "--tier", "spot")
    assert (made["class"], made["tier"], made["per_gpu_hour"], made["micro_per_gpu_hour"]) == (
        "*",
        "spot",
        "0.125",
        125_000,
    )
    assert [(p["class"], p["per_gpu_hour"]) for p in as_json(home, "price", "ls")] == [
        ("*", "0.125"),
        ("host", "2.50"),
    ]
    assert sublet(home, "price", "rm", "*", "--tier", "spot").returncode == 0
    assert sublet(home, "price", "rm", "*", "--tier", "spot").returncode == 2
    assert "removed" in sublet(home, "price", "ls", "--all").stdout
    assert [p["class"] for p in as_json(home, "price", "ls")] == ["host"]
    assert len(as_json(home, "price", "ls", "--all")) == 3
    for wrong in ("-1", "much", "1e9"):
        assert sublet(home, "price", "set", "host", "--", wrong).returncode == 2
    assert sublet(home, "price", "set", "host", "1", "--tier", "gold").returncode == 2


@pytest.mark.parametrize(
    ("micro", "text"),
    [(0, "0.00"), (1, "0.000001"), (2_500_000, "2.50"), (12_345_600, "12.3456"), (3_000_000, "3.00")],
)
def test_money_is_exact(micro: int, text: str) -> None:
    assert money(micro) == text


def test_a_lease_costs_what_the_list_said_when_it_was_granted(home: Home) -> None:
    def held(job: str) -> None:
        made = as_json(home, "lease", "acquire", "--vram", "1GiB", "--job", job, "--ttl", "1m")
        assert sublet(home, "lease", "release", made["id"]).returncode == 0

    held("free")
    assert as_json(home, "report")["total"]["cost"] is None
    sublet(home, "price", "set", "host", "3600")
    held("old")
    sublet(home, "price", "set", "host", "7200")
    held("new")
    rows = {row["name"]: row for row in as_json(home, "report")["rows"]}
    assert rows["free"]["cost"] is None
    assert rows["old"]["cost"] == pytest.approx(rows["old"]["held_gpu_seconds"], abs=1e-5)
    assert rows["new"]["cost"] == pytest.approx(rows["new"]["held_gpu_seconds"] * 2, abs=1e-5)
    table = {line.split()[0]: line.split() for line in sublet(home, "report").stdout.splitlines()[:4]}
    assert table["free"][-2:] == ["-", "-"]
    # What is not on the list costs what was given, or the setting.
    rows = {row["name"]: row for row in as_json(home, "report", "--price", "36000")["rows"]}
    assert rows["free"]["cost"] == pytest.approx(rows["free"]["held_gpu_seconds"] * 10, abs=1e-5)
    assert rows["old"]["cost"] == pytest.approx(rows["old"]["held_gpu_seconds"], abs=1e-5)


def test_quotas_of_sessions_and_storage(home: Home) -> None:
    [made] = as_json(home, "tenant", "add", "ada", "--sessions", "2", "--storage", "5GB")
    assert (made["quotas"]["max_sessions"], made["quotas"]["max_storage_bytes"]) == (2, 5 * 10**9)
    [made] = as_json(home, "quota", "set", "ada", "--sessions", "1", "--storage", "20GB")
    assert (made["quotas"]["max_sessions"], made["quotas"]["max_storage_bytes"]) == (1, 20 * 10**9)
    assert (made["sessions"], made["stored_bytes"]) == (0, 0)
    ledger = open_ledger(home.settings)

    def enter() -> None:
        session_id = f"S{secrets.token_hex(10)}"
        wish = Request(tenant="ada", vram_bytes=1, ttl_us=60_000_000, job=job_of("ada", session_id))
        ledger.open_session(session_id, "ada", request=wish, warm_us=60_000_000, host="h")

    enter()
    with pytest.raises(QuotaReached):
        enter()
    assert as_json(home, "quota", "show", "ada")[0]["sessions"] == 1
    assert "1 of 1" in sublet(home, "tenant", "ls").stdout
    assert "0 of 20GB" in sublet(home, "tenant", "ls").stdout
    assert "session" in sublet(home, "tenant", "rm", "ada").stderr
    assert as_json(home, "quota", "set", "ada", "--storage", "none")[0]["quotas"]["max_storage_bytes"] == 0
    assert sublet(home, "quota", "set", "ada", "--sessions", "-1").returncode == 2
