"""`python -m proof.linear --engine sqlite --ops 100000`: real processes on a real ledger, some of them killed, and every answer explained."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from proof.linear.batch import Checked, Recorded, check_batch, lines_of
from proof.linear.client import LOCKS
from sublet.core.errors import NotFound
from sublet.core.leasing.tenancy import Tenant
from sublet.ports.ledger import FoundDevice
from sublet.processes.clock import HostClock
from sublet.testing.postgres import PostgresServer
from sublet.wiring import plug_in
from tests.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 4
#: In one history, on one ledger with clients of its own.
BATCH = 25_000
#: Ledgers at once. Clients of one ledger mostly wait for each other's turn at its writer lock; those of another use that time.
LEDGERS = 4
#: Are written down for one operation, about.
BYTES_AN_OP = 72
MEMORY = Path("/dev/shm")
#: A PostgreSQL server may finish what a dead client had sent.
AFTERLIFE_NS = 2_000_000_000


def prepare(url: str) -> Any:
    ledger = plug_in("sublet.ledgers", url.split(":", 1)[0])(url, HostClock())
    ledger.add_tenant(Tenant(name="ada"), actor="linear")
    # One lock has room for one; the others are kept apart by being held alone, and by nothing else.
    for name, size in [("shared", 1 << 40), *((f"lock{i}", 1 << 40 if i else 1) for i in range(LOCKS))]:
        ledger.report_host(
            name, [FoundDevice(id=f"{name}-gpu", driver="host", ordinal=0, name=name, capacity_bytes=size)]
        )
    return ledger


class Clients:
    """Processes at one ledger, killed now and then and replaced; with the operations of all of them."""

    def __init__(self, url: str, seed: int, seconds: float, folder: Path) -> None:
        self.url, self.seconds, self.folder = url, seconds, folder
        self.chance = random.Random(seed)
        self.ledger = prepare(url)
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.died: dict[str, int] = {}  # when, of those that were killed
        self.number = 0
        self.kills = 0
        self.janitor: list[list[str]] = []
        self.doubtful: list[tuple[str, str, int]] = []  # locks whose holder died before it was answered

    def start(self) -> None:
        self.number += 1
        name = str(self.number)
        self.running[name] = Forked(
            [sys.executable, "-m", "proof.linear.client", self.url, name, str(self.chance.getrandbits(31)), str(self.seconds), str(self.folder / name)],
            cwd=ROOT,
        )  # fmt: skip

    def kill_one(self) -> None:
        """One that has asked something. One that has not is left alone: its death would show nothing."""
        begun = [name for name in sorted(self.running) if _size(self.folder / name)]
        if not begun:
            return
        name = self.chance.choice(begun)
        process = self.running.pop(name)
        process.kill()
        code = process.wait()
        self.died[name] = time.monotonic_ns()
        if code != -signal.SIGKILL:
            raise RuntimeError(f"client {name} ended by itself, with {code}")
        self.kills += 1
        self.tidy(name)

    def tidy(self, name: str) -> None:
        """The dead one's locks are freed by somebody who writes that down too; what it had no answer to, once more later."""
        self.doubtful = [
            (lock, lease, died)
            for lock, lease, died in self.doubtful
            if self.release(lock, lease) == "no" and _ago(died) < 2 * AFTERLIFE_NS
        ]
        for lock, lease, answered in held_at_the_end(lines_of(self.folder / name)):
            if self.release(lock, lease) == "no" and not answered:
                self.doubtful.append((lock, lease, self.died[name]))  # fmt: skip

    def release(self, lock: str, lease: str) -> str:
        called = time.monotonic_ns()
        try:
            answer = "yes" if self.ledger.release(lease, "s") else "no"
        except NotFound:
            answer = "no"
        self.janitor.append(["release", lock, lease, str(called), str(time.monotonic_ns()), answer])
        return answer

    def recorded(self) -> Recorded:
        return Recorded(self.folder, self.died, self.janitor)

    def stop(self) -> None:
        for name, process in self.running.items():
            process.kill()
            process.wait()
            self.died[name] = time.monotonic_ns()
        self.ledger.close()


def _ago(moment_ns: int) -> int:
    return time.monotonic_ns() - moment_ns


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def held_at_the_end(lines: list[list[str]]) -> list[tuple[str, str, bool]]:
    """(lock, lease, whether it was told so) of everything acquired, or perhaps, and not released."""
    asked: dict[str, tuple[str, str, str]] = {}  # by number: kind, lock, lease
    held: dict[str, tuple[str, bool]] = {}  # by lease
    for words in lines:
        if words[0] == "c" and words[3] in ("acquire", "release"):
            asked[words[1]] = (words[3], words[4], words[5])
            if words[3] == "acquire":
                held[words[5]] = (words[4], False)
        elif words[0] == "r" and words[1] in asked:
            kind, lock, lease = asked.pop(words[1])
            if kind == "acquire" and words[3] == "granted":
                held[lease] = (lock, True)
            else:
                held.pop(lease, None)
    return [(lock, lease, told) for lease, (lock, told) in held.items()]


def record(url: str, seed: int, ops: int, seconds: float, folder: Path, kill_every: float) -> Clients:
    clients = Clients(url, seed, seconds + 60, folder)
    until = time.monotonic() + seconds
    for _ in range(CLIENTS):
        clients.start()
    try:
        while time.monotonic() < until and sum(map(_size, folder.iterdir())) < ops * BYTES_AN_OP:
            time.sleep(clients.chance.uniform(0.5, 1.5) * kill_every)
            clients.kill_one()
            while len(clients.running) < CLIENTS:
                clients.start()
    finally:
        clients.stop()
    return clients


def a_place_in_memory() -> str | None:
    """What a killed process has written is there whether or not it was synced: a disk would only make the histories slower and sparser."""
    return str(MEMORY) if os.access(MEMORY, os.W_OK) else None


class Histories:
    """Batch after batch on several ledgers at once, each on a ledger of its own; what is recorded is explained while others are recorded."""

    def __init__(
        self,
        seed: int,
        ops: int,
        seconds: float,
        kill_every: float,
        folder: Path,
        server: PostgresServer | None,
    ) -> None:
        self.seed, self.ops, self.kill_every, self.folder, self.server = seed, ops, kill_every, folder, server
        self.began = time.monotonic()
        self.until = self.began + seconds
        self.batches = self.kills = self.asked_for = 0
        self.checked: list[Checked] = []
        self.lock = threading.Lock()

    def next_batch(self) -> tuple[int, int]:
        """(its number, how many operations), or (0, 0): enough was asked for, or the time is over."""
        with self.lock:
            left = self.ops - self.asked_for
            if left <= 0 or time.monotonic() >= self.until:
                return 0, 0
            self.batches += 1
            wanted = min(BATCH, max(left, 500))
            self.asked_for += wanted
            return self.batches, wanted

    def record_on(self, checker: ProcessPoolExecutor) -> None:
        while True:
            number, wanted = self.next_batch()
            if not number:
                return
            home = self.folder / str(number)
            logs = home / "logs"
            logs.mkdir(parents=True)
            url = (
                f"{self.server.url}&sublet_schema=linear{number}"
                if self.server
                else f"sqlite:{home}/ledger.db"
            )
            left = self.until - time.monotonic()
            clients = record(url, self.seed + number, wanted, left, logs, self.kill_every)
            found = checker.submit(
                check_batch, clients.recorded(), AFTERLIFE_NS if self.server else 0
            ).result()
            shutil.rmtree(home)
            with self.lock:
                self.checked.append(found)
                self.kills += clients.kills
                self.asked_for += min(0, found.operations - wanted)  # what is missing is asked for again
                counted = sum(c.operations for c in self.checked)
                print(
                    f"{time.monotonic() - self.began:5.0f} s  {counted:,} of {self.ops:,} operations, {self.kills} kills",
                    flush=True,
                )


def run(engine: str, seed: int, ops: int, seconds: float, kill_every: float) -> dict[str, Any]:
    server = None
    known_place, tempfile.tempdir = tempfile.tempdir, a_place_in_memory()
    try:
        if engine == "postgres":
            server = PostgresServer()
            server.start()
        with (
            tempfile.TemporaryDirectory(prefix="sublet-linear-") as folder,
            ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as checker,
            ThreadPoolExecutor(LEDGERS) as lanes,
        ):
            histories = Histories(seed, ops, seconds, kill_every, Path(folder), server)
            for lane in [lanes.submit(histories.record_on, checker) for _ in range(LEDGERS)]:
                lane.result()
    finally:
        tempfile.tempdir = known_place
        if server is not None:
            server.stop()
    checked = histories.checked
    kinds: Counter[str] = Counter()
    for c in checked:
        kinds.update(c.by_kind)
    flaws = [flaw for c in checked for flaw in c.flaws]
    return {
        "engine": engine,
        "seed": seed,
        "operations": sum(c.operations for c in checked),
        "by_kind": dict(sorted(kinds.items())),
        "without_answer": sum(c.without_answer for c in checked),
        "overlapping": sum(c.overlapping for c in checked),
        "batches": len(checked),
        "objects": sum(c.objects for c in checked),
        "kills": histories.kills,
        "violations": len(flaws),
        "flaws": flaws[:5],
        "seconds": round(time.monotonic() - histories.began, 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.linear", description=__doc__)
    parser.add_argument("--engine", choices=["sqlite", "postgres"], default="sqlite")
    parser.add_argument("--ops", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kill-every", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    wanted = parser.parse_args(argv)
    seed = wanted.seed or random.SystemRandom().randrange(1, 1 << 31)
    print(f"seed {seed}", flush=True)
    numbers = run(wanted.engine, seed, wanted.ops, wanted.seconds, wanted.kill_every)
    print(json.dumps(numbers, indent=1))
    if wanted.json:
        wanted.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 1 if numbers["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
