"""Fifty processes on one PostgreSQL ledger: first as many leases a day as a large site has, then as fast as it goes.

No deadlock, no lost update, nothing done twice; neither clients nor server backends grow; nobody holds the oldest snapshot; dead rows are cleaned up.
SUBLET_CROWD_SECONDS is how long both phases take together (`make proof` says 120), SUBLET_CROWD how many processes there are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sublet.core.leasing.tenancy import Tenant
from sublet.ledger.engines.postgres.engine import open_ledger
from sublet.ports.ledger import FoundDevice
from sublet.processes.clock import HostClock
from sublet.testing.postgres import PostgresServer
from tests.forked import Forked

SECONDS = float(os.environ.get("SUBLET_CROWD_SECONDS", "3"))
CROWD = int(os.environ.get("SUBLET_CROWD", "8"))
#: Of the whole crowd.
LEASES_A_DAY = 100_000
#: What a process may grow by while it does the same again and again: caches of statements and plans fill up.
GROWTH_KIB = 12 * 1024

pytestmark = [pytest.mark.storm, pytest.mark.timeout(900)]


@pytest.fixture
def server(postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    server = PostgresServer()
    with (server.data / "postgresql.conf").open("a") as conf:
        conf.write("max_connections = 300\nautovacuum_naptime = 1s\n")
    server.start()
    yield server
    server.stop()


class Watch:
    """Looks at the server while the crowd is at work."""

    def __init__(self, url: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        self.oldest_xids = 0
        self.first_xid = self._xid()
        self.backends: dict[int, list[int]] = {}

    def look(self) -> None:
        row = self.connection.execute(
            "SELECT coalesce(max(age(backend_xmin)), 0) FROM pg_stat_activity WHERE application_name = 'sublet'"
        ).fetchone()
        self.oldest_xids = max(self.oldest_xids, int(row[0]) if row else 0)
        for (pid,) in self.connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'sublet'"
        ).fetchall():
            anonymous = _anonymous_kib(pid)
            if anonymous:
                self.backends.setdefault(pid, []).append(anonymous)

    def _xid(self) -> int:
        row = self.connection.execute(
            "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
        ).fetchone()
        return int(row[0]) if row else 0

    def transactions(self) -> int:
        return self._xid() - self.first_xid

    def deadlocks(self) -> int:
        row = self.connection.execute("SELECT sum(deadlocks) FROM pg_stat_database").fetchone()
        return int(row[0]) if row else 0

    def growth_kib(self) -> int:
        """Of the backend that grew most, from when it had served a while."""
        return max(
            (seen[-1] - seen[len(seen) // 3] for seen in self.backends.values() if len(seen) > 3), default=0
        )


def _anonymous_kib(pid: int) -> int:
    """What is its own: shared buffers it has touched are not."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


def _run(
    url: str, seconds: float, pause: float, folder: Path, watch: Watch, phase: str, first: int
) -> list[dict[str, Any]]:
    logs = [folder / f"{phase}-{n}.json" for n in range(CROWD)]
    members = [
        Forked(
            [
                sys.executable,
                "-m",
                "tests.storms.crowd_worker",
                url,
                str(first + n),
                str(seconds),
                str(pause),
                str(logs[n]),
            ],
            cwd=Path(__file__).parents[2],
            env={**os.environ},
            stdin=subprocess.DEVNULL,
        )
        for n in range(CROWD)
    ]
    while any(member.poll() is None for member in members):
        watch.look()
        time.sleep(0.25)
    assert [member.returncode for member in members] == [0] * CROWD
    return [json.loads(log.read_text()) for log in logs]


def test_a_crowd_on_postgres(server: PostgresServer, tmp_path: Path) -> None:
    url = f"{server.url}&sublet_schema=crowd&sublet_connections=4"
    ledger = open_ledger(url, HostClock())
    for name in ("ada", "bob"):
        ledger.add_tenant(Tenant(name=name), actor="storm")
    for n in range(4):
        found = FoundDevice(id=f"gpu-{n}", driver="host", ordinal=0, name="storm", capacity_bytes=1 << 40)
        ledger.report_host(f"node-{n}", [found])
    watch = Watch(server.url)
    pause = CROWD * 86_400 / LEASES_A_DAY / 2  # twice the rate, so that starting up does not count against it
    paced = _run(url, SECONDS / 2, pause, tmp_path, watch, "paced", 0)
    fast = _run(url, SECONDS / 2, 0.0, tmp_path, watch, "fast", 500)
    rate = sum(m["lives"] / m["seconds"] for m in paced) * 86_400
    lives = sum(m["lives"] for m in [*paced, *fast])
    commits = sum(m["steps"] for m in [*paced, *fast])
    print(
        f"paced: {rate:.0f} leases a day; fast: {sum(m['lives'] / m['seconds'] for m in fast):.0f} lives a second; "
        f"{lives} leases, {commits} commits, {watch.transactions()} transactions, most held back {watch.oldest_xids}, "
        f"backends grew by at most {watch.growth_kib()} KiB"
    )
    assert rate >= LEASES_A_DAY
    # Nothing lost, nothing twice: what was acknowledged is there.
    assert all(m["refused"] == 0 for m in [*paced, *fast])
    heads = sum(head.version for head in ledger.heads())
    assert heads == commits
    done = Counter(item for m in [*paced, *fast] for item in m["completed"])
    assert set(done.values()) <= {1}, "an item was completed twice"
    stats = [ledger.queue_stats(queue.id) for queue in ledger.queues("ada")]
    assert sum(s.done for s in stats) == len(done)
    assert all(device.free_bytes == 1 << 40 for device in ledger.devices())
    assert ledger.verify().faults == ()
    # Nobody waited for each other, nobody held on to the past.
    assert watch.deadlocks() == 0
    assert watch.oldest_xids <= watch.transactions() / 2 + 1000
    for m in [*paced, *fast]:
        assert not m["early_kib"] or m["late_kib"] - m["early_kib"] < GROWTH_KIB
    assert watch.growth_kib() < GROWTH_KIB
    _rows_are_cleaned_up(watch.connection, lives)
    ledger.close()


def _rows_are_cleaned_up(connection: Any, lives: int) -> None:
    """The rows everybody updates: their dead versions are reused within their own page, so that their tables stay as small as they are."""
    connection.execute("SELECT pg_stat_force_next_flush()")
    for table in ("pool", "tenant", "device"):
        pages, updates, hot = connection.execute(
            "SELECT pg_relation_size(relid) / 8192, n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables "
            "WHERE schemaname = 'crowd' AND relname = %s",
            (table,),
        ).fetchone()
        print(f"{table}: {updates} updates, {hot} of them in their page, {pages} pages")
        assert updates >= lives
        assert hot >= 0.75 * updates
        assert pages <= 64
