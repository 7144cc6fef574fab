"""What a drill decides: when faults strike, what a loss cost, whether two runs ended alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.errors import BadInput
from sublet.core.runs.drill import (
    PPM,
    DrillFault,
    DrillLoss,
    EndState,
    by_kind,
    delay_us,
    differences,
    parse_kinds,
    place,
)
from sublet.runs.drill import draw


@given(st.lists(st.integers(0, PPM - 1), min_size=1, max_size=30), st.integers(1, 10**10))
def test_every_blow_falls_before_the_work_is_done(shares: list[int], work: int) -> None:
    """If nothing a life did were lost, the run would still be at work when its last fault strikes."""
    done = 0
    for number, share in enumerate(shares):
        fault = DrillFault(kind="kill", early=False, share_ppm=share)
        left = (work - done) * PPM // work
        done += delay_us(fault, start_us=5, work_us=work, left_ppm=left, faults_left=len(shares) - number)
        assert done < work


@given(st.lists(st.integers(0, PPM - 1), min_size=1, max_size=30), st.integers(0, 50), st.integers(1, 10**6))
def test_every_blow_falls_in_a_step_that_comes(shares: list[int], done: int, more: int) -> None:
    last = done + more
    for number, share in enumerate(shares):
        fault = DrillFault(kind="kill", early=False, share_ppm=share)
        step, part = place(fault, done=done, last=last, faults_left=len(shares) - number)
        assert done < step <= last
        assert 0 <= part < PPM
        done = step - 1  # the most a life can have committed


def test_no_blow_waits_for_longer_than_its_part() -> None:
    late = DrillFault(kind="kill", early=False, share_ppm=PPM - 1)
    assert place(late, done=0, last=100, faults_left=10)[0] == 9
    assert delay_us(late, start_us=0, work_us=1000, left_ppm=PPM, faults_left=10) == 89


def test_an_early_blow_falls_while_the_run_starts() -> None:
    fault = DrillFault(kind="kill", early=True, share_ppm=PPM // 2)
    assert delay_us(fault, start_us=100, work_us=10**9, left_ppm=PPM, faults_left=1) == 50


def test_the_same_seed_draws_the_same_blows_and_every_kind_comes() -> None:
    kinds = ("kill", "term", "revoke", "stop")
    faults = draw(7, 20, kinds)
    assert faults == draw(7, 20, kinds)
    assert faults != draw(8, 20, kinds)
    assert [sum(b.kind == kind for b in faults) for kind in kinds] == [5, 5, 5, 5]
    graces = [b.grace_us for b in faults if b.kind == "revoke"]
    assert 0 in graces
    assert any(graces)
    assert {b.early for b in faults} == {True, False}
    assert [b.kind for b in draw(3, 2, ["kill"])] == ["kill", "kill"]


@pytest.mark.parametrize("text", ["", "kill,explode", ","])
def test_unknown_kinds_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="kill, term, revoke, stop"):
        parse_kinds(text)


def test_what_a_loss_cost() -> None:
    losses = [
        DrillLoss(kind="kill", grace_us=0, working_on=9, committed=6, back_us=30),
        DrillLoss(kind="kill", grace_us=0, working_on=0, committed=6, back_us=10),
        DrillLoss(kind="kill", grace_us=0, working_on=6, committed=6, back_us=20),
        DrillLoss(kind="revoke", grace_us=5, working_on=7, committed=7),
        DrillLoss(kind="revoke", grace_us=0, working_on=8, committed=7),
    ]
    kill, without, grace = by_kind(losses)
    assert (kill.kind, kill.count, kill.wasted, kill.most_wasted) == ("kill", 3, 3, 3)
    assert (kill.median_back_us, kill.longest_back_us) == (20, 30)
    assert (grace.kind, grace.wasted, grace.median_back_us) == ("revoke, none", 1, None)
    assert (without.kind, without.wasted) == ("revoke, grace", 0)


def test_what_makes_two_runs_different() -> None:
    quiet = {
        "a": EndState(step=9, content="x"),
        "b": EndState(step=9, content="x"),
        "c": EndState(step=1, content="x"),
    }
    rough = {
        "a": EndState(step=9, content="x"),
        "b": EndState(step=9, content="y"),
        "d": EndState(step=1, content="x"),
    }
    found = differences(quiet, rough)
    assert list(found) == ["b", "c", "d"]
    assert "state is different" in found["b"]
    assert "never committed" in found["c"]
    assert "only the disturbed" in found["d"]
    assert (
        "step 9, disturbed at step 8"
        in differences(quiet, {**quiet, "a": EndState(step=8, content="x")})["a"]
    )
