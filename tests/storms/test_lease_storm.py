"""Eight processes, random verbs, on each engine: calm, then with kill -9 of holders, of the warden and of PostgreSQL.

The seed is printed first; `SUBLET_SEED=N SUBLET_STORM_SECONDS=S pytest tests/storms` replays it for longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet import wiring
from sublet.core.journal.chain import Entry
from sublet.core.leasing.lease import LeaseState
from sublet.core.leasing.tenancy import Tenant
from sublet.leases.warden import warden_process
from sublet.ports.ledger import FoundDevice, Ledger
from sublet.processes.clock import HostClock
from sublet.settings import load_settings
from sublet.testing.postgres import PostgresServer
from tests.forked import Forked
from tests.homes import wait_until
from tests.seeds import SEED

SECONDS = float(os.environ.get("SUBLET_STORM_SECONDS", "4"))
PROCESSES = 8
#: Of PostgreSQL. `make proof` wants hundreds.
MANY_CRASHES = int(os.environ.get("SUBLET_POSTGRES_CRASHES", "0"))
CRASHES = MANY_CRASHES or min(5, int(SECONDS))
DEVICES = "host:3x16GiB"

pytestmark = [pytest.mark.storm, pytest.mark.timeout(int(SECONDS * 4 + 180 + 12 * MANY_CRASHES))]


def prepare(ledger: Ledger) -> None:
    for name in ("ada", "bob", "eve"):
        ledger.add_tenant(Tenant(name=name), actor="storm")
    ledger.report_host(
        "storm",
        [
            FoundDevice(id=f"storm-host{i}", driver="host", ordinal=i, name="storm", capacity_bytes=16 << 30)
            for i in range(3)
        ],
    )


def start_worker(url: str, seed: int, seconds: float, log: Path, commits: int = 25) -> subprocess.Popen[str]:
    return Forked(
        [sys.executable, "-m", "tests.storms.worker", url, str(seed), str(seconds), str(log), str(commits)],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.DEVNULL,
    )


class Swarm:
    """Workers that are killed and replaced, with the logs of all that ever were."""

    def __init__(
        self, url: str, folder: Path, seconds: float | None = None, commits: int = 25, many: int = PROCESSES
    ) -> None:
        self.url = url
        self.folder = folder
        self.seconds = SECONDS * 4 if seconds is None else seconds
        self.commits = commits
        self.many = many
        self.logs: list[Path] = []
        self.workers: dict[Path, subprocess.Popen[str]] = {}
        self.read: dict[Path, int] = {}
        self.told: Counter[str] = Counter()
        self.fill()

    def fill(self) -> list[Path]:
        """As many live workers as there should be; where each writes."""
        for log in [log for log, worker in self.workers.items() if worker.poll() is not None]:
            del self.workers[log]
        while len(self.workers) < self.many:
            log = self.folder / f"log{len(self.logs)}"
            self.logs.append(log)
            self.workers[log] = start_worker(self.url, SEED + len(self.logs), self.seconds, log, self.commits)
        return list(self.workers)

    def kill_one(self, chance: random.Random) -> bool:
        """Whether one died that was at work: what it was killed at, it had begun."""
        at_work = [log for log in self.fill() if log.exists()]
        if not at_work:
            return False
        log = chance.choice(at_work)
        victim = self.workers.pop(log)
        victim.kill()
        code = victim.wait()
        self.fill()
        return code == -signal.SIGKILL

    def heard(self) -> Counter[str]:
        """What all of them were answered so far, by its first word. Reads on where it stopped."""
        for log in self.logs:
            if log.exists() and log.stat().st_size > self.read.get(log, 0):
                with log.open("rb") as file:
                    file.seek(self.read.get(log, 0))
                    data = file.read()
                data = data[: data.rfind(b"\n") + 1]
                self.read[log] = self.read.get(log, 0) + len(data)
                self.told.update(line.split(b" ", 1)[0].decode() for line in data.splitlines())
        return Counter(self.told)

    def served(self, before: Counter[str], least: dict[str, int], seconds: float = 60) -> None:
        """Until so much more was answered: a server that dies before anybody was served shows nothing."""
        deadline = time.monotonic() + seconds
        while any(self.heard()[word] < before[word] + n for word, n in least.items()):
            assert time.monotonic() < deadline, (
                f"in {seconds:.0f} s only {self.heard() - before} was answered"
            )
            self.fill()
            time.sleep(0.005)

    def end(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.wait()


def read_logs(logs: list[Path]) -> list[list[str]]:
    return [line.split() for log in logs if log.exists() for line in log.read_text().splitlines()]


def enough(logs: list[Path], *words: str) -> bool:
    """So much was done that there is something to check, however busy the machine is otherwise."""
    seen = [w[0] for w in read_logs(logs) if w]
    return all(seen.count(word) > PROCESSES for word in words or ("granted", "committed"))


def check_everything(ledger: Ledger, logs: list[Path]) -> dict[str, int]:
    """Everything acknowledged is there, everything there obeys the rules (L1-L5, S1-S3, S7, T4)."""
    words = read_logs(logs)
    errors = [w for w in words if w[0] == "ERROR"]
    assert not errors, errors[:3]
    result = ledger.verify()
    assert not result.faults, result.faults[:5]
    granted = {w[1]: int(w[2]) for w in words if w[0] == "granted"}
    epochs = list(granted.values())
    assert len(set(epochs)) == len(epochs), "an epoch was granted twice"
    journal = dict(e for e in _grants(ledger))
    for lease_id, epoch in granted.items():
        assert journal.get(lease_id) == epoch, f"the acknowledged grant of {lease_id} is lost"
    committed = [(w[1], int(w[2]), w[3]) for w in words if w[0] == "committed"]
    assert len({(job, version) for job, version, _ in committed}) == len(committed), (
        "a version committed twice"
    )
    steps = _committed_steps(ledger)
    for job, version, lease_id in committed:
        assert steps.get((job, version)) == lease_id, f"the acknowledged commit {job}:{version} is lost"
    for job in {job for job, _ in steps}:
        versions = sorted(version for j, version in steps if j == job)
        assert versions == list(range(1, len(versions) + 1)), f"steps of {job} have a gap or a repeat"  # S3
        head = ledger.head(job)
        assert head is not None
        assert head.version == versions[-1]
    usage = {u.lease_id: u for u in ledger.usage()}
    ended = [
        a.lease for a in ledger.leases(live_only=False, limit=10**6) if a.lease.state is LeaseState.ENDED
    ]
    for lease in ended:
        if lease.granted_at:
            assert usage[lease.id].gpu_us == (lease.ended_at - lease.granted_at) * len(lease.slices)
    return {"granted": len(granted), "committed": len(committed), "rows": result.rows, "leases": len(ended)}


def _entries(ledger: Ledger) -> Iterator[Entry]:
    after = 0
    while batch := ledger.tail(after=after, limit=5000):
        for after, entry in batch:  # noqa: B007
            yield entry


def _grants(ledger: Ledger):
    for entry in _entries(ledger):
        if entry.kind == "lease.granted":
            yield entry.subject, json.loads(entry.body)["epoch"]


def _committed_steps(ledger: Ledger) -> dict[tuple[str, int], str]:
    found = {}
    for entry in _entries(ledger):
        if entry.kind == "step.committed":
            body = json.loads(entry.body)
            found[(entry.strand.removeprefix("job:"), body["version"])] = body["lease"]
    return found


def drain(ledger: Ledger) -> None:
    """After the storm every lease ends by itself and every device is whole again."""
    from sublet.ports.processes import Receipt

    deadline = time.monotonic() + 30
    while True:
        ledger.tick("storm")
        live = [a.lease for a in ledger.leases()]
        for lease in live:
            if lease.state is LeaseState.ENDED:
                ledger.settle(lease.id, lease.epoch, Receipt(proven=True, ladder="gone", containment="test"))
        if not live:
            break
        assert time.monotonic() < deadline, [x.id for x in live]
        time.sleep(0.1)
    assert all(d.free_bytes == d.capacity_bytes and d.leases == 0 for d in ledger.devices("storm"))
    assert all(t.live_leases == 0 and t.live_bytes == 0 and t.waiting == 0 for t in ledger.tenants())


@contextlib.contextmanager
def settling(url: str):
    """Stands in for the storm host's warden, without killing: it runs the schedule and returns ended slices."""
    from sublet.core.errors import SubletError
    from sublet.ports.processes import Receipt

    stop = threading.Event()

    def loop() -> None:
        ledger = wiring.plug_in("sublet.ledgers", url.split(":", 1)[0])(url, HostClock())
        while not stop.wait(0.02):
            with contextlib.suppress(SubletError):
                ledger.tick("storm")
                for lease in ledger.host_view("storm").leases:
                    if lease.state is LeaseState.ENDED:
                        ledger.settle(
                            lease.id, lease.epoch, Receipt(proven=True, ladder="gone", containment="test")
                        )
        ledger.close()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path}/ledger.db"
    return f"{request.getfixturevalue('postgres_server').url}&sublet_schema=s{uuid.uuid4().hex[:10]}"


def test_eight_processes_obey_the_lease_rules(url: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    ledger = wiring.plug_in("sublet.ledgers", url.split(":", 1)[0])(url, HostClock())
    prepare(ledger)
    logs = [tmp_path / f"log{i}" for i in range(PROCESSES)]
    with settling(url):
        workers = [start_worker(url, SEED + i, SECONDS, logs[i]) for i in range(PROCESSES)]
        assert [w.wait(timeout=SECONDS + 120) for w in workers] == [0] * PROCESSES
    words = read_logs(logs)
    assert not [w for w in words if w[0] == "disconnected"], "a lock or connection error reached a caller"
    drain(ledger)
    seen = check_everything(ledger, logs)
    print(seen)
    assert seen["granted"] > PROCESSES
    assert seen["committed"] > PROCESSES
    ledger.close()


#: Confirmed between two crashes of the server, at the least.
BETWEEN_CRASHES = {"granted": 4, "committed": 2}
MEMORY = Path("/dev/shm")


def test_kill_9_of_holders_and_of_postgres(tmp_path: Path) -> None:
    """Crashes of the server and a stream of killed holders: nothing granted twice, nothing acknowledged lost.

    Each crash interrupts work: grants and commits were confirmed since the one before it.
    """
    print(f"seed {SEED}", flush=True)
    chance = random.Random(SEED)
    server = PostgresServer(MEMORY if os.access(MEMORY, os.W_OK) else None)
    server.start()
    url = f"{server.url}&sublet_schema=crash"
    try:
        ledger = wiring.plug_in("sublet.ledgers", "postgresql")(url, HostClock())
        prepare(ledger)
        swarm = Swarm(url, tmp_path, seconds=SECONDS * 4 + MANY_CRASHES, commits=60)
        crashes = kills = 0
        shown = time.monotonic()
        with settling(url):
            while crashes < CRASHES:
                swarm.served(swarm.heard(), BETWEEN_CRASHES)
                time.sleep(chance.uniform(0, 0.05))
                if chance.random() < 0.5:
                    kills += swarm.kill_one(chance)
                server.crash()
                crashes += 1
                server.start()
                if time.monotonic() - shown > 15:
                    shown = time.monotonic()
                    print(f"{crashes} of {CRASHES} crashes, {dict(swarm.told)}", flush=True)
            swarm.served(swarm.heard(), BETWEEN_CRASHES)
            wait_until(lambda: enough(swarm.logs), 60)
        swarm.end()
        drain(ledger)
        seen = check_everything(ledger, swarm.logs)
        print(seen, "crashes", crashes, "kills", kills)
        assert seen["granted"] >= BETWEEN_CRASHES["granted"] * crashes
        assert seen["committed"] >= BETWEEN_CRASHES["committed"] * crashes
        ledger.close()
    finally:
        server.stop()


def test_kill_9_of_holders_and_of_the_warden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real wardens on the embedded ledger, killed again and again with their holders (K3)."""
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    url = f"sqlite:{tmp_path}/ledger.db"
    for name, value in {
        "SUBLET_HOME": str(tmp_path / "home"),
        "SUBLET_LEDGER": url,
        "SUBLET_DEVICES": DEVICES,
        "SUBLET_HOST": "storm",
    }.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    ledger = wiring.plug_in("sublet.ledgers", "sqlite")(url, HostClock())
    for name in ("ada", "bob", "eve"):
        ledger.add_tenant(Tenant(name=name), actor="storm")
    warden_process.ensure_warden(settings)
    swarm = Swarm(url, tmp_path)
    until = time.monotonic() + max(4, SECONDS / 2)
    kills = 0
    try:
        while time.monotonic() < until:
            time.sleep(chance.uniform(0.05, 0.6))
            kills += swarm.kill_one(chance)  # the warden ends workers too, when a lease of theirs runs out
            if chance.random() < 0.4:
                pid = warden_process.warden_state(settings)[2]
                if pid:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, 9)
                        kills += 1
                time.sleep(chance.uniform(0, 0.2))
                warden_process.ensure_warden(settings)
        wait_until(lambda: enough(swarm.logs, "granted"), 60)
        swarm.end()
        warden_process.ensure_warden(settings)
        deadline = time.monotonic() + 30
        while ledger.leases():
            assert time.monotonic() < deadline, [a.lease for a in ledger.leases()]
            time.sleep(0.05)
    finally:
        swarm.end()
        pid = warden_process.warden_state(settings)[2]
        if pid:
            os.kill(pid, 9)
    assert all(d.free_bytes == d.capacity_bytes and d.state.value == "ready" for d in ledger.devices("storm"))
    seen = check_everything(ledger, swarm.logs)
    print(seen, "kills", kills)
    assert seen["granted"] > PROCESSES
    ledger.close()
