"""Eight workers, one killed with -9 every 100 ms, one stopped past its visibility and let go again: each result is stored once, none is lost.

The seed is printed first; SUBLET_QUEUE_STORM=N is how many items there are (`make proof` says 10,000).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import sublet
from sublet import wiring
from sublet.core.leasing.tenancy import Tenant
from sublet.core.queues.items import ItemState
from sublet.queues.queue import Queue
from sublet.settings import load_settings
from sublet.testing.postgres import PostgresServer
from tests.forked import Forked
from tests.seeds import SEED

ITEMS = int(os.environ.get("SUBLET_QUEUE_STORM", "1000"))
WORKERS = 8
KILL_EVERY = 0.1
BATCH = 16

pytestmark = [pytest.mark.storm, pytest.mark.timeout(600)]


class Swarm:
    """Workers that are killed and replaced, with the logs of all that ever were."""

    def __init__(self, environment: dict[str, str], name: str, folder: Path) -> None:
        self.environment, self.name, self.folder = environment, name, folder
        self.workers: list[subprocess.Popen[str]] = []
        self.logs: list[Path] = []
        self.stopped: subprocess.Popen[str] | None = None

    def fill(self) -> list[subprocess.Popen[str]]:
        while len(alive := [w for w in self.workers if w.poll() is None]) < WORKERS:
            self.logs.append(self.folder / f"log{len(self.logs)}")
            self.workers.append(
                Forked(
                    [
                        sys.executable,
                        "-m",
                        "tests.storms.queue_worker",
                        self.name,
                        str(BATCH),
                        str(self.logs[-1]),
                    ],
                    cwd=Path(__file__).parents[2],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                )
            )
        return alive

    def kill_one(self, chance: random.Random) -> bool:
        """Whether one died that was at work: it had opened its queue, and was alive."""
        started = zip(self.workers, self.logs, strict=True)
        at_work = [w for w, log in started if w is not self.stopped and w.poll() is None and log.exists()]
        if at_work:
            victim = chance.choice(at_work)
            victim.kill()
            victim.wait()
        self.fill()
        return bool(at_work) and victim.returncode == -signal.SIGKILL

    def end(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.send_signal(signal.SIGCONT)
                worker.kill()
        for worker in self.workers:
            worker.wait()

    def told(self, word: str) -> Counter[tuple[int, int]]:
        found: Counter[tuple[int, int]] = Counter()
        for log in self.logs:
            for line in log.read_text().splitlines() if log.exists() else ():
                parts = line.split()
                if len(parts) == 3 and parts[0] == word:
                    found[int(parts[1]), int(parts[2])] += 1
        return found


def has_items_in_hand(queue: Queue, pid: int) -> bool:
    return any(consumer.pid == pid for consumer in queue.workers())


def others_go_on(queue: Queue) -> bool:
    """Not while one that was stopped has the ledger's writer lock: nobody else is given its items then, and its result is not late."""
    before = queue.stats().done
    time.sleep(0.3)
    return queue.stats().done > before


def storm(queue: Queue, swarm: Swarm, wanted: int) -> int:
    """Until all is done; how many were killed."""
    chance = random.Random(SEED)
    kills = 0
    stopped_at = 0.0
    until = time.monotonic() + 300
    swarm.fill()
    while (stats := queue.stats()).done + stats.dead < wanted or swarm.stopped is not None:
        assert time.monotonic() < until, f"not over: {stats}"
        time.sleep(KILL_EVERY)
        now = time.monotonic()
        if not stopped_at and stats.done > wanted // 4:
            # One that has items when it is stopped: its late results must be refused.
            for worker in swarm.fill():
                worker.send_signal(signal.SIGSTOP)
                if has_items_in_hand(queue, worker.pid) and others_go_on(queue):
                    swarm.stopped, stopped_at = worker, now
                    break
                worker.send_signal(signal.SIGCONT)
        if swarm.stopped is not None and now - stopped_at > 3:
            swarm.stopped.send_signal(signal.SIGCONT)
            swarm.stopped = None
            time.sleep(0.5)  # it finds out
        kills += swarm.kill_one(chance)
    return kills


def check(queue: Queue, swarm: Swarm, bodies: set[str]) -> None:
    stats = queue.stats()
    results = list(queue.results())
    assert {r.body for r in results} == bodies, "an item was lost"
    assert len(results) == len(bodies), "an item was done twice"
    assert stats.completed == len(bodies), "the meter counted another number of results"
    assert (stats.dead, stats.ready, stats.leased) == (0, 0, 0)
    assert all(r.value["item"] == r.id and r.value["body"] == r.body for r in results)
    stored = {(r.id, r.delivery) for r in results}
    done = swarm.told("done")
    assert all(count == 1 for count in done.values())
    assert set(done) <= stored, "a result that was acknowledged is not the one that is stored"
    refused = swarm.told("stale")
    assert not set(refused) & stored
    assert stats.stale >= len(refused)
    ledger = queue._ledger
    assert ledger.verify().faults == ()
    proof = ledger.prove_queue(queue.record().id)
    assert (proof.flaws, proof.completed, proof.refused) == ((), len(bodies), stats.stale)
    again = sum(r.delivery - 1 for r in results)
    print(
        f"\n{len(results)} items once each, {again} handed out again, {stats.stale} stale results refused, {len(swarm.logs)} workers",
        end="",
    )
    assert again > 0
    assert stats.stale > 0, "the one that was stopped past its visibility had nothing refused"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    wiring.close_all()


def environment(folder: Path, ledger: str = "", **more: str) -> dict[str, str]:
    told = {"SUBLET_HOME": str(folder / "home"), "SUBLET_TENANT": "storm", **more}
    return {**os.environ, **told, **({"SUBLET_LEDGER": ledger} if ledger else {})}


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_every_result_is_stored_once(folder: Path, engine: str, request: pytest.FixtureRequest) -> None:
    print(f"seed {SEED}", end=" ")
    url = ""
    if engine == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        url = f"{server.url}?sublet_schema=storm_{uuid.uuid4().hex[:8]}"
    told = environment(folder, url)
    settings = load_settings(home=told["SUBLET_HOME"], tenant="storm", ledger=url or None)
    wiring.open_ledger(settings).add_tenant(Tenant(name="storm"), actor="storm", exist_ok=True)
    queue = sublet.queue("images", settings=settings)
    bodies = {f"image {n}" for n in range(ITEMS)}
    queue.publish(sorted(bodies), key=str)
    swarm = Swarm(told, "images", folder)
    try:
        kills = storm(queue, swarm, ITEMS)
    finally:
        swarm.end()
    check(queue, swarm, bodies)
    print(f", {kills} killed", end=" ")
    assert not list(queue.peek(state=ItemState.LEASED))
