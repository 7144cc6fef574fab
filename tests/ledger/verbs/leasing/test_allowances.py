"""GPU time by the day in the ledger, on both engines: paid ahead, given back, the same after a restart, and never paid twice (T2)."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import replace
from typing import Any

import pytest

from sublet.core.errors import BadInput, LeaseNotActive, QuotaReached
from sublet.core.leasing.lease import EndReason, LeaseState
from sublet.core.scheduling.device import Exclusivity
from sublet.core.values import DAY_US, HOUR_US
from tests.ledger.rig import HERE, MINUTE, SECOND, Rig

#: PostgreSQL's time goes on by itself.
SLACK = 5 * SECOND


@pytest.fixture
def pool(rig: Rig) -> Rig:
    rig.device()
    rig.tenant("ada", gpu_us_per_day=2 * HOUR_US)
    return rig


def left(rig: Rig, name: str = "ada") -> int:
    """What may still be paid for now."""
    seen = rig.ledger.allowance(name)
    return seen.left_us - seen.ahead_us


def whole(rig: Rig, **request: Any) -> Any:
    return rig.ask(80, exclusivity=Exclusivity.DEVICE, wait_us=0, **request)


def drain(rig: Rig, leave: int, name: str = "ada") -> None:
    rig.sql("UPDATE tenant SET left_us = ?, left_at = ? WHERE name = ?", leave, rig.ledger.now(), name)


def test_a_lease_is_paid_ahead_and_gets_back_what_it_did_not_use(pool: Rig) -> None:
    lease = whole(pool, ttl_us=10 * MINUTE)
    seen = pool.ledger.allowance("ada")
    assert 2 * HOUR_US - SLACK <= seen.left_us <= 2 * HOUR_US
    assert 10 * MINUTE - SLACK <= seen.ahead_us <= 10 * MINUTE
    pool.advance(6 * MINUTE)
    seen = pool.ledger.allowance("ada")  # used as it is used, and a twelfth has come back meanwhile
    assert seen.left_us == pytest.approx(2 * HOUR_US - 5.5 * MINUTE, abs=SLACK)
    pool.ledger.renew(pool.key(lease))
    assert left(pool) == pytest.approx(2 * HOUR_US - 15.5 * MINUTE, abs=SLACK)
    pool.release(lease)
    assert left(pool) == pytest.approx(2 * HOUR_US - 5.5 * MINUTE, abs=SLACK)
    pool.advance(DAY_US)
    assert left(pool) == 2 * HOUR_US


def test_half_a_device_is_half_the_time(pool: Rig) -> None:
    pool.ask(40, ttl_us=10 * MINUTE)
    assert left(pool) == pytest.approx(2 * HOUR_US - 5 * MINUTE, abs=SLACK)


def test_who_has_used_it_up_is_refused_and_it_is_journalled(pool: Rig) -> None:
    drain(pool, SECOND)
    with pytest.raises(
        QuotaReached, match=r"asked for 5m00s of GPU time, left are 1\.\ds of 2h00m a day, refill at"
    ):
        whole(pool, lease_id="no")
    assert pool.kinds("no") == ["lease.refused"]
    pool.advance(10 * MINUTE)
    assert whole(pool).lease.state is LeaseState.ACTIVE


def test_a_grant_is_as_long_as_can_be_paid(pool: Rig) -> None:
    drain(pool, MINUTE)
    answer = whole(pool, ttl_us=10 * MINUTE)
    assert answer.lease.expires_at - answer.at == pytest.approx(MINUTE, abs=SLACK)
    assert left(pool) < SECOND
    with pytest.raises(QuotaReached):
        pool.ask(10, wait_us=0)


def test_a_live_lease_that_empties_it_is_not_renewed_past_that_and_is_told(pool: Rig) -> None:
    drain(pool, 2 * MINUTE)
    answer = whole(pool, ttl_us=2 * MINUTE)
    pool.later(MINUTE)
    renewed = pool.ledger.renew(pool.key(answer))
    # A twelfth of the minute has come back; nothing else.
    assert renewed.lease.expires_at - answer.lease.expires_at == pytest.approx(5 * SECOND, abs=SLACK)
    pool.later(renewed.lease.expires_at - pool.ledger.now() - 10 * SECOND)
    pool.ledger.tick(HERE)
    told = pool.look(answer)
    assert (told.state, told.reason) == (LeaseState.REVOKING, EndReason.QUOTA)
    assert told.deadline_at == renewed.lease.expires_at
    with pytest.raises(LeaseNotActive):
        pool.ledger.renew(pool.key(answer))
    pool.later(11 * SECOND)
    pool.ledger.tick(HERE)
    assert (pool.look(answer).state, pool.look(answer).reason) == (LeaseState.ENDED, EndReason.QUOTA)
    assert -SECOND <= left(pool) < 20 * SECOND
    assert pool.faults() == []


def test_a_waiter_is_served_when_it_has_refilled(pool: Rig) -> None:
    drain(pool, 0)
    waiter = pool.ask(80, exclusivity=Exclusivity.DEVICE)
    assert waiter.lease.state is LeaseState.WAITING
    result = pool.ledger.tick(HERE)
    assert result.next_look_at is not None
    pool.policy(waiter_silence_us=HOUR_US)
    pool.later(121 * SECOND, waiter)
    pool.ledger.tick(HERE)
    granted = pool.look(waiter)
    assert granted.state is LeaseState.ACTIVE
    taken = pool.ledger.renew(pool.key(granted))
    assert taken.lease.expires_at > pool.ledger.now()


def test_an_offer_is_not_a_way_round(pool: Rig) -> None:
    pool.tenant("bob")
    pool.ask(60, tenant="bob")
    offered = pool.ask(40, wants_offers=True)
    assert offered.lease.slices
    drain(pool, 0)
    with pytest.raises(QuotaReached, match="refill at"):
        pool.ledger.accept(offered.lease.id, pool.secret(offered))
    assert pool.look(offered).state is LeaseState.WAITING


def test_a_restart_keeps_it_and_refills_no_time_twice(pool: Rig) -> None:
    drain(pool, MINUTE)
    pool.advance(12 * MINUTE)
    before = left(pool)
    assert before == pytest.approx(2 * MINUTE, abs=SLACK)
    again = pool.open()
    for _ in range(3):
        seen = again.allowance("ada")
        assert seen.left_us == pytest.approx(before, abs=SECOND)
        again.set_tenant("ada", actor="op", weight=100)
        whole(pool, ledger=again, lease_id=f"again-{_}", ttl_us=SECOND)
        pool.ledger.release(f"again-{_}", pool.secrets[f"again-{_}"])
    assert left(pool) == pytest.approx(before, abs=SLACK)


def test_a_machine_whose_clock_went_back_refills_nothing(sqlite: Rig) -> None:
    sqlite.device()
    sqlite.tenant("ada", gpu_us_per_day=2 * HOUR_US)
    drain(sqlite, 0)
    sqlite.advance(HOUR_US)
    held = whole(sqlite, ttl_us=SECOND)
    sqlite.release(held)
    before = left(sqlite)
    assert before == 5 * MINUTE
    assert sqlite.clock is not None
    sqlite.clock.step_wall(-3 * HOUR_US)
    assert left(sqlite) == before
    sqlite.clock.reboot()
    sqlite.release(whole(sqlite, ttl_us=SECOND))
    assert left(sqlite) == before
    sqlite.advance(HOUR_US)
    assert left(sqlite) == 2 * before


def test_threads_racing_for_the_last_second_get_one_grant(pool: Rig) -> None:
    drain(pool, SECOND)
    outcomes: list[str] = []
    start = threading.Barrier(4)

    def race(number: int) -> None:
        ledger = pool.open()
        start.wait()
        try:
            pool.ask(80, lease_id=f"race-{number}", ledger=ledger, wait_us=0, ttl_us=SECOND)
            outcomes.append("granted")
        except QuotaReached:
            outcomes.append("refused")

    pool.devices({"gpu0": 80, "gpu1": 80, "gpu2": 80, "gpu3": 80})
    threads = [threading.Thread(target=race, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == ["granted"] + ["refused"] * 3
    assert left(pool) >= 0


def _race(rig: Rig, number: int, start: Any, said: Any) -> None:
    ledger = rig.open()
    start.wait(30)
    try:
        rig.ask(80, lease_id=f"process-{number}", ledger=ledger, wait_us=0, ttl_us=SECOND)
        said.put("granted")
    except QuotaReached:
        said.put("refused")
    finally:
        ledger.close()


def test_processes_racing_for_the_last_second_get_one_grant(pool: Rig) -> None:
    pool.devices({"gpu0": 80, "gpu1": 80})
    drain(pool, SECOND)
    fork = multiprocessing.get_context("fork")
    start, said = fork.Barrier(2), fork.Queue()
    children = [fork.Process(target=_race, args=(pool, n, start, said)) for n in range(2)]
    for child in children:
        child.start()
    found = sorted(said.get(timeout=30) for _ in children)
    for child in children:
        child.join(30)
    assert found == ["granted", "refused"]


def test_a_quota_set_while_leases_live_counts_what_they_hold(rig: Rig) -> None:
    rig.device()
    rig.tenant("ada")
    lease = whole(rig, ttl_us=30 * MINUTE)
    assert rig.ledger.allowance("ada").per_day_us == 0
    rig.ledger.set_tenant("ada", actor="op", gpu_us_per_day=HOUR_US)
    assert left(rig) == pytest.approx(30 * MINUTE, abs=SLACK)
    rig.advance(10 * MINUTE)
    rig.ledger.renew(rig.key(lease))  # in SQL it would not have been paid for
    assert left(rig) == pytest.approx(20 * MINUTE + 25 * SECOND, abs=SLACK)
    rig.release(lease)
    assert left(rig) == pytest.approx(50 * MINUTE + 25 * SECOND, abs=SLACK)
    rig.ledger.set_tenant("ada", actor="op", gpu_us_per_day=2 * HOUR_US)
    assert left(rig) == pytest.approx(110 * MINUTE + 25 * SECOND, abs=SLACK)
    rig.ledger.set_tenant("ada", actor="op", gpu_us_per_day=0)
    assert whole(rig).lease.state is LeaseState.ACTIVE
    assert rig.kinds("ada").count("tenant.changed") == 3


def test_a_lease_that_ended_costs_nothing_though_nobody_tore_it_down(pool: Rig) -> None:
    """A dead host must not eat its tenants' time."""
    answer = whole(pool, ttl_us=MINUTE, pid=4711)
    pool.advance(HOUR_US)
    pool.ledger.tick(HERE)
    assert pool.look(answer).settled_at == 0
    assert left(pool) == 2 * HOUR_US  # a minute of use, and 55 s over an hour of refill


def test_a_grace_past_what_was_paid_is_paid_at_the_end(pool: Rig) -> None:
    drain(pool, 10 * SECOND)
    answer = whole(pool, ttl_us=10 * SECOND)
    pool.ledger.revoke(
        answer.lease.id, reason=EndReason.REVOKED, detail="maintenance", grace_us=MINUTE, actor="op"
    )
    pool.later(50 * SECOND)
    pool.release(answer)
    assert left(pool) == pytest.approx(-36 * SECOND, abs=SLACK)
    with pytest.raises(QuotaReached):
        whole(pool)


@pytest.mark.parametrize("wrong", [-1, 1, SECOND - 1])
def test_a_quota_no_lease_could_live_on_is_refused(pool: Rig, wrong: int) -> None:
    with pool.only_journals():
        with pytest.raises(BadInput):
            pool.ledger.set_tenant("ada", actor="op", gpu_us_per_day=wrong)
        with pytest.raises(BadInput):
            pool.tenant("eve", gpu_us_per_day=wrong)


def test_others_pay_nothing(pool: Rig) -> None:
    pool.tenant("bob")
    answer = pool.ask(10, tenant="bob")
    pool.ledger.renew(pool.key(answer))
    pool.release(answer)
    bob = pool.ledger.tenant("bob")
    assert (bob.gpu_us_per_day, bob.left_us) == (0, 0)
    assert replace(pool.ledger.allowance("bob"), at=0, full_at=0).left_us == 0


def test_a_renewal_on_its_way_is_counted_when_a_quota_is_set(postgres: Rig) -> None:
    """Renewing in SQL takes no lock of the pool. Whoever sets a quota waits for the lease's row and counts what it says then."""
    postgres.device()
    postgres.tenant("ada")
    lease = whole(postgres, ttl_us=MINUTE).lease
    renewing = postgres.schema.connect()  # type: ignore[attr-defined]
    renewing.execute("BEGIN")
    renewing.execute(
        "UPDATE lease SET expires_at = %s WHERE id = %s", (lease.expires_at + 30 * MINUTE, lease.id)
    )
    other = postgres.open()
    setting = threading.Thread(target=lambda: other.set_tenant("ada", actor="op", gpu_us_per_day=HOUR_US))
    setting.start()
    setting.join(0.3)
    assert setting.is_alive()
    renewing.execute("COMMIT")
    setting.join(30)
    renewing.close()
    assert left(postgres) == pytest.approx(29 * MINUTE, abs=SLACK)
