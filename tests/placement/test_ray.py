"""Leased workers on Ray nodes: placed where the slice is, called as any other, gone with whoever asked for
them.

One cluster of two real nodes for all of it; a node's losses are in `test_node_loss.py`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sublet.core.leasing.lease import EndReason
from sublet.core.scheduling.device import DeviceState
from sublet.ledger.engines.postgres.engine import open_ledger
from sublet.ports.ledger import Ledger
from sublet.processes.clock import HostClock
from sublet.processes.ladder import read_stat
from sublet.testing.ray_cluster import PYTHON, Cluster
from tests.conftest import repository
from tests.waiting import wait_until

long = pytest.mark.skipif(not os.environ.get("SUBLET_NODE_LOSSES"), reason="long: part of make proof")


def ledger_of(cluster: Cluster) -> Ledger:
    return open_ledger(cluster.ledger, HostClock())


def all_free(ledger: Ledger) -> bool:
    devices = ledger.devices()
    return bool(devices) and all(
        d.free_bytes == d.capacity_bytes and d.state is DeviceState.READY for d in devices
    )


EVERYTHING = """
    import json, os, sys
    import sublet

    def say(**facts):
        print(json.dumps(facts), flush=True)

    factor = 3

    def where():
        print("printed there")
        return dict(lease=os.environ["SUBLET_LEASE_ID"], home=os.environ.get("SUBLET_LEDGER", ""), pid=os.getpid())

    with sublet.gpu(vram="600MiB", ttl="20s") as one, sublet.gpu(vram="600MiB", ttl="20s") as two:
        say(devices=[*one.devices, *two.devices], here=one.here, containment=one.containment)
        say(there=two.run(where), id=two.id)
        say(product=one.run(lambda x: x * factor, 14))
        try:
            one.run(lambda: {}["missing"])
        except KeyError as e:
            say(raised=str(e), cause=str(e.__cause__))
        large = bytearray(os.urandom(3_000_000)) * 8
        back = one.run(lambda data: data[::-1], large)
        say(large=back == large[::-1], writable=type(back).__name__)
        with two.open() as gpu:
            buffer = gpu.alloc(64)
            gpu.write(buffer, b"y" * 64)
            say(read=gpu.read(buffer).decode())
        say(many=one.run_many(len, [(("a",), {}), (([1, 2],), {})]))
        try:
            sublet.gpu(vram="600MiB", ttl="20s", wait=0).acquire()
        except sublet.Refused as e:
            say(third=e.code)

    @sublet.on_gpu(vram="500MiB", ttl="20s")
    def twice(x):
        return os.getpid(), x * 2

    first, second = twice(1), twice(2)
    say(warm=first[0] == second[0], twice=[first[1], second[1]], ray="ray" in sys.modules)
"""


def test_a_worker_runs_where_its_slice_is(two_nodes: Cluster) -> None:
    """K1, L2: each lease's worker on its own node, called like any worker; with the end of the driver nothing
    of it is left."""
    with two_nodes.driver(EVERYTHING) as driver:
        said = driver.all()
    assert said["devices"] == ["a-host0", "z-host0"]
    assert not said["here"]
    assert said["there"]["lease"] == said["id"]
    assert said["there"]["home"] == "", "a worker knows no ledger"
    assert said["product"] == 42
    assert said["raised"] == "'missing'"
    assert "in the leased worker" in said["cause"]
    assert said["large"]
    assert said["writable"] == "bytearray"
    assert said["read"] == "y" * 64
    assert said["many"] == [[True, 1], [True, 2]]
    assert said["third"] in ("no_capacity", "refused")
    assert said["warm"]
    assert said["twice"] == [2, 4]
    ledger = ledger_of(two_nodes)
    wait_until(lambda: all_free(ledger))
    leases = [answer.lease for answer in ledger.leases(live_only=False)]
    assert {x.holder.host for x in leases if x.granted_at} == {"a", "z"}
    seated = [entry for _, entry in ledger.tail(limit=1000) if entry.kind == "lease.seated"]
    assert {entry.subject for entry in seated} == {x.id for x in leases if x.granted_at}
    assert all(teardown.receipt.proven for teardown in ledger.receipts())
    assert not ledger.verify().faults
    ledger.close()


def test_what_a_killed_driver_leaves_is_ended_on_the_node(two_nodes: Cluster) -> None:
    """K1: Ray says that its job is over; the agent ends the worker long before the ttl, and the warden there
    proves it."""
    code = """
        import json, sublet, time
        lease = sublet.gpu(vram="600MiB", ttl="10m", holder="worker").__enter__()
        holder = lease._row.holder
        print(json.dumps(dict(id=lease.id, pid=holder.pid, host=holder.host)), flush=True)
        lease.run(time.sleep, 600)
    """
    ledger = ledger_of(two_nodes)
    with two_nodes.driver(code) as driver:
        said = next(driver.said())
        assert os.path.exists(f"/proc/{said['pid']}")
        os.kill(driver.process.pid, signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{said['pid']}"))
        wait_until(lambda: all_free(ledger))
    lease = ledger.look(said["id"]).lease
    assert lease.reason is EndReason.HOLDER_LOST
    ledger.close()


@long
def test_an_interrupt_reaches_the_call_on_the_node(two_nodes: Cluster) -> None:
    code = """
        import json, os, signal, sublet, threading, time

        def slow():
            print("begun", flush=True)
            try:
                time.sleep(600)
            except KeyboardInterrupt:
                print("interrupted there", flush=True)
                raise

        with sublet.gpu(vram="600MiB", ttl="20s") as lease:
            threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                lease.run(slow)
            except KeyboardInterrupt:
                print(json.dumps(dict(interrupted=True)), flush=True)
            print(json.dumps(dict(after=lease.run(len, "abc"))), flush=True)
    """
    with two_nodes.driver(code) as driver:
        said = driver.all()
    assert said == {"interrupted": True, "after": 3}


def agents(cluster: Cluster, host: str) -> list[int]:
    found = []
    for pid in cluster.node(host).pids():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Agent"):
                found.append(pid)
    return found


LONG_CALL = """
    import json, sublet, sys, time

    def say(**facts):
        print(json.dumps(facts), flush=True)

    lease = sublet.gpu(vram="600MiB", ttl=sys.argv[1]).__enter__()
    holder = lease._row.holder
    say(id=lease.id, pid=holder.pid, host=holder.host)
    begun = time.monotonic()
    try:
        lease.run(time.sleep, 600)
    except sublet.WorkerLost as e:
        say(lost=str(e), begun=e.begun, seconds=time.monotonic() - begun, status=lease.status)
    lease.release()
    with sublet.gpu(vram="600MiB", ttl="20s") as again:
        say(again=again.run(len, "abc"), device=again.devices[0])
"""


@long
def test_a_killed_agent_takes_its_workers_along_and_comes_back(two_nodes: Cluster) -> None:
    """K1, K3: its workers end with it, the warden proves it, Ray starts it again, and the next lease is
    served."""
    ledger = ledger_of(two_nodes)
    with two_nodes.driver(LONG_CALL, "10m") as driver:
        lines = driver.said()
        said = next(lines)
        [agent] = agents(two_nodes, said["host"])
        os.kill(agent, signal.SIGKILL)
        wait_until(lambda: not os.path.exists(f"/proc/{said['pid']}"))
        rest = {name: value for line in lines for name, value in line.items()}
    assert rest["begun"]
    assert rest["status"] == "ended"
    assert rest["again"] == 3
    wait_until(lambda: all_free(ledger))
    assert all(teardown.receipt.proven for teardown in ledger.receipts())
    ledger.close()


@long
def test_a_node_that_confirms_nothing_is_given_up_while_ray_says_nothing(two_nodes: Cluster) -> None:
    """L6, K2: this cluster has Ray's defaults, which take more than a minute to miss a frozen node. The lease
    is renewed all the while, and the worker is given up when the last deadline its node confirmed is over. It
    is dead by then, though its supervisor is frozen too."""
    ledger = ledger_of(two_nodes)
    node = two_nodes.node("a")
    try:
        with two_nodes.driver(LONG_CALL, "5s") as driver:
            lines = driver.said()
            said = next(lines)
            assert said["host"] == "a"
            node.freeze()
            rest = {name: value for line in lines for name, value in line.items()}
            assert "did not confirm" in rest["lost"]
            assert rest["begun"]
            assert rest["device"] == "z-host0", "a slice of a node that says nothing is still taken"
            wait_until(lambda: _dead(said["pid"]), 20)
            lease = ledger.look(said["id"]).lease
            assert lease.state.value == "ended"
            assert not lease.settled_at
    finally:
        node.resume()
    wait_until(lambda: bool(ledger.look(said["id"]).lease.settled_at))
    wait_until(lambda: all_free(ledger))
    assert not ledger.verify().faults
    ledger.close()


def _dead(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is None or stat.state in ("Z", "X")


def test_the_page_runs_as_it_stands(two_nodes: Cluster) -> None:
    page = repository("docs/how-to/run-on-ray.md").read_text()
    [example] = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    with two_nodes.driver(example) as driver:
        said = driver.process.communicate(timeout=120)[0]
    assert driver.process.returncode == 0, driver.errors()
    assert said.splitlines() == ["[3, 5]", "('a-host0',) 6"]


def test_without_a_cluster_it_says_so_at_once(two_nodes: Cluster) -> None:
    code = "import sublet; sublet.gpu(vram='1MiB', ttl='10s').acquire()"
    for changed, words in (
        ({"SUBLET_PLACEMENT": "ray://127.0.0.1:1"}, "cannot be reached"),
        ({"SUBLET_LEDGER": "sqlite:/tmp/none.db"}, "must be PostgreSQL"),
        ({"SUBLET_PLACEMENT": "nowhere://x"}, "there is no placement named"),
    ):
        with two_nodes.driver(code, **changed) as driver:
            assert driver.process.wait(60) == 1
            assert words in driver.errors()


def test_sublet_alone_does_not_load_ray() -> None:
    code = "import sublet, sublet.leases.request, sys; raise SystemExit('ray' in sys.modules)"
    python = PYTHON if os.path.exists(PYTHON) else sys.executable
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBLET_")}
    assert subprocess.run([python, "-c", code], env=environment, check=False, timeout=60).returncode == 0
