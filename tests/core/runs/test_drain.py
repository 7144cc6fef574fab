"""Between a Notice and its deadline: save what will be durable in time, and say why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.core.notice import Notice
from sublet.core.runs.drain import MARGIN_US, DrainPlan, Save, SaveBehind, Speed, plan_batch, plan_drain
from sublet.core.values import SECOND_US

NOW = 1_000 * SECOND_US
MB = 1_000_000
MEASURED = Speed(bytes_per_second=100 * MB, latency_us=SECOND_US // 10)


def notice(seconds: float) -> Notice:
    return Notice(source="signal", reason="SIGTERM", deadline_us=NOW + round(seconds * SECOND_US))


def plan(seconds: float, **facts: object) -> DrainPlan:
    given = {"uncommitted": True, "speed": MEASURED, "full_bytes": 1000 * MB, "delta_bytes": 100 * MB} | facts
    return plan_drain(notice(seconds), NOW, **given)  # type: ignore[arg-type]


def test_nothing_to_save() -> None:
    found = plan(0.0, uncommitted=False)
    assert found.save is Save.NOTHING
    assert "everything is committed" in found.reason


def test_the_delta_when_this_process_has_saved_before() -> None:
    found = plan(15)
    assert found.save is Save.DELTA
    # 0.1 s + 1 s, half as much again
    assert found.estimate_us == 1_650_000
    assert found.reason == "save what changed: 100MB at 100MB/s needs 1.6s, 14s left to save in"


def test_the_first_save_here_is_a_full_one() -> None:
    assert plan(30, delta_bytes=None).save is Save.FULL
    assert plan(15, delta_bytes=None).save is Save.SKIP


def test_a_delta_larger_than_everything_is_a_full_save() -> None:
    assert plan(60, delta_bytes=2000 * MB).save is Save.FULL


def test_a_save_that_would_not_be_durable_in_time_is_not_begun() -> None:
    found = plan(2.0)
    assert found.save is Save.SKIP
    assert "leave with what is committed" in found.reason
    assert "would not be durable in time" in found.reason
    assert plan(2.65).save is Save.DELTA  # to the microsecond: 1.65 s and a second to leave
    assert plan(2.649_999).save is Save.SKIP


def test_what_was_never_measured_is_tried_and_said() -> None:
    found = plan(5, speed=Speed())
    assert found.save is Save.DELTA
    assert found.estimate_us is None
    assert "never measured" in found.reason
    assert not found.finish_step
    assert plan(0.5, speed=Speed()).save is Save.SKIP  # no time for anything


def test_the_save_under_way_is_waited_for_when_it_holds_everything() -> None:
    found = plan(15, behind=SaveBehind(bytes_left=100 * MB, holds_all=True))
    assert found.save is Save.WAIT
    assert "holds everything" in found.reason
    assert plan(2, behind=SaveBehind(bytes_left=100 * MB, holds_all=True)).save is Save.SKIP


def test_a_save_under_way_that_is_behind_is_followed_by_another_if_there_is_time() -> None:
    behind = SaveBehind(bytes_left=100 * MB, holds_all=False)
    assert plan(15, behind=behind).save is Save.DELTA
    assert "after the one under way" in plan(15, behind=behind).reason
    found = plan(3, behind=behind)  # time for one of them
    assert found.save is Save.WAIT
    assert "is done again" in found.reason
    assert not found.finish_step
    assert plan(2, behind=behind).save is Save.SKIP


@pytest.mark.parametrize("uncommitted", [True, False])
def test_a_step_is_finished_only_if_its_save_fits_after_it(uncommitted: bool) -> None:
    # 2 s of step, stretched to 3, then 1.65 s, then a second to leave
    assert plan(5.65, step_us=2 * SECOND_US, uncommitted=uncommitted).finish_step
    assert not plan(5.649_999, step_us=2 * SECOND_US, uncommitted=uncommitted).finish_step
    assert not plan(600, step_us=None, uncommitted=uncommitted).finish_step


facts = st.fixed_dictionaries(
    {
        "uncommitted": st.booleans(),
        "behind": st.none()
        | st.builds(SaveBehind, bytes_left=st.integers(0, 10**12), holds_all=st.booleans()),
        "step_us": st.none() | st.integers(0, 10**9),
        "speed": st.builds(
            Speed, bytes_per_second=st.none() | st.integers(0, 10**10), latency_us=st.integers(0, 10**8)
        ),
        "full_bytes": st.integers(0, 10**12),
        "delta_bytes": st.none() | st.integers(0, 10**12),
    }
)
RANK = {Save.SKIP: 0, Save.WAIT: 1, Save.DELTA: 2, Save.FULL: 2, Save.NOTHING: 3}


@settings(max_examples=400, deadline=None)
@given(facts, st.integers(-(10**8), 10**10))
def test_no_plan_ends_after_the_deadline(facts: dict[str, object], left_us: int) -> None:
    found = plan_drain(Notice(source="x", reason="y", deadline_us=NOW + left_us), NOW, **facts)  # type: ignore[arg-type]
    assert found.reason
    if found.save in (Save.WAIT, Save.DELTA, Save.FULL):
        assert left_us > MARGIN_US
        if found.estimate_us is None:
            assert "never measured" in found.reason
        else:
            assert found.estimate_us <= left_us - MARGIN_US
    if found.finish_step:
        assert facts["step_us"] is not None
        assert facts["step_us"] <= left_us - MARGIN_US  # type: ignore[operator]
        speed = facts["speed"]
        assert isinstance(speed, Speed)
        assert speed.bytes_per_second  # never on a guess


@settings(max_examples=400, deadline=None)
@given(facts, st.integers(-(10**8), 10**10), st.integers(0, 10**10))
def test_more_time_is_never_worse(facts: dict[str, object], left_us: int, more_us: int) -> None:
    sooner = Notice(source="x", reason="y", deadline_us=NOW + left_us)
    later = replace(sooner, deadline_us=sooner.deadline_us + more_us)
    less = plan_drain(sooner, NOW, **facts)  # type: ignore[arg-type]
    more = plan_drain(later, NOW, **facts)  # type: ignore[arg-type]
    assert RANK[more.save] >= RANK[less.save]
    assert more.finish_step or not less.finish_step


@settings(max_examples=200, deadline=None)
@given(facts, st.integers(0, 10**10))
def test_nothing_committed_is_saved_again(facts: dict[str, object], left_us: int) -> None:
    found = plan_drain(
        Notice(source="x", reason="y", deadline_us=NOW + left_us),
        NOW,
        **(facts | {"uncommitted": False, "behind": None}),  # type: ignore[arg-type]
    )
    assert found.save is Save.NOTHING


# --- a batch of items ----------------------------------------------------------------------------------------


def test_a_batch_that_was_never_measured_is_let_try() -> None:
    found = plan_batch(notice(15), NOW, begun_us=NOW - SECOND_US, usual_us=None)
    assert found.end_at_us == NOW + 14 * SECOND_US
    assert "may finish if it can" in found.reason


def test_a_batch_that_usually_makes_it_may_finish() -> None:
    found = plan_batch(notice(15), NOW, begun_us=NOW - SECOND_US, usual_us=10 * SECOND_US)
    assert found.end_at_us == NOW + 14 * SECOND_US


def test_a_batch_that_usually_does_not_make_it_is_ended_at_once() -> None:
    found = plan_batch(notice(15), NOW, begun_us=NOW - SECOND_US, usual_us=11 * SECOND_US)
    assert found.end_at_us == NOW
    assert found.reason == "the batch that runs is ended: such a batch takes 11s here, 14s left"


def test_a_short_notice_is_shared_between_the_batch_and_leaving() -> None:
    assert plan_batch(notice(1), NOW, begun_us=NOW, usual_us=None).end_at_us == NOW + SECOND_US // 2
    assert plan_batch(notice(0), NOW, begun_us=NOW, usual_us=None).end_at_us == NOW
    assert plan_batch(notice(-1), NOW, begun_us=NOW, usual_us=None).end_at_us <= NOW


@given(
    less=st.integers(0, 100 * SECOND_US),
    more=st.integers(0, 100 * SECOND_US),
    usual=st.none() | st.integers(0, 100 * SECOND_US),
)
def test_more_time_never_ends_a_batch_sooner(less: int, more: int, usual: int | None) -> None:
    ends = [
        plan_batch(notice(s / SECOND_US), NOW, begun_us=NOW - SECOND_US, usual_us=usual).end_at_us
        for s in sorted((less, more))
    ]
    assert ends[0] <= ends[1]
    assert all(end >= NOW for end in ends)
