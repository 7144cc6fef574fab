"""A node killed, a node frozen and resumed, under everything a user can have there at once: two jobs of `sublet run`, a queue's worker and a
session of the studio.

Nothing granted twice, nothing committed by whoever was given up, nobody alive after its deadline; the jobs are the same to the last bit, the
items were worked on once each, and the session goes on elsewhere with what it had saved. `make proof` runs it; SUBLET_NODE_LOSSES=1 does so here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sublet
from sublet.client.session import Session
from sublet.core.leasing.lease import LeaseRecord
from sublet.machine import lease_environment
from sublet.machine.run_folder import find_run
from sublet.ports.ledger import Ledger
from sublet.settings import Settings, load_settings
from sublet.testing.ray_cluster import Cluster, Node
from tests.everywhere.place import Place, facts
from tests.everywhere.test_programs import chained
from tests.placement.test_node_loss import _back_again, alive, process_tree_of
from tests.placement.test_ray import ledger_of
from tests.store.servers import Server
from tests.studio.served import free_port, token_for
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(not os.environ.get("SUBLET_NODE_LOSSES"), reason="long: part of make proof"),
    pytest.mark.timeout(900),
]

STEPS, TTL_SECONDS, ITEMS = 40, 8, 40


@dataclass
class Everything:
    """What runs on the cluster."""

    jobs: dict[str, subprocess.Popen[bytes]]
    worker: subprocess.Popen[bytes]
    session: Session
    leases: dict[str, LeaseRecord]  # by whose they are

    @property
    def busiest(self) -> str:
        """The host that has the most of it."""
        hosts = [lease.holder.host for lease in self.leases.values()]
        return max(sorted(set(hosts)), key=hosts.count)


@contextlib.contextmanager
def served(place: Place) -> Iterator[sublet.Studio]:
    with place.ledger() as ledger:
        token = token_for(ledger, "ann")
    port = free_port()
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    service = place.start_sublet("serve", "--port", str(port), **quiet)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                yield sublet.connect(f"http://127.0.0.1:{port}", token=token)
                return
            except sublet.Disconnected:
                assert time.monotonic() < deadline, "the service did not start"
                time.sleep(0.2)
    finally:
        service.terminate()
        service.wait(60)


def started(place: Place, ledger: Ledger, studio: sublet.Studio, mark: str, hold: Path) -> Everything:
    """When it returns, all of it is in the middle of its work, and stays there until the file `hold` is."""
    session = studio.session(vram="64MiB", ttl="40s").wait_until_active()
    session.run_code(f"import sublet\nkept = '{mark}'\nversion = sublet.save({{'kept': kept}})")
    names = [f"{mark}-1", f"{mark}-2"]
    ttl = f"{TTL_SECONDS}s"
    jobs = {}
    for name in names:
        program = (place.python, "train.py", name, str(STEPS), "0.05", str(hold))
        words = ("run", "--vram", "64MiB", "--ttl", ttl, "--name", name, "--", *program)
        jobs[name] = place.start_sublet(*words)
    bodies = [{"number": n} | ({"hold": str(hold)} if n == 5 else {}) for n in range(ITEMS)]
    place.run("-c", f"import sublet; sublet.queue('{mark}').publish({bodies!r})")
    worker = place.start_sublet(
        "work", mark, "items.py:digest", "--vram", "64MiB", "--ttl", ttl, "--until-empty"
    )
    leases: dict[str, LeaseRecord] = {}

    def all_there() -> bool:
        home = Path(place.environment["SUBLET_HOME"])
        session.touch()  # its user is there
        held = {a.lease.id: a.lease for a in ledger.leases() if a.lease.holder.pid}
        for name in names:
            with contextlib.suppress(sublet.NotFound):
                run = find_run(home, name).facts()
                if run.get("lease") in held and _committed(ledger, name):
                    leases[name] = held[run["lease"]]
        if session.lease_id in held:
            leases["session"] = held[session.lease_id]
        others = [lease for lease in held.values() if lease.tenant != "ann" and not lease.request.job]
        if others and sublet.queue(mark, settings=_settings(place)).stats().done:
            leases["worker"] = others[-1]
        return len(leases) == 4

    wait_until(all_there, 240)
    return Everything(jobs, worker, session, leases)


def _committed(ledger: Ledger, job: str) -> bool:
    head = ledger.head(job)
    return head is not None and head.version > 0


def zombies(node: Node) -> list[lease_environment.ProcessLease]:
    """What the node's commands have in their hands: the right to commit under leases that are about to be lost."""
    found = []
    for path in (node.home / "run" / "placed").iterdir():
        key = json.loads((path / lease_environment.KEY_FILE).read_text())
        page = mmap.mmap(-1, lease_environment.PAGE_BYTES)
        lease_environment.write_deadline(page, 1 << 62)  # and none of them looks at a clock
        found.append(lease_environment.ProcessLease(key["lease"], key["epoch"], page, key["secret"]))
    return found


def lost_and_finished(
    place: Place, cluster: Cluster, s3: Server, mark: str, hold: Path, lose: Callable[[Node], object]
) -> tuple[str, Everything]:
    ledger = ledger_of(cluster)
    with contextlib.closing(ledger), served(place) as studio:
        everything = started(place, ledger, studio, mark, hold)
        victim = everything.busiest
        node = cluster.node(victim)
        hit = {name: lease for name, lease in everything.leases.items() if lease.holder.host == victim}
        assert {*everything.jobs, "worker", "session"} == set(hit), "a loss of all of it at once was meant"
        dead_hands = zombies(node)
        assert len(dead_hands) == 2
        trees = {name: process_tree_of(lease.holder.pid) for name, lease in hit.items()}
        lose(node)
        hold.touch()

        # the session is told, and goes on elsewhere with what it saved
        session = everything.session
        wait_until(lambda: session.look().status != "active", 120)
        said = session.facts
        assert said.reason == "holder_lost", said
        assert "node" in said.detail, said
        session.resume().wait_until_active()
        assert session.saved() == {"kept": mark}
        assert session.run(lambda: 6 * 7) == 42
        held = ledger.look(session.lease_id).lease
        assert held.holder.host != victim
        session.end()

        # the jobs end as if nothing had happened
        for name, process in everything.jobs.items():
            assert facts(place.ended(process)) == {"digest": chained(STEPS)}
            left = find_run(Path(place.environment["SUBLET_HOME"]), name).exit()
            assert (left["outcome"], left["preemptions"]) == ("done", 1), left

        # every item once
        place.ended(everything.worker)
        code = f"import json, sublet; print(json.dumps({{'found': [r.value for r in sublet.queue('{mark}').results()]}}))"
        expected = sorted(hashlib.sha256(str(n).encode()).hexdigest() for n in range(ITEMS))
        assert sorted(place.run("-c", code)["found"]) == expected

        # nobody outlived its deadline
        for pids in trees.values():
            wait_until(lambda pids=pids: not alive(pids), 120)

        # nothing was granted twice, and whoever was given up commits nothing
        rows = [a.lease for a in ledger.leases(live_only=False)]
        for lease in hit.values():
            now = ledger.look(lease.id).lease
            assert now.state.value == "ended"
            assert not now.settled_at, "nobody there could prove that it is gone"
            beside = [
                row
                for row in rows
                if row.granted_at > lease.granted_at
                and row.id not in {one.id for one in hit.values()}
                and {s.device_id for s in row.slices} & {s.device_id for s in lease.slices}
            ]
            assert all(row.holder.pid == 0 for row in beside), "a worker was put beside one that may live"
        with pytest.MonkeyPatch.context() as patched:
            for variable, value in s3.environment.items():
                patched.setenv(variable, value)
            store = sublet.checkpoints(place.environment["SUBLET_STORE"], settings=_settings(place))
            for process_lease in dead_hands:
                for name in everything.jobs:
                    version = ledger.head(name).version
                    with pytest.raises(sublet.SubletError) as refused:
                        store.save(
                            name, {"chain": b"from beyond"}, expected_version=version, lease=process_lease
                        )
                    assert refused.value.code in ("fenced", "lease_lost", "lease_not_active")
            store.close()
        assert not ledger.verify().faults
    return victim, everything


def _settings(place: Place) -> Settings:
    return load_settings(home=place.environment["SUBLET_HOME"], ledger=place.environment["SUBLET_LEDGER"])


def test_a_frozen_node_under_all_of_it(
    clustered: Place, three_nodes: Cluster, s3: Server, tmp_path: Path
) -> None:
    """K1, K2, L1, L2, S2, S3, S6: raylet, agent, warden and every supervisor stand still, and move again when all is over."""
    victim, everything = lost_and_finished(clustered, three_nodes, s3, "frozen", tmp_path / "go", Node.freeze)
    three_nodes.node(victim).resume()
    ledger = ledger_of(three_nodes)
    with contextlib.closing(ledger):
        for lease in everything.leases.values():
            wait_until(lambda lease=lease: bool(ledger.look(lease.id).lease.settled_at), 120)
        proven = {t.lease_id: t.receipt.proven for t in ledger.receipts()}
        assert all(proven[lease.id] for lease in everything.leases.values())
    _back_again(three_nodes, victim)


def test_a_killed_node_under_all_of_it(
    clustered: Place, three_nodes: Cluster, s3: Server, tmp_path: Path
) -> None:
    """L1, L2, S2, S3, S6, K3: as when a machine loses its power."""
    victim, _ = lost_and_finished(clustered, three_nodes, s3, "killed", tmp_path / "go", Node.kill)
    _back_again(three_nodes, victim)
