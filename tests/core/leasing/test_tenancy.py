"""Use that fades, in integers; quotas that hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.leasing.tenancy import PPM, Tenant, decay, never_within_quota, over_quota, rate_of, used_now
from sublet.core.values import DAY_US, HOUR_US
from tests.core.pool import DEVICE, GB, NOW, SESSION, SHARED

quick = settings(max_examples=200, deadline=None)
used = st.integers(0, 10**16)
half_lives = st.integers(HOUR_US, 30 * DAY_US)


@quick
@given(used, half_lives, st.integers(0, 70))
def test_decay_is_exact_at_each_half_life(amount: int, half_life: int, halvings: int) -> None:
    assert decay(amount, halvings * half_life, half_life) == amount >> halvings


@quick
@given(used, half_lives, st.integers(0, 400 * DAY_US), st.integers(0, 10 * DAY_US))
def test_decay_never_rises_never_goes_negative_and_stays_an_integer(
    amount: int, half_life: int, elapsed: int, more: int
) -> None:
    sooner, later = decay(amount, elapsed, half_life), decay(amount, elapsed + more, half_life)
    assert 0 <= later <= sooner <= amount
    assert type(sooner) is int


@quick
@given(used, half_lives, st.integers(1, 60), st.integers(-3, 3))
def test_decay_does_not_jump_at_a_half_life(amount: int, half_life: int, halvings: int, offset: int) -> None:
    at = decay(amount, halvings * half_life, half_life)
    near = decay(amount, halvings * half_life + offset, half_life)
    assert abs(near - at) <= 2 + (amount >> halvings) * 4 // half_life


def test_decay_of_nothing_or_back_in_time_changes_nothing() -> None:
    assert decay(0, DAY_US, DAY_US) == 0
    assert decay(-5, DAY_US, DAY_US) == 0
    assert decay(1000, 0, DAY_US) == decay(1000, -5, DAY_US) == 1000
    assert decay(10**30, 64 * DAY_US, DAY_US) == 0


@quick
@given(used, st.integers(0, 8 * PPM), st.integers(0, 5 * DAY_US))
def test_use_now_is_what_is_left_plus_what_the_rate_added(amount: int, rate: int, elapsed: int) -> None:
    tenant = Tenant(name="ann", used_us=amount, rate_ppm=rate, as_of=NOW)
    left = used_now(replace(tenant, rate_ppm=0), NOW + elapsed, DAY_US)
    added = used_now(replace(tenant, used_us=0), NOW + elapsed, DAY_US)
    assert used_now(tenant, NOW + elapsed, DAY_US) == left + added
    assert left == decay(amount, elapsed, DAY_US)
    assert added == rate * elapsed // PPM


@quick
@given(st.integers(0, 4 * PPM), st.integers(0, 4 * PPM), st.integers(0, DAY_US))
def test_rates_add_up(one: int, two: int, elapsed: int) -> None:
    tenant = Tenant(name="ann", as_of=NOW)
    apart = sum(used_now(replace(tenant, rate_ppm=r), NOW + elapsed, DAY_US) for r in (one, two))
    together = used_now(replace(tenant, rate_ppm=one + two), NOW + elapsed, DAY_US)
    assert 0 <= together - apart <= 1  # two roundings down against one


@quick
@given(st.integers(0, 4 * PPM), st.integers(0, 2 * DAY_US), st.integers(0, 2 * DAY_US))
def test_bringing_the_row_forward_never_adds_to_what_a_rate_gave(rate: int, first: int, second: int) -> None:
    row = Tenant(name="ann", rate_ppm=rate, as_of=NOW)
    forward = replace(row, used_us=used_now(row, NOW + first, DAY_US), as_of=NOW + first)
    at_once = used_now(row, NOW + first + second, DAY_US)
    assert used_now(forward, NOW + first + second, DAY_US) <= at_once + 1


@pytest.mark.parametrize("times", [2, 24, 1440])
def test_t3_use_halves_in_a_half_life_however_often_the_row_is_brought_forward(times: int) -> None:
    amount = 1000 * HOUR_US
    row = Tenant(name="ann", used_us=amount, as_of=NOW)
    for i in range(1, times + 1):
        now = NOW + DAY_US * i // times
        row = replace(row, used_us=used_now(row, now, DAY_US), as_of=now)
    assert row.used_us == pytest.approx(amount / 2, rel=0.01)


def test_a_clock_that_steps_back_adds_nothing() -> None:
    row = Tenant(name="ann", used_us=500, rate_ppm=PPM, as_of=NOW)
    assert used_now(row, NOW - DAY_US, DAY_US) == 500


def test_a_shared_slice_counts_its_part_and_any_other_the_whole_device() -> None:
    assert rate_of(SHARED, 20 * GB, 80 * GB) == PPM // 4
    assert rate_of(SHARED, 80 * GB, 80 * GB) == PPM
    assert rate_of(SHARED, 1, 80 * GB) == 1
    assert rate_of(SESSION, 1, 80 * GB) == rate_of(DEVICE, 1, 80 * GB) == PPM


@pytest.mark.parametrize(
    ("row", "need", "blocked"),
    [
        (Tenant(name="a"), 10**15, False),
        (Tenant(name="a", max_leases=2, live_leases=1), 1, False),
        (Tenant(name="a", max_leases=2, live_leases=2), 1, True),
        (Tenant(name="a", max_leases=2, live_leases=3), 1, True),
        (Tenant(name="a", max_vram_bytes=10, live_bytes=4), 6, False),
        (Tenant(name="a", max_vram_bytes=10, live_bytes=4), 7, True),
    ],
)
def test_t2_a_quota_is_reached_at_its_number_not_before(row: Tenant, need: int, blocked: bool) -> None:
    why = over_quota(row, need)
    assert bool(why) is blocked
    if blocked:
        assert "tenant a" in why


def test_t2_a_need_above_the_whole_quota_is_never_within_it() -> None:
    assert never_within_quota(Tenant(name="a", max_vram_bytes=10), 11)
    assert not never_within_quota(Tenant(name="a", max_vram_bytes=10, live_bytes=10), 10)
    assert not never_within_quota(Tenant(name="a"), 10**15)
