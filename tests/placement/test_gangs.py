"""A gang over nodes of Ray: one worker on each, called at once; a training over two nodes of three, one of
which is killed in the middle.

`make proof` runs it; SUBLET_NODE_LOSSES=1 does so here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.core.leasing.lease import LeaseState
from sublet.testing.postgres import PostgresServer
from sublet.testing.ray_cluster import Cluster, running
from tests.conftest import needed
from tests.placement.conftest import fresh_ledger
from tests.placement.test_ray import all_free, ledger_of
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(not os.environ.get("SUBLET_NODE_LOSSES"), reason="long: part of make proof"),
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]
HOSTS = {"z": "host:1x1GiB", "a": "host:1x1GiB", "b": "host:1x1GiB"}

EVERYWHERE = """
    import json, os
    import sublet

    def say(**facts):
        print(json.dumps(facts), flush=True)

    def around(factor):
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SUBLET_HOST", "SUBLET_EPOCH")
        return [os.environ.get(name) for name in names] + [factor * int(os.environ["RANK"]), os.getpid()]

    def fails():
        if os.environ["RANK"] == "1":
            raise ValueError("a fault of the user's code")
        return "fine"

    with sublet.gpu(vram="1GiB", count=2, ttl="20s", spread="ok") as lease:
        say(hosts=lease.hosts, devices=lease.devices, epoch=lease.epoch, id=lease.id)
        say(seen=lease.run_everywhere(around, 21))
        say(again=lease.run_everywhere(around, 1))
        for name, call in (("alone", lambda: lease.run(os.getpid)), ("failed", lambda: lease.run_everywhere(fails))):
            try:
                call()
            except (ValueError, sublet.BadInput) as e:
                say(**{name: str(e)})
        say(after=lease.run_everywhere(os.getpid))
    with sublet.gpu(vram="100MiB", ttl="20s") as one:
        say(one=one.run_everywhere(around, 1)[0][:3])
    try:
        sublet.gpu(vram="1GiB", count=2, ttl="20s", wait=0).acquire()
    except sublet.SubletError as e:
        say(forbidden=e.code)
"""

TRAIN = """
    import json, sys
    sys.path += sys.argv[1:3]
    import sublet
    from tests.deploy.gang_jobs import trained

    name, total = sys.argv[3], int(sys.argv[4])

    def say(**facts):
        print(json.dumps(facts), flush=True)

    while True:
        lease = None
        try:
            with sublet.gpu(vram="1GiB", count=2, ttl="6s", tier="batch", spread="ok", job=name) as lease:
                say(lease=lease.id, hosts=lease.hosts, epoch=lease.epoch)
                say(finals=lease.run_everywhere(trained, name, total))
                break
        except sublet.LeaseLost as e:
            say(lost=lease.id, why=str(e)[:300])
    try:
        sublet.checkpoints().save(name, {"late": 1}, expected_version=10**6, lease=lease)
        say(late="committed")
    except sublet.SubletError as e:
        say(late=e.code)
"""


@pytest.fixture(scope="module")
def three_nodes(with_ray: None, postgres_server: PostgresServer) -> Iterator[Cluster]:
    with running(fresh_ledger(postgres_server), HOSTS) as cluster:
        yield cluster


def test_a_function_runs_once_in_each_member(three_nodes: Cluster) -> None:
    with three_nodes.driver(EVERYWHERE) as driver:
        said = driver.all()
    assert len(said["hosts"]) == len(said["devices"]) == 2
    first, second = said["seen"]
    assert first[:3] == ["0", "2", "0"]
    assert second[:3] == ["1", "2", "0"]
    assert first[3:5] == second[3:5], "one place to meet"
    assert [first[5], second[5]] == said["hosts"]
    assert {first[6], second[6]} == {str(said["epoch"])}
    assert [first[7], second[7]] == [0, 21]
    assert [m[8] for m in said["again"]] == [first[8], second[8]] == said["after"], "the same workers"
    assert "2 hosts" in said["alone"]
    assert said["failed"] == "a fault of the user's code"
    assert said["one"] == ["0", "1", "0"]
    assert said["forbidden"] in ("not_placed", "never_fits")
    ledger = ledger_of(three_nodes)
    with contextlib.closing(ledger):
        wait_until(lambda: all_free(ledger), 90)
        assert {t.host for t in ledger.receipts() if t.lease_id == said["id"]} == set(said["hosts"])
        assert not ledger.verify().faults


def test_ddp_over_two_nodes_survives_the_loss_of_one_bit_for_bit(
    three_nodes: Cluster, tmp_path: Path
) -> None:
    """L1, S1, S2, S3, K1: a node of the gang is killed as by a power cut; the gang is granted anew on the
    others and ends as if nothing had been."""
    torch = needed("torch")
    where = [str(Path(torch.__file__).parents[1]), str(ROOT)]
    store = {"SUBLET_STORE": f"dir:{tmp_path}/store", "OMP_NUM_THREADS": "1"}
    with three_nodes.driver(TRAIN, *where, "whole", "24", **store) as driver:
        whole = driver.all()
    assert "lost" not in whole, whole
    ledger = ledger_of(three_nodes)
    with contextlib.closing(ledger):
        wait_until(lambda: all_free(ledger), 90)
        grants: list[Any] = []
        lost: list[Any] = []

        def kill_in_the_middle(host: str) -> None:
            wait_until(lambda: (head := ledger.head("lost")) is not None and head.step >= 6, 120)
            three_nodes.node(host).kill()

        found: dict[str, Any] = {}
        with three_nodes.driver(TRAIN, *where, "lost", "24", PAUSE="0.3", **store) as driver:
            for said in driver.said():
                if "hosts" in said:
                    grants.append(said)
                    if len(grants) == 1:
                        threading.Thread(
                            target=kill_in_the_middle, args=(said["hosts"][1],), daemon=True
                        ).start()
                if "lost" in said:
                    lost.append(said)
                found |= said
        assert len(lost) == 1, lost
        gone = grants[0]["hosts"][1]
        assert gone not in grants[1]["hosts"]
        assert grants[1]["epoch"] > grants[0]["epoch"], "L1"
        assert found["finals"] == whole["finals"]
        assert ledger.head("lost").step == 24
        assert found["late"] not in ("", "committed"), "S2"
        over = ledger.look(grants[0]["lease"]).lease
        assert over.state is LeaseState.ENDED
        assert not over.settled_at, "nobody on the lost node has looked"
        [there] = [d for d in ledger.devices() if d.host == gone]
        assert there.leases == 1
        assert not ledger.verify().faults
        # Back under its name, its warden settles what the last one could not.
        assert three_nodes.node(gone).start().wait(150) == 0, three_nodes.node(gone).said()
        with three_nodes.driver(
            "import sublet; sublet.gpu(vram='1MiB', ttl='10s').acquire().release()"
        ) as driver:
            driver.all()
        wait_until(lambda: bool(ledger.look(grants[0]["lease"]).lease.settled_at), 90)
        wait_until(lambda: all_free(ledger), 90)
        assert not ledger.verify().faults
