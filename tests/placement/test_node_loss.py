"""A node killed, a node frozen and resumed, under a job that commits: nothing granted twice, nothing lost,
nobody outlives a deadline.

Three real nodes; the job holds a lease, works in its worker on some node, and commits each step from here.
The undisturbed result is computed beside it, and the job's must be the same to the last bit. `make proof`
runs it; SUBLET_NODE_LOSSES=1 does so here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sublet.core.scheduling.device import DeviceState
from sublet.processes.ladder import descendants, read_stat
from sublet.testing.postgres import PostgresServer
from sublet.testing.ray_cluster import HEALTH, Cluster, running
from tests.placement.conftest import fresh_ledger
from tests.placement.test_ray import all_free, ledger_of
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(not os.environ.get("SUBLET_NODE_LOSSES"), reason="long: part of make proof"),
    pytest.mark.timeout(600),
]

STEPS = 30
TTL_SECONDS = 6

JOB = """
    import hashlib, json, sys, time
    import sublet

    STEPS, TTL, NAME = int(sys.argv[1]), sys.argv[2], sys.argv[3]

    def say(**facts):
        print(json.dumps(facts), flush=True)

    def advance(state, step):
        time.sleep(0.25)
        return hashlib.sha256(state + step.to_bytes(4, "big")).digest()

    store = sublet.checkpoints()
    version, state, stale = 0, b"", None
    while version < STEPS:
        try:
            with sublet.gpu(vram="600MiB", ttl=TTL) as lease:
                holder = lease._row.holder
                say(lease=lease.id, host=holder.host, pid=holder.pid, device=lease.devices[0])
                if version:
                    state = store.load(NAME)["state"]
                while version < STEPS:
                    state = lease.run(advance, state, version + 1)
                    store.save(NAME, {"state": state}, expected_version=version, lease=lease)
                    version += 1
                    say(step=version, host=holder.host)
        except sublet.LeaseLost as e:
            say(lost=str(e)[:200], lease=lease.id, code=e.code)
            stale = lease
    if stale is not None:
        try:
            store.save(NAME, {"state": b"from beyond"}, expected_version=version, lease=stale)
            say(zombie="committed")
        except sublet.SubletError as e:
            say(zombie=e.code)
    say(result=store.load(NAME)["state"].hex())
"""


def undisturbed() -> str:
    state = b""
    for step in range(1, STEPS + 1):
        state = hashlib.sha256(state + step.to_bytes(4, "big")).digest()
    return state.hex()


@pytest.fixture(scope="module")
def three_nodes(with_ray: None, postgres_server: PostgresServer) -> Iterator[Cluster]:
    devices = "host:1x1GiB"
    with running(
        fresh_ledger(postgres_server), {"z": devices, "a": devices, "b": devices}, health=HEALTH
    ) as cluster:
        yield cluster


def alive(pids: list[int]) -> list[int]:
    """Those that are processes still: what is dead and not waited for is none."""
    stats = [stat for pid in pids if (stat := read_stat(pid)) is not None]
    return [stat.pid for stat in stats if stat.state not in ("Z", "X")]


def process_tree_of(pid: int) -> list[int]:
    return [pid, *(child.pid for child in descendants(pid))]


def run_through(cluster: Cluster, name: str, lose: Any) -> dict[str, Any]:
    """Run the job; `lose` is called once, with the node of a worker in the middle of its work and what is
    known of its lease."""
    found: dict[str, Any] = {"steps": [], "grants": [], "lost": []}
    with cluster.driver(JOB, str(STEPS), f"{TTL_SECONDS}s", name) as driver:
        told = False
        for said in driver.said():
            if "device" in said:
                found["grants"].append(said)
            if "lost" in said:
                found["lost"].append(said)
            if "step" in said:
                found["steps"].append(said["step"])
                if said["step"] >= 5 and not told:
                    told = True
                    time.sleep(0.1)  # in the middle of the next
                    lose(found["grants"][-1])
            found |= {k: v for k, v in said.items() if k in ("result", "zombie")}
    return found


def check_job(found: dict[str, Any], host: str) -> None:
    assert found["result"] == undisturbed()
    assert found["steps"] == list(range(1, STEPS + 1)), "S3"
    assert len(found["lost"]) == 1
    assert found["zombie"] in ("fenced", "lease_lost", "lease_not_active"), "S2"
    first, second, *_ = found["grants"]
    assert first["host"] == host != second["host"]


def nothing_twice(cluster: Cluster, device_id: str, since: str) -> None:
    """L1, L2: the lost lease still owns its slice: nobody else was given it since."""
    ledger = ledger_of(cluster)
    with contextlib.closing(ledger):
        lost = ledger.look(since).lease
        assert not lost.settled_at, "nobody there could prove that it is gone"
        later = [
            a.lease
            for a in ledger.leases(live_only=False)
            if a.lease.granted_at > lost.granted_at and any(s.device_id == device_id for s in a.lease.slices)
        ]
        assert all(x.holder.pid == 0 for x in later), "a worker was put beside one that may live"
        [device] = [d for d in ledger.devices() if d.id == device_id]
        assert device.free_bytes < device.capacity_bytes
        assert not ledger.verify().faults


def test_a_frozen_node_and_its_return(three_nodes: Cluster) -> None:
    """K1, K2, L1, L2, S2, S3: everything of the node is stopped, its warden and the worker's supervisor too.
    The kernel's own timer ends the worker at its deadline, the job goes on elsewhere, and when the node moves
    again its warden settles what it finds."""
    seen: dict[str, Any] = {}

    def freeze(grant: dict[str, Any]) -> None:
        node = three_nodes.node(grant["host"])
        seen["worker"] = process_tree_of(grant["pid"])
        seen["grant"], seen["at"] = grant, time.monotonic()
        assert len(seen["worker"]) >= 2
        stopped = node.freeze()
        assert set(seen["worker"]) <= set(stopped)

    found = run_through(three_nodes, "frozen", freeze)
    host = seen["grant"]["host"]
    check_job(found, host)
    wait_until(lambda: not alive(seen["worker"]), 3 * TTL_SECONDS)
    nothing_twice(three_nodes, seen["grant"]["device"], seen["grant"]["lease"])
    three_nodes.node(host).resume()
    ledger = ledger_of(three_nodes)
    with contextlib.closing(ledger):
        wait_until(lambda: bool(ledger.look(seen["grant"]["lease"]).lease.settled_at), 90)
        [teardown] = [t for t in ledger.receipts() if t.lease_id == seen["grant"]["lease"]]
        assert teardown.receipt.proven
    _back_again(three_nodes, host)


def test_a_killed_node_and_its_return(three_nodes: Cluster) -> None:
    """L1, L2, S2, S3, K3: as when a machine loses its power. Its slice stays taken until a warden of that
    host is back and has looked."""
    seen: dict[str, Any] = {}

    def kill(grant: dict[str, Any]) -> None:
        seen["grant"] = grant
        three_nodes.node(grant["host"]).kill()

    found = run_through(three_nodes, "killed", kill)
    host = seen["grant"]["host"]
    check_job(found, host)
    nothing_twice(three_nodes, seen["grant"]["device"], seen["grant"]["lease"])
    _back_again(three_nodes, host)


def _back_again(cluster: Cluster, host: str) -> None:
    """The node is started again under its old name: the next driver finds it, and in the end everything is
    free."""
    node = cluster.node(host)
    node.kill()  # what is left of a node that Ray gave up
    assert node.start().wait(120) == 0, node.said()
    with cluster.driver("import sublet; sublet.gpu(vram='1MiB', ttl='10s').acquire().release()") as driver:
        driver.all()
    ledger = ledger_of(cluster)
    with contextlib.closing(ledger):
        wait_until(lambda: all_free(ledger), 90)
        assert all(d.state is DeviceState.READY for d in ledger.devices())
        assert not ledger.verify().faults
