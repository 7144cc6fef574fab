"""The pool of the simulator is the ledger's: every verb of a replay is also asked of a real SQLite ledger, and both say the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pytest

from sublet.core.errors import LeaseLost, LeaseNotActive
from sublet.core.leasing.lease import LeaseRecord, Request
from sublet.core.leasing.tenancy import Tenant
from sublet.core.values import MINUTE_US, SECOND_US
from sublet.ports.ledger import LeaseKey
from sublet.ports.processes import Receipt
from sublet.sim.engine import TraceReplay
from sublet.sim.schemes import FAIR_TTL, OURS, Scheme
from sublet.sim.world import CAPACITY_BYTES, HOLDER, World
from tests.ledger.rig import HERE, Rig, sqlite_rig
from tests.sim.workloads import came, people

GONE = Receipt(proven=True, ladder="gone", containment="cgroup")
SECRET = "secret-of-a-simulated-holder-0123456789abcdef"
#: A waiter here never falls silent, and the ledger's is seen when it is looked at.
NOT_COMPARED = {"holder", "seen_at"}
INSTANTS = {f.name for f in fields(LeaseRecord) if f.name.endswith("_at") or f.name.endswith("_until")}


class Beside(World):
    """A world that does everything twice."""

    def __init__(self, scheme: Scheme, gpus: int, rig: Rig) -> None:
        super().__init__(scheme, gpus)
        self.rig, self.ledger = rig, rig.ledger
        rig.devices(dict.fromkeys(self.devices, CAPACITY_BYTES))
        self.ledger.set_policy(scheme.policy, actor="test")
        self.began = self.ledger.now()
        self.compared = 0

    def _same_time(self) -> None:
        self.rig.advance(self.began + self.now - self.ledger.now())
        self.ledger.beat_host(HERE)
        for name in self.waiters:
            self.ledger.attend(name, SECRET, explain=False)

    def _key(self, lease: LeaseRecord) -> LeaseKey:
        return LeaseKey(lease.id, lease.epoch, SECRET)

    def acquire(self, lease_id: str, request: Request) -> LeaseRecord:
        if request.tenant not in self.tenants:
            self.rig.tenant(request.tenant)
        self._same_time()
        answer = self.ledger.acquire(lease_id, SECRET, request, replace(HOLDER, host=HERE))
        lease = super().acquire(lease_id, request)
        assert answer.lease.state is lease.state
        self.compare()
        return lease

    def renew(self, lease: LeaseRecord, *, busy: bool) -> bool:
        self._same_time()
        renewed = super().renew(lease, busy=busy)
        try:
            self.ledger.renew(self._key(lease), busy=busy)
            assert renewed
        except (LeaseLost, LeaseNotActive):
            assert not renewed
        self.compare()
        return renewed

    def mark(self, lease: LeaseRecord, *, busy: bool) -> None:
        self._same_time()
        self.ledger.mark(self._key(lease), busy=busy)
        super().mark(lease, busy=busy)
        self.compare()

    def release(self, lease: LeaseRecord) -> None:
        self._same_time()
        self.ledger.release(lease.id, SECRET, torn_down=False)
        super().release(lease)
        self.compare()

    def settle(self, lease_id: str) -> None:
        self._same_time()
        assert self.ledger.settle(lease_id, self.leases[lease_id].epoch, GONE)
        super().settle(lease_id)
        self.compare()

    def tick(self) -> int | None:
        self._same_time()
        self.ledger.tick(HERE)
        found = super().tick()
        self.compare()
        return found

    def compare(self) -> None:
        theirs = {a.lease.id: self._plain(a.lease, self.began) for a in self.ledger.leases()}
        ours = {x.id: self._plain(x, 0) for x in (*self.leases.values(), *self.waiters.values())}
        assert ours == theirs, f"at {self.now}"
        theirs_too = {
            t.name: self._counted(t, self.began) for t in self.ledger.tenants() if t.name in self.tenants
        }
        assert {name: self._counted(t, 0) for name, t in self.tenants.items()} == theirs_too, f"at {self.now}"
        self.compared += 1

    def _counted(self, tenant: Tenant, began: int) -> Tenant:
        """As of when is compared where anything has been counted: one that only exists is brought forward by nobody."""
        counted = tenant.used_us or tenant.rate_ppm
        cooldown = tenant.cooldown_until - began if tenant.cooldown_until else 0
        assert tenant.gpu_us_per_day == 0  # so that since when nothing is left of it says nothing
        as_of = tenant.as_of - began if counted else 0
        return replace(tenant, as_of=as_of, cooldown_until=cooldown, left_at=0)

    def _plain(self, lease: LeaseRecord, began: int) -> dict[str, object]:
        found = {f.name: getattr(lease, f.name) for f in fields(LeaseRecord) if f.name not in NOT_COMPARED}
        # A reason in words is the ledger's own where it is about a holder's doing; a decision's is compared in one word.
        found.pop("detail")
        found["request"] = replace(lease.request, hold_cap_us=None)  # a row keeps the cap that applies, once
        return {k: v - began if k in INSTANTS and v else v for k, v in found.items()}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = sqlite_rig(tmp_path)
    yield made
    made.close()


def crowd():
    return people(5, tenants=20, visits=45, apart_s=60)


def small_crowd():
    return people(5, tenants=12, visits=20, apart_s=60)


def busy():
    """Who never stops meets the hold cap; who comes back behind it waits."""
    hog = [("hog", float(i), 400.0) for i in range(8)]
    return came(*hog, *((f"t{i}", 60.0 + 90 * i, 30.0) for i in range(6)), ("t0", 2_200.0, 10.0))


@pytest.mark.parametrize(
    ("workload", "scheme", "gpus", "ended"),
    [
        (crowd, OURS, 2, {"idle", "released"}),
        (busy, OURS, 1, {"hold_cap", "idle", "released"}),
        (small_crowd, FAIR_TTL, 2, {"released"}),
    ],
    ids=["a crowd", "one that never stops", "without idle on demand"],
)
def test_every_lease_is_what_the_ledger_says_after_every_verb(rig, workload, scheme, gpus, ended):
    run = TraceReplay(workload(), scheme, gpus=gpus)
    # An instant of 0 is 'never' in a record; arrivals begin a minute later than that.
    run._arrivals = tuple(replace(a, at=a.at + MINUTE_US) for a in run._arrivals)
    run.world = beside = Beside(scheme, gpus, rig)
    found = run.run()
    assert set(found.ends) >= ended
    assert beside.compared > len(found.served)
    assert found.ended_at > 10 * SECOND_US
    assert rig.faults() == []
