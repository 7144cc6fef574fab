"""Hosts cut off from their PostgreSQL ledger, silently or not, in one direction or both, for a moment or for longer than a lease lasts.

`SUBLET_CUTS=200 pytest tests/storms/test_partitions.py`; the seed is printed first, SUBLET_SEED=N takes another.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sublet import wiring
from sublet.core.leasing.lease import EndReason, LeaseRecord
from sublet.core.leasing.tenancy import Tenant
from sublet.core.scheduling.device import DeviceState
from sublet.machine.run_folder import find_run
from sublet.ports.ledger import Ledger
from sublet.processes.clock import HostClock
from sublet.testing.postgres import PostgresServer
from tests.conftest import need
from tests.everywhere.test_programs import chained
from tests.homes import wait_until
from tests.storms import wires
from tests.storms.test_lease_storm import SEED, check_everything, drain, enough, prepare, read_logs, settling
from tests.storms.wires import Wire

ROOT = Path(__file__).parents[2]
CUTS = int(os.environ.get("SUBLET_CUTS", "6"))
#: A glance, unless more was asked for.
HOSTS, STEPS = (3, 150) if CUTS > 20 else (2, 60)
TTL_S = 3.0
#: A connection that hears nothing is given up soon; the patience of a verb is longer.
IMPATIENT = "tcp_user_timeout=1500&keepalives_idle=1&keepalives_interval=1&keepalives_count=2"

pytestmark = [pytest.mark.storm, pytest.mark.timeout(300 + 10 * CUTS)]


@pytest.fixture(scope="module")
def network() -> Iterator[tuple[Path, list[Wire]]]:
    need(wires.possible(), "the right to make network namespaces (root and iproute2)")
    with wires.wires(HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def server(network: tuple[Path, list[Wire]]) -> Iterator[PostgresServer]:
    server = PostgresServer(network=(network[0], wires.SERVER))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def hosts(network: tuple[Path, list[Wire]]) -> Iterator[list[Wire]]:
    yield network[1]
    for wire in network[1]:
        wire.heal()


def of_schema(server: PostgresServer, schema: str) -> tuple[str, str]:
    """The ledger's address past the wires, and over them."""
    return f"{server.url}&sublet_schema={schema}", f"{server.network_url}{IMPATIENT}&sublet_schema={schema}"


class Weather:
    """Cuts and heals every wire by itself, so that several may be cut at once, until there were enough."""

    def __init__(self, wires: list[Wire], cuts: int, chance: random.Random) -> None:
        self.cuts = 0
        self._wanted = cuts
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._over, args=(wire, random.Random(chance.random()))) for wire in wires
        ]
        for thread in self._threads:
            thread.start()

    def _over(self, wire: Wire, chance: random.Random) -> None:
        lasts = TTL_S * 1.5  # the first takes a lease, and then as it comes
        while self._one_more():
            time.sleep(chance.uniform(0.3, 2.0))
            wire.cut(chance.choice(sorted(wires.CUTS)))
            time.sleep(lasts)
            wire.heal()
            # A moment, a part of a lease's ttl, or longer than any of it.
            lasts = chance.choice([0.05, 0.4, 1.5, TTL_S * 0.7, TTL_S * 1.5, TTL_S * 2])

    def _one_more(self) -> bool:
        with self._lock:
            self.cuts += 1
            return self.cuts <= self._wanted

    def is_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()


def test_a_cut_is_silent_and_heals(network: tuple[Path, list[Wire]], hosts: list[Wire]) -> None:
    """Or the storms below show nothing."""
    listening = wires.listener(network[0])
    try:
        first, second, *_ = hosts
        assert wires.reaches(first, 7777)
        for how in wires.CUTS:
            first.cut(how)
            assert not wires.reaches(first, 7777, 0.4), how
            assert wires.reaches(second, 7777), "the others are not cut"
            first.heal()
            assert wires.reaches(first, 7777), how
    finally:
        listening.kill()
        listening.wait()


def test_random_verbs_of_hosts_that_are_cut_off(
    server: PostgresServer, hosts: list[Wire], tmp_path: Path
) -> None:
    """L1-L5, S1-S3, S5, S7, T4: what was answered is true, what was not may be; nothing was granted or committed twice."""
    print(f"seed {SEED}", flush=True)
    near, far = of_schema(server, f"verbs{uuid.uuid4().hex[:8]}")
    ledger = wiring.plug_in("sublet.ledgers", "postgresql")(near, HostClock())
    prepare(ledger)
    logs = [tmp_path / f"log{n}" for n in range(HOSTS * (2 if CUTS > 20 else 1))]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        with settling(near):
            for n, log in enumerate(logs):
                words = (sys.executable, "-m", "tests.storms.worker", far, str(SEED + n), "3600", str(log))
                workers.append(subprocess.Popen(hosts[n % HOSTS].command(*words), cwd=ROOT))
            wait_until(lambda: enough(logs), 90)
            weather = Weather(hosts, CUTS, random.Random(SEED))
            weather.wait()
            before = len(read_logs(logs))
            wait_until(lambda: len(read_logs(logs)) > before + 20, 90)  # they go on afterwards
            assert [w.poll() for w in workers] == [None] * len(workers), "a cut ended a program"
            for worker in workers:
                worker.kill()
                worker.wait()
        drain(ledger)
        seen = check_everything(ledger, logs)
        print(f"{weather.cuts - HOSTS} cuts under random verbs: {seen}", flush=True)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        ledger.close()


#: A chain of digests in which no step may be missing and none may be there twice; and when it worked under which lease.
JOB = """
import hashlib, json, os, sys, time
import sublet

class Chain:
    digest = b""
    def state_dict(self): return {"digest": self.digest}
    def load_state_dict(self, state): self.digest = bytes(state["digest"])

name, steps, stamps = sys.argv[1], int(sys.argv[2]), open(sys.argv[3], "ab", buffering=0)
chain = Chain()
run = sublet.train(name, {"chain": chain}, every=2, progress=False)
for step in run.steps(steps):
    for _ in range(4):
        stamps.write(f"{os.environ['SUBLET_LEASE_ID']} {time.time_ns() // 1000}\\n".encode())
        time.sleep(0.01)
    chain.digest = hashlib.sha256(chain.digest + step.number.to_bytes(4, "big")).digest()
print(json.dumps({"digest": chain.digest.hex()}), flush=True)
"""


class Host:
    """A warden and jobs of `sublet run` behind one wire."""

    def __init__(self, folder: Path, number: int, wire: Wire, ledger: str) -> None:
        self.wire = wire
        self.name = f"host{number}-{uuid.uuid4().hex[:6]}"
        self.home = folder / self.name
        self.home.mkdir()
        (self.home / "sublet.toml").write_text('[policy]\nhost_silence = "15s"\nhost_gone = "1h"\n')
        self.stamps = self.home / "stamps"
        self.program = self.home / "job.py"
        self.program.write_text(JOB)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")} | {
            "SUBLET_HOME": str(self.home),
            "SUBLET_LEDGER": ledger,
            "SUBLET_HOST": self.name,
            "SUBLET_STORE": f"dir:{folder}/store",
            "SUBLET_DEVICES": "host:1x16GiB",
            "SUBLET_PRELOAD": "none",
            "SUBLET_TENANT": "ada",
        }
        self.started: list[subprocess.Popen[str]] = []
        self.runs: dict[str, subprocess.Popen[str]] = {}
        self.warden = self._start("warden")
        self.jobs = 0

    def _start(self, *words: str) -> subprocess.Popen[str]:
        log = (self.home / "said").open("ab")
        command = self.wire.command(sys.executable, "-m", "sublet", *words)
        child = subprocess.Popen(
            command,
            env=self.environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
        )
        log.close()
        self.started.append(child)
        return child

    def keep_busy(self, many: int = 2) -> None:
        """So many runs that are not over: they want the same device, and take turns when one loses it."""
        while sum(run.poll() is None for run in self.runs.values()) < many:
            self.jobs += 1
            self.run(f"{self.name}-{self.jobs}")

    def run(self, job: str) -> None:
        words = ("--vram", "16GiB", "--ttl", f"{TTL_S}s", "--grace", "1s", "--backoff", "0.2s", "--name", job)
        program = (sys.executable, str(self.program), job, str(STEPS), str(self.stamps))
        self.runs[job] = self._start("run", *words, "--", *program)

    def outcome(self, job: str) -> dict[str, Any]:
        return dict(find_run(self.home, job).exit())

    def end(self) -> None:
        for child in reversed(self.started):  # the warden last: it ends what they leave
            if child.poll() is None:
                child.terminate()
        for child in reversed(self.started):
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def stamped(hosts: list[Host]) -> dict[str, int]:
    """When a process last worked under each lease."""
    last: dict[str, int] = {}
    for host in hosts:
        for line in host.stamps.read_text().splitlines() if host.stamps.exists() else ():
            lease, at = line.split()
            last[lease] = max(last.get(lease, 0), int(at))
    return last


def check_leases(ledger: Ledger, hosts: list[Host]) -> dict[EndReason | None, int]:
    """L1, L2, L6, K1, K2: nobody worked on a device that was not its own any more, whatever it could hear."""
    leases = [a.lease for a in ledger.leases(live_only=False, limit=10**6) if a.lease.granted_at]
    last = stamped(hosts)
    assert last
    by_device: dict[str, list[LeaseRecord]] = defaultdict(list)
    counts: dict[EndReason | None, int] = defaultdict(int)
    for lease in leases:
        counts[lease.reason] += 1
        worked = last.get(lease.id, 0)
        assert worked <= lease.ended_at, f"{lease.id} worked {worked - lease.ended_at} us after it had ended"
        assert lease.settled_at >= lease.ended_at
        for piece in lease.slices:
            by_device[piece.device_id].append(lease)
    for device, held in by_device.items():
        held.sort(key=lambda lease: lease.epoch)
        for one, next_one in itertools.pairwise(held):
            assert one.settled_at <= next_one.granted_at, f"{device} was granted before it was clean"
    assert all(t.receipt.proven for t in ledger.receipts()), "every teardown was proven in the end"
    return dict(counts)


def test_jobs_on_hosts_that_are_cut_off(server: PostgresServer, hosts: list[Wire], tmp_path: Path) -> None:
    """K1, K2, L6, S1-S3, S8: a host that hears nothing ends its own holders in time; its jobs go on when it is back, to the same last bit."""
    print(f"seed {SEED}", flush=True)
    near, far = of_schema(server, f"jobs{uuid.uuid4().hex[:8]}")
    ledger = wiring.plug_in("sublet.ledgers", "postgresql")(near, HostClock())
    ledger.add_tenant(Tenant(name="ada"), actor="storm")
    made = [Host(tmp_path, number, wire, far) for number, wire in enumerate(hosts, 1)]
    try:
        for host in made:
            host.keep_busy()
        wait_until(lambda: len(stamped(made)) >= HOSTS, 90)
        weather = Weather(hosts, CUTS, random.Random(SEED))
        while not weather.is_over():
            for host in made:
                host.keep_busy()
            time.sleep(0.2)
        weather.wait()
        for host in made:  # S8: nothing is cut any more, and everything ends
            for job, run in host.runs.items():
                run.wait(120)
                if (
                    run.returncode and not host.outcome(job)["lease"]
                ):  # begun while it was cut off: who typed it is told
                    host.run(job)
                    host.runs[job].wait(120)
                left = host.outcome(job)
                assert left["outcome"] == "done", (left, (host.home / "said").read_text()[-3000:])
        wait_until(lambda: all(a.lease.settled_at for a in ledger.leases(live_only=False, limit=10**6)), 60)
        counts = check_leases(ledger, made)
        said = [
            json.loads(line)["digest"]
            for host in made
            for line in (host.home / "said").read_text().splitlines()
            if line.startswith('{"digest"')
        ]
        jobs = [job for host in made for job in host.runs]
        assert said == [chained(STEPS)] * len(jobs)
        for job in jobs:
            head = ledger.head(job)
            assert head is not None
            assert head.step == STEPS
        assert counts.get(EndReason.EXPIRED, 0) > 0, "no cut was long enough to take a lease"
        assert {d.state for d in ledger.devices()} == {DeviceState.READY}
        assert not ledger.verify().faults
        ended = ", ".join(f"{n} {reason.value if reason else 'not'}" for reason, n in counts.items())
        print(f"{weather.cuts - HOSTS} cuts under {len(jobs)} jobs; leases: {ended}", flush=True)
    finally:
        for host in made:
            host.end()
        ledger.close()


def test_a_host_that_hears_nothing_ends_its_holder_by_its_own_clock(
    server: PostgresServer, hosts: list[Wire], tmp_path: Path
) -> None:
    """K2, L6, L7: the answers to its renewals are lost; the ledger renews, and the holder stops all the same. Then the requests are: nobody renews."""
    near, far = of_schema(server, f"one{uuid.uuid4().hex[:8]}")
    ledger = wiring.plug_in("sublet.ledgers", "postgresql")(near, HostClock())
    ledger.add_tenant(Tenant(name="ada"), actor="storm")
    host = Host(tmp_path, 1, hosts[0], far)
    try:
        host.run("only")
        for how in sorted(wires.CUTS)[: max(1, CUTS // 5)]:
            before = set(stamped([host]))
            wait_until(lambda before=before: len(set(stamped([host])) - before) == 1, 60)
            [lease_id] = set(stamped([host])) - before
            hosts[0].cut(how)
            at = time.time()
            wait_until(lambda lease_id=lease_id: (a := ledger.look(lease_id)).at > a.lease.expires_at, 60)
            time.sleep(0.5)
            last = stamped([host])[lease_id]
            assert last < ledger.look(lease_id).lease.expires_at, how
            assert last / 1e6 - at < TTL_S + 0.5, f"{how}: it worked on for {last / 1e6 - at:.1f} s"
            hosts[0].heal()
        assert host.runs["only"].wait(120) == 0
        check_leases(ledger, [host])
    finally:
        host.end()
        ledger.close()


#: Connected, and then nothing is asked for.
CONNECTED = """
import sys
from sublet import wiring
from sublet.settings import load_settings
ledger = wiring.open_ledger(load_settings(ledger=sys.argv[1]))
ledger.now()
print("connected", flush=True)
sys.stdin.readline()
"""


def test_the_server_lets_go_of_connections_that_were_cut(server: PostgresServer, hosts: list[Wire]) -> None:
    """Or each cut would leave some there for hours, until there is none left for anybody."""
    _, far = of_schema(server, f"left{uuid.uuid4().hex[:8]}")
    wire = hosts[0]

    def connections() -> int:
        with psycopg.connect(server.url) as looking:
            row = looking.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE client_addr = %s", (wire.far,)
            ).fetchone()
        return int(row[0]) if row else 0

    child = subprocess.Popen(
        wire.command(sys.executable, "-c", CONNECTED, far),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "connected\n"
        assert connections() > 0
        wire.cut("both")
        child.kill()  # what it says to the server last is lost too
        child.wait()
        wait_until(lambda: connections() == 0, 60)
    finally:
        child.kill()
        child.wait()
