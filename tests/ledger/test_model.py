"""A random life of a ledger, step by step beside a naive model of it (L1-L5, S3, T2, T4), on both engines."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sublet.core.errors import Fenced, HeadMoved, LeaseLost, NoCapacity, NotFound, QuotaReached, Refused
from sublet.core.leasing.lease import EndReason, Tier
from sublet.core.progress.effect import AlreadyCommitted, Committed
from sublet.core.scheduling.device import Exclusivity
from sublet.ports.ledger import LeaseKey
from sublet.ports.processes import Receipt
from tests.conftest import MORE_EXAMPLES
from tests.ledger.model import Held, Model, get_along
from tests.ledger.rig import MINUTE, SECOND, Rig, a_step, postgres_rig, sqlite_rig

DEVICES = {"gpu0": 100, "gpu1": 100, "gpu2": 60}
QUOTAS = {"ada": 0, "bob": 3, "eve": 2}
FOREVER = 30 * 24 * 60 * MINUTE
TTL = 10 * MINUTE


class Life(RuleBasedStateMachine):
    make: Any  # set by the test: () -> Rig, and what to do with it afterwards

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.rig, self.drop = type(self).make()
        self.names = itertools.count(1)

    @initialize()
    def begin(self) -> None:
        rig = self.rig
        for name, most in QUOTAS.items():
            rig.tenant(name, max_leases=most)
        rig.devices(DEVICES)
        rig.policy(
            waiter_silence_us=FOREVER,
            host_silence_us=FOREVER,
            host_gone_us=FOREVER,
            promote_after_us=FOREVER,
            batch_promote_after_us=FOREVER,
            backfill_patience_us=FOREVER,
            gang_patience_us=FOREVER,
            idle_after_us=FOREVER,
            hold_cap_us=0,
            claim_us=2 * MINUTE,
            min_run_us=MINUTE,
            max_min_run_factor=1,
        )
        self.model = Model(DEVICES, QUOTAS, MINUTE, 2 * MINUTE)

    # rules

    @rule(
        target=leases,
        size=st.sampled_from([10, 30, 50, 60, 100]),
        kind=st.sampled_from(["shared", "shared", "session", "device"]),
        tier=st.sampled_from(list(Tier)),
        tenant=st.sampled_from(sorted(QUOTAS)),
        count=st.sampled_from([1, 1, 1, 2]),
        patient=st.booleans(),
    )
    def acquire(self, size: int, kind: str, tier: Tier, tenant: str, count: int, patient: bool) -> str:
        lease_id = f"lease-{next(self.names):03d}"
        h = Held(lease_id, tenant, size, kind, tier.value, count, TTL)
        alone, fits = not self.model.waiting(), self.model.fits(h)
        try:
            answer = self.rig.ask(
                size,
                lease_id=lease_id,
                tenant=tenant,
                exclusivity=Exclusivity(kind),
                tier=tier,
                count=count,
                wait_us=None if patient else 0,
                hold_cap_us=0,
                ttl_us=TTL,
                pid=1,
            )
        except Refused as refused:
            self.was_right_to_refuse(h, refused, patient=patient, fits=alone and fits)
            return lease_id
        self.model.leases[lease_id] = h
        if answer.lease.state.value == "active":
            self.model.grant(h, self.rows()[lease_id], answer.at, claimed=True)
        else:
            assert patient
            assert not (alone and fits), "waits although it fits and nobody waits"
        self.follow(answer.at)
        return lease_id

    @rule(lease_id=leases, busy=st.just(True))
    def renew(self, lease_id: str, busy: bool) -> None:
        h = self.model.leases.get(lease_id)
        if h is None:
            return
        try:
            answer = self.rig.ledger.renew(self.key(h), busy=busy)
        except LeaseLost:
            assert h.state != "active" or self.now() >= h.expires_at, "L3: a live lease was not renewed"
        else:
            assert h.state == "active"
            assert answer.at < h.expires_at, "L3: renewed after it expired"
            h.expires_at = max(h.expires_at, answer.at + h.ttl)
        self.follow(self.now())

    @rule(lease_id=leases)
    def release(self, lease_id: str) -> None:
        h = self.model.leases.get(lease_id)
        if h is None:
            return
        was = h.state
        before = self.now()
        assert self.rig.ledger.release(h.id, self.rig.secrets[h.id]) is (was != "ended")
        if was == "revoking":
            self.model.end(h, h.reason, settled=True)
        elif was == "active":
            self.model.end(h, "expired" if before >= h.expires_at else "released", settled=True)
        elif was == "waiting":
            self.model.end(h, "released", settled=True)
        self.follow(self.now())
        self.nobody_waits_for_nothing()

    @rule(lease_id=leases, grace=st.sampled_from([0, 5 * SECOND, 2 * MINUTE]))
    def revoke(self, lease_id: str, grace: int) -> None:
        h = self.model.leases.get(lease_id)
        if h is None or h.overdue(self.now()):
            return
        call = {"reason": EndReason.REVOKED, "detail": "asked", "grace_us": grace, "actor": "test"}
        if h.state == "ended":
            with pytest.raises(LeaseLost):
                self.rig.ledger.revoke(h.id, **call)
        else:
            answer = self.rig.ledger.revoke(h.id, **call)
            if h.state == "waiting":
                self.model.end(h, "revoked", settled=True)
            else:
                deadline = answer.at + grace
                h.deadline_at = min(deadline, h.deadline_at) if h.state == "revoking" else deadline
                h.state, h.reason = "revoking", "revoked"
        self.follow(self.now())

    @rule(lease_id=leases, proven=st.sampled_from([True, True, True, False]))
    def settle(self, lease_id: str, proven: bool) -> None:
        h = self.model.leases.get(lease_id)
        if h is None:
            return
        receipt = Receipt(proven=proven, ladder="kill", containment="none")
        owed = h.state == "ended" and not h.settled
        assert self.rig.ledger.settle(h.id, h.epoch, receipt) is owed
        if owed:
            h.settled = True
            if not proven:
                self.model.ready |= {device: False for device, _ in h.slices}
        self.follow(self.now())
        if owed:
            self.nobody_waits_for_nothing()

    @rule()
    def tick(self) -> None:
        result = self.rig.ledger.tick()
        self.follow(result.at, ticking=True)
        self.nobody_waits_for_nothing()

    @rule(us=st.sampled_from([SECOND, 30 * SECOND, 3 * MINUTE, 11 * MINUTE]))
    def advance(self, us: int) -> None:
        self.rig.advance(us)

    @rule(device=st.sampled_from(sorted(DEVICES)), ready=st.sampled_from([True, True, False]))
    def set_device(self, device: str, ready: bool) -> None:
        state = "ready" if ready else "quarantined"
        self.rig.ledger.set_device(device, state=state, note="", actor="test")
        self.model.ready[device] = ready
        self.follow(self.now())
        if ready:
            self.nobody_waits_for_nothing()

    @rule(lease_id=leases, job=st.sampled_from(["train", "tune"]), skip=st.sampled_from([0, 0, 0, -1, 1]))
    def commit(self, lease_id: str, job: str, skip: int) -> None:
        h = self.model.leases.get(lease_id)
        if h is None:
            return
        done = self.model.steps.setdefault(job, [])
        step = max(1, len(done) + 1 + skip)
        before = self.now()
        live = h.state in ("active", "revoking") and not h.overdue(before)
        if done and self.model.leases[done[0]].tenant != h.tenant:
            with pytest.raises((NotFound, Fenced)):  # T1: another tenant's job
                self.rig.ledger.commit(self.key(h), a_step(step, job=job))
            assert self.rig.ledger.head(job).step == len(done)
            return
        try:
            answer = self.rig.ledger.commit(self.key(h), a_step(step, job=job))
        except Fenced:
            assert step > len(done)
            assert not live or h.overdue(self.now()) or h.epoch < self.model.job_epoch.get(job, 0)
        except HeadMoved:
            assert step > len(done) + 1
            assert live
        else:
            if step <= len(done):
                mine = done[step - 1] == h.id
                assert answer == (Committed(step) if mine else AlreadyCommitted(step, f"outcome-{step}"))
            else:
                assert live, f"S2: a {h.state} lease committed"
                assert h.epoch >= self.model.job_epoch.get(job, 0), "S2: an older epoch committed"
                assert answer == Committed(len(done) + 1), "S3"
                done.append(h.id)
                self.model.job_epoch[job] = h.epoch
        head = self.rig.ledger.head(job)
        assert (head.step if head else 0) == (head.version if head else 0) == len(done)
        self.follow(self.now())

    # what must hold after every step, from the tables

    @invariant()
    def sums_are_what_they_sum(self) -> None:
        if not hasattr(self, "model"):
            return
        slices = self.rig.sql("SELECT device_id, lease_id, tenant, exclusivity, vram_bytes FROM slice")
        held = {
            (d, h.id, h.tenant, h.kind, n)
            for h in self.model.leases.values()
            if not h.settled
            for d, n in h.slices
        }
        assert set(slices) == held
        for device in self.rig.ledger.devices():
            here = [s for s in slices if s[0] == device.id]
            used = sum(s[4] for s in here)
            tenants = {s[2] for s in here}
            assert used <= device.capacity_bytes, "L2"
            for a, b in itertools.combinations(here, 2):
                pair = [Held("", s[2], s[4], s[3], "", 1, 0) for s in (a, b)]
                assert get_along(*pair), f"L2: {a} beside {b}"
            assert device.free_bytes == device.capacity_bytes - used
            assert device.leases == len(here)
            assert device.session_leases == sum(s[3] == "session" for s in here)
            assert device.device_leases == sum(s[3] == "device" for s in here)
            sole = "" if not tenants else next(iter(tenants)) if len(tenants) == 1 else "*"
            assert device.sole_tenant == sole
            assert (device.state.value == "ready") == self.model.ready[device.id]
        rates = dict(self.rig.sql("SELECT tenant, sum(rate_ppm) FROM slice GROUP BY tenant"))
        waiting = self.model.waiting()
        for tenant in self.rig.ledger.tenants():
            mine = [s for s in slices if s[2] == tenant.name]
            assert tenant.live_leases == len({s[1] for s in mine})
            assert tenant.live_bytes == sum(s[4] for s in mine)
            assert tenant.rate_ppm == int(rates.get(tenant.name, 0))
            assert tenant.waiting == sum(w.tenant == tenant.name for w in waiting)
            assert not tenant.max_leases or tenant.live_leases <= tenant.max_leases, "T2"
        assert self.rig.sql("SELECT waiting, epoch FROM pool") == [(len(waiting), self.model.top_epoch)]

    @invariant()
    def every_ended_grant_is_metered_once(self) -> None:
        if not hasattr(self, "model"):
            return
        usage = {u.lease_id: u for u in self.rig.ledger.usage()}
        ended = {h.id for h in self.model.leases.values() if h.state == "ended" and h.epoch}
        assert usage.keys() == ended, "T4"
        for u in usage.values():
            h = self.model.leases[u.lease_id]
            last = h.deadline_at or h.expires_at
            assert u.from_at == h.granted_at
            assert u.from_at <= u.to_at <= last
            assert u.gpu_us == (u.to_at - u.from_at) * h.count

    def teardown(self) -> None:
        try:
            if hasattr(self, "model"):
                assert self.rig.faults() == [], "S7"
        finally:
            self.drop()

    # reading

    def now(self) -> int:
        return self.rig.ledger.now()

    def key(self, h: Held) -> Any:
        return LeaseKey(h.id, h.epoch, self.rig.secrets[h.id])

    def rows(self) -> dict[str, Held]:
        found: dict[str, Held] = {}
        for r in self.rig.sql(
            "SELECT id, tenant, state, epoch, slices, granted_at, expires_at, deadline_at, reason, settled_at FROM lease"
        ):
            slices = [(p.split("=")[0], int(p.split("=")[1])) for p in r[4].split(";") if p]
            found[r[0]] = Held(
                r[0], r[1], 0, "", "", 0, 0, r[2], r[3], slices, r[5], r[6], r[7], r[8], bool(r[9])
            )
        return found

    def follow(self, at: int, *, ticking: bool = False) -> None:
        self.model.follow(self.rows(), at=at, ticking=ticking)

    def was_right_to_refuse(self, h: Held, refused: Refused, *, patient: bool, fits: bool) -> None:
        assert not patient
        assert not fits, f"refused although it fits: {refused}"
        expected = NoCapacity if self.model.quota_left(h.tenant) else QuotaReached
        assert type(refused) is expected

    def nobody_waits_for_nothing(self) -> None:
        """With endless patience for backfilling, whoever fits has been served."""
        stuck = [w.id for w in self.model.waiting() if self.model.fits(w)]
        assert not stuck, f"T3: room for {stuck}, and they wait"


def live(make: Any, examples: int, steps: int) -> None:
    machine = type("Life", (Life,), {"make": staticmethod(make)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            print_blob=True,
        ),
    )


def test_sqlite_lives_like_the_model() -> None:
    with tempfile.TemporaryDirectory() as folder:

        def make() -> tuple[Rig, Any]:
            rig = sqlite_rig(Path(folder))
            return rig, rig.close

        live(make, examples=20 * MORE_EXAMPLES, steps=40)


def test_postgres_lives_like_the_model(postgres_server: Any) -> None:
    def make() -> tuple[Rig, Any]:
        rig, schema = postgres_rig(postgres_server.url)

        def drop() -> None:
            rig.close()
            schema.hand_on()

        return rig, drop

    live(make, examples=10 * MORE_EXAMPLES, steps=35)
