"""Job logs: gangs, partitions, first come first served, and ours, worked out by hand."""

from __future__ import annotations

import random

import pytest

from sublet.core.errors import BadInput
from sublet.core.values import HOUR_US, SECOND_US
from sublet.sim.jobs import FinishedJob, JobReplay, dedicated, fifo, figures, ours, partitions
from sublet.sim.traces import TraceJob, read_jobs
from tests.sim.workloads import SHARED_TRACE

S = SECOND_US


def job(tenant: str, at: float, work: float, gpus: int = 1) -> TraceJob:
    return TraceJob(tenant=tenant, at=int(at * S), work_us=int(work * S), gpus=gpus)


def waits(ended: list[FinishedJob]) -> dict[tuple[str, float], float]:
    return {(e.job.tenant, e.job.at / S): e.wait_us / S for e in ended}


#: Two GPUs. a's job of both comes when one is taken; b's small one comes after it.
GANG = [job("x", 0, 100), job("a", 1, 10, 2), job("b", 2, 10)]


def test_first_come_first_served_lets_nobody_pass():
    assert waits(fifo(GANG, 2)) == {("x", 0): 0, ("a", 1): 99, ("b", 2): 108}


def test_ours_lets_a_small_one_pass_for_a_while():
    assert waits(ours(GANG, 2)) == {("x", 0): 0, ("b", 2): 0, ("a", 1): 99}


def test_and_then_keeps_room_for_the_gang():
    x, hours = 5 * 3600, 3600
    late = [job("x", 0, x), job("a", 1, 10, 2), job("b", 3 * hours, 100), job("c", 4 * hours + 1, 2 * hours)]
    found = waits(ours(late, 2))
    assert found[("b", 3 * hours)] == 0  # passes
    assert found[("a", 1)] == x - 1  # c, who came after four hours, does not


def test_ours_serves_who_has_used_less_before_who_has_used_more():
    jobs = [job("hog", 0, 100), job("hog", 1, 100), job("small", 2, 100)]
    assert waits(ours(jobs, 1)) == {("hog", 0): 0, ("small", 2): 98, ("hog", 1): 199}
    assert waits(fifo(jobs, 1))[("small", 2)] == 198


def test_a_hold_cap_makes_room_and_what_was_done_is_kept():
    # hog is told a grace (15 s) before its hour: it has worked 3585 s; small runs to 3595; hog goes on at 3595 + 60 with 3615 left.
    jobs = [job("hog", 0, 7200), job("small", 100, 10)]
    found = {e.job.tenant: e for e in ours(jobs, 1, hold_cap_us=HOUR_US)}
    assert found["small"].wait_us == 3485 * S
    assert found["hog"].ended_at == (3595 + 60 + 3615) * S
    assert (found["hog"].preemptions, found["hog"].wait_us) == (1, 70 * S)


def test_without_anybody_waiting_the_cap_takes_nothing():
    found = ours([job("hog", 0, 7200)], 1, hold_cap_us=HOUR_US)
    assert (found[0].preemptions, found[0].wait_us) == (0, 0)


def test_a_cap_that_applied_when_it_was_granted_does_not_end_it_when_nobody_waits_any_more():
    # small waits when hog is granted at 10, so hog is promised no more than its cap; small is served at 20, and at the cap nobody waits.
    jobs = [job("x", 0, 10), job("y", 0, 20), job("hog", 1, 9000), job("small", 2, 5)]
    found = {e.job.tenant: e for e in ours(jobs, 2, hold_cap_us=HOUR_US)}
    assert (found["hog"].wait_us, found["hog"].preemptions) == (9 * S, 0)
    assert found["small"].wait_us == 18 * S


def test_a_gang_gets_the_room_of_many_that_are_past_their_cap():
    # a alone is no room for the gang, so nobody is told for it until b is past its cap too.
    jobs = [job("a", 0, 9000), job("b", 600, 9000), job("gang", 700, 100, 2)]
    found = {e.job.tenant: e for e in ours(jobs, 2, hold_cap_us=HOUR_US)}
    assert found["gang"].wait_us == (600 + 3600 - 15 - 700) * S  # when b, the later one, is told
    assert found["a"].preemptions >= 1
    assert all(e.wait_us >= 0 for e in found.values())


def test_partitions_are_by_work_and_hold_the_largest_job():
    jobs = [job("big", 0, 100, 4), job("busy", 0, 1000), job("busy", 0, 1000), job("idle", 0, 1)]
    assert partitions(jobs, 10) == {"big": 4, "busy": 5, "idle": 1}
    with pytest.raises(BadInput, match="cannot be divided"):
        partitions(jobs, 5)


def test_partitions_do_not_help_each_other():
    jobs = [job("a", 0, 100), job("a", 0, 100), job("b", 0, 100)]
    assert max(e.wait_us for e in dedicated(jobs, 2)) == 100 * S
    assert max(e.wait_us for e in fifo(jobs, 3)) == 0


def test_a_job_larger_than_the_pool_is_refused():
    for way in (fifo, ours):
        with pytest.raises(BadInput, match="a job needs 4 GPUs and there are 2: use --gpus 4 or more"):
            way([job("a", 0, 1, 4)], 2)


def test_figures():
    ended = [
        FinishedJob(job=job("a", 0, 60), ended_at=120 * S),  # waited 60: slowdown 2
        FinishedJob(job=job("b", 0, 1), ended_at=1 * S),  # no wait: 1
        FinishedJob(job=job("b", 0, 10), ended_at=130 * S, preemptions=2),  # waited 120: 130 / 60
    ]
    found = figures("x", 2, ended)
    assert (found.mean_us, found.p99_us, found.preemptions) == (60 * S, 120 * S, 2)
    assert found.worst_slowdown == 2
    assert found.worst_tenant == "a"
    assert found.slowdown == pytest.approx((2 + (1 + 130 / 60) / 2) / 2)
    assert found.at_once == pytest.approx(1 / 3)
    assert found.utilisation == pytest.approx(71 / (2 * 130))


def random_jobs(seed: int, count: int = 150) -> list[TraceJob]:
    draw = random.Random(seed)
    at, found = 0.0, []
    for _ in range(count):
        at += draw.expovariate(1 / 40)
        found.append(
            job(
                f"t{draw.randrange(6)}",
                round(at, 1),
                round(draw.lognormvariate(4, 1.5), 1) + 1,
                draw.choice((1, 1, 1, 2, 4)),
            )
        )
    return found


@pytest.mark.parametrize("cap", [0, 120 * S])
def test_every_job_ends_once_and_no_gpu_is_held_twice(cap):
    jobs = random_jobs(4)
    run = JobReplay(jobs, 8, hold_cap_us=cap, after_event=lambda r: r.world.check())
    found = run.run()
    assert sorted((e.job.tenant, e.job.at) for e in found) == sorted((j.tenant, j.at) for j in jobs)
    assert all(e.wait_us >= 0 for e in found)
    assert not run.world.leases
    assert (sum(e.preemptions for e in found) > 0) is bool(cap)


def test_the_real_jobs_as_the_reference_has_them():
    path = SHARED_TRACE.parent / "philly_two_weeks.csv"
    if not path.exists():
        pytest.skip("the trace philly_two_weeks.csv is not in ../shared/traces")
    from sublet.sim.traces import of_busy_tenants

    day = 24 * HOUR_US
    jobs = [
        TraceJob(tenant=j.tenant, at=j.at, work_us=min(j.work_us, day), gpus=j.gpus)
        for j in of_busy_tenants(read_jobs(path), 20)
    ]
    found = figures("fifo", 250, fifo(jobs, 250))
    assert round(found.mean_us / S) == 5647
    assert round(found.p90_us / S) == 22_166
    assert round(found.p99_us / S) == 31_216
    assert (round(found.slowdown, 1), round(found.worst_slowdown, 1), round(found.jain, 3)) == (
        16.4,
        47.8,
        0.528,
    )
