"""The keeper's clockwork: when to try, when to warn, when to stop (L6), whatever the ledger does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.leasing.lease import MAX_TTL_US, MIN_TTL_US
from sublet.core.leasing.renewal import (
    RenewalAction,
    Tenure,
    first_try_at,
    local_deadline,
    mix,
    next_move,
    retry_at,
)
from tests.conftest import MORE_EXAMPLES
from tests.core.pool import NOW, M, S

quick = settings(max_examples=60 * MORE_EXAMPLES, deadline=None)
seeds = st.integers(0, 2**64 - 1)
#: Evenly spread over the orders of magnitude from 0.1 s to 7 d, not over the microseconds.
ttls = st.builds(
    lambda scale, part: min(MAX_TTL_US, max(MIN_TTL_US, MIN_TTL_US * 2**scale * (100 + part) // 100)),
    st.integers(0, 22),
    st.integers(0, 99),
)


@dataclass
class Story:
    """What a keeper did, by its own clock."""

    did: list[tuple[int, RenewalAction]] = field(default_factory=list)
    tenure: Tenure | None = None

    def at(self, *todos: RenewalAction) -> list[int]:
        return [at for at, todo in self.did if todo in todos]


def keep(
    ttl: int,
    seed: int,
    *,
    answers: Callable[[int], bool],
    works: Callable[[int], bool] = lambda now: True,
    until: int | None = None,
    try_us: int = 0,
) -> Story:
    """The keeper's loop as a simulation. A failed try takes `try_us`, as one that times out does."""
    tenure = Tenure(ttl_us=ttl, sent_at=NOW, seed=seed, worked=False)
    story, now = Story(), NOW
    for _ in range(200_000):
        if until is not None and now >= until:
            break
        tenure = replace(tenure, worked=works(now))
        move = next_move(tenure, now)
        if move.todo is RenewalAction.SLEEP:
            assert move.at > now, "a keeper that sleeps for no time spins"
            now = move.at
            continue
        assert move.at == now
        story.did.append((now, move.todo))
        if move.todo is RenewalAction.STOP:
            break
        if move.todo is RenewalAction.RENEW:
            if answers(now):
                tenure = replace(tenure, sent_at=now, attempt=0, tried_at=0, warned=False)
            else:
                tenure = replace(tenure, attempt=tenure.attempt + 1, tried_at=now)
                now += try_us
        else:
            tenure = replace(tenure, warned=True)
    else:
        pytest.fail("the keeper never came to an end")
    story.tenure = tenure
    return story


@quick
@given(ttls, seeds)
def test_the_first_try_falls_at_60_to_70_percent(ttl: int, seed: int) -> None:
    after = first_try_at(NOW, ttl, seed) - NOW
    assert ttl * 600 // 1000 <= after <= ttl * 700 // 1000
    assert (
        next_move(Tenure(ttl_us=ttl, sent_at=NOW, seed=seed, worked=True), NOW + after).todo
        is RenewalAction.RENEW
    )
    early = next_move(Tenure(ttl_us=ttl, sent_at=NOW, seed=seed, worked=True), NOW + after - 1)
    assert (early.todo, early.at) == (RenewalAction.SLEEP, NOW + after)


@quick
@given(ttls)
def test_l6_the_holders_deadline_is_at_80_percent_of_when_it_asked(ttl: int) -> None:
    assert local_deadline(NOW, ttl) - NOW == ttl * 8 // 10
    assert local_deadline(NOW, ttl) < NOW + ttl


@quick
@given(ttls, seeds, st.integers(0, 200), st.integers(0, 20), st.booleans(), st.booleans())
def test_l6_after_the_deadline_there_is_only_stop(
    ttl: int, seed: int, per_100: int, attempt: int, worked: bool, warned: bool
) -> None:
    tenure = Tenure(
        ttl_us=ttl, sent_at=NOW, seed=seed, worked=worked, attempt=attempt, tried_at=NOW, warned=warned
    )
    stop = local_deadline(NOW, ttl)
    now = NOW + ttl * per_100 // 100
    move = next_move(tenure, now)
    assert (move.todo is RenewalAction.STOP) is (now >= stop)
    assert move.reason
    if move.todo is RenewalAction.SLEEP:
        assert now < move.at <= stop


@quick
@given(ttls, seeds, st.integers(1, 30))
def test_the_jitter_is_a_function_of_the_seed(ttl: int, seed: int, attempt: int) -> None:
    assert first_try_at(NOW, ttl, seed) == first_try_at(NOW, ttl, seed)
    assert retry_at(NOW, ttl, attempt, seed) == retry_at(NOW, ttl, attempt, seed)
    assert first_try_at(NOW + 5, ttl, seed) == first_try_at(NOW, ttl, seed) + 5
    assert 0 <= mix(seed) < 2**64


def test_the_mixer_gives_the_same_numbers_on_every_machine() -> None:
    # splitmix64 of these seeds, from its published reference.
    assert [mix(0), mix(1), mix(2**64 - 1)] == [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, 0xE4D971771B652C20]


def test_a_thousand_leases_of_one_moment_do_not_renew_in_one_moment() -> None:
    ttl = 5 * M
    moments = [first_try_at(NOW, ttl, seed) - NOW for seed in range(1000)]
    buckets = [0] * 10
    for at in moments:
        buckets[min(9, (at - ttl * 6 // 10) * 10 // (ttl // 10))] += 1
    assert min(buckets) > 50
    assert max(buckets) < 160


@quick
@given(st.integers(MIN_TTL_US, MAX_TTL_US), seeds, st.integers(1, 40))
def test_a_retry_comes_after_a_pause_that_is_neither_zero_nor_longer_than_five_seconds(
    ttl: int, seed: int, attempt: int
) -> None:
    pause = retry_at(NOW, ttl, attempt, seed) - NOW
    assert 5_000 <= pause <= 5 * S


@settings(max_examples=40 * MORE_EXAMPLES, deadline=None)
@given(st.builds(min, ttls, st.just(6 * 60 * M)), seeds)
def test_l6_a_dead_ledger_is_warned_of_before_the_stop_and_the_stop_before_the_expiry(
    ttl: int, seed: int
) -> None:
    story = keep(ttl, seed, answers=lambda now: False)
    check_warned(story, ttl, seed)


@pytest.mark.parametrize("ttl", [MIN_TTL_US, S, 5 * M, 24 * 60 * M, MAX_TTL_US])
def test_l6_a_dead_ledger_is_warned_of_at_the_ends_of_the_range(ttl: int) -> None:
    check_warned(keep(ttl, 3, answers=lambda now: False), ttl, 3)


def check_warned(story: Story, ttl: int, seed: int) -> None:
    first, stop = first_try_at(NOW, ttl, seed), local_deadline(NOW, ttl)
    tries = story.at(RenewalAction.RENEW)
    assert tries
    assert tries[0] == first
    assert all(first <= at < stop for at in tries)
    assert tries == sorted(set(tries))
    warned, stopped = story.at(RenewalAction.WARN_UNREACHABLE), story.at(RenewalAction.STOP)
    assert len(warned) == len(stopped) == 1
    assert warned[0] < stopped[0] < NOW + ttl
    assert stopped[0] == stop
    assert not story.at(RenewalAction.WARN_IDLE)


@quick
@given(st.integers(10 * S, 60 * M), seeds)
def test_a_lease_of_ten_seconds_or_more_gets_at_least_three_tries(ttl: int, seed: int) -> None:
    assert len(keep(ttl, seed, answers=lambda now: False).at(RenewalAction.RENEW)) >= 3


@quick
@given(st.builds(min, ttls, st.just(60 * M)), seeds, st.integers(1, 40))
def test_l6_a_ledger_that_fails_slowly_is_warned_of_too(ttl: int, seed: int, per_100: int) -> None:
    band = local_deadline(NOW, ttl) - first_try_at(NOW, ttl, seed)
    story = keep(ttl, seed, answers=lambda now: False, try_us=band * per_100 // 100)
    warned, stopped = story.at(RenewalAction.WARN_UNREACHABLE), story.at(RenewalAction.STOP)
    assert len(stopped) == 1
    assert warned, f"stopped after {len(story.at(RenewalAction.RENEW))} tries without a warning"
    assert warned[0] < stopped[0] < NOW + ttl


@quick
@given(ttls, seeds)
def test_an_idle_lease_warns_then_stops_and_never_renews(ttl: int, seed: int) -> None:
    story = keep(ttl, seed, answers=lambda now: True, works=lambda now: False, until=NOW + 2 * ttl)
    assert [todo for _, todo in story.did] == [RenewalAction.WARN_IDLE, RenewalAction.STOP]
    warned, stopped = story.did[0][0], story.did[1][0]
    assert warned == first_try_at(NOW, ttl, seed)
    assert warned < stopped == local_deadline(NOW, ttl) < NOW + ttl


@quick
@given(st.builds(max, ttls, st.just(S)), seeds, st.integers(0, 70))
def test_work_that_resumes_before_the_stop_renews(ttl: int, seed: int, per_100: int) -> None:
    first, stop = first_try_at(NOW, ttl, seed), local_deadline(NOW, ttl)
    resumes = first + (stop - first) * per_100 // 100
    story = keep(ttl, seed, answers=lambda now: True, works=lambda now: now >= resumes, until=stop + 1)
    renewed = story.at(RenewalAction.RENEW)
    assert renewed
    assert resumes <= renewed[0] < stop
    assert not story.at(RenewalAction.STOP)


@settings(max_examples=40 * MORE_EXAMPLES, deadline=None)
@given(st.builds(min, ttls, st.just(60 * M)), seeds)
def test_a_healthy_ledger_and_steady_work_never_warn_or_stop(ttl: int, seed: int) -> None:
    story = keep(ttl, seed, answers=lambda now: True, until=NOW + 20 * ttl)
    assert {todo for _, todo in story.did} == {RenewalAction.RENEW}
    gaps = [
        b - a
        for a, b in zip([NOW, *story.at(RenewalAction.RENEW)], story.at(RenewalAction.RENEW), strict=False)
    ]
    assert all(ttl * 6 // 10 <= gap <= ttl * 7 // 10 for gap in gaps)


@quick
@given(st.integers(10 * S, 60 * M), seeds, st.integers(0, 40))
def test_a_ledger_that_comes_back_in_time_is_no_loss(ttl: int, seed: int, per_100: int) -> None:
    first, stop = first_try_at(NOW, ttl, seed), local_deadline(NOW, ttl)
    back = first + (stop - first) * per_100 // 100
    story = keep(ttl, seed, answers=lambda now: now >= back, until=stop + 1)
    assert not story.at(RenewalAction.STOP)
    assert story.tenure is not None
    assert story.tenure.attempt == 0


def test_the_reasons_tell_idle_from_unreachable() -> None:
    idle = Tenure(ttl_us=M, sent_at=NOW, seed=1, worked=False, warned=True)
    dead = replace(idle, worked=True, attempt=3, tried_at=NOW)
    assert "no work" in next_move(idle, NOW + M).reason
    assert "did not answer" in next_move(dead, NOW + M).reason


@quick
@given(ttls, seeds)
def test_l6_a_try_that_hangs_is_warned_of_before_the_stop(ttl: int, seed: int) -> None:
    """The call never returns: no second try, and the warning comes half-way through the band all the same."""
    first, stop = first_try_at(NOW, ttl, seed), local_deadline(NOW, ttl)
    hanging = Tenure(ttl_us=ttl, sent_at=NOW, seed=seed, worked=True, calling=True)
    early = next_move(hanging, first)
    assert early.todo is RenewalAction.SLEEP
    assert first <= early.at < stop
    assert next_move(hanging, early.at).todo is RenewalAction.WARN_UNREACHABLE
    warned = next_move(replace(hanging, warned=True), early.at)
    assert (warned.todo, warned.at) == (RenewalAction.SLEEP, stop)
    assert next_move(replace(hanging, warned=True), stop).todo is RenewalAction.STOP
