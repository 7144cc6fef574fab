"""`sublet report` over real runs: what was useful, what was lost, and that the columns add up."""

from __future__ import annotations

import csv
import io
import sys

import pytest
from click.testing import CliRunner

from sublet.cli.studio.report import report
from sublet.core.errors import BadInput
from sublet.core.leasing.lease import EndReason
from sublet.wiring import open_ledger
from tests import forked
from tests.cli.test_commands import as_json, home, sublet  # noqa: F401
from tests.homes import Home, wait_until

JOB = """
import sys, time, numpy as np, sublet
w = np.zeros(100)
run = sublet.train("toy", state={"w": w}, every=2, vram="64MiB", ttl="5s", progress=False)
for step in run.steps(int(sys.argv[1])):
    w += 1
    time.sleep(0.02)
"""
PARTS = [
    "useful_gpu_seconds",
    "overhead_gpu_seconds",
    "wasted_gpu_seconds",
    "open_gpu_seconds",
    "other_gpu_seconds",
]


def micro(seconds: float) -> int:
    return round(seconds * 1e6)


@pytest.fixture
def lost(home: Home) -> Home:  # noqa: F811
    """One run that was killed, one that finished, and a lease nobody committed under."""
    first = forked.Forked([sys.executable, "-c", JOB, "100000"], env=home.environment)
    ledger = open_ledger(home.settings)
    wait_until(lambda: (head := ledger.head("toy")) is not None and head.version >= 3)
    first.kill()
    first.wait()
    wait_until(lambda: not ledger.leases())
    steps = ledger.head("toy").step + 6
    forked.run([sys.executable, "-c", JOB, str(steps)], env=home.environment, check=True)
    as_json(home, "lease", "acquire", "--vram", "1GiB", "--job", "cell", "--ttl", "1m")
    return home


def test_what_was_held_is_accounted_for(lost: Home) -> None:
    found = as_json(lost, "report", "--price", "2.50")
    rows = {row["name"]: row for row in found["rows"]}
    toy, cell = rows["toy"], rows["cell"]
    for row in (*rows.values(), found["total"]):
        assert micro(row["held_gpu_seconds"]) == sum(micro(row[part]) for part in PARTS)
    assert 0 < toy["goodput"] < 1
    assert toy["wasted_gpu_seconds"] > 0
    assert (toy["losses"], toy["losses_with_notice"], toy["losses_without_notice"]) == (
        {"holder_lost": 1},
        0,
        1,
    )
    assert toy["steps"] == open_ledger(lost.settings).head("toy").step
    assert toy["leases"] == 2
    assert (toy["refund_gpu_seconds"], toy["median_between_commits_seconds"] > 0) == (0, True)
    assert (cell["goodput"], cell["other_gpu_seconds"]) == (None, cell["held_gpu_seconds"])
    hours = toy["held_gpu_seconds"] / 3600
    assert toy["cost"] == pytest.approx(hours * 2.5, abs=1e-4)
    for by, names in (("tier", {"batch", "interactive"}), ("day", None)):
        grouped = as_json(lost, "report", "--by", by)
        assert names is None or {row["name"] for row in grouped["rows"]} == names
        assert sum(micro(row["useful_gpu_seconds"]) for row in grouped["rows"]) == micro(
            toy["useful_gpu_seconds"]
        )
    table = sublet(lost, "report", "--price", "1")
    assert "1 holder_lost" in table.stdout
    assert "1 leases were lost, 0 of them with notice" in table.stdout
    assert "refunded: time since the last commit" in table.stdout
    (line,) = csv.DictReader(io.StringIO(sublet(lost, "report", "--job", "toy", "--csv").stdout))
    assert (line["job"], float(line["useful_gpu_seconds"])) == ("toy", toy["useful_gpu_seconds"])


def test_a_revoked_lease_is_refunded_since_its_last_commit(home: Home) -> None:  # noqa: F811
    run = forked.Forked([sys.executable, "-c", JOB, "100000"], env=home.environment)
    ledger = open_ledger(home.settings)
    wait_until(lambda: (head := ledger.head("toy")) is not None and head.version >= 2)
    (held,) = ledger.leases()
    ledger.revoke(held.lease.id, reason=EndReason.REVOKED, detail="test", grace_us=0, actor="test")
    run.wait()
    wait_until(lambda: not ledger.leases())
    (row,) = as_json(home, "report")["rows"]
    assert (row["losses"], row["losses_with_notice"]) == ({"revoked": 1}, 1)
    assert row["refund_gpu_seconds"] == row["wasted_gpu_seconds"] > 0


def test_nothing_to_report_and_wrong_prices(home: Home) -> None:  # noqa: F811
    assert "no GPU was held in the last 7 days" in sublet(home, "report").stderr
    for price in ("-1", "much", "nan", "1e99"):
        assert isinstance(CliRunner().invoke(report, ["--price", price]).exception, BadInput)
