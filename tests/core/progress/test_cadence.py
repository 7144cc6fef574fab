"""How often to save, and the reason that is given for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.errors import BadInput
from sublet.core.progress.cadence import (
    BELIEVED_US,
    FIRST_US,
    LONGEST_US,
    Cadence,
    Cost,
    Losses,
    best_interval,
    parse_cadence,
)

costs = st.builds(Cost, stall_us=st.integers(0, 10**8), save_us=st.integers(0, 10**9))
losses = st.builds(Losses, count=st.integers(0, 1000), held_us=st.integers(0, 10**13))


def test_the_first_save_comes_before_anything_was_measured() -> None:
    assert best_interval(None, Losses()).us == FIRST_US


def test_young_s_rule() -> None:
    """0.1 s of stall and a loss an hour: sqrt(2 × 0.1 × 3600) s."""
    found = best_interval(Cost(stall_us=100_000, save_us=500_000), Losses())
    assert found.us == pytest.approx(26_832_815, rel=1e-6)
    assert "100 ms" in found.reason
    assert "no loss seen yet" in found.reason


@given(costs, losses)
def test_it_wastes_less_than_any_other_interval_that_is_allowed(cost: Cost, seen: Losses) -> None:
    found = best_interval(cost, seen).us

    def waste(interval: int) -> float:
        return max(1, cost.stall_us) / interval + interval / (2 * seen.apart_us)

    lowest = max(1, cost.save_us)
    for other in (found * 9 // 10, found * 11 // 10 + 1):
        if lowest <= other <= max(LONGEST_US, cost.save_us):
            assert waste(found) <= waste(other) * (1 + 1e-6) + 1e-9


@given(costs, losses)
def test_saves_do_not_overlap_and_little_is_put_at_risk(cost: Cost, seen: Losses) -> None:
    found = best_interval(cost, seen).us
    assert found >= min(cost.save_us, found)
    assert cost.save_us <= found or found == LONGEST_US or cost.save_us == found
    assert found <= max(LONGEST_US, cost.save_us)


@given(costs, losses, st.integers(1, 100))
def test_more_losses_never_make_it_save_less_often(cost: Cost, seen: Losses, more: int) -> None:
    worse = Losses(count=seen.count + more, held_us=seen.held_us)
    assert best_interval(cost, worse).us <= best_interval(cost, seen).us


def test_what_is_believed_gives_way_to_what_is_seen() -> None:
    assert Losses().apart_us == BELIEVED_US
    assert Losses(count=99, held_us=99 * 60_000_000).apart_us < 100_000_000
    assert Losses(count=0, held_us=100 * BELIEVED_US).apart_us == 101 * BELIEVED_US


def test_however_rare_losses_are_no_more_than_ten_minutes_are_put_at_risk() -> None:
    rare = Losses(count=0, held_us=10_000 * BELIEVED_US)
    found = best_interval(Cost(stall_us=10_000_000, save_us=10_000_000), rare)
    assert found.us == LONGEST_US
    assert "never more than" in found.reason


@pytest.mark.parametrize(
    ("text", "cadence"),
    [("auto", Cadence()), (10, Cadence(steps=10)), (3.0, Cadence(steps=3)), ("30s", Cadence(us=30_000_000))],
)
def test_words_for_it(text: object, cadence: Cadence) -> None:
    assert parse_cadence(text) == cadence  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [0, -1, 1.5, True, "often", "0s"])
def test_other_words_are_refused(text: object) -> None:
    with pytest.raises(BadInput):
        parse_cadence(text)  # type: ignore[arg-type]
