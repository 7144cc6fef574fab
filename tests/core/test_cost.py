"""What a decision costs grows no faster than the logarithm of the pool: counted in elementary steps, from 10 devices to 10,000, and with up to
100,000 tenants that have used something."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sublet.core.leasing.lease import changed
from sublet.core.scheduling import admission, schedule
from sublet.core.scheduling.admission import Grant, Offer, Wait
from sublet.core.scheduling.pool_index import PoolIndex
from sublet.core.scheduling.schedule import Revoke
from tests.core.crowded import NOW, name_of, pool, waiter
from tests.core.reference import schedule as ticked_before
from tests.core.steps import steps

SMALL, LARGE = 10, 10_000


@functools.cache
def full(devices: int, **setting: Any) -> PoolIndex:
    """Made once for all who ask about it: to decide leaves a pool as it was, a renewal and a bill move one row by a microsecond."""
    return pool(devices, tenant_count=devices, **setting)


#: How many times more steps a thousand times the devices may cost.
LOGARITHMIC = math.log2(LARGE) / math.log2(SMALL)


def asked(found: PoolIndex) -> object:
    return admission.admit(waiter(999, name_of(1)), found, NOW, forecast=False)


def ticked(found: PoolIndex) -> object:
    return schedule.tick(found, NOW)


def handed_out(found: PoolIndex) -> object:
    return admission.place(found, NOW)


def looked_again(found: PoolIndex) -> object:
    return schedule.next_look_at(found, NOW)


def renewed(found: PoolIndex) -> object:
    lease = found.leases["l000003"]
    found.set_lease(changed(lease, expires_at=lease.expires_at + 1))
    return lease


def billed(found: PoolIndex) -> object:
    tenant = found.tenants[name_of(3)]
    found.set_tenant(replace(tenant, used_us=tenant.used_us + 1, as_of=NOW))
    return tenant


CASES: list[tuple[str, Callable[[PoolIndex], object], dict[str, object], type | None]] = [
    ("a request when one device is free", asked, {"free": 1, "waiting": 0}, Grant),
    ("a request when nothing is free", asked, {"waiting": 4}, Wait),
    ("handing out one device", handed_out, {"free": 1, "waiting": 4}, list),
    ("a tick with nothing to do", ticked, {"waiting": 0}, list),
    ("a tick with waiters and nothing to take", ticked, {"waiting": 4}, list),
    ("taking idle leases", ticked, {"waiting": 4, "kind": "idle"}, list),
    ("taking lower tiers", ticked, {"waiting": 4, "kind": "lower"}, list),
    ("when to look again", looked_again, {"waiting": 4}, None),
    ("a renewal", renewed, {"waiting": 4}, None),
    ("a tenant's use", billed, {"waiting": 4}, None),
]


@pytest.mark.parametrize(("case", "kind"), [(c, c[3]) for c in CASES], ids=[c[0] for c in CASES])
def test_a_decision_grows_no_faster_than_the_logarithm_of_the_devices(case, kind):
    _, call, setting, _ = case
    cost = {}
    for devices in (SMALL, LARGE):
        found = full(devices, **setting)
        # What has come due by now is sorted in once. And Python 3.12 counts nothing the first time.
        steps(lambda found=found: call(found))
        cost[devices] = steps(lambda found=found: call(found))
        answer = call(found)
        assert kind is None or isinstance(answer, kind)
    assert cost[SMALL] > 30, "nothing was counted"
    assert cost[LARGE] <= LOGARITHMIC * cost[SMALL], cost


def test_ten_thousand_devices_and_a_hundred_thousand_tenants_cost_what_ten_of_each_do():
    small = pool(SMALL, tenant_count=SMALL, waiting=4, kind="idle")
    large = pool(LARGE, tenant_count=100_000, waiting=4, kind="idle")
    for found in (small, large):
        assert sum(isinstance(step, Revoke) for step in schedule.tick(found, NOW)) == min(
            4, len(found.devices) // 3
        )
    # Three of ten are idle, so one waiter of the small pool looks in vain: compared is the cost for each who is served.
    cost_small = steps(lambda: schedule.tick(small, NOW)) / 3
    cost_large = steps(lambda: schedule.tick(large, NOW)) / 4
    assert cost_large <= LOGARITHMIC * cost_small
    before = steps(lambda: schedule.next_look_at(large, NOW))
    assert before <= 1_500


def test_where_nothing_is_free_and_nothing_may_be_taken_it_does_not_matter_how_many_wait():
    few, many = (pool(100, tenant_count=1_000, waiting=n) for n in (4, 1_000))
    for call in (asked, ticked, handed_out):
        call(few)
        call(many)
        assert steps(lambda call=call: call(many)) <= 2 * steps(lambda call=call: call(few)), call.__name__


def test_the_count_sees_a_walk_over_everything():
    """What was there before is linear, and is seen to be."""
    cost = {}
    for devices in (SMALL, 1_000):
        found = pool(devices, tenant_count=devices, waiting=4, kind="idle")
        view = admission.PoolView(
            devices=tuple(found.devices.values()),
            leases=tuple(found.leases.values()),
            waiters=tuple(found.waiters.values()),
            tenants=found.tenants,
            policy=found.policy,
        )
        import tests.core.steps as counted

        known, counted.CORE = counted.CORE, "/core/"
        try:
            cost[devices] = steps(lambda view=view: ticked_before.tick(view, NOW))
        finally:
            counted.CORE = known
    assert cost[1_000] > 50 * cost[SMALL]


def test_a_decision_is_a_grant_an_offer_or_a_wait_in_both_sizes():
    for devices in (SMALL, 1_000):
        found = pool(devices, tenant_count=devices, waiting=4, free=1)
        placed = admission.place(found, NOW)
        assert [type(p) for p in placed] == [Grant]
        assert not any(isinstance(p, Offer) for p in placed)
