"""Training on nodes that are taken: where each microsecond goes, worked out by hand, and what is advised."""

from __future__ import annotations

import random

import pytest

from sublet.core.progress.cadence import Cost, Losses, best_interval
from sublet.core.values import HOUR_US, MINUTE_US, SECOND_US
from sublet.sim.spot import AUTO, WAYS, SavePlan, Training, advise, cost_per_useful_hour, fixed, replay
from sublet.sim.traces import Availability, NodeSpan

S = SECOND_US
#: A step of 1 s, a save that stops training for 0.5 s and is durable after 2 s, a start of 10 s.
TRAINING = Training(step_us=S, stall_us=S // 2, save_us=2 * S, restart_us=10 * S)


def trace(*spans: tuple[float, float, bool]) -> Availability:
    found = tuple(NodeSpan(since=int(a * S), until=int(b * S), lost=lost) for a, b, lost in spans)
    return Availability(name="t", spans=found, ends_at=max(s.until for s in found))


def parts(result) -> tuple[float, ...]:
    found = (result.useful_us, result.starting_us, result.saving_us, result.lost_us, result.left_over_us)
    assert sum(found) == result.node_us
    return tuple(us / S for us in found)


def test_a_loss_takes_what_was_not_in_a_durable_save():
    # Starts until 10; steps to 30, a save stops it until 30.5 and is durable at 32; steps to 50.5, saved at 51, durable at 52.5; steps to 60.
    assert parts(replay(trace((0, 60, True)), TRAINING, fixed(20 * S))) == (40, 10, 1, 9, 0)


def test_a_save_that_was_not_durable_in_time_does_not_count():
    # The second save begins at 50.5 and would be durable at 52.5; the node goes at 52: of its 41 steps 20 are saved.
    assert parts(replay(trace((0, 52, True)), TRAINING, fixed(20 * S))) == (20, 10, 1, 21, 0)
    assert parts(replay(trace((0, 52.5, True)), TRAINING, fixed(20 * S))) == (40, 10, 1, 1.5, 0)


def test_never_saving_keeps_only_what_no_loss_has_ended():
    assert parts(replay(trace((0, 60, True)), TRAINING, fixed(0))) == (0, 10, 0, 50, 0)
    assert parts(replay(trace((0, 60, False)), TRAINING, fixed(0))) == (50, 10, 0, 0, 0)


def test_a_node_that_goes_before_the_first_step_only_costs_a_start():
    assert parts(replay(trace((0, 4, True)), TRAINING, fixed(20 * S))) == (0, 4, 0, 0, 0)


def test_told_in_time_the_step_is_ended_and_saved():
    # Told at 50: one more step to 51, a save stops it for half a second and is durable at 53.
    told = fixed(0, notice_us=10 * S)
    assert parts(replay(trace((0, 60, True)), TRAINING, told)) == (41, 10, 0.5, 0, 8.5)
    # Not enough time for a save: what was done is lost.
    short = fixed(0, notice_us=2 * S)
    assert replay(trace((0, 60, True)), TRAINING, short).useful_us == 0


def test_a_save_in_flight_is_waited_for():
    # Every second is shorter than a save takes: one begins when the one before it is durable.
    found = replay(trace((0, 31, True)), TRAINING, fixed(S))
    assert found.saves == 8  # at 11, 13.5, 16, ... 28.5
    assert sum(parts(found)) == 31


def test_a_job_goes_on_with_what_it_has_learnt_and_a_new_one_with_nothing():
    lost = trace((0, 600, True), (600, 1200, True), (1300, 2400, False))
    found = replay(lost, TRAINING, AUTO)
    assert (found.jobs, found.losses) == (1, 2)
    held = 600 * S + 600 * S + 1100 * S
    cost = Cost(stall_us=TRAINING.stall_us, save_us=TRAINING.save_us)
    expected = best_interval(cost, Losses(count=2, held_us=held)).us
    assert found.last_every_us == pytest.approx(expected, rel=0.02)
    assert replay(trace((0, 600, True), (0, 600, True), (1300, 2400, False)), TRAINING, AUTO).jobs == 2


def test_with_a_notice_losses_do_not_make_auto_save_more_often():
    lost = trace(*((i * 600, i * 600 + 600, True) for i in range(6)))
    warned = replay(lost, TRAINING, SavePlan(name="told", every_us=None, notice_us=5 * S))
    assert warned.last_every_us > replay(lost, TRAINING, AUTO).last_every_us
    assert warned.goodput > replay(lost, TRAINING, AUTO).goodput


def random_trace(seed: int) -> Availability:
    draw = random.Random(seed)
    spans, at = [], 0.0
    for _ in range(60):
        at += draw.expovariate(1 / 200)
        spans.append(
            (
                round(at, 2),
                round(at + draw.choice((3, 30, 600, 4000)) * draw.random() + 1, 2),
                draw.random() < 0.8,
            )
        )
    return trace(*spans)


@pytest.mark.parametrize("seed", range(5))
def test_every_microsecond_is_in_one_part_and_no_part_is_negative(seed):
    for way in (
        AUTO,
        *WAYS,
        fixed(10 * MINUTE_US, 30 * S),
        SavePlan(name="x", every_us=None, notice_us=15 * S),
    ):
        found = replay(random_trace(seed), TRAINING, way)
        assert min(parts(found)) >= 0, way.name
        assert found.starting_us > 0


@pytest.mark.parametrize("seed", range(3))
def test_auto_is_close_to_the_best_interval_that_was_tried(seed):
    advice = advise([random_trace(seed)], TRAINING)
    assert advice.auto_goodput >= 0.95 * advice.goodput
    assert advice.goodput >= replay(random_trace(seed), TRAINING, fixed(10 * MINUTE_US)).goodput
    assert "Young's rule" in advice.reasons[1]


def test_advice_is_the_arithmetic_it_says():
    # One loss an hour: sqrt(2 x 0.5 s x 3600 s) = 60 s.
    draw, spans = random.Random(3), []
    lengths = [draw.expovariate(1) for _ in range(100)]
    for length in lengths:
        spans.append((0, length * 3600 * 100 / sum(lengths), True))
    advice = advise([trace(*spans)], TRAINING)
    assert "= 60s;" in advice.reasons[1]
    assert 15 * S <= advice.every_us <= 4 * MINUTE_US
    assert advice.ttl_us == 10 * S  # sqrt(5 ms x 3600 s / 0.4355) is 6.4 s
    rare = advise([trace((0, 3600 * 20, True))], TRAINING)
    assert rare.ttl_us > 25 * S  # sqrt(5 ms x 20 h / 0.4355) is 28.8 s


def test_a_useful_hour_costs_more_than_an_hour():
    found = replay(trace((0, 3600, False)), Training(restart_us=360 * S), fixed(0))
    assert found.goodput == pytest.approx(0.9)
    assert cost_per_useful_hour(found, 900_000) == 1_000_000
    assert found.node_us == HOUR_US
