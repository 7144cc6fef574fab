"""Leases beside their peers, the step beside the disk, and eight processes on one ledger.

Rules of this file:
- "As shipped": acquire is durable, renew and release may be lost in a crash. "All durable" waits for the disk after
  each of the three. The peers' class: etcd writes grant, put and revoke to disk and keeps a renewal in memory; Redis
  writes all three.
- The eight processes do the same transaction through the ledger and through plain SQLite with a busy timeout.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import statistics
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, TypeVar

import apsw

from bench import peers
from bench.ledgers import furnish, lease_cycle, on_postgres, on_sqlite, postgres_server, step_cycle
from bench.measure import Goal, Section, Subject, interleave, median_ratio, progress, rate_row
from sublet.ledger.engines.sqlite.engine import SqliteEngine
from sublet.ledger.ledger import SqlLedger
from sublet.processes.clock import HostClock

SQLITE = "sublet SQLite, as shipped"
SQLITE_DURABLE = "sublet SQLite, all durable"
POSTGRES = "sublet PostgreSQL, as shipped"
ETCD = "etcd"
REDIS = "Redis AOF always"
DISK = "raw fdatasync"
STEP_SQLITE = "step on SQLite"
STEP_POSTGRES = "step on PostgreSQL"

PROCESSES = 8
PROCESS_ROUNDS = 5
PROCESS_S = 1.5
START_S = 30
WRITER_LOCK = "ledger: gate"
SAME_VERB = "ledger: busy timeout instead of the gate"
PLAIN = "plain SQLite: busy timeout"


def run(place: Path) -> list[Section]:
    sections: list[Section] = []
    with contextlib.ExitStack() as stack:
        ledger = on_sqlite(place / "leases.db")
        stack.callback(ledger.close)
        host = furnish(ledger)[0]
        url = stack.enter_context(postgres_server(place))
        shared = on_postgres(url, "leases")
        stack.callback(shared.close)
        furnish(shared)
        sections.append(_leases(place, ledger, shared, host))
        sections.append(_steps(place, ledger, shared, host))
        for each in (ledger, shared):
            faults = each.verify().faults
            assert not faults, faults[:3]
    sections.append(_processes(place))
    return sections


def _leases(place: Path, ledger: SqlLedger, shared: SqlLedger, host: str) -> Section:
    progress("leases: acquire, renew, release ...")
    section = Section(
        "Leases: acquire + renew + release, operations per second, one process",
        ["", "ops/s", "rounds", "x etcd", "x Redis AOF", ""],
    )
    subjects = [
        Subject(SQLITE, lease_cycle(ledger, host), ops=3),
        Subject(SQLITE_DURABLE, lease_cycle(ledger, host, all_durable=True), ops=3),
        Subject(POSTGRES, lease_cycle(shared, host), ops=3),
    ]
    notes = {
        SQLITE: "acquire durable, renew and release relaxed",
        SQLITE_DURABLE: "a barrier after each",
        POSTGRES: "one call each; renew and release with synchronous_commit off",
    }
    with contextlib.ExitStack() as stack:
        for name, start in _PEERS.items():
            try:
                subject, notes[name] = stack.enter_context(start(place))
            except peers.NotInstalled as missing:
                section.rows.append([name, "-", "-", "-", "-", str(missing)])
                section.data[name] = {"missing": str(missing)}
                continue
            assert subject.name == name
            subjects.append(subject)
        rates = interleave(subjects)
    section.rows[:0] = [rate_row(s.name, rates, (ETCD, REDIS), notes[s.name]) for s in subjects]
    section.data |= {s.name: {"ops_per_s": rates[s.name], "note": notes[s.name]} for s in subjects}
    wanted = [
        (SQLITE, ETCD, 6.0),
        (SQLITE_DURABLE, ETCD, 6.0),
        (POSTGRES, ETCD, 3.5),
        (SQLITE, REDIS, 1.7),
        (SQLITE_DURABLE, REDIS, 1.7),
    ]
    section.goals = [
        Goal(f"leases, {ours} / {other}", median_ratio(rates[ours], rates[other]), least)
        for ours, other, least in wanted
        if other in rates
    ]
    return section


_PEERS: dict[str, Callable[[Path], contextlib.AbstractContextManager[tuple[Subject, str]]]] = {
    ETCD: peers.etcd,
    REDIS: lambda place: peers.redis(place, durable=True),
    "Redis volatile": lambda place: peers.redis(place, durable=False),
    "filelock": peers.file_lock,
    DISK: peers.raw_disk,
}


def _steps(place: Path, ledger: SqlLedger, shared: SqlLedger, host: str) -> Section:
    progress("steps: fence, head, effect, journal ...")
    with peers.raw_disk(place) as (disk, note):
        rates = interleave(
            [
                Subject(STEP_SQLITE, step_cycle(ledger, host), ops=1),
                Subject(STEP_POSTGRES, step_cycle(shared, host), ops=1),
                disk,
            ]
        )
    return Section(
        "Steps: one durable commit of fence, head, effect and journal, per second, one process",
        ["", "per s", "rounds", "of raw fdatasync", ""],
        rows=[
            rate_row(STEP_SQLITE, rates, (DISK,), "durable"),
            rate_row(STEP_POSTGRES, rates, (DISK,), "durable; one call"),
            rate_row(DISK, rates, (DISK,), note),
        ],
        goals=[
            Goal(
                "step on SQLite, of raw fdatasync",
                100 * median_ratio(rates[STEP_SQLITE], rates[DISK]),
                75,
                "%",
            )
        ],
        data={name: {"per_s": found} for name, found in rates.items()},
    )


# --- eight processes -----------------------------------------------------------------------------------------


def _processes(place: Path) -> Section:
    section = Section(
        f"{PROCESSES} processes commit steps of their own jobs to one file, durable",
        ["", "txn/s", "rounds", "fairness (min/max)", "longest call ms", ""],
    )
    ways: dict[str, tuple[Callable[..., Any], str]] = {
        WRITER_LOCK: (_writer_lock_worker, "as shipped"),
        SAME_VERB: (_no_writer_lock_worker, "the same verb, synchronous=FULL: what the gate alone changes"),
        PLAIN: (_plain_worker, "BEGIN IMMEDIATE, synchronous=FULL, the same five rows and nothing else"),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for number in range(PROCESS_ROUNDS):
        progress(f"processes: round {number + 1} of {PROCESS_ROUNDS} ...")
        for name, (worker, _) in ways.items():
            folder = place / f"processes-{number}-{worker.__name__}"
            folder.mkdir()
            found[name].append(_race(folder / "ledger.db", worker))
    for name, (_, note) in ways.items():
        rates, fair, longest = zip(*found[name], strict=True)
        section.rows.append(
            [
                name,
                f"{statistics.median(rates):,.0f}",
                f"{min(rates):,.0f}-{max(rates):,.0f}",
                f"{statistics.median(fair):.2f}",
                f"{statistics.median(longest):.1f}",
                note,
            ]
        )
        section.data[name] = {"txn_per_s": rates, "fairness_min_max": fair, "longest_call_ms": longest}
    rates, fair, longest = zip(*found[WRITER_LOCK], strict=True)
    section.goals = [
        Goal(
            "8 processes, ledger / plain busy timeout", median_ratio(rates, [r[0] for r in found[PLAIN]]), 1.8
        ),
        Goal("8 processes, fairness (fewest / most commits)", statistics.median(fair), 0.9, ""),
        Goal("8 processes, longest call", statistics.median(longest), 25, "ms", at_most=True),
    ]
    return section


def _race(path: Path, worker: Callable[..., Any]) -> tuple[float, float, float]:
    """Transactions per second, fewest/most of a process, longest call in ms."""
    ledger = on_sqlite(path)
    furnish(ledger)
    ledger.close()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    start = context.Barrier(PROCESSES, timeout=START_S)
    workers = [
        context.Process(target=worker, args=(str(path), start, answers), daemon=True)
        for _ in range(PROCESSES)
    ]
    for each in workers:
        each.start()
    try:
        results = [answers.get(timeout=START_S + 60) for _ in workers]
    except queue.Empty:
        raise RuntimeError(f"{worker.__name__}: a process ended without an answer") from None
    finally:
        for each in workers:
            each.join(timeout=5)
            if each.is_alive():
                each.kill()
    counts = [count for count, _ in results]
    return (
        sum(counts) / PROCESS_S,
        min(counts) / max(1, max(counts)),
        max(worst for _, worst in results) * 1000,
    )


T = TypeVar("T")


def _drive(cycle: Callable[[], None], start: Barrier, answers: Any) -> None:
    cycle()
    start.wait()
    count, worst = 0, 0.0
    before = time.perf_counter()
    end = before + PROCESS_S
    while before < end:
        cycle()
        now = time.perf_counter()
        worst = max(worst, now - before)
        before = now
        count += 1
    answers.put((count, worst))


def _writer_lock_worker(path: str, start: Barrier, answers: Any) -> None:
    ledger = on_sqlite(Path(path))
    _drive(step_cycle(ledger, "host-0000"), start, answers)
    ledger.close()


class _NoWriterLock(SqliteEngine):
    """What the ledger would be without its writer lock and its own fsync."""

    def _write_alone(self, work: Callable[[Any], T], durable: bool) -> T:
        lending = self._lent()
        connection = lending.take()
        try:
            connection.db.execute("PRAGMA synchronous = full")
            _, result = self._transact(connection, work)
        finally:
            lending.give_back(connection)
        return result


def _no_writer_lock_worker(path: str, start: Barrier, answers: Any) -> None:
    ledger = SqlLedger(_NoWriterLock(Path(path), HostClock()))
    _drive(step_cycle(ledger, "host-0000"), start, answers)
    ledger.close()


def _plain_worker(path: str, start: Barrier, answers: Any) -> None:
    """The rows a step writes, with nothing read or decided: pool, journal, head, effect, lease."""
    setting_up = on_sqlite(Path(path))
    step_cycle(setting_up, "host-0000")()
    setting_up.close()
    mine = f"lease-{os.getpid()}-00000001"
    db = apsw.Connection(path)
    db.set_busy_timeout(60_000)
    db.execute("PRAGMA synchronous = full")
    steps = iter(range(2, 1 << 30))
    digest = "0" * 64

    def cycle() -> None:
        step = next(steps)
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE pool SET clock_us = clock_us + 1")  # a ledger whose clock goes back is refused
        db.execute(
            "INSERT INTO journal (strand, seq, at, kind, tenant, subject, body, hash) VALUES (?,?,?,?,?,?,?,?)",
            (f"job:job-{mine}", step, step, "step.committed", "lab", f"job-{mine}:{step}", _BODY, digest),
        )
        db.execute(
            "UPDATE head SET version = ?, step = ?, committed_at = ?, strand_seq = ?, strand_hash = ? WHERE job = ?",
            (step, step, step, step, digest, f"job-{mine}"),
        )
        db.execute(
            "INSERT INTO effect VALUES (?,?,?,?,1,1,'',?)",
            (f"job-{mine}:{step}", "f" * 16, f"job-{mine}", mine, step),
        )
        db.execute("UPDATE lease SET committed_at = ?, active_at = ? WHERE id = ?", (step, step, mine))
        db.execute("COMMIT")

    _drive(cycle, start, answers)
    db.close()


_BODY = '{"digest":"' + "d" * 64 + '","epoch":1,"fingerprint":"' + "f" * 16 + '","step":100,"version":100}'
