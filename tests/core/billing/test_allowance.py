"""GPU time by the day, as arithmetic: it refills evenly, never twice, never past full; a lease is paid for ahead and gets back what it did not use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.billing.allowance import (
    LEAST_PER_DAY_US,
    SPELL_US,
    allowance,
    brought_forward,
    changed_quota,
    cost,
    left_now,
    needed,
    paid,
    payable_us,
    refilled_at,
    settled,
    used_up,
)
from sublet.core.errors import QuotaReached
from sublet.core.leasing.lease import EndReason, Holder, LeaseRecord, LeaseState, Request, renew
from sublet.core.leasing.tenancy import PPM, Tenant
from sublet.core.scheduling import admission, schedule
from sublet.core.scheduling.admission import Grant, PoolView, Refusal, Wait
from sublet.core.scheduling.device import Device, DeviceState, Slice
from sublet.core.scheduling.schedule import Revoke
from sublet.core.values import DAY_US, HOUR_US, MINUTE_US, SECOND_US

NOW = 20_000 * DAY_US


def a_tenant(left: int, per_day: int = 2 * HOUR_US, at: int = NOW) -> Tenant:
    return Tenant(name="ada", gpu_us_per_day=per_day, left_us=left, left_at=at)


caps = st.integers(LEAST_PER_DAY_US, 50 * DAY_US)
times = st.lists(st.integers(0, 2 * DAY_US) | st.integers(0, 1000), max_size=30)


@given(caps, st.integers(0, 100), times)
def test_looking_often_is_looking_once(cap: int, percent: int, steps: list[int]) -> None:
    """Counted once, however the time is cut up; less than a microsecond is lost each time."""
    start = a_tenant(cap * percent // 100, cap)
    often, now = start, NOW
    for step in steps:
        now += step
        often = brought_forward(brought_forward(often, now), now)
    once = brought_forward(start, now)
    assert once.left_us - len(steps) <= often.left_us <= once.left_us <= cap


def test_a_bucket_of_a_second_refills_though_somebody_looks_every_millisecond() -> None:
    tenant, now = a_tenant(0, SECOND_US), NOW
    for _ in range(10_000):
        now += 1000
        tenant = brought_forward(tenant, now)
    assert tenant.left_us == 10_000_000 * SECOND_US // DAY_US


def test_it_refills_evenly_and_is_full_after_a_day() -> None:
    empty = a_tenant(0)
    assert left_now(empty, NOW + 12 * HOUR_US) == HOUR_US
    assert left_now(empty, NOW + DAY_US) == left_now(empty, NOW + 9 * DAY_US) == 2 * HOUR_US


def test_a_clock_that_goes_back_refills_nothing() -> None:
    tenant = brought_forward(a_tenant(0), NOW + HOUR_US)
    assert brought_forward(tenant, NOW) == tenant
    assert brought_forward(tenant, NOW + HOUR_US) == tenant


@given(caps, st.integers(1, 64 * PPM), st.integers(0, DAY_US), st.integers(0, DAY_US), st.integers(0, DAY_US))
def test_what_comes_back_is_never_more_than_what_was_paid(
    cap: int, rate: int, span: int, used: int, later: int
) -> None:
    full = a_tenant(cap, cap)
    most = payable_us(full, rate, NOW)
    assert most is not None
    span = min(span, most)
    bought = paid(full, rate, span, NOW)
    assert bought.left_us >= 0
    ended = settled(bought, rate, span - min(used, span), NOW + later)
    assert ended.left_us <= min(cap, brought_forward(bought, NOW + later).left_us + cost(rate, span))


def test_a_grace_past_what_was_paid_is_owed() -> None:
    assert settled(a_tenant(0), PPM, -5 * SECOND_US, NOW).left_us == -5 * SECOND_US


@given(caps, st.integers(0, 99), st.integers(1, 100))
def test_there_is_as_much_as_was_said_when_it_was_said_and_not_before(cap: int, has: int, wants: int) -> None:
    tenant, wanted = a_tenant(cap * has // 100, cap), cap * wants // 100
    at = refilled_at(tenant, wanted, NOW)
    assert left_now(tenant, at) >= wanted
    if at > NOW:
        assert left_now(tenant, at - 1) < wanted


def test_a_new_quota_keeps_what_was_used() -> None:
    used_half = a_tenant(HOUR_US)
    assert changed_quota(used_half, 4 * HOUR_US, 0, NOW).left_us == 3 * HOUR_US
    assert changed_quota(used_half, HOUR_US // 2, 0, NOW).left_us == 0  # not a debt of weeks
    first = changed_quota(Tenant(name="ada"), 2 * HOUR_US, MINUTE_US, NOW)
    assert (first.left_us, first.left_at) == (2 * HOUR_US - MINUTE_US, NOW)
    assert changed_quota(used_half, 2 * HOUR_US, 0, NOW) == used_half


def test_people_see_what_is_used_not_what_is_paid_ahead() -> None:
    seen = allowance(a_tenant(HOUR_US), 10 * MINUTE_US, NOW)
    assert (seen.left_us, seen.per_day_us) == (HOUR_US + 10 * MINUTE_US, 2 * HOUR_US)
    assert seen.full_at == NOW + 10 * HOUR_US  # 50 of 120 minutes are missing


REQUEST = Request(tenant="ada", vram_bytes=40, ttl_us=5 * MINUTE_US)
DEVICE = Device(
    id="gpu0",
    host="h",
    driver="host",
    ordinal=0,
    name="",
    capacity_bytes=80,
    free_bytes=80,
    state=DeviceState.READY,
)


def test_it_says_what_was_asked_what_is_left_and_when_there_is_more() -> None:
    assert used_up(a_tenant(SPELL_US), REQUEST, PPM, NOW) == ""
    assert used_up(Tenant(name="ada"), REQUEST, PPM, NOW) == ""
    said = used_up(a_tenant(4 * SECOND_US), REQUEST, PPM, NOW)
    assert "asked for 5m00s of GPU time" in said
    assert "left are 4.0s of 2h00m a day" in said
    assert "refill at 2024-10-04 00:01:12 UTC (in 1m12s)" in said  # 6 s missing, at a twelfth


def test_a_short_task_is_not_refused_for_its_default_ttl() -> None:
    """Ten seconds that are left are given, whatever the ttl; a bucket smaller than that must only be full."""
    assert needed(a_tenant(0), PPM, HOUR_US) == SPELL_US
    assert needed(a_tenant(0), PPM, SECOND_US) == SECOND_US
    assert needed(a_tenant(0, per_day=3 * SECOND_US), PPM, HOUR_US) == 3 * SECOND_US


def asking(left: int, **request: object) -> tuple[LeaseRecord, PoolView]:
    wish = replace(REQUEST, **request)  # type: ignore[arg-type]
    newcomer = LeaseRecord(
        id="new", request=wish, holder=Holder(host="h"), state=LeaseState.WAITING, joined_at=NOW, seen_at=NOW
    )
    return newcomer, PoolView(devices=(DEVICE,), tenants={"ada": a_tenant(left)})


def test_admission_refuses_who_has_used_it_up_and_lets_others_wait_for_the_refill() -> None:
    newcomer, view = asking(0, wait_us=0)
    refused = admission.admit(newcomer, view, NOW)
    assert isinstance(refused, Refusal)
    assert refused.error is QuotaReached
    assert "refill at" in refused.reason
    waiter, view = asking(0)
    waits = admission.admit(waiter, view, NOW)
    assert isinstance(waits, Wait)
    assert "refill at" in waits.reason
    view = replace(view, waiters=(waiter,))
    # Half a device for 10 s is 5 s of GPU time, a minute at a twelfth: looked at then, granted then.
    assert schedule.next_look_at(
        replace(view, policy=replace(view.policy, waiter_silence_us=HOUR_US)), NOW
    ) == (NOW + MINUTE_US)
    assert admission.place(view, NOW + MINUTE_US - 1) == []
    assert [type(step) for step in admission.place(view, NOW + MINUTE_US)] == [Grant]


def test_two_waiters_of_one_tenant_do_not_get_the_same_seconds() -> None:
    first, view = asking(5 * SECOND_US)
    second = replace(first, id="second", joined_at=NOW + 1)
    placed = admission.place(replace(view, waiters=(first, second)), NOW + 1)
    assert [step.lease_id for step in placed] == ["new"]


def test_nobody_is_revoked_for_a_waiter_that_could_not_pay() -> None:
    waiter, view = asking(0, vram_bytes=80)
    spot = LeaseRecord(
        id="spot",
        request=Request(tenant="bob", vram_bytes=80, ttl_us=HOUR_US),
        holder=Holder(host="h"),
        state=LeaseState.ACTIVE,
        epoch=1,
        slices=(Slice("gpu0", 80),),
        granted_at=NOW - HOUR_US,
        expires_at=NOW + HOUR_US,
        active_at=NOW - HOUR_US,
    )
    full = replace(DEVICE, free_bytes=0, leases=1, sole_tenant="bob")
    tenants = {**view.tenants, "bob": Tenant(name="bob", live_leases=1)}
    view = replace(view, devices=(full,), leases=(spot,), waiters=(waiter,), tenants=tenants)
    assert schedule.tick(view, NOW) == []
    rich = replace(view, tenants={**tenants, "ada": a_tenant(HOUR_US)})
    assert [type(step) for step in schedule.tick(rich, NOW)] == [Revoke]


def held(left: int, expires_in: int) -> tuple[LeaseRecord, PoolView]:
    lease = LeaseRecord(
        id="L",
        request=REQUEST,
        holder=Holder(host="h"),
        state=LeaseState.ACTIVE,
        epoch=1,
        slices=(Slice("gpu0", 40),),
        granted_at=NOW - HOUR_US,
        expires_at=NOW + expires_in,
        active_at=NOW,
        busy=True,
    )
    return lease, PoolView(devices=(DEVICE,), leases=(lease,), tenants={"ada": a_tenant(left)})


def test_a_lease_that_cannot_be_paid_any_longer_is_told_a_grace_before_it_ends() -> None:
    lease, view = held(0, MINUTE_US)
    told_at = NOW + MINUTE_US - view.policy.grace_us
    assert schedule.next_look_at(view, NOW) == told_at
    # By then a little has refilled; too little to be worth it.
    assert schedule.tick(view, told_at - 1) == []
    [step] = schedule.tick(view, told_at)
    assert isinstance(step, Revoke)
    assert (step.end_reason, step.deadline_at) == (EndReason.QUOTA, lease.expires_at)
    assert "GPU time a day" in step.reason
    _, rich = held(HOUR_US, MINUTE_US)
    assert schedule.tick(rich, told_at) == []


@pytest.mark.parametrize(
    ("payable", "expires"),
    [
        (None, 5 * MINUTE_US),
        (HOUR_US, 5 * MINUTE_US),
        (2 * MINUTE_US, 3 * MINUTE_US),
        (0, MINUTE_US),  # paid for until then, so not refused
    ],
)
def test_a_renewal_goes_as_far_as_can_be_paid(payable: int | None, expires: int) -> None:
    lease, _ = held(0, MINUTE_US)
    renewed = renew(lease, 1, NOW, capped=False, payable_us=payable)
    assert renewed.expires_at == NOW + expires  # type: ignore[union-attr]
