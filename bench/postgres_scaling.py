"""Leases and steps on PostgreSQL from one process to eight, beside the server's own measure of itself.

Rules of this file:
- pgbench's simple-update (an update, a select and an insert, each statement a round trip, one durable commit) runs on the same server, in the same
  rounds, with as many clients. What is compared is operations: each verb of a lease, each commit of a step, each transaction of pgbench.
- The clients of the ledger are Python processes on the same cores as the server; pgbench is one program in C. That is part of the ratio.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.ledgers import furnish, on_postgres
from bench.measure import Goal, Section, median_ratio, progress
from sublet.testing.postgres import PostgresServer, find_binaries

PROCESSES = (1, 2, 4, 8)
ROUNDS = 5
TURN_S = 1.0
SCALE = 10
LEAST = 0.5
PGBENCH = "pgbench simple-update"
KINDS = {"leases": "leases: acquire, renew, release", "steps": "steps: one commit each"}


def find_pgbench() -> Path | None:
    """Beside the server's own programs, or Debian's (postgresql-contrib)."""
    own = find_binaries()
    found = [own / "pgbench"] if own is not None else []
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin/pgbench"), reverse=True)
    return next((path for path in found if path.exists()), None)


def run(server: PostgresServer, url: str) -> Section:
    section = Section(
        "PostgreSQL from one process to eight, operations per second, beside pgbench on the same server",
        ["", "processes", "ops/s", "rounds", "x pgbench"],
    )
    pgbench = find_pgbench()
    if pgbench is None:
        section.notes.append("pgbench is not installed: nothing to compare with (Debian: postgresql-contrib)")
        return section
    section.notes.append(
        "Clients are Python processes on the server's own cores. Every acquire and release locks the pool's row: leases of one pool are one "
        "queue, however many processes ask. The disk is waited for outside of it."
    )
    _init(pgbench, server)
    hosts = furnish(on_postgres(url, "crowd"), devices=16, per_host=2)
    for count in PROCESSES:
        progress(f"PostgreSQL with {count} process(es) ...")
        rates: dict[str, list[float]] = {name: [] for name in (*KINDS, PGBENCH)}
        with contextlib.ExitStack() as stack:
            crowds = {
                kind: [
                    stack.enter_context(_client(f"{url}&sublet_schema=crowd", hosts[n % len(hosts)], kind))
                    for n in range(count)
                ]
                for kind in KINDS
            }
            for number in range(ROUNDS):
                order = [*rates][number % 3 :] + [*rates][: number % 3]
                for name in order:
                    rates[name].append(
                        _pgbench(pgbench, server, count) if name == PGBENCH else _together(crowds[name])
                    )
        for name, found in rates.items():
            ratio = median_ratio(found, rates[PGBENCH])
            section.rows.append(
                [
                    KINDS.get(name, name),
                    str(count),
                    f"{statistics.median(found):,.0f}",
                    f"{min(found):,.0f}-{max(found):,.0f}",
                    f"{ratio:.2f}",
                ]
            )
            section.data[f"{name}, {count}"] = {"ops_per_s": found}
            if name != PGBENCH:
                section.goals.append(Goal(f"PostgreSQL, {name}, {count} processes / pgbench", ratio, LEAST))
    return section


def _init(pgbench: Path, server: PostgresServer) -> None:
    subprocess.run(
        [str(pgbench), "-i", "-q", "-s", str(SCALE), *_where(server)], check=True, capture_output=True
    )


def _where(server: PostgresServer) -> list[str]:
    return ["-h", str(server.folder), "-U", "sublet", "postgres"]


def _pgbench(pgbench: Path, server: PostgresServer, clients: int) -> float:
    """Transactions per second; as fast as it goes, statements prepared as ours are."""
    done = subprocess.run(
        [
            *(str(pgbench), "-n", "-N", "-M", "prepared", "-c", str(clients), "-j", str(min(2, clients))),
            *("-T", str(max(1, round(TURN_S))), *_where(server)),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    found = re.search(r"tps = ([\d.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found.group(1))


@contextlib.contextmanager
def _client(url: str, host: str, kind: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.postgres_load", url, host, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "ready", f"a client of {kind} did not start"
        yield process
    finally:
        process.stdin.close()
        process.wait(30)


def _together(crowd: list[subprocess.Popen[str]]) -> float:
    for process in crowd:
        assert process.stdin is not None
        process.stdin.write(f"{TURN_S}\n")
        process.stdin.flush()
    return sum(float(process.stdout.readline()) for process in crowd if process.stdout is not None)
