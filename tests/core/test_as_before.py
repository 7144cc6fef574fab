"""A decision looks at no more than it needs, and is the one that looking at everything gives (`tests/core/reference`)."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from sublet.core.billing.allowance import least_rate
from sublet.core.leasing.lease import LeaseState, Request
from sublet.core.leasing.tenancy import PPM, Tenant, used_now
from sublet.core.scheduling import admission, schedule, victim_search
from sublet.core.scheduling.admission import PoolIndex, PoolView
from sublet.core.scheduling.device import Slice, could_ever_fit, fit, largest_smaller, usable
from sublet.core.scheduling.device_index import DeviceIndex
from sublet.core.scheduling.fair_share_index import FairShareIndex, grown
from sublet.core.values import DAY_US, HOUR_US
from tests.conftest import MORE_EXAMPLES
from tests.core import random_views
from tests.core.pool import BATCH, DEVICE, GB, NOW, SPOT, M, S, active, device, view_of, waiter
from tests.core.reference import admission as before
from tests.core.reference import preemption as chosen_before
from tests.core.reference import schedule as ticked_before

#: Random pools; `make proof` looks at ten times as many.
VIEWS = 400 * MORE_EXAMPLES
PARTS = 2


def assert_decides_as_before(view: PoolView, pool: PoolIndex, now: int, newcomer) -> None:
    assert schedule.tick(pool, now) == ticked_before.tick(view, now)
    assert admission.place(pool, now) == before.place(view, now)
    assert admission.in_order(pool, now) == before.in_order(view, now)
    assert admission.admit(newcomer, pool, now) == before.admit(newcomer, view, now)
    assert schedule.next_look_at(pool, now) == ticked_before.next_look_at(view, now)
    for w in view.waiters:
        assert admission.expect(w, pool, now) == before.expect(w, view, now)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_decision_is_the_one_that_a_walk_over_everything_makes(part):
    kinds: set[str] = set()
    for seed in range(part * VIEWS // PARTS, (part + 1) * VIEWS // PARTS):
        view = random_views.view(seed)
        newcomer = random_views.wish(Random(seed), "new")
        try:
            assert_decides_as_before(view, view.pool(), NOW, newcomer)
            later = NOW + (seed % 7) * 31 * S
            assert_decides_as_before(view, view.pool(), later, newcomer)  # the same pool, looked at again
        except AssertionError as e:
            raise AssertionError(f"random_views.view({seed})") from e
        kinds |= {type(step).__name__ for step in schedule.tick(view, NOW)}
        kinds |= {type(admission.admit(newcomer, view, NOW)).__name__}
    assert kinds == {"End", "Drop", "Withdraw", "Revoke", "Grant", "Offer", "Wait", "Refusal"}


def test_a_larger_pool_is_decided_on_as_before():
    for seed in range(10 * MORE_EXAMPLES):
        view = random_views.view(seed, most_devices=40)
        newcomer = random_views.wish(Random(seed), "new")
        assert_decides_as_before(view, view.pool(), NOW, newcomer)


def lists_of(pool: PoolIndex) -> dict[str, object]:
    """All it knows, without what is empty."""
    pool._sort_in()
    found: dict[str, object] = {}
    for name in (
        "_ends",
        "_notices",
        "_looks",
        "_leaving",
        "_resting",
        "_untils",
        "_seens",
        "_offers",
        "_sizes",
    ):
        found[name] = list(getattr(pool, name))
    found["capped"] = {n for _, n in [*pool._caps_ahead, *pool._caps]}
    found["lines"] = {line: list(keys) for line, keys in pool.lines.items()}
    found["on"] = {d: set(names) for d, names in pool._on.items() if names}
    found["rationed"] = set(pool._rationed)
    found["cooldowns"] = list(pool._cooldowns)
    found["free"] = {k: list(v) for k, v in pool.device_index._free.items() if v}
    found["ready"] = {
        (h, c): list(v) for h, by in pool.device_index._by_capacity.items() for c, v in by.items() if v
    }
    found["not lost"] = {h: +n for h, n in pool.device_index._not_lost.items() if +n}
    found["sums"] = (pool.shares._weight, pool.shares._users, pool.shares._rate, pool.shares._drift)
    return found


def view_of_pool(pool: PoolIndex) -> PoolView:
    return PoolView(
        devices=tuple(pool.devices.values()),
        leases=tuple(pool.leases[n] for n in sorted(pool.leases)),
        waiters=tuple(sorted(pool.waiters.values(), key=lambda w: (w.joined_at, w.id))),
        tenants=dict(pool.tenants),
        policy=pool.policy,
    )


def test_a_pool_that_is_kept_up_to_date_is_one_that_is_made_anew():
    """Leases come, change and go, devices fail, tenants get quotas; after each change it is asked, and is left as it was."""
    for seed in range(15 * MORE_EXAMPLES):
        draw = Random(seed)
        start, other = random_views.view(seed), random_views.view(seed + 10**6)
        pool, now = start.pool(), NOW
        for step in range(12):
            match draw.randrange(6):
                case 0 if pool.leases:
                    lease = pool.leases[draw.choice(sorted(pool.leases))]
                    if lease.state is not LeaseState.WAITING:
                        pool.set_lease(random_views.held(draw, lease, lease.epoch, lease.slices))
                case 1 if pool.leases:
                    name = draw.choice(sorted(pool.leases))
                    if name not in pool.waiters:
                        pool.drop_lease(name)
                case 2:
                    pool.set_waiter(random_views.wish(draw, f"w{step}"))
                case 3 if pool.waiters:
                    name = draw.choice(sorted(pool.waiters))
                    if name not in pool.leases:
                        pool.drop_waiter(name)
                case 4:
                    pool.set_tenant(other.tenants[draw.choice(random_views.NAMES)])
                case _:
                    device = draw.choice(sorted(pool.devices.values(), key=lambda d: d.id))
                    state = draw.choice([d.state for d in other.devices])
                    pool.set_device(replace(device, state=state))
            # Devices' sums are the caller's: made to fit who is there, so that every view is one the ledger could load.
            for device in list(pool.devices.values()):
                residents = random_views.view_of([device], pool.leases.values()).devices[0]
                pool.set_device(residents)
            now += draw.choice([0, 1, 5 * S, 61 * S])
            fresh = view_of_pool(pool)
            known = lists_of(pool)
            assert known == lists_of(fresh.pool()), f"seed {seed}, step {step}"
            newcomer = random_views.wish(draw, "new")
            assert_decides_as_before(fresh, pool, now, newcomer)
            assert lists_of(pool) == known, f"a decision changed the pool: seed {seed}, step {step}"


def test_rooms_say_what_a_walk_over_the_devices_says():
    for seed in range(150 * MORE_EXAMPLES):
        view = random_views.view(seed)
        draw = Random(seed)
        device_index, devices = DeviceIndex(view.devices), list(view.devices)
        request: Request = random_views.wish(draw, "w").request
        shape = request.shape()
        kept = {d.id for d in devices if draw.random() < 0.2}
        left = [d for d in devices if d.id not in kept]
        assert device_index.fit(shape, kept) == fit(shape, left)
        assert list(device_index.usable(shape)) == [
            d.id for d in sorted(devices, key=lambda d: (d.free_bytes, d.id)) if usable(d, shape)
        ]
        assert device_index.largest_smaller(shape, 4 * GB, kept) == largest_smaller(shape, left, 4 * GB)
        capacities = [(d.host, d.capacity_bytes) for d in devices if d.state.value not in ("lost", "taken")]
        assert device_index.could_ever_fit(shape) is could_ever_fit(shape, capacities)
        assert device_index.not_lost() == (len(capacities), max((c for _, c in capacities), default=0))
        assert device_index.least_rate(request) == least_rate(request, devices)
        assert device_index.least_bytes(request, lost_too=False) == before._least_bytes(request, capacities)


def test_victims_are_those_that_looking_at_every_device_finds():
    for seed in range(150 * MORE_EXAMPLES):
        view = random_views.view(seed)
        for w in view.waiters[:3]:
            asked = (w, view.devices, view.leases, view.policy, NOW)
            assert victim_search.choose(*asked) == chosen_before.choose(*asked), f"seed {seed}, {w.id}"


# --- shares ------------------------------------------------------------------------------------------------------


def tenants(draw: Random, count: int, now: int) -> dict[str, Tenant]:
    return {
        f"t{i}": Tenant(
            name=f"t{i}",
            weight=draw.choice([1, 100, 100, 250]),
            used_us=draw.choice([0, draw.randrange(10**6), draw.randrange(10**13)]),
            rate_ppm=draw.choice([0, 0, 1, PPM, 8 * PPM]),
            as_of=now - draw.choice([0, 1, draw.randrange(100 * DAY_US)]),
        )
        for i in range(count)
    }


def test_the_sum_is_within_its_error_and_every_share_is_exact():
    asked_all = 0
    for seed in range(60 * MORE_EXAMPLES):
        draw = Random(seed)
        half_life = draw.choice([HOUR_US, DAY_US, 30 * DAY_US])
        rows = tenants(draw, draw.randint(1, 12), NOW)
        shares = FairShareIndex(rows, half_life)
        now = NOW
        for _ in range(8):
            now += draw.choice([0, 1, draw.randrange(DAY_US), 40 * DAY_US])
            name = draw.choice(sorted(rows))
            new = replace(rows[name], used_us=used_now(rows[name], now, half_life), as_of=now)
            new = replace(new, rate_ppm=draw.choice([0, PPM]), weight=draw.choice([1, 100]))
            old, rows[name] = rows[name], new
            shares.change(old, new)
            total, exact = shares._total(now), shares.exact(now)
            # Half of what is allowed: the rule has room to spare.
            assert abs(total - exact) <= exact * 30 // PPM + 2 * len(rows) + 1, f"seed {seed}"
            weight = sum(t.weight for t in rows.values())
            for t in rows.values():
                used = used_now(t, now, half_life)
                assert shares.of(t, now) == (used * weight > exact * t.weight, used * 100 // t.weight)
            asked_all += 1
    assert asked_all


def test_who_has_used_exactly_its_share_is_not_above_it(monkeypatch):
    rows = {n: Tenant(name=n, used_us=7_654_321, as_of=NOW - HOUR_US) for n in ("a", "b", "c")}
    shares = FairShareIndex(rows, DAY_US)
    assert [shares.of(t, NOW)[0] for t in rows.values()] == [False] * 3
    rows["a"] = replace(rows["a"], used_us=7_654_421)
    shares.change(None, None)
    assert [FairShareIndex(rows, DAY_US).of(t, NOW)[0] for t in rows.values()] == [True, False, False]


def test_growing_is_undone_by_decaying():
    for part in range(129):
        elapsed = part * HOUR_US // 16 - 3 * HOUR_US
        assert grown(elapsed, HOUR_US) / 2**96 == pytest.approx(2 ** (elapsed / HOUR_US), rel=16e-6)


# --- the order, line by line ---------------------------------------------------------------------------------------


def in_line(name: str, gb: int, ago: int):
    return random_views.waiter(name, "ann", gb, joined_at=NOW - ago * S)


LINES = [
    in_line("a1", 8, 30),
    in_line("b1", 16, 25),
    in_line("a2", 8, 20),
    in_line("b2", 16, 10),
    in_line("a3", 8, 5),
]


def test_a_line_that_is_passed_over_is_come_back_to_from_the_place_one_has_reached():
    order = admission.WaitlistOrder(PoolIndex(waiters=LINES, tenants={"ann": Tenant(name="ann")}), NOW)
    walk = iter(order)
    assert next(walk).id == "a1"
    order.pass_over()
    assert [next(walk).id, next(walk).id] == ["b1", "b2"]
    order.come_back()
    assert [w.id for w in walk] == ["a3"]  # a2 stood before b2


def test_a_line_that_is_not_come_back_to_is_over():
    order = admission.WaitlistOrder(PoolIndex(waiters=LINES, tenants={"ann": Tenant(name="ann")}), NOW)
    found = []
    for w in order:
        found.append(w.id)
        if w.id == "b1":
            order.pass_over()
    assert found == ["a1", "b1", "a2", "a3"]


def test_who_holds_an_offer_is_passed_and_who_stands_behind_it_in_its_line_is_not():
    first = replace(in_line("a1", 8, 30), slices=(Slice("d0", 8 * GB),), offer_until=NOW + S)
    view = view_of([device("d0")], [], [first, in_line("a2", 8, 20)])
    assert [p.lease_id for p in admission.place(view, NOW)] == ["a2"]


def test_who_found_nobody_to_move_is_asked_again_when_somebody_was_moved():
    """a comes first and may not take the gang; b may, and one device of two is left over for a2, who stands in a's line; so c must take from x."""
    gang = active("gang", ("d0", "d1"), gb=80, tier=BATCH, exclusivity=DEVICE, granted_at=NOW - 10 * M)
    spot = active("x", "d2", "dot", gb=24, tier=SPOT, exclusivity=DEVICE, granted_at=NOW - 10 * M)
    alone = {"exclusivity": DEVICE, "seen_at": NOW}
    view = view_of(
        [device("d0"), device("d1"), device("d2", 24)],
        [gang, spot],
        [
            waiter("a", "ann", 80, tier=BATCH, joined_at=NOW - 31 * M, **alone),
            waiter("b", "bea", 80, joined_at=NOW - S, **alone),
            waiter("a2", "ann", 80, tier=BATCH, joined_at=NOW - S, **alone),
            waiter("c", "cyd", 24, tier=BATCH, joined_at=NOW - 2, **alone),
        ],
    )
    found = schedule.tick(view, NOW)
    assert found == ticked_before.tick(view, NOW)
    assert [step.lease_id for step in found] == ["gang", "x"]


def test_who_sits_behind_one_that_leaves_is_alone_there_for_who_comes_after():
    """x leaves room beside it on d0, which is kept for a, who wants it whole: b must not count on it, and y is told for b."""
    leaving = replace(active("x", "d0", gb=40), state=LeaseState.REVOKING, deadline_at=NOW + S)
    idle = replace(active("y", "d1", "dot", gb=80), busy=False, active_at=NOW - M)
    view = view_of(
        [device("d0"), device("d1")],
        [leaving, idle],
        [
            waiter("a", "ann", 80, joined_at=NOW - 2 * M, seen_at=NOW, exclusivity=DEVICE),
            waiter("b", "bea", 30, joined_at=NOW - S, seen_at=NOW),
        ],
    )
    found = schedule.tick(view, NOW)
    assert found == ticked_before.tick(view, NOW)
    assert [step.lease_id for step in found] == ["y"]
