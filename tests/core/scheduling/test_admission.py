"""Who gets a slice now, who waits and where, who is offered less, who is refused (T2, T3, L2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.errors import DeviceTaken, NeverFits, NoCapacity, QuotaReached, WaitlistFull
from sublet.core.leasing.lease import LeaseRecord, LeaseState, Tier
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.tenancy import PPM, Tenant
from sublet.core.scheduling.admission import (
    Grant,
    Offer,
    PoolView,
    Refusal,
    Wait,
    admit,
    expect,
    fair_shares,
    in_order,
    known_end,
    place,
    tier_now,
    why_waiting,
)
from sublet.core.scheduling.device import DeviceState, Exclusivity, Slice, fit
from sublet.core.values import HOUR_US
from tests.conftest import MORE_EXAMPLES
from tests.core.pool import (
    BATCH,
    DEVICE,
    GB,
    INTERACTIVE,
    NOW,
    SESSION,
    SHARED,
    SPOT,
    M,
    S,
    active,
    assert_exclusion,
    device,
    view_of,
    waiter,
)

quick = settings(max_examples=50 * MORE_EXAMPLES, deadline=None)
POLICY = Policy()


def ids(found: Sequence[LeaseRecord | Grant | Offer]) -> list[str]:
    return [x.id if isinstance(x, LeaseRecord) else x.lease_id for x in found]


# --- grant, wait, offer, refuse ------------------------------------------------------------------------------


def test_a_request_that_fits_is_granted_at_once() -> None:
    got = admit(waiter("w", gb=8), view_of([device()], tenants=[Tenant(name="ann")]), NOW)
    assert got == Grant(
        lease_id="w", slices=(Slice("d0", 8 * GB),), vram_bytes=8 * GB, reason="capacity is free"
    )


def test_a_whole_device_request_gets_the_whole_device() -> None:
    got = admit(waiter("w", gb=8, exclusivity=DEVICE), view_of([device()], tenants=[Tenant(name="ann")]), NOW)
    assert isinstance(got, Grant)
    assert got.slices == (Slice("d0", 80 * GB),)


def test_a_request_that_does_not_fit_waits_with_position_reason_and_eta() -> None:
    full = active("x", gb=80, granted_at=NOW - 10 * M, hold_cap_us=30 * M)
    ahead = waiter("ahead", "cyd", 80, joined_at=NOW - S)
    got = admit(waiter("w", gb=80), view_of([device()], [full], [ahead], [Tenant(name="ann")]), NOW)
    assert isinstance(got, Wait)
    assert got.position == 2
    assert got.eta_us is None, "the one ahead takes the only end that is known"
    assert got.reason == "resources: needs 80GB, nothing is free"
    first = admit(waiter("w", gb=80), view_of([device()], [full], [], [Tenant(name="ann")]), NOW)
    assert isinstance(first, Wait)
    assert (first.position, first.eta_us) == (1, 20 * M + POLICY.grace_us)


def test_now_or_never_is_refused_instead_of_waiting() -> None:
    full = active("x", gb=80)
    view = view_of([device()], [full], [], [Tenant(name="ann")])
    got = admit(waiter("w", gb=8, wait_us=0), view, NOW)
    assert isinstance(got, Refusal)
    assert got.error is NoCapacity
    assert got.reason.startswith("resources: needs 8GB")


def test_now_or_never_with_a_quota_reached_says_quota() -> None:
    view = view_of([device()], [active("x", tenant="ann")], [], [Tenant(name="ann", max_leases=1)])
    got = admit(waiter("w", gb=8, wait_us=0), view, NOW)
    assert isinstance(got, Refusal)
    assert got.error is QuotaReached


def test_a_range_takes_what_is_free_at_once() -> None:
    view = view_of([device()], [active("x", gb=50)], [], [Tenant(name="ann")])
    got = admit(waiter("w", gb=80, least_bytes=24 * GB), view, NOW)
    assert isinstance(got, Grant)
    assert (got.vram_bytes, got.slices) == (30 * GB, (Slice("d0", 30 * GB),))
    assert "later" in got.reason
    too_little = admit(waiter("w", gb=80, least_bytes=31 * GB), view, NOW)
    assert isinstance(too_little, Wait)


def test_an_offer_is_held_for_a_while_and_made_once() -> None:
    view = view_of([device()], [active("x", gb=50)], [], [Tenant(name="ann")])
    wish = waiter("w", gb=80, wants_offers=True)
    got = admit(wish, view, NOW)
    assert isinstance(got, Offer)
    assert (got.vram_bytes, got.until) == (30 * GB, NOW + POLICY.offer_hold_us)
    assert got.reason.startswith("30GB is free now")
    offered = replace(wish, offer_until=NOW - 1)
    assert place(replace(view, waiters=(offered,)), NOW) == []
    assert isinstance(admit(replace(wish, request=replace(wish.request, wait_us=0)), view, NOW), Refusal)


def test_a_waiter_that_holds_an_offer_is_given_nothing_more() -> None:
    holding = waiter(
        "w", gb=40, offer_until=NOW + S, slices=(Slice("d1", 8 * GB),), wants_offers=True, vram_bytes=8 * GB
    )
    assert place(view_of([device("d0"), device("d1")], [], [holding]), NOW) == []


# --- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"gb": 81}, NeverFits),
        ({"gb": 8, "count": 3}, NeverFits),
        ({"gb": 8, "host": "elsewhere"}, NeverFits),
        ({"gb": 80, "count": 2}, NeverFits),
        ({"gb": 60}, QuotaReached),
    ],
)
def test_what_can_never_be_is_refused_at_once(asked: dict[str, object], error: type) -> None:
    pool = [device("d0"), device("d1", 24), device("d2", 80, state=DeviceState.LOST)]
    view = view_of(pool, tenants=[Tenant(name="ann", max_vram_bytes=50 * GB)])
    got = admit(waiter("w", **asked), view, NOW)  # type: ignore[arg-type]
    assert isinstance(got, Refusal)
    assert got.error is error
    assert got.reason


def test_a_range_is_judged_by_its_least() -> None:
    view = view_of([device("d0", 24)], tenants=[Tenant(name="ann")])
    assert isinstance(admit(waiter("w", gb=80, least_bytes=24 * GB), view, NOW), Grant)
    got = admit(waiter("w", gb=80, least_bytes=25 * GB), view, NOW)
    assert isinstance(got, Refusal)


def test_a_quarantined_device_may_come_back_so_the_request_waits() -> None:
    view = view_of([device(state=DeviceState.QUARANTINED)], tenants=[Tenant(name="ann")])
    assert isinstance(admit(waiter("w"), view, NOW), Wait)


def test_an_empty_pool_refuses_and_says_so() -> None:
    got = admit(waiter("w"), view_of([], tenants=[Tenant(name="ann")]), NOW)
    assert isinstance(got, Refusal)
    assert "no device" in got.reason


def test_t2_the_waitlist_has_bounds_for_all_and_for_one_tenant() -> None:
    full = active("x", gb=80)
    others = [waiter(f"b{i}", "bob") for i in range(3)]

    def ask(policy: Policy, ann: Tenant, waiting: Sequence[LeaseRecord]) -> object:
        return admit(waiter("w"), view_of([device()], [full], waiting, [ann], policy), NOW)

    assert isinstance(ask(Policy(waitlist_max=4), Tenant(name="ann"), others), Wait)
    got = ask(Policy(waitlist_max=3), Tenant(name="ann"), others)
    assert isinstance(got, Refusal)
    assert got.error is WaitlistFull
    mine = [waiter(f"a{i}", "ann") for i in range(2)]
    assert isinstance(ask(Policy(tenant_waiting_max=3), Tenant(name="ann"), mine), Wait)
    assert isinstance(ask(Policy(tenant_waiting_max=2), Tenant(name="ann"), mine), Refusal)
    assert isinstance(ask(Policy(tenant_waiting_max=9), Tenant(name="ann", max_waiting=2), mine), Refusal)
    assert isinstance(ask(Policy(tenant_waiting_max=1), Tenant(name="ann", max_waiting=3), mine), Wait)


def test_a_full_waitlist_does_not_stop_one_who_would_not_wait() -> None:
    others = [waiter(f"b{i}", "bob", 80) for i in range(3)]
    view = view_of([device()], [active("x", gb=70)], others, [Tenant(name="ann")], Policy(waitlist_max=3))
    assert isinstance(admit(waiter("w", gb=8, wait_us=0), view, NOW), Grant)


# --- quotas --------------------------------------------------------------------------------------------------


def test_t2_a_quota_counts_what_the_same_walk_has_given() -> None:
    wishes = [waiter(f"w{i}", gb=10, joined_at=NOW - S + i) for i in range(4)]
    view = view_of([device()], [], wishes, [Tenant(name="ann", max_vram_bytes=25 * GB)])
    assert ids(place(view, NOW)) == ["w0", "w1"]
    view = view_of([device()], [], wishes, [Tenant(name="ann", max_leases=3)])
    assert ids(place(view, NOW)) == ["w0", "w1", "w2"]


def test_t2_one_who_is_blocked_by_a_quota_holds_nothing_back_from_others() -> None:
    mine = waiter("w", "ann", 80, exclusivity=DEVICE, joined_at=NOW - 10 * M)
    view = view_of(
        [device("d0"), device("d1", 80, state=DeviceState.DRAINING)],
        [active("x", "d1", "ann")],
        [mine, waiter("v", "bob", 80)],
        [Tenant(name="ann", max_leases=1)],
    )
    assert ids(place(view, NOW)) == ["v"]


def test_t2_a_whole_device_counts_as_the_whole_device_against_the_quota() -> None:
    view = view_of([device()], tenants=[Tenant(name="ann", max_vram_bytes=24 * GB)])
    got = admit(waiter("w", gb=8, exclusivity=DEVICE), view, NOW)
    assert not isinstance(got, Grant), f"the quota is 24GB, granted {got.slices}"  # type: ignore[union-attr]


def test_t2_a_range_is_given_what_its_quota_allows() -> None:
    view = view_of([device()], tenants=[Tenant(name="ann", max_vram_bytes=16 * GB)])
    got = admit(waiter("w", gb=80, least_bytes=8 * GB), view, NOW)
    assert isinstance(got, Grant | Refusal), got
    if isinstance(got, Grant):
        assert 8 * GB <= got.vram_bytes <= 16 * GB


# --- order ---------------------------------------------------------------------------------------------------


def order(
    *wishes: LeaseRecord, rows: Sequence[Tenant] = (), policy: Policy = POLICY, now: int = NOW
) -> list[str]:
    return ids(in_order(view_of([device()], [], wishes, rows, policy), now))


def test_tiers_come_first() -> None:
    found = order(
        waiter("s", "ann", tier=SPOT, joined_at=NOW - 3 * S),
        waiter("b", "bob", tier=BATCH, joined_at=NOW - 2 * S),
        waiter("i", "cyd", tier=INTERACTIVE, joined_at=NOW - S),
    )
    assert found == ["i", "b", "s"]


def test_t3_below_its_share_comes_before_above_within_a_tier() -> None:
    rows = [Tenant(name="ann", used_us=15 * M, as_of=NOW), Tenant(name="bob", used_us=10 * M, as_of=NOW)]
    # What the wait has earned would put `a` first; the share decides before it.
    early = waiter("a", "ann", joined_at=NOW - 29 * M)
    assert order(early, waiter("b", "bob"), rows=rows) == ["b", "a"]
    # The tier still comes first.
    assert order(early, waiter("b", "bob", tier=BATCH), rows=rows) == ["a", "b"]


def test_t3_a_share_is_use_per_weight() -> None:
    rows = [
        Tenant(name="ann", weight=900, used_us=60 * M, as_of=NOW),
        Tenant(name="bob", weight=100, used_us=40 * M, as_of=NOW),
    ]
    shares = fair_shares(view_of([device()], tenants=rows), NOW)
    assert shares == {"ann": (False, 60 * M * 100 // 900), "bob": (True, 40 * M)}
    assert order(waiter("a", "ann"), waiter("b", "bob", joined_at=NOW - M), rows=rows) == ["a", "b"]


@quick
@given(
    st.lists(
        st.tuples(st.integers(1, 1000), st.integers(0, 10**12), st.integers(0, 4 * PPM)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 60 * M),
)
def test_t3_somebody_is_always_at_or_below_its_share(rows: list[tuple[int, int, int]], later: int) -> None:
    made = [
        Tenant(name=f"t{i}", weight=w, used_us=u, rate_ppm=r, as_of=NOW) for i, (w, u, r) in enumerate(rows)
    ]
    shares = fair_shares(view_of([device()], tenants=made), NOW + later)
    assert not all(above for above, _ in shares.values())


@quick
@given(st.data())
def test_t3_the_order_is_tier_then_cooldown_then_share(data: st.DataObject) -> None:
    names = ["ann", "bob", "cyd"]
    rows = [
        Tenant(
            name=n,
            used_us=data.draw(st.integers(0, 100)) * M,
            as_of=NOW,
            cooldown_until=data.draw(st.sampled_from([0, NOW, NOW + M])),
        )
        for n in names
    ]
    wishes = [
        waiter(
            f"w{i}",
            data.draw(st.sampled_from(names)),
            tier=data.draw(st.sampled_from(Tier)),
            joined_at=NOW - data.draw(st.integers(0, 29)) * M,
        )
        for i in range(data.draw(st.integers(2, 6)))
    ]
    view = view_of([device()], [], wishes, rows)
    shares = fair_shares(view, NOW)
    keys = [
        (w.request.tier.rank, view.tenants[w.tenant].cooldown_until > NOW, shares[w.tenant][0])
        for w in in_order(view, NOW)
    ]
    assert keys == sorted(keys)


def test_one_who_used_less_comes_first_and_of_equals_the_earlier() -> None:
    # One heavy tenant puts both others below their share; between them, the use decides.
    rows = [
        Tenant(name="ann", used_us=20 * M, as_of=NOW),
        Tenant(name="bob", used_us=5 * M, as_of=NOW),
        Tenant(name="cyd", used_us=900 * M, as_of=NOW),
    ]
    assert order(waiter("a", "ann"), waiter("b", "bob"), rows=rows) == ["b", "a"]
    assert order(waiter("a", "ann", joined_at=NOW - 16 * M), waiter("b", "bob"), rows=rows) == ["a", "b"]
    assert order(waiter("z", "ann", joined_at=NOW - 1), waiter("a", "ann"), rows=rows) == ["z", "a"]
    assert order(waiter("z", "ann"), waiter("a", "ann"), rows=rows) == ["a", "z"]


def test_a_tenant_that_is_cooling_down_goes_behind_the_others_of_its_tier() -> None:
    rows = [Tenant(name="ann", cooldown_until=NOW + M)]
    early = waiter("a", "ann", joined_at=NOW - 10 * M)
    assert order(early, waiter("b", "bob"), rows=rows) == ["b", "a"]
    assert order(early, waiter("b", "bob"), rows=rows, now=NOW + M) == ["a", "b"]
    assert order(early, waiter("b", "bob", tier=BATCH), rows=rows) == ["a", "b"]


def test_a_cooling_tenant_is_served_when_nobody_else_waits() -> None:
    view = view_of([device()], [], [waiter("a", "ann")], [Tenant(name="ann", cooldown_until=NOW + M)])
    assert ids(place(view, NOW)) == ["a"]


@quick
@given(st.sampled_from(Tier), st.integers(0, 800 * M))
def test_t3_a_tier_rises_by_one_for_each_promotion_time_waited(tier: Tier, waited: int) -> None:
    w = waiter("w", tier=tier, joined_at=NOW - waited)
    assert tier_now(w, POLICY, NOW) == tier.rank - waited // ((2 * HOUR_US) if tier.rank else 30 * M)


@pytest.mark.parametrize("tier", list(Tier))
def test_t3_the_longest_waiting_is_first_after_a_bounded_time_against_any_newcomers(tier: Tier) -> None:
    heavy = Tenant(name="ann", used_us=10_000 * HOUR_US, as_of=NOW, cooldown_until=NOW + 2 * M)
    old = waiter("old", "ann", tier=tier)
    wait = (tier.rank + 1) * POLICY.rises_after_us(tier.rank)
    fresh = [waiter(f"n{i}", f"t{i}", joined_at=NOW + wait - 1) for i in range(5)]
    assert order(old, *fresh, rows=[heavy], now=NOW + wait) == ["old", *[f"n{i}" for i in range(5)]]


# --- backfill and keeping ------------------------------------------------------------------------------------


def test_smaller_ones_pass_while_a_big_one_is_patient_and_then_no_more() -> None:
    residents = [active("x", gb=60)]
    big = waiter("big", "cyd", 80, joined_at=NOW)
    small = waiter("small", "ann", 10, joined_at=NOW + S)

    def placed(at: int) -> list[str]:
        return ids(place(view_of([device()], residents, [big, small]), at))

    assert placed(NOW + POLICY.backfill_patience_us - 1) == ["small"]
    assert placed(NOW + POLICY.backfill_patience_us) == []


@pytest.mark.parametrize(
    ("tier", "count", "patience_us"),
    [
        (Tier.INTERACTIVE, 1, POLICY.backfill_patience_us),
        (Tier.INTERACTIVE, 2, POLICY.backfill_patience_us),
        (Tier.BATCH, 1, POLICY.backfill_patience_us),
        (Tier.BATCH, 2, POLICY.gang_patience_us),
        (Tier.SPOT, 2, POLICY.gang_patience_us),
    ],
)
def test_a_gang_below_interactive_lets_others_pass_for_longer(
    tier: Tier, count: int, patience_us: int
) -> None:
    """Its devices stand idle while they are kept for it, and nobody sits in front of it."""
    residents = [active("x", gb=60), *([active("y", "d1", gb=60)] if count > 1 else [])]
    big = waiter("big", "cyd", 80, count=count, tier=tier, joined_at=NOW)
    pool = [device(), *([device("d1")] if count > 1 else [])]

    def placed(at: int) -> list[str]:
        small = waiter("small", "ann", 10, tier=tier, joined_at=at)
        return ids(place(view_of(pool, residents, [big, small]), at))

    assert placed(NOW + patience_us - 1) == ["small"]
    assert placed(NOW + patience_us) == []


def test_only_as_many_devices_as_needed_are_kept_and_the_emptiest() -> None:
    pool = [device("d0"), device("d1"), device("d2", 24)]
    residents = [active("x", "d0", gb=60), active("y", "d1", gb=20)]
    big = waiter("big", "cyd", 80, joined_at=NOW - M)
    small = waiter("small", "ann", 20)
    got = place(view_of(pool, residents, [big, small]), NOW)
    assert [g.slices[0].device_id for g in got] == ["d0"], "d1 has more room, so it is the one that is kept"


def test_one_that_never_fits_here_keeps_nothing() -> None:
    big = waiter("big", "cyd", 80, joined_at=NOW - M)
    view = view_of([device("d0", 24)], [], [big, waiter("small", "ann", 20)])
    assert ids(place(view, NOW)) == ["small"]


def test_devices_are_kept_for_the_first_that_does_not_fit_only() -> None:
    pool = [device("d0"), device("d1")]
    residents = [active("x", "d0", gb=40), active("y", "d1", gb=40)]
    bigs = [waiter(f"big{i}", "cyd", 80, joined_at=NOW - M - i) for i in range(2)]
    got = place(view_of(pool, residents, [*bigs, waiter("small", "ann", 10)]), NOW)
    assert ids(got) == ["small"]


def test_t3_a_gang_is_served_although_small_ones_keep_coming() -> None:
    """Two devices, a stream of 40 s small leases, one gang of two: it starts within patience + one small lease."""
    pool, now, live = [device("d0"), device("d1")], NOW, []
    gang = waiter("gang", "cyd", 80, count=2, joined_at=NOW)
    live = [active("s0", "d0", gb=40, granted_at=NOW), active("s1", "d1", gb=40, granted_at=NOW + 20 * S)]
    for step in range(100):
        now = NOW + step * S
        live = [x for x in live if now - x.granted_at < 40 * S]
        wishes = [
            gang,
            waiter(f"n{step}", "ann", 40, joined_at=now),
            waiter(f"m{step}", "bob", 40, joined_at=now),
        ]
        for got in place(view_of(pool, live, wishes), now):
            if got.lease_id == "gang":
                assert now - NOW <= POLICY.backfill_patience_us + 40 * S
                return
            live.append(active(got.lease_id, got.slices[0].device_id, "ann", 40, granted_at=now))
    pytest.fail("T3: the gang starved")


def test_a_gang_is_all_or_nothing() -> None:
    pool = [device("d0"), device("d1"), device("d2")]
    gang = waiter("gang", gb=80, count=3)
    assert place(view_of(pool, [active("x", "d2", gb=1)], [gang]), NOW) == []
    got = place(view_of(pool, [], [gang]), NOW)
    assert [s.device_id for s in got[0].slices] == ["d0", "d1", "d2"]


def test_a_newcomer_does_not_pass_one_who_is_ahead() -> None:
    ahead = waiter("ahead", "bob", 80, joined_at=NOW - S)
    got = admit(waiter("w", gb=80), view_of([device()], [], [ahead], [Tenant(name="ann")]), NOW)
    assert isinstance(got, Wait)
    assert got.position == 2
    beside = view_of([device("d0"), device("d1", 24)], [], [ahead], [Tenant(name="ann")])
    smaller = admit(waiter("w", gb=8), beside, NOW)
    assert isinstance(smaller, Grant)
    assert smaller.slices[0].device_id == "d1"


# --- position and ETA ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "eta"),
    [
        ({"busy": False, "active_at": NOW - 5 * S}, 15 * S),
        ({"granted_at": NOW - 10 * M, "hold_cap_us": 30 * M}, 20 * M + 15 * S),
        ({"granted_at": NOW - 40 * M, "hold_cap_us": 30 * M}, 15 * S),
        ({"granted_at": NOW - 10 * S, "tier": SPOT}, 50 * S + 15 * S),
        ({"granted_at": NOW - 5 * M, "tier": BATCH}, 15 * S),
        ({"granted_at": NOW - 5 * M}, None),
    ],
    ids=str,
)
def test_the_eta_is_when_the_rules_make_room_at_the_latest(
    fields: dict[str, object], eta: int | None
) -> None:
    view = view_of([device()], [active("x", gb=80, **fields)], [waiter("w", gb=80)])
    assert expect(view.waiters[0], view, NOW).eta_us == eta


def test_the_eta_of_one_that_is_leaving_is_its_deadline() -> None:
    going = replace(active("x", gb=80), state=LeaseState.REVOKING, deadline_at=NOW + 7 * S)
    view = view_of([device()], [going], [waiter("w", gb=80)])
    assert expect(view.waiters[0], view, NOW).eta_us == 7 * S
    ended = replace(going, state=LeaseState.ENDED)
    view = view_of([device()], [ended], [waiter("w", gb=80)])
    assert expect(view.waiters[0], view, NOW).eta_us == 0


def test_the_eta_reckons_with_the_doubled_protection_of_a_preempted_job() -> None:
    lease = active("x", gb=80, tier=SPOT, granted_at=NOW, preemptions=2)
    view = view_of([device()], [lease], [waiter("w", gb=80)])
    assert known_end(lease, view, view.waiters[0], NOW) == NOW + 4 * M + POLICY.grace_us


def test_the_second_in_line_is_told_the_second_end() -> None:
    pool = [device("d0"), device("d1")]
    leases = [
        active("x", "d0", gb=80, granted_at=NOW - 20 * M, hold_cap_us=30 * M),
        active("y", "d1", gb=80, granted_at=NOW - 5 * M, hold_cap_us=30 * M),
    ]
    wishes = [waiter("w1", "ann", 80, joined_at=NOW - 2), waiter("w2", "cyd", 80, joined_at=NOW - 1)]
    view = view_of(pool, leases, wishes)
    assert [expect(w, view, NOW).eta_us for w in wishes] == [10 * M + 15 * S, 25 * M + 15 * S]
    assert [expect(w, view, NOW).position for w in wishes] == [1, 2]


@pytest.mark.parametrize(
    ("leases", "asked", "why"),
    [
        ([active("x", gb=80)], {"gb": 8}, "resources: needs 8GB, nothing is free"),
        ([active("x", gb=8, exclusivity=SESSION)], {"gb": 8}, "exclusivity: shared cannot share"),
        ([active("x", gb=8)], {"gb": 8, "exclusivity": DEVICE}, "exclusivity: device cannot share"),
        ([active("x", gb=40)], {"gb": 60, "count": 2}, "resources: needs 2 × 60GB, 0 such devices are free"),
    ],
)
def test_the_reason_names_the_one_thing_in_the_way(
    leases: list[LeaseRecord], asked: dict[str, object], why: str
) -> None:
    w = waiter("w", **asked)  # type: ignore[arg-type]
    assert why_waiting(w, view_of([device()], leases, [w]), NOW).startswith(why)


def test_the_reason_names_the_quota_first() -> None:
    w = waiter("w", gb=8)
    view = view_of([device()], [active("x", tenant="ann")], [w], [Tenant(name="ann", max_leases=1)])
    assert why_waiting(w, view, NOW) == "quota: tenant ann holds 1 of 1 leases"


# --- random views --------------------------------------------------------------------------------------------

NAMES = ("ann", "bob", "cyd")


@st.composite
def views(draw: st.DrawFn) -> PoolView:
    pool = [
        device(
            f"d{i}",
            draw(st.sampled_from([24, 80])),
            host=draw(st.sampled_from(["h", "k"])),
            state=draw(st.sampled_from([DeviceState.READY] * 9 + list(DeviceState))),
        )
        for i in range(draw(st.integers(1, 4)))
    ]
    rows = [
        Tenant(
            name=name,
            weight=draw(st.sampled_from([50, 100, 300])),
            used_us=draw(st.integers(0, 100)) * M,
            as_of=NOW,
            cooldown_until=draw(st.sampled_from([0, NOW + M])),
        )
        for name in NAMES
    ]

    def wish(i: int) -> LeaseRecord:
        gb = draw(st.sampled_from([4, 8, 8, 16, 40, 80]))
        return waiter(
            f"{draw(st.sampled_from('abcdef'))}{i}",
            draw(st.sampled_from(NAMES)),
            gb,
            count=draw(st.sampled_from([1, 1, 1, 2, 3])),
            exclusivity=draw(st.sampled_from(Exclusivity)),
            tier=draw(st.sampled_from(Tier)),
            host=draw(st.sampled_from(["", "", "", "h"])),
            least_bytes=draw(st.sampled_from([0, 0, 4 * GB])),
            wants_offers=draw(st.booleans()),
            joined_at=NOW - draw(st.sampled_from([0, 10, 31, 300, 2000])) * S,
        )

    leases: list[LeaseRecord] = []
    for i in range(draw(st.integers(0, 4))):
        w = wish(100 + i)
        slices = fit(w.request.shape(), view_of(pool, leases).devices)
        if slices is not None:
            leases.append(
                replace(w, state=LeaseState.ACTIVE, slices=slices, epoch=i + 1, expires_at=NOW + M, busy=True)
            )
    wishes = [wish(i) for i in range(draw(st.integers(1, 6)))]
    made = view_of(pool, leases, wishes, rows)
    # A quota is drawn last, so that it is never already broken when the walk begins.
    limited = {
        name: replace(
            row,
            max_leases=draw(st.sampled_from([row.live_leases + 2, row.live_leases + 1, 0])),
            max_vram_bytes=draw(st.sampled_from([row.live_bytes + 20 * GB, row.live_bytes + 90 * GB, 0])),
        )
        for name, row in made.tenants.items()
    }
    return replace(made, tenants=limited)


def after_placing(view: PoolView, placed: Sequence[Grant | Offer]) -> list[LeaseRecord]:
    by_id = {w.id: w for w in view.waiters}
    return [
        *view.leases,
        *(
            replace(by_id[p.lease_id], state=LeaseState.ACTIVE, slices=p.slices, vram_bytes=p.vram_bytes)
            for p in placed
        ),
    ]


@settings(max_examples=50 * MORE_EXAMPLES, deadline=None)
@given(views())
def test_l2_place_never_overcommits_nor_breaks_the_matrix(view: PoolView) -> None:
    placed = place(view, NOW)
    assert_exclusion(view.devices, after_placing(view, placed))
    by_id = {w.id: w for w in view.waiters}
    devices = {d.id: d for d in view.devices}
    for p in placed:
        request = by_id[p.lease_id].request
        used = [devices[s.device_id] for s in p.slices]
        assert len({d.id for d in used}) == len(used) == request.count, "a gang is whole, on distinct devices"
        assert all(d.state is DeviceState.READY and request.host in ("", d.host) for d in used)
        assert max(1, request.least_bytes) <= p.vram_bytes <= request.vram_bytes
        assert p.vram_bytes == request.vram_bytes or request.least_bytes or request.wants_offers
        assert p.reason
    assert len({p.lease_id for p in placed}) == len(placed)


@settings(max_examples=50 * MORE_EXAMPLES, deadline=None)
@given(views())
def test_t2_place_never_breaks_a_quota(view: PoolView) -> None:
    leases = after_placing(view, place(view, NOW))
    for name, row in view.tenants.items():
        mine = [x for x in leases if x.tenant == name]
        assert not row.max_leases or len(mine) <= row.max_leases
        held = sum(s.vram_bytes for x in mine for s in x.slices)
        assert not row.max_vram_bytes or held <= row.max_vram_bytes, f"T2: {name} holds {held}"


@quick
@given(views(), st.randoms(use_true_random=False))
def test_the_answer_does_not_depend_on_the_order_of_rows(view: PoolView, random: Random) -> None:
    def mixed(rows: tuple) -> tuple:
        return tuple(random.sample(rows, len(rows)))

    other = replace(
        view,
        devices=mixed(view.devices),
        leases=mixed(view.leases),
        waiters=mixed(view.waiters),
        tenants=dict(mixed(tuple(view.tenants.items()))),
    )
    assert place(view, NOW) == place(other, NOW)
    assert ids(in_order(view, NOW)) == ids(in_order(other, NOW))
    newcomer = waiter("new", "ann", 16)
    assert admit(newcomer, view, NOW) == admit(newcomer, other, NOW)


@quick
@given(views())
def test_the_first_in_order_is_served_whenever_the_pool_has_room_for_it(view: PoolView) -> None:
    free = {name: replace(row, max_leases=0, max_vram_bytes=0) for name, row in view.tenants.items()}
    view = replace(view, tenants=free)
    first = in_order(view, NOW)[0]
    shape = first.request.shape()
    if fit(shape, view.devices) is not None:
        assert first.id in ids(place(view, NOW))


@quick
@given(views())
def test_every_waiter_has_its_own_position_and_a_reason(view: PoolView) -> None:
    waits = [expect(w, view, NOW) for w in view.waiters]
    assert sorted(w.position for w in waits) == list(range(1, len(waits) + 1))
    for w in waits:
        assert w.reason.split(":")[0] in ("quota", "resources", "exclusivity")
        assert w.eta_us is None or w.eta_us >= 0


@quick
@given(views(), st.sampled_from(NAMES), st.sampled_from([8, 80]), st.sampled_from(Exclusivity), st.booleans())
def test_a_newcomer_is_answered_and_a_grant_is_one_that_place_would_make(
    view: PoolView, name: str, gb: int, exclusivity: Exclusivity, waits: bool
) -> None:
    newcomer = waiter("new", name, gb, exclusivity=exclusivity, wait_us=None if waits else 0)
    got = admit(newcomer, view, NOW)
    if isinstance(got, Wait):
        assert waits
        assert 1 <= got.position <= len(view.waiters) + 1
    elif isinstance(got, Grant | Offer):
        with_it = replace(view, waiters=(*view.waiters, newcomer))
        assert got.slices == next(p.slices for p in place(with_it, NOW) if p.lease_id == "new")
        assert_exclusion(view.devices, after_placing(with_it, place(with_it, NOW)))
    else:
        assert got.reason
    if exclusivity is SHARED and gb == 8 and not view.waiters and isinstance(got, Refusal):
        assert got.error in (DeviceTaken, NeverFits, NoCapacity, QuotaReached)
