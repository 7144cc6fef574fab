"""Whose lease is taken: the gentlest claim first, no more than needed, never one's own tier in full work."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.leasing.lease import EndReason, LeaseRecord, LeaseState, Tier
from sublet.core.leasing.policy import Policy
from sublet.core.scheduling.device import Device, DeviceState, Exclusivity, fit, occupy, usable
from sublet.core.scheduling.preemption import Claim, claim_on, protected_us, work_at_risk
from sublet.core.scheduling.victim_search import choose
from tests.conftest import MORE_EXAMPLES
from tests.core.pool import (
    BATCH,
    DEVICE,
    NOW,
    SESSION,
    SPOT,
    M,
    S,
    active,
    device,
    residents_of,
    view_of,
    waiter,
)

quick = settings(max_examples=100, deadline=None)
POLICY = Policy()
LONG_AGO = NOW - 20 * M


def idle(name: str, on: str | list[str] = "d0", gb: int = 80, **fields: object) -> LeaseRecord:
    return active(name, on, gb=gb, **({"busy": False, "active_at": NOW - 10 * S} | fields))


def capped(name: str, on: str = "d0", gb: int = 80, **fields: object) -> LeaseRecord:
    return active(name, on, gb=gb, **({"granted_at": NOW - 31 * M, "hold_cap_us": 30 * M} | fields))


def lower(
    name: str, on: str | list[str] = "d0", gb: int = 80, tier: Tier = SPOT, **fields: object
) -> LeaseRecord:
    return active(name, on, gb=gb, tier=tier, **({"granted_at": LONG_AGO} | fields))


def picked(
    wish: LeaseRecord, pool: list[Device], leases: list[LeaseRecord], now: int = NOW
) -> list[str] | None:
    view = view_of(pool, leases, [wish])
    found = choose(wish, view.devices, view.leases, view.policy, now)
    return None if found is None else [v.lease.id for v in found[0]]


WISH = waiter("w", "ann", 80)
POOL = [device("d0"), device("d1"), device("d2"), device("d3")]


# --- the order of claims -------------------------------------------------------------------------------------


def test_leaving_then_idle_then_hold_cap_then_lower_tier() -> None:
    going = replace(active("going", "d3", gb=80), state=LeaseState.REVOKING, deadline_at=NOW + S)
    leases = [lower("low", "d0"), capped("cap", "d1"), idle("idle", "d2"), going]
    expected = ["going", "idle", "cap", "low"]
    while leases:
        assert picked(WISH, POOL[: len(leases)], leases) == [expected[-len(leases)]]
        leases.pop()


def test_the_longest_idle_goes_first_wherever_it_is() -> None:
    leases = [
        idle("short", "d0", active_at=NOW - 10 * S),
        idle("longest", "d1", active_at=NOW - 90 * S),
        idle("long", "d2", active_at=NOW - 60 * S),
    ]
    assert picked(WISH, POOL[:3], leases) == ["longest"]
    assert picked(waiter("w", "ann", 80, count=2), POOL[:3], leases) == ["longest", "long"]


def test_nobody_busy_is_disturbed_on_the_same_device_while_an_idle_one_would_do() -> None:
    leases = [lower("low", gb=40), idle("idle", gb=40)]
    assert picked(waiter("w", gb=40), [device()], leases) == ["idle"]
    leases = [lower("low", gb=40), capped("cap", gb=40)]
    assert picked(waiter("w", gb=40), [device()], leases) == ["cap"]


@pytest.mark.parametrize(
    ("lease", "claim", "reason"),
    [
        (idle("x"), Claim.IDLE, EndReason.IDLE),
        (capped("x"), Claim.HOLD_CAP, EndReason.HOLD_CAP),
        (lower("x"), Claim.LOWER_TIER, EndReason.PREEMPTED),
    ],
)
def test_a_victim_is_told_why(lease: LeaseRecord, claim: Claim, reason: EndReason) -> None:
    victim = claim_on(lease, WISH, POLICY, NOW)
    assert victim is not None
    assert (victim.claim, victim.end_reason) == (claim, reason)
    assert len(victim.reason) > 10


def test_the_limits_are_exact() -> None:
    assert claim_on(idle("x", active_at=NOW - 5 * S + 1), WISH, POLICY, NOW) is None
    assert claim_on(idle("x", active_at=NOW - 5 * S), WISH, POLICY, NOW) is not None
    # Whether the grace lies before the cap or after it is for the schedule to say; not earlier, and not later.
    early = NOW - 30 * M + POLICY.grace_us + 1
    assert claim_on(capped("x", granted_at=early), WISH, POLICY, NOW) is None
    assert claim_on(capped("x", granted_at=NOW - 30 * M), WISH, POLICY, NOW) is not None
    assert claim_on(lower("x", granted_at=NOW - M + 1), WISH, POLICY, NOW) is None
    assert claim_on(lower("x", granted_at=NOW - M), WISH, POLICY, NOW) is not None


def test_a_busy_lease_is_not_idle_however_long_it_was_silent() -> None:
    assert claim_on(idle("x", busy=True, active_at=LONG_AGO), WISH, POLICY, NOW) is None


def test_a_lease_without_a_cap_has_none() -> None:
    assert claim_on(capped("x", hold_cap_us=0, granted_at=NOW - 10_000 * M), WISH, POLICY, NOW) is None


def test_a_held_offer_is_not_taken() -> None:
    held = replace(active("x", gb=80), state=LeaseState.WAITING, offer_until=NOW + S)
    assert claim_on(held, WISH, POLICY, NOW) is None


@quick
@given(
    st.sampled_from(Tier),
    st.sampled_from(Tier),
    st.booleans(),
    st.integers(0, 20),
    st.integers(0, 90),
    st.sampled_from([0, 30 * M]),
    st.integers(0, 5),
)
def test_t3_same_or_higher_tier_is_taken_only_when_idle_or_past_its_cap(
    mine: Tier, theirs: Tier, busy: bool, idle_s: int, held_m: int, cap: int, preemptions: int
) -> None:
    lease = active(
        "x",
        tier=theirs,
        busy=busy,
        active_at=NOW - idle_s * S,
        granted_at=NOW - held_m * M,
        hold_cap_us=cap,
        preemptions=preemptions,
    )
    victim = claim_on(lease, waiter("w", tier=mine), POLICY, NOW)
    is_idle = not busy and idle_s >= 5
    is_capped = bool(cap) and held_m >= 30
    is_lower = theirs.rank > mine.rank and held_m * M >= POLICY.min_run_us * min(8, 2**preemptions)
    assert (victim is not None) is (is_idle or is_capped or is_lower)
    if victim is not None:
        expected = Claim.IDLE if is_idle else Claim.HOLD_CAP if is_capped else Claim.LOWER_TIER
        assert victim.claim is expected


# --- among lower tiers ---------------------------------------------------------------------------------------


def test_lowest_tier_first_on_one_device() -> None:
    leases = [
        lower("batch", gb=40, tier=BATCH, committed_at=NOW),
        lower("spot", gb=40, tier=SPOT, committed_at=NOW - 9 * M),
    ]
    assert picked(waiter("w", gb=40), [device()], leases) == ["spot"]


def test_lowest_tier_first_across_devices() -> None:
    leases = [
        lower("batch", "d0", tier=BATCH, committed_at=NOW),
        lower("spot", "d1", tier=SPOT, committed_at=NOW - 9 * M),
    ]
    assert picked(WISH, POOL[:2], leases) == ["spot"]


def test_least_work_since_the_last_commit_first() -> None:
    near, far = lower("near", "d1", committed_at=NOW - 10 * S), lower("far", "d0", committed_at=NOW - 50 * S)
    assert picked(WISH, POOL[:2], [near, far]) == ["near"]
    near, far = (
        lower("near", gb=40, committed_at=NOW - 10 * S),
        lower("far", gb=40, committed_at=NOW - 50 * S),
    )
    assert picked(waiter("w", gb=40), [device()], [far, near]) == ["near"]


def test_never_committing_is_no_shield_and_no_death_sentence() -> None:
    never = lower("never", "d0", granted_at=NOW - 100 * M)
    fresh, stale = lower("a", "d1", committed_at=NOW - 4 * M), lower("a", "d1", committed_at=NOW - 6 * M)
    assert work_at_risk(never, POLICY, NOW) == POLICY.neutral_work_us
    assert picked(WISH, POOL[:2], [never, fresh]) == ["a"]
    assert picked(WISH, POOL[:2], [never, stale]) == ["never"]


def test_work_at_risk_counts_every_device_and_is_never_negative() -> None:
    gang = lower("x", ["d0", "d1", "d2"], committed_at=NOW - M)
    assert work_at_risk(gang, POLICY, NOW) == 3 * M
    assert work_at_risk(lower("x", committed_at=NOW + M), POLICY, NOW) == 0


@pytest.mark.parametrize(
    ("preemptions", "factor"), [(0, 1), (1, 2), (2, 4), (3, 8), (4, 8), (16, 8), (1000, 8)]
)
def test_each_preemption_doubles_the_protected_time_up_to_a_bound(preemptions: int, factor: int) -> None:
    lease = lower("x", preemptions=preemptions)
    assert protected_us(lease, POLICY) == factor * M
    young = replace(lease, granted_at=NOW - factor * M + 1)
    assert claim_on(young, WISH, POLICY, NOW) is None
    assert claim_on(replace(young, granted_at=NOW - factor * M), WISH, POLICY, NOW) is not None


def test_protection_does_not_shield_an_idle_or_capped_lease() -> None:
    assert claim_on(idle("x", preemptions=9), WISH, POLICY, NOW) is not None
    assert (
        claim_on(capped("x", tier=SPOT, preemptions=9, granted_at=NOW - 31 * M), WISH, POLICY, NOW)
        is not None
    )


@pytest.mark.parametrize(("one", "two"), list(combinations(Tier, 2)) + [(t, t) for t in Tier])
def test_a_cannot_preempt_b_and_b_then_a(one: Tier, two: Tier) -> None:
    """No ping-pong: between two busy leases under their caps, at most one direction is ever a claim."""

    def takes(mine: Tier, theirs: Tier) -> bool:
        held = active("x", tier=theirs, granted_at=NOW - 1000 * M)
        return claim_on(held, waiter("w", tier=mine), POLICY, NOW) is not None

    assert not (takes(one, two) and takes(two, one))
    assert takes(one, two) is (one.rank < two.rank)


# --- how many ------------------------------------------------------------------------------------------------


def test_room_that_is_free_costs_nobody() -> None:
    assert picked(waiter("w", gb=40), [device()], [lower("x", gb=40)]) == []


def test_a_victim_that_turned_out_needless_is_spared() -> None:
    # In order of cost: small, then big; big alone is enough.
    leases = [lower("small", gb=10, committed_at=NOW - S), lower("big", gb=70, committed_at=NOW - M)]
    assert picked(waiter("w", gb=70), [device()], leases) == ["big"]


def test_a_small_victim_is_spared_when_the_two_big_ones_are_needed() -> None:
    leases = [
        lower("small", gb=10, committed_at=NOW - S),
        lower("mid", gb=30, committed_at=NOW - M),
        lower("big", gb=40, committed_at=NOW - 2 * M),
    ]
    assert picked(waiter("w", gb=70), [device()], leases) == ["mid", "big"]


def test_one_victim_is_taken_where_one_suffices() -> None:
    leases = [
        lower("a", gb=20, committed_at=NOW - 4 * M),
        lower("b", gb=20, committed_at=NOW - 5 * M),
        lower("c", gb=40, committed_at=NOW - 6 * M),
    ]
    assert picked(waiter("w", gb=40), [device()], leases) == ["c"]
    leases = [
        idle("a", gb=20, active_at=NOW - 40 * S),
        idle("b", gb=20, active_at=NOW - 30 * S),
        idle("c", gb=40, active_at=NOW - 20 * S),
    ]
    assert picked(waiter("w", gb=40), [device()], leases) == ["c"]


def test_exclusivity_is_made_room_for_too() -> None:
    leases = [lower("x", gb=1, tenant="bob"), lower("y", gb=1, tenant="ann")]
    assert picked(waiter("w", "ann", 1, exclusivity=SESSION), [device()], leases) == ["x"]
    assert sorted(picked(waiter("w", "ann", 1, exclusivity=DEVICE), [device()], leases) or []) == ["x", "y"]


def test_a_lease_goes_whole_and_counts_once() -> None:
    gang = lower("gang", ["d0", "d1"])
    assert picked(waiter("w", "ann", 80, count=2), POOL[:2], [gang]) == ["gang"]
    assert picked(WISH, POOL[:2], [gang]) == ["gang"]


def test_a_gang_gets_all_its_devices_or_nothing_is_taken() -> None:
    leases = [lower("x", "d0"), active("y", "d1", gb=80)]
    wish = waiter("w", "ann", 80, count=2)
    assert picked(wish, POOL[:2], leases) is None
    assert picked(wish, POOL[:3], leases) == ["x"]
    found = choose(wish, view_of(POOL[:3], leases).devices, leases, POLICY, NOW)
    assert found is not None
    assert sorted(found[1]) == ["d0", "d2"]


@pytest.mark.parametrize("state", [s for s in DeviceState if s is not DeviceState.READY])
def test_nobody_is_taken_for_a_device_that_could_not_be_granted(state: DeviceState) -> None:
    assert picked(WISH, [device(state=state)], [lower("x")]) is None


def test_nobody_is_taken_on_another_host_or_a_device_too_small() -> None:
    assert picked(waiter("w", "ann", 80, host="k"), [device()], [lower("x")]) is None
    assert picked(WISH, [device("d0", 24)], [lower("x", gb=24)]) is None


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[Device], list[LeaseRecord], LeaseRecord]:
    pool = [device(f"d{i}", draw(st.sampled_from([24, 80]))) for i in range(draw(st.integers(1, 3)))]

    def wish(name: str) -> LeaseRecord:
        return waiter(
            name,
            draw(st.sampled_from(["ann", "bob"])),
            draw(st.sampled_from([8, 20, 40, 80])),
            count=draw(st.sampled_from([1, 1, 2])),
            exclusivity=draw(st.sampled_from(Exclusivity)),
            tier=draw(st.sampled_from(Tier)),
        )

    leases: list[LeaseRecord] = []
    for i in range(draw(st.integers(0, 7))):
        w = wish(f"x{i}")
        slices = fit(w.request.shape(), view_of(pool, leases).devices)
        if slices is None:
            continue
        leases.append(
            replace(
                w,
                state=draw(st.sampled_from([LeaseState.ACTIVE] * 4 + [LeaseState.REVOKING])),
                slices=slices,
                epoch=i + 1,
                expires_at=NOW + M,
                deadline_at=NOW + S,
                busy=draw(st.booleans()),
                active_at=NOW - draw(st.sampled_from([0, 10, 20])) * S,
                granted_at=NOW - draw(st.sampled_from([0, 2, 5, 40])) * M,
                committed_at=draw(st.sampled_from([0, NOW - S, NOW - 9 * M])),
                hold_cap_us=draw(st.sampled_from([0, 30 * M])),
                preemptions=draw(st.sampled_from([0, 0, 2])),
            )
        )
    return pool, leases, wish("w")


def opened(pool: list[Device], leases: list[LeaseRecord], gone: set[str], wish: LeaseRecord) -> set[str]:
    left = [x for x in leases if x.id not in gone]
    return {d.id for d in pool if usable(occupy(d, residents_of(left, d.id)), wish.request.shape())}


@settings(max_examples=80 * MORE_EXAMPLES, deadline=None)
@given(pools())
def test_the_choice_makes_room_with_claims_only_and_not_one_too_many(
    case: tuple[list[Device], list[LeaseRecord], LeaseRecord],
) -> None:
    pool, leases, wish = case
    view = view_of(pool, leases, [wish])
    found = choose(wish, view.devices, view.leases, POLICY, NOW)
    claims = {x.id: claim_on(x, wish, POLICY, NOW) for x in leases}
    takeable = {name for name, claim in claims.items() if claim is not None}
    count = wish.request.count
    if found is None:
        assert len(opened(pool, leases, takeable, wish)) < count, "room could have been made"
        return
    victims, devices = found
    gone = {v.lease.id for v in victims}
    assert len(set(devices)) == len(devices) == count
    assert gone <= takeable
    assert set(devices) <= opened(pool, leases, gone, wish)
    for spared in gone:
        assert not set(devices) <= opened(pool, leases, gone - {spared}, wish), (
            f"{spared} was taken for nothing"
        )


@settings(max_examples=80 * MORE_EXAMPLES, deadline=None)
@given(pools())
def test_nobody_is_taken_by_a_harder_claim_than_some_device_needs(
    case: tuple[list[Device], list[LeaseRecord], LeaseRecord],
) -> None:
    pool, leases, wish = case
    if wish.request.count != 1:
        wish = replace(wish, request=replace(wish.request, count=1))
    view = view_of(pool, leases, [wish])
    found = choose(wish, view.devices, view.leases, POLICY, NOW)
    if found is None:
        return
    worst = max((v.claim for v in found[0]), default=-1)
    claims = {x.id: claim_on(x, wish, POLICY, NOW) for x in leases}
    gentler = {name for name, v in claims.items() if v is not None and v.claim < worst}
    assert worst <= Claim.LEAVING or not opened(pool, leases, gentler, wish)


@quick
@given(pools(), st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_rows(
    case: tuple[list[Device], list[LeaseRecord], LeaseRecord],
    random: Random,
) -> None:
    pool, leases, wish = case
    devices = view_of(pool, leases, [wish]).devices
    mixed = random.sample(devices, len(devices)), random.sample(leases, len(leases))
    assert choose(wish, devices, leases, POLICY, NOW) == choose(wish, *mixed, POLICY, NOW)
