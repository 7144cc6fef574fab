"""The meter: one interval per lease, never negative, never past the right to use it (T4)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.billing.meter import billed_until, close
from sublet.core.leasing.lease import EndReason, LeaseRecord, LeaseState, Renewed, renew
from sublet.core.scheduling.device import Slice
from tests.core.pool import GB, NOW, M, S, active, waiter

quick = settings(max_examples=200, deadline=None)
moments = st.integers(-60 * M, 60 * M).map(lambda d: NOW + d)


@st.composite
def leases(draw: st.DrawFn) -> LeaseRecord:
    made = active("x", granted_at=draw(moments), expires_at=draw(moments), deadline_at=draw(moments))
    return replace(
        made,
        state=draw(st.sampled_from([LeaseState.ACTIVE, LeaseState.REVOKING])),
        slices=tuple(Slice(f"d{i}", draw(st.integers(1, 80)) * GB) for i in range(draw(st.integers(0, 4)))),
    )


@quick
@given(leases(), moments)
def test_t4_use_is_never_negative_whatever_the_clocks_say(lease: LeaseRecord, now: int) -> None:
    usage = close(lease, EndReason.EXPIRED, now)
    assert usage.from_at <= usage.to_at
    assert usage.gpu_us >= 0
    assert usage.vram_byte_s >= 0


@quick
@given(leases(), moments)
def test_t4_it_closes_at_now_or_at_the_end_whichever_came_first(lease: LeaseRecord, now: int) -> None:
    end = lease.deadline_at if lease.state is LeaseState.REVOKING else lease.expires_at
    assert billed_until(lease, now) == max(lease.granted_at, min(now, end))


@quick
@given(leases(), moments)
def test_t4_gpu_time_is_the_interval_times_the_devices(lease: LeaseRecord, now: int) -> None:
    usage = close(lease, EndReason.RELEASED, now)
    elapsed = usage.to_at - usage.from_at
    assert usage.gpu_us == elapsed * len(lease.slices)
    assert usage.vram_byte_s == elapsed * sum(s.vram_bytes for s in lease.slices) // 1_000_000


@quick
@given(st.integers(1, 20), st.integers(0, 10 * M), st.integers(0, 100 * M))
def test_t4_a_slow_reaper_bills_nothing_more(renewals: int, late: int, later: int) -> None:
    lease = active("x", granted_at=NOW, expires_at=NOW + 5 * M)
    now = NOW
    for _ in range(renewals):
        now += 3 * M
        answer = renew(lease, 1, now, capped=False)
        assert isinstance(answer, Renewed)
        lease = replace(lease, expires_at=answer.expires_at)
    on_time = close(lease, EndReason.EXPIRED, lease.expires_at)
    assert close(lease, EndReason.EXPIRED, lease.expires_at + late) == on_time
    assert close(lease, EndReason.EXPIRED, lease.expires_at + late + later) == on_time
    assert on_time.gpu_us == (renewals * 3 + 5) * M


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30 * M), st.integers(1, 4)), min_size=1, max_size=8))
def test_t4_leases_one_after_the_other_add_up_without_overlap_or_gap(turns: list[tuple[int, int]]) -> None:
    now, total, usages = NOW, 0, []
    for held, devices in turns:
        lease = active("x", [f"d{i}" for i in range(devices)], granted_at=now, expires_at=now + 60 * M)
        usages.append(close(lease, EndReason.RELEASED, now + held))
        total += held * devices
        now += held
    assert sum(u.gpu_us for u in usages) == total
    assert all(a.to_at == b.from_at for a, b in pairwise(usages))
    assert usages[-1].to_at - usages[0].from_at == sum(held for held, _ in turns)


def test_t4_a_lease_that_was_never_granted_used_nothing() -> None:
    usage = close(waiter("w"), EndReason.REFUSED, NOW)
    assert (usage.from_at, usage.to_at, usage.gpu_us, usage.vram_byte_s) == (0, 0, 0, 0)


def test_the_row_says_whose_it_was_and_why_it_ended() -> None:
    lease = active("x", "d0", "bob", 40, job="lab/train", granted_at=NOW - 10 * S)
    usage = close(lease, EndReason.PREEMPTED, NOW)
    assert (usage.lease_id, usage.tenant, usage.tier, usage.job) == ("x", "bob", "interactive", "lab/train")
    assert (usage.gpu_us, usage.vram_byte_s, usage.reason) == (10 * S, 400 * GB, "preempted")
