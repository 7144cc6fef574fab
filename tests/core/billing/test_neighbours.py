"""Waiting is laid at the door of who had more than its share just then, and never twice."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.billing.neighbours import Neighbour, NeighbourLease, neighbour_lease_of, neighbours
from sublet.core.journal.counters import Worked
from sublet.core.leasing.lease import EndReason, Holder, LeaseRecord, LeaseState, Request
from sublet.core.leasing.tenancy import PPM
from sublet.core.scheduling.device import Exclusivity, Slice
from sublet.core.values import MINUTE_US
from tests.conftest import MORE_EXAMPLES

END = 40


def stay(tenant: str, joined: int, granted: int, ended: int, rate: int = PPM) -> NeighbourLease:
    """One that waits from `joined`, holds from `granted`, and is gone at `ended`."""
    return NeighbourLease(
        tenant=tenant,
        waited_from=joined,
        waited_to=granted,
        held_from=granted,
        held_to=ended,
        rate_ppm=rate,
    )


def by_name(rows: list[Neighbour]) -> dict[str, Neighbour]:
    return {row.tenant: row for row in rows}


@st.composite
def some_stays(draw: st.DrawFn) -> list[NeighbourLease]:
    found = []
    for _ in range(draw(st.integers(0, 7))):
        joined, granted, ended = sorted(draw(st.tuples(*[st.integers(0, END + 5)] * 3)))
        tenant = draw(st.sampled_from("abc"))
        found.append(stay(tenant, joined, granted, ended, draw(st.sampled_from([PPM, PPM // 4, 2 * PPM]))))
    return found


@settings(max_examples=200 * MORE_EXAMPLES, deadline=None)
@given(some_stays(), st.fixed_dictionaries({name: st.sampled_from([1, 3]) for name in "abc"}))
def test_against_a_clock_that_ticks(stays: list[NeighbourLease], weights: dict[str, int]) -> None:
    """The same, moment by moment."""
    since, now = 5, END
    held, waited, caused = Counter[str](), Counter[str](), Counter[str]()
    for t in range(since, now):
        holding, waiting = Counter[str](), Counter[str]()
        for one in stays:
            if one.held_from <= t < one.held_to:
                holding[one.tenant] += one.rate_ppm
            if one.waited_from <= t < one.waited_to:
                waiting[one.tenant] += 1
        total = sum(holding.values())
        weight = sum(weights[name] for name in {*holding, *waiting})
        over = {
            name: rate - Fraction(total * weights[name], weight)
            for name, rate in holding.items()
            if rate * weight > total * weights[name]
        }
        held.update(holding)
        waited.update(waiting)
        for waiter, count in waiting.items():
            blamed = {name: excess for name, excess in over.items() if name != waiter}
            for name, excess in blamed.items():
                caused[name] += count * excess / sum(blamed.values())
    rows = by_name(neighbours(stays, weights, {}, since=since, now=now))
    assert set(rows) == {one.tenant for one in stays}
    for name, row in rows.items():
        assert row.device_us == held[name] // PPM
        assert row.waited_us == waited[name]
        assert caused[name] - 100 <= row.caused_us <= caused[name]  # rounded down for each change
    assert sum(row.caused_us for row in rows.values()) <= sum(row.waited_us for row in rows.values())


def test_who_holds_all_while_another_waits_is_named() -> None:
    rows = neighbours(
        [stay("greedy", 0, 0, 600 * MINUTE_US), stay("patient", 10 * MINUTE_US, 130 * MINUTE_US, 140 * MINUTE_US)],
        {"greedy": 100, "patient": 300},
        {},
        since=0,
        now=600 * MINUTE_US,
    )  # fmt: skip
    assert [row.tenant for row in rows] == ["greedy", "patient"]
    greedy, patient = rows
    assert (greedy.caused_us, greedy.fair_ppm) == (120 * MINUTE_US, 250_000)
    assert greedy.reason == (
        "others waited 2h00m while it had more than its share: 98% of the GPU time with 25% of the weight"
    )
    assert (patient.noisy, patient.reason, patient.waited_us) == (False, "", 120 * MINUTE_US)


def test_holding_alone_or_within_ones_share_harms_nobody() -> None:
    alone = neighbours([stay("a", 0, 0, 10**9)], {}, {}, since=0, now=10**9)
    assert [(row.caused_us, row.noisy) for row in alone] == [(0, False)]
    own = neighbours([stay("a", 0, 0, 10**9), stay("a", 0, 10**9, 10**9)], {}, {}, since=0, now=10**9)
    assert [(row.caused_us, row.waited_us) for row in own] == [(0, 10**9)]
    # Three quarters of the weight, three quarters of what is held: who waits has nobody to blame but the size of the studio.
    shares = neighbours(
        [stay("a", 0, 0, 10**9, 3 * PPM), stay("b", 0, 0, 10**9), stay("b", 0, 10**9, 10**9)],
        {"a": 300, "b": 100},
        {},
        since=0,
        now=10**9,
    )
    assert {row.tenant: row.caused_us for row in shares} == {"a": 0, "b": 0}


def test_calls_that_fail_are_named_too() -> None:
    def of(calls: int, errors: int) -> Neighbour:
        work = {"a": Worked(tenant="a", calls=calls, errors=errors, launches=7)}
        [row] = neighbours([], {}, work, since=0, now=1)
        return row

    assert of(100, 20).reason == "20 of its 100 calls failed"
    assert of(100, 20).launches == 7
    assert not of(100, 19).noisy
    assert not of(19, 19).noisy  # too few to say


def test_what_a_lease_takes_from_others() -> None:
    request = Request(tenant="a", vram_bytes=10, ttl_us=10**6)
    lease = LeaseRecord(
        id="L",
        request=request,
        holder=Holder(host="h"),
        state=LeaseState.ACTIVE,
        slices=(Slice("d", 25), Slice("gone", 10)),
        joined_at=1,
        granted_at=5,
        expires_at=50,
    )
    shared = neighbour_lease_of(lease, {"d": 100}, 20)
    assert shared == stay("a", 1, 5, 20, PPM // 4 + PPM)
    assert neighbour_lease_of(lease, {"d": 100}, 99).held_to == 50  # nobody holds longer than they may
    alone = replace(lease, request=replace(request, exclusivity=Exclusivity.SESSION))
    assert neighbour_lease_of(alone, {"d": 100}, 20).rate_ppm == 2 * PPM
    never = replace(
        lease, state=LeaseState.ENDED, slices=(), granted_at=0, ended_at=9, reason=EndReason.RELEASED
    )
    assert neighbour_lease_of(never, {}, 20) == stay("a", 1, 9, 9, 0)
