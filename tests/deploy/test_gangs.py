"""A gang over several machines on one PostgreSQL, each with its own `sublet warden`, without anything that places: its members are processes that
join. One machine is lost in the middle, in every way a machine can be.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.core.leasing.tenancy import Tenant
from sublet.ledger.engines.postgres.engine import open_ledger
from sublet.processes.clock import HostClock
from tests import forked
from tests.conftest import needed
from tests.deploy.test_machines import Machine, ledger_url  # noqa: F401
from tests.homes import process_is_gone, wait_until
from tests.training.processes import Job

#: Asks for a gang by name, says where it is and how to join it, and gives it back when told.
ASK = """
    import sublet, sys
    with sublet.gpu(vram="16GiB", count=int(sys.argv[1]), ttl=sys.argv[2], tier="batch", spread="ok", job="gang") as lease:
        print("granted", lease.id, lease.ticket, *lease.hosts, flush=True)
        sys.stdin.readline()
    print("released", flush=True)
"""
#: Sits, commits as often as it can if it is rank 0, and leaves when told.
MEMBER = """
    import sublet, sys, threading, os
    from sublet import wiring
    from sublet.core.progress.effect import Commit
    ledger = wiring.open_ledger(wiring.load_settings())
    told = threading.Event()
    with sublet.join() as gang:
        seen = {k: os.environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
        print("sits", gang.rank, gang.world, gang.epoch, *gang.devices, *seen.values(), flush=True)
        threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
        step = 0
        while not told.wait(0.02):
            if gang.rank == 0:
                step += 1
                try:
                    ledger.commit(gang.key, Commit(job="j", key=f"j:{step}", step=step, fingerprint="f",
                                                   expected_version=step - 1, digest=f"d{step}"))
                except sublet.SubletError as e:
                    print("refused", e.code, step, flush=True)
                    break
    print("left", flush=True)
"""


class Gang:
    def __init__(self, asker: Any, asked_from: Machine, said: str, machines: dict[str, Machine]) -> None:
        self.asker = asker
        self.asked_from = asked_from
        word, self.id, self.ticket, *self.hosts = said.split()
        assert word == "granted"
        self.machines = [machines[host] for host in self.hosts]
        self.members: list[Any] = []

    def join(self) -> list[list[str]]:
        """One member on each of its machines; what each says when all sit."""
        for machine in self.machines:
            machine.environment["SUBLET_GANG"] = self.ticket
            self.members.append(machine.start(MEMBER))
        return [member.stdout.readline().split() for member in self.members]

    def give_back(self) -> None:
        tell(self.asker)
        assert self.asker.wait(timeout=30) == 0


def tell(child: Any) -> None:
    child.stdin.write("\n")
    child.stdin.flush()


@pytest.fixture
def three(tmp_path: Path, ledger_url: str) -> Iterator[tuple[dict[str, Machine], Any]]:  # noqa: F811
    forked.warm()
    ledger = open_ledger(ledger_url, HostClock())
    ledger.add_tenant(Tenant(name="ada"), actor="test")
    found = {}
    for name in ("a", "b", "c"):
        machine = Machine(tmp_path, ledger_url, name)
        machine.environment["SUBLET_STORE"] = f"dir:{tmp_path}/store"
        machine.warden()
        found[machine.name] = machine
    yield found, ledger
    for machine in found.values():
        machine.end()
    ledger.close()


def asked(three: dict[str, Machine], count: int = 2, ttl: str = "30s", lost: Machine | None = None) -> Gang:
    """From a machine of the three that lives, which need not be one of the gang's."""
    last = [machine for machine in three.values() if machine is not lost][-1]
    give_up = time.monotonic() + 60
    while True:
        asker = last.start(ASK, str(count), ttl)
        if said := asker.stdout.readline():
            return Gang(asker, last, said, three)
        # On a crowded machine a warden may be late by the two seconds after which its devices do not count here.
        assert asker.wait(timeout=30)
        assert time.monotonic() < give_up, "no gang was granted"


def test_members_join_work_under_one_epoch_and_leave(three: tuple[dict[str, Machine], Any]) -> None:
    machines, ledger = three
    gang = asked(machines)
    said = gang.join()
    assert [words[:3] for words in said] == [["sits", "0", "2"], ["sits", "1", "2"]]
    assert len({words[3] for words in said}) == 1, "one epoch"
    assert [words[4] for words in said] == [machine.device for machine in gang.machines]
    assert [words[5:8] for words in said] == [["0", "2", "0"], ["1", "2", "0"]]
    assert said[0][8:] == said[1][8:], "one place to meet"
    wait_until(lambda: (head := ledger.head("j")) is not None and head.step > 3)
    tell(gang.members[1])  # one leaves in order: the other goes on
    assert gang.members[1].wait(timeout=30) == 0
    step = ledger.head("j").step
    wait_until(lambda: ledger.head("j").step > step + 3)
    assert ledger.look(gang.id).lease.state is LeaseState.ACTIVE
    tell(gang.members[0])
    assert gang.members[0].wait(timeout=30) == 0
    gang.give_back()
    over = ledger.look(gang.id).lease
    assert over.reason is EndReason.RELEASED
    assert over.settled_at
    assert all(d.leases == 0 for d in ledger.devices())
    assert not ledger.verify().faults


def test_a_member_killed_ends_the_others_at_once_and_its_epoch_commits_nothing_more(
    three: tuple[dict[str, Machine], Any],
) -> None:
    """S2, K1: the reason names the seat; each machine's own warden ends its member and proves it."""
    machines, ledger = three
    gang = asked(machines, ttl="10m")
    gang.join()
    wait_until(lambda: (head := ledger.head("j")) is not None and head.step > 3)
    gang.members[1].kill()
    wait_until(lambda: process_is_gone(gang.members[0].pid))  # long before its ttl
    wait_until(lambda: ledger.look(gang.id).lease.settled_at)
    over = ledger.look(gang.id).lease
    assert over.reason is EndReason.HOLDER_LOST
    assert over.detail.startswith(f"its member on {gang.hosts[1]} (rank 1 of 2) is lost: process ")
    assert {t.host for t in ledger.receipts() if t.lease_id == gang.id} == set(gang.hosts)
    assert all(t.receipt.proven for t in ledger.receipts())
    assert ledger.head("j").committed_at <= over.ended_at
    assert all(d.leases == 0 for d in ledger.devices())
    again = asked(machines, count=3)
    assert set(again.hosts) == set(machines)
    assert ledger.look(again.id).lease.epoch > over.epoch
    assert not ledger.verify().faults


def test_a_frozen_machine_ends_the_gang_and_keeps_its_slice_until_it_moves_again(
    three: tuple[dict[str, Machine], Any],
) -> None:
    """K1, K3: warden and member stopped together; back, its member is ended by its own warden, and only then is its device free."""
    machines, ledger = three
    gang = asked(machines, ttl="10m")
    gang.join()
    frozen, other = gang.machines[1], gang.machines[0]
    frozen.signal(signal.SIGSTOP)
    wait_until(lambda: process_is_gone(gang.members[0].pid), 40)
    over = ledger.look(gang.id).lease
    assert over.reason is EndReason.DEVICE_LOST
    assert (
        f"its member on {frozen.name} (rank 1 of 2) is lost: the warden there has said nothing" in over.detail
    )
    wait_until(lambda: {d.host: d.leases for d in ledger.devices()}[other.name] == 0)
    assert {d.host: d.leases for d in ledger.devices()}[frozen.name] == 1
    assert not ledger.look(gang.id).lease.settled_at
    frozen.signal(signal.SIGCONT)
    wait_until(lambda: process_is_gone(gang.members[1].pid))
    wait_until(lambda: ledger.look(gang.id).lease.settled_at)
    wait_until(lambda: all(d.leases == 0 and d.state.value == "ready" for d in ledger.devices()))
    assert all(t.receipt.proven for t in ledger.receipts())
    assert not ledger.verify().faults


# --- training ----------------------------------------------------------------------------------------------------

TOTAL = 24
_RUN = "import json, sys; from tests.deploy.gang_jobs import member; member(*json.loads(sys.argv[1]))"


def train(gang: Gang, name: str, folder: Path, **environment: str) -> list[Job]:
    """A rank on each machine of the gang."""
    jobs = []
    for machine in gang.machines:
        output = folder / f"{name}-{gang.id}-{machine.name}.txt"
        with output.open("wb") as lines:
            process = forked.Forked(
                [sys.executable, "-u", "-c", _RUN, json.dumps([name, TOTAL])],
                origin=forked.with_torch(),
                env={
                    "OMP_NUM_THREADS": "1",
                    **machine.environment,
                    "SUBLET_GANG": gang.ticket,
                    **environment,
                },
                cwd=Path("/"),
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=lines,
                start_new_session=True,
            )
        machine.processes.append(process)
        jobs.append(Job(process, output))
    return jobs


def finals(jobs: list[Job]) -> list[str]:
    assert [job.wait(100) for job in jobs] == [0, 0], "\n---\n".join(job.said() for job in jobs)
    return [line for job in jobs for line in job.said().splitlines() if line.startswith("final ")]


def test_ddp_over_two_machines_survives_the_loss_of_one_bit_for_bit(
    three: tuple[dict[str, Machine], Any], tmp_path: Path
) -> None:
    """S1, S3: warden and rank of one machine killed at once in the middle; the gang is granted anew, on other machines, and goes on."""
    torch = needed("torch")
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch has no gloo")
    machines, ledger = three
    gang = asked(machines, ttl="10s")
    whole = finals(train(gang, "whole", tmp_path))
    assert whole[0].split()[1] == whole[1].split()[1], "both ranks have one model"
    gang.give_back()
    first = asked(machines, ttl="10s")
    jobs = train(first, "lost", tmp_path, PAUSE="0.1")
    jobs[0].wait_for_step(8)
    lost = first.machines[1]
    assert "step 8" in jobs[0].said(), jobs[0].said()
    lost.signal(signal.SIGKILL)
    assert jobs[1].wait(30) == -signal.SIGKILL
    jobs[0].wait(60)  # by torch's own error, or by its warden: whoever is first
    wait_until(lambda: ledger.look(first.id).lease.state is LeaseState.ENDED, 60)
    over = ledger.look(first.id).lease
    committed = ledger.head("lost").step
    assert 0 < committed < TOTAL
    assert committed % 3 == 0, "one commit has both ranks at one step"
    if lost is not first.asked_from:  # then who asked was killed with it
        tell(first.asker)
    second = asked(machines, ttl="10s", lost=lost)
    assert lost.name not in second.hosts, "nobody has seen what is left there"
    assert ledger.look(second.id).lease.epoch > over.epoch
    assert finals(train(second, "lost", tmp_path)) == whole
    assert ledger.head("lost").step == TOTAL
    second.give_back()
    assert os.path.isdir(tmp_path / "store")
    assert not ledger.verify().faults
