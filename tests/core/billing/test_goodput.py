"""Where GPU time went (T4): the parts add up exactly, none is negative, and each rule holds by itself."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.billing.goodput import LOSSES, REFUNDED, CommitUse, Stretch, accounts, cost_micro, stretches
from sublet.core.leasing.lease import EndReason, Holder, LeaseRecord, LeaseState, Request, Tier
from sublet.core.scheduling.device import Slice
from sublet.core.values import DAY_US, HOUR_US

SECOND = 1_000_000
PARTS = ("useful_us", "overhead_us", "wasted_us", "open_us", "other_us")


def a_lease(
    number: int = 1,
    *,
    granted: int = 0,
    ended: int | None = 100 * SECOND,
    reason: EndReason = EndReason.RELEASED,
    job: str = "train",
    devices: int = 1,
    deadline: int = 0,
    expires: int = 1000 * SECOND,
    tenant: str = "ada",
) -> LeaseRecord:
    return LeaseRecord(
        id=f"L{number}",
        request=Request(tenant=tenant, vram_bytes=1, ttl_us=300 * SECOND, count=devices, job=job),
        holder=Holder(host="h"),
        state=LeaseState.ACTIVE if ended is None else LeaseState.ENDED,
        epoch=number,
        slices=tuple(Slice(f"gpu{i}", 1) for i in range(devices)),
        granted_at=granted + 1,
        expires_at=expires,
        ended_at=0 if ended is None else ended + 1,
        reason=None if ended is None else reason,
        deadline_at=deadline,
    )


def commit(at: int, compute: int, *, lease: int = 1, job: str = "train", steps: int = 1) -> CommitUse:
    return CommitUse(lease=f"L{lease}", job=job, at=at * SECOND + 1, steps=steps, compute_us=compute * SECOND)


def total(leases: list[LeaseRecord], commits: list[CommitUse], **window: int) -> Any:
    window = {"since": 0, "now": 1000 * SECOND, **window}
    return accounts(stretches(leases, commits, **window), lambda s: s.job)[1]


def seconds(account: Any) -> dict[str, int]:
    return {name: getattr(account, name) // SECOND for name in PARTS if getattr(account, name)}


def test_time_is_cut_at_the_commits() -> None:
    found = total([a_lease(reason=EndReason.HOLDER_LOST)], [commit(40, 30, steps=5), commit(80, 35, steps=5)])
    assert seconds(found) == {"useful_us": 65, "overhead_us": 15, "wasted_us": 20}
    assert (found.commits, found.steps, found.median_gap_us) == (2, 10, 40 * SECOND)
    assert found.goodput_ppm == 650_000
    assert dict(found.losses) == {"holder_lost": 1}
    assert (found.noticed, found.refund_us) == (0, 0)


@pytest.mark.parametrize("reason", [r for r in EndReason if r is not EndReason.REFUSED])
def test_only_what_was_taken_back_is_refunded(reason: EndReason) -> None:
    found = total([a_lease(reason=reason, deadline=90)], [commit(40, 40)])
    wasted = 60 if reason in LOSSES else 0
    assert found.wasted_us == wasted * SECOND
    assert found.refund_us == (wasted * SECOND if reason in REFUNDED else 0)
    assert found.noticed == (reason in LOSSES)
    assert found.overhead_us == (60 - wasted) * SECOND


def test_work_that_does_not_fit_between_two_commits_was_done_before_them() -> None:
    """Two commits shortly after each other: the second was computed while the first was being saved."""
    found = total([a_lease()], [commit(50, 20), commit(51, 20)])
    assert seconds(found) == {"useful_us": 40, "overhead_us": 60}


def test_no_more_is_useful_than_was_held() -> None:
    found = total([a_lease()], [commit(10, 500), commit(20, 5)])
    assert seconds(found) == {"useful_us": 15, "overhead_us": 85}


def test_a_lease_that_is_held_counts_up_to_now() -> None:
    found = total([a_lease(ended=None)], [commit(40, 40)], now=70 * SECOND + 1)
    assert seconds(found) == {"useful_us": 40, "open_us": 30}
    late = total([a_lease(ended=None, expires=60 * SECOND + 1)], [commit(40, 40)], now=900 * SECOND)
    assert seconds(late) == {"useful_us": 40, "open_us": 20}, "not beyond its right"


def test_jobs_without_commits_have_no_goodput() -> None:
    found = total([a_lease(job="cell", reason=EndReason.PREEMPTED)], [])
    assert seconds(found) == {"other_us": 100}
    assert (found.goodput_ppm, found.refund_us, dict(found.losses)) == (None, 0, {"preempted": 1})


def test_a_spot_lease_preempted_before_anything_was_committed_gets_its_last_minutes_back() -> None:
    def refund(tier: Tier, seconds: int, reason: EndReason, devices: int = 1) -> int:
        lease = a_lease(
            job="cell", reason=reason, ended=seconds * SECOND, expires=seconds * SECOND, devices=devices
        )
        found = total([replace(lease, request=replace(lease.request, tier=tier))], [])
        return found.refund_us // SECOND

    assert refund(Tier.SPOT, 100, EndReason.PREEMPTED) == 100
    assert refund(Tier.SPOT, 100, EndReason.PREEMPTED, devices=2) == 200
    assert refund(Tier.SPOT, 3600, EndReason.PREEMPTED) == 300, "an hour without a commit is its own fault"
    assert refund(Tier.BATCH, 100, EndReason.PREEMPTED) == 0
    assert refund(Tier.SPOT, 100, EndReason.EXPIRED) == 0


def test_a_lease_lost_before_its_first_commit_is_wasted_if_its_job_commits() -> None:
    leases = [a_lease(1, reason=EndReason.PREEMPTED), a_lease(2, granted=200 * SECOND, ended=300 * SECOND)]
    found = total(leases, [commit(250, 50, lease=2)])
    assert seconds(found) == {"useful_us": 50, "overhead_us": 50, "wasted_us": 100}
    assert found.refund_us == 100 * SECOND


def test_every_device_counts() -> None:
    found = total([a_lease(devices=4, reason=EndReason.EXPIRED)], [commit(40, 30)])
    assert seconds(found) == {"useful_us": 120, "overhead_us": 40, "wasted_us": 240}


def test_what_lies_before_the_window_is_left_out() -> None:
    found = total([a_lease()], [commit(40, 40), commit(90, 45)], since=60 * SECOND + 1)
    assert found.held_us == 40 * SECOND
    assert seconds(found) == {"useful_us": 30, "overhead_us": 10}
    assert found.commits == 1


def test_cost_is_held_time_less_refunds() -> None:
    lease = a_lease(ended=HOUR_US, reason=EndReason.PREEMPTED)
    commits = [commit(1800, 1800)]
    parts = stretches([lease], commits, since=0, now=2 * HOUR_US)
    assert accounts(parts, lambda s: s.job, 2_500_000)[1].cost_micro == 1_250_000
    assert cost_micro(HOUR_US // 3, 1) == 0


lease_shapes = st.tuples(
    st.integers(0, 50),
    st.integers(0, 50),
    st.sampled_from([*EndReason, None]),
    st.integers(1, 3),
    st.sampled_from(["a", "b", ""]),
)
commit_shapes = st.tuples(
    st.integers(0, 120), st.integers(-5, 200), st.integers(0, 4), st.sampled_from(["a", "b"])
)


@given(
    st.lists(lease_shapes, max_size=5),
    st.lists(commit_shapes, max_size=12),
    st.integers(0, 120),
    st.integers(0, 10**7),
)
def test_the_parts_add_up_exactly_and_none_is_negative(
    shapes: Any, done: Any, since: int, price: int
) -> None:
    leases = [
        a_lease(
            i,
            granted=start,
            ended=None if reason is None else start + length,
            reason=reason or EndReason.RELEASED,
            devices=n,
            job=job,
        )
        for i, (start, length, reason, n, job) in enumerate(shapes)
    ]
    commits = [
        CommitUse(lease=f"L{lease}", job=job, at=at, steps=1, compute_us=compute)
        for at, compute, lease, job in done
    ]
    now = 150
    parts = stretches(leases, commits, since=since, now=now)
    for part in parts:
        assert part.held_us == sum(getattr(part, name) for name in PARTS)
        numbers = [getattr(part, f.name) for f in fields(Stretch)]
        assert all(n >= 0 for n in numbers if isinstance(n, int))
        assert part.refund_us <= part.wasted_us + part.other_us
    expected = sum(
        len(x.slices) * max(0, (x.ended_at if x.ended_at else now) - max(x.granted_at, since)) for x in leases
    )
    for group in (lambda s: s.job, lambda s: s.tier, lambda s: s.lease, lambda s: str(s.until // DAY_US)):
        rows, whole = accounts(parts, group, price)
        assert whole.held_us == expected
        for name in ("held_us", *PARTS, "refund_us", "cost_micro", "commits", "steps", "noticed"):
            assert sum(getattr(row, name) for row in rows) == getattr(whole, name)
        assert 0 <= (whole.goodput_ppm or 0) <= 1_000_000
