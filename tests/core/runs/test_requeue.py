"""When a command is started again, with what the run leaves if not, and which code says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet.core.errors import BadInput
from sublet.core.runs.exits import PROFILES, Outcome, exit_code
from sublet.core.runs.requeue import (
    BACKOFF_CEILING_US,
    Attempt,
    Cause,
    Leave,
    Restart,
    RestartLimits,
    RestartTally,
    backoff,
    decide,
)

attempts = st.builds(
    Attempt,
    code=st.one_of(st.none(), st.integers(0, 255)),
    cause=st.sampled_from(Cause),
    why=st.just("w"),
    killed=st.booleans(),
    progressed=st.booleans(),
    unfinished=st.booleans(),
)
limits = st.builds(
    RestartLimits, failures=st.integers(0, 3), preemptions=st.one_of(st.none(), st.integers(0, 3))
)


def is_done(ended: Attempt) -> bool:
    return ended.code == 0 and not ended.killed and not ended.unfinished


STOPPING = {Cause.STOP, Cause.TIME, Cause.MACHINE}


@given(st.lists(attempts, max_size=30), limits)
def test_over_any_history_the_two_budgets_hold_and_do_not_mix(
    history: list[Attempt], bounds: RestartLimits
) -> None:
    tally = RestartTally()
    failures = preemptions = 0
    for restarts, ended in enumerate(history, 1):
        decision = decide(ended, tally, bounds)
        assert decision.reason
        if ended.progressed:
            failures = 0
        if isinstance(decision, Leave):
            return
        tally = decision.tally
        assert not is_done(ended), "a command that is done was started again"
        assert ended.cause not in STOPPING, "somebody asked the run to stop"
        if ended.cause is Cause.LEASE or ended.killed:
            preemptions += 1
            assert decision.pause_us == 0
        else:
            failures += 1
            assert 0 < decision.pause_us <= BACKOFF_CEILING_US
        assert failures <= bounds.failures
        assert bounds.preemptions is None or preemptions <= bounds.preemptions
        assert (tally.failures, tally.preemptions, tally.restarts) == (failures, preemptions, restarts)


@given(attempts, st.integers(0, 100), limits)
def test_a_lost_lease_is_leased_again_whatever_has_failed_before(
    ended: Attempt, failed: int, bounds: RestartLimits
) -> None:
    bounds = replace(bounds, preemptions=None)
    lost = replace(ended, cause=Cause.LEASE)
    decision = decide(lost, RestartTally(failures=failed), bounds)
    assert isinstance(decision, Leave if is_done(lost) else Restart)


@given(attempts, limits)
def test_asking_the_run_to_stop_always_ends_it(ended: Attempt, bounds: RestartLimits) -> None:
    for cause in STOPPING:
        decision = decide(replace(ended, cause=cause), RestartTally(), bounds)
        assert isinstance(decision, Leave)
        assert (decision.outcome is Outcome.DONE) == is_done(ended)


ROWS = [
    (Attempt(code=0), Outcome.DONE, 0),
    (Attempt(code=0, cause=Cause.STOP), Outcome.DONE, 0),
    (Attempt(code=3), Outcome.FAILED, 3),
    (Attempt(code=139), Outcome.FAILED, 139),
    (Attempt(code=None), Outcome.FAILED, 137),
    (Attempt(code=85), Outcome.PREEMPTED, 85),
    (Attempt(code=85, cause=Cause.STOP), Outcome.PREEMPTED, 85),
    (Attempt(code=85, cause=Cause.MACHINE), Outcome.PREEMPTED, 85),
    (Attempt(code=143, cause=Cause.STOP), Outcome.STOPPED, 143),
    (Attempt(code=1, cause=Cause.MACHINE), Outcome.STOPPED, 1),
    (Attempt(code=85, cause=Cause.TIME), Outcome.TIME_LIMIT, 124),
    (Attempt(code=143, cause=Cause.TIME), Outcome.TIME_LIMIT, 124),
    (Attempt(code=137, cause=Cause.TIME, killed=True), Outcome.KILLED, 137),
    (Attempt(code=137, cause=Cause.STOP, killed=True), Outcome.KILLED, 137),
]


@pytest.mark.parametrize(("ended", "outcome", "code"), ROWS)
def test_what_a_run_leaves_with(ended: Attempt, outcome: Outcome, code: int) -> None:
    decision = decide(ended, RestartTally(), RestartLimits())
    assert isinstance(decision, Leave)
    assert (decision.outcome, exit_code(decision.outcome, ended.code)) == (outcome, code)


@pytest.mark.parametrize(
    ("cause", "outcome"),
    [(Cause.STOP, Outcome.PREEMPTED), (Cause.LEASE, None), (Cause.NOBODY, Outcome.PREEMPTED)],
)
def test_steps_left_undone_because_of_a_warning_are_not_done_by_exit_0(
    cause: Cause, outcome: Outcome | None
) -> None:
    """A script that catches everything may have caught the order to leave."""
    decision = decide(Attempt(code=0, cause=cause, why="w", unfinished=True), RestartTally(), RestartLimits())
    if outcome is None:
        assert isinstance(decision, Restart)
        assert "left steps undone" in decision.reason
    else:
        assert isinstance(decision, Leave)
        assert (decision.outcome, exit_code(decision.outcome, 0)) == (outcome, 85)


def test_progress_forgives_failures() -> None:
    spent = RestartTally(failures=2)
    assert isinstance(decide(Attempt(code=1), spent, RestartLimits(failures=2)), Leave)
    again = decide(Attempt(code=1, progressed=True), spent, RestartLimits(failures=2))
    assert isinstance(again, Restart)
    assert again.tally.failures == 1


def test_a_limit_of_preemptions_is_the_last_word() -> None:
    decision = decide(
        Attempt(code=85, cause=Cause.LEASE, why="preempted"),
        RestartTally(preemptions=1),
        RestartLimits(preemptions=1),
    )
    assert isinstance(decision, Leave)
    assert decision.outcome is Outcome.PREEMPTED
    assert "--preemptions 1" in decision.reason


def test_other_codes_may_mean_drained() -> None:
    wanted = RestartLimits(drained_codes=(77, 85))
    decision = decide(Attempt(code=77, cause=Cause.MACHINE), RestartTally(), wanted)
    assert isinstance(decision, Leave)
    assert decision.outcome is Outcome.PREEMPTED


@given(st.integers(1, 1000), st.integers(0, 1 << 64), st.integers(1, 3_600_000_000))
def test_the_pause_grows_to_a_ceiling_and_is_never_nothing_of_it(failures: int, seed: int, base: int) -> None:
    pause = backoff(failures, seed, base)
    whole = min(base << min(failures - 1, 20), max(base, BACKOFF_CEILING_US))
    assert whole // 2 <= pause <= whole
    assert backoff(failures, seed, base) == pause


def test_profiles_differ_where_the_docs_say() -> None:
    codes = {profile: [exit_code(outcome, 9, profile) for outcome in Outcome] for profile in PROFILES}
    assert codes["default"] == [0, 85, 75, 124, 137, 9, 9, 137]
    assert codes["slurm"] == codes["condor"] == codes["default"]
    assert codes["k8s"] == [0, 143, 75, 124, 137, 9, 9, 137]
    assert codes["sge"] == [0, 99, 99, 124, 137, 9, 9, 137]
    assert codes["zero"] == [0, 0, 75, 124, 137, 9, 9, 137]
    with pytest.raises(BadInput, match="use default, k8s"):
        exit_code(Outcome.DONE, 0, "lsf")
