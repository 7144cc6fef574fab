"""The replay: waits worked out by hand, what holds after every event, and the same result every time."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from sublet.core.errors import BadInput, InvariantBroken
from sublet.core.leasing.policy import Policy
from sublet.core.leasing.renewal import first_try_at
from sublet.core.values import HOUR_US, MINUTE_US, SECOND_US
from sublet.sim.engine import ReplayOutcome, TraceReplay, replay
from sublet.sim.schemes import (
    FAIR_TTL,
    IDLE_CULL,
    OURS,
    PASSIVE_TTL,
    PER_REQUEST,
    PER_USER,
    SCHEMES,
    with_ttl,
)
from tests.sim.workloads import came, holds, people

RESTORE_US = 10 * SECOND_US


def waits(workload, scheme, gpus=1) -> list[tuple[str, float]]:
    """By arrival, in seconds; a restore takes ten and a teardown half a one."""
    outcome = replay(workload, scheme, gpus=gpus, restore_us=RESTORE_US, teardown_us=SECOND_US // 2)
    return [(s.tenant, s.wait_us / SECOND_US) for s in sorted(outcome.served, key=lambda s: s.arrived_at)]


# --- by hand -----------------------------------------------------------------------------------------------------

#: a restores to 10 and runs to 30. b comes at 12. a comes back at 40.
TWO = came(("a", 0, 20), ("b", 12, 5), ("a", 40, 10))


def test_an_idle_gpu_goes_to_who_waits():
    # Idle is said at 30.25 and believed at 35.25; the device is clean at 35.75, b has restored at 45.75 and ends at 50.75.
    # a asked at 40; b is taken at 56, a device is there at 56.5, restored at 66.5.
    assert waits(TWO, OURS) == [("a", 10), ("b", 33.75), ("a", 26.5)]


def test_without_idle_on_demand_it_waits_for_the_ttl():
    # a keeps the GPU until 330 and finds it warm at 40, which moves that to 350; b is restored at 360.5.
    assert waits(TWO, PASSIVE_TTL) == [("a", 10), ("b", 348.5), ("a", 0)]
    assert waits(TWO, FAIR_TTL) == [("a", 10), ("b", 348.5), ("a", 0)]


def test_an_idle_cull_waits_for_the_cull():
    assert waits(TWO, IDLE_CULL) == [("a", 10), ("b", 50 + 1800 + 10.5 - 12), ("a", 0)]


def test_an_instance_per_user_waits_for_the_end_of_the_stay():
    assert waits(TWO, PER_USER) == [("a", 10), ("b", 8 * 3600 + 10.5 - 12), ("a", 0)]


def test_a_gpu_per_request_restores_for_each():
    # b has it from 30.5, restored at 40.5, done at 45.5; a from 46, restored at 56.
    assert waits(TWO, PER_REQUEST) == [("a", 10), ("b", 28.5), ("a", 16)]


def test_who_comes_back_to_a_gpu_it_still_holds_does_not_wait():
    assert waits(came(("a", 0, 20), ("a", 60, 5)), OURS) == [("a", 10), ("a", 0)]


def test_requests_of_one_tenant_run_one_after_another():
    found = replay(came(("a", 0, 20), ("a", 1, 5)), OURS, gpus=2, restore_us=RESTORE_US)
    assert [(s.wait_us, s.began_at - s.alone_at) for s in found.served] == [
        (10 * SECOND_US, 10 * SECOND_US),
        (29 * SECOND_US, 0),
    ]


def test_two_gpus_serve_two_tenants_at_once():
    assert waits(TWO, OURS, gpus=2) == [("a", 10), ("b", 10), ("a", 0)]


#: a never stops: five runs of ten minutes. b comes at 100.
BUSY = came(*(("a", i, 600) for i in range(5)), ("b", 100, 5))


def test_who_never_stops_is_cut_off_at_the_hold_cap_and_its_run_begins_again():
    # The cap is at 1800: a is told at 1785 and cut off in its third run, which began at 1210. b runs at 1810.5 and ends at
    # 1815.5; it is taken for idle at 1820.75, and a is restored at 1831.25.
    found = replay(BUSY, OURS, gpus=1, restore_us=RESTORE_US)
    served = {(s.tenant, s.arrived_at // SECOND_US): s for s in found.served}
    assert served[("b", 100)].wait_us == int(1710.5 * SECOND_US)
    third = served[("a", 2)]
    assert (third.began_at, third.lost_runs) == (int(1831.25 * SECOND_US), 1)
    assert found.lost_us == (1800 - 1210) * SECOND_US
    assert found.ends["hold_cap"] == 1
    assert found.worked_us == (5 * 600 + 5) * SECOND_US


def test_without_a_hold_cap_who_never_stops_keeps_it():
    uncapped = replace(OURS, policy=Policy(hold_cap_us=0))
    assert dict(waits(BUSY, uncapped))["b"] == 10 + 3000 + 5.25 + 0.5 + 10 - 100


def test_who_is_told_ends_its_run_in_the_grace_and_begins_no_other():
    # a's twentieth run of 89 ends at 1790: told at 1785, it goes then, and has lost nothing.
    found = replay(
        came(*(("a", i, 89) for i in range(25)), ("b", 100, 5)), OURS, gpus=1, restore_us=RESTORE_US
    )
    assert [s.began_at for s in found.served if s.tenant == "b"] == [int(1800.5 * SECOND_US)]
    assert (found.lost_us, found.ends["hold_cap"]) == (0, 1)


def test_who_came_first_is_first_where_nobody_is_fair():
    crowd = came(("a", 0, 20), ("b", 12, 5), ("c", 13, 5), ("d", 14, 5))
    assert waits(crowd, PER_REQUEST) == [("a", 10), ("b", 28.5), ("c", 43), ("d", 57.5)]


def test_a_renewal_refused_for_somebody_who_waits_a_moment_is_tried_again():
    # a is past its cap and renewed, for nobody waits. w comes a moment before one renewal and waits until c's GPU is clean.
    renewed = [0]
    while renewed[-1] <= 31 * MINUTE_US:
        renewed.append(first_try_at(renewed[-1], OURS.ttl_us, 1))
    moment = renewed[-1] / SECOND_US
    crowd = came(("a", 0, 4000), ("c", moment - 100, 20), ("w", moment - 0.25, 5))
    found = replay(crowd, OURS, gpus=2, restore_us=RESTORE_US)
    assert (found.lost_us, found.ends) == (0, {"idle": 1, "released": 2})
    assert [s.wait_us for s in found.served if s.tenant == "w"] == [int(10.5 * SECOND_US)]


def test_held_is_from_the_grant_until_the_device_is_clean():
    found = replay(came(("a", 0, 20)), PER_REQUEST, gpus=1, restore_us=RESTORE_US)
    assert (found.held_us, found.restored_us, found.worked_us) == (30_500_000, 10_000_000, 20_000_000)
    kept = replay(came(("a", 0, 20)), OURS, gpus=1, restore_us=RESTORE_US)
    assert kept.held_us == 330_500_000  # ttl after its last use, and it was renewed meanwhile
    assert kept.ends == {"released": 1}


def test_another_ttl_is_what_schemes_with_a_ttl_have():
    assert dict(waits(TWO, with_ttl(PASSIVE_TTL, MINUTE_US)))["b"] == 50 + 60 + 10.5 - 12
    assert with_ttl(IDLE_CULL, MINUTE_US) is IDLE_CULL
    assert with_ttl(OURS, HOUR_US).says == "ttl 1h00m, renewed while used, idle on demand"


# --- after every event -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_gpu_is_held_twice_and_every_request_is_served_once(name, seed):
    workload = people(seed, tenants=25, visits=60, apart_s=40)
    run = TraceReplay(workload, SCHEMES[name], gpus=3, after_event=holds)
    found = run.run()
    asked = sorted((a.tenant, a.at, a.work_us) for a in workload.arrivals)
    assert sorted((s.tenant, s.arrived_at, s.ended_at - s.began_at) for s in found.served) == asked
    assert all(s.arrived_at <= s.alone_at <= s.began_at for s in found.served)
    assert not run.world.leases
    assert not run.world.waiters
    assert found.held_us >= found.worked_us + found.restored_us + found.lost_us


def test_a_tenant_below_its_share_is_not_starved_by_one_that_never_stops():
    hog = [("hog", float(i), 60.0) for i in range(400)]
    others = [(f"small{i}", 700.0 * i + 30, 20.0) for i in range(30)]
    passed: list[str] = []

    def nobody_is_passed(run: TraceReplay) -> None:
        holds(run)
        latest = max(run.world.leases.values(), key=lambda x: x.epoch, default=None)
        granted_now = latest is not None and latest.granted_at == run.world.now
        if granted_now and latest.tenant == "hog" and run.world.waiters and latest.joined_at < run.world.now:
            passed.extend(w.tenant for w in run.world.waiters.values())

    found = TraceReplay(came(*hog, *others), OURS, gpus=1, after_event=nobody_is_passed).run()
    assert passed == []
    longest = max(s.wait_us for s in found.served if s.tenant != "hog")
    assert longest <= 30 * MINUTE_US + 5 * MINUTE_US  # a hold cap, and those who came before
    first_come = replay(came(*hog, *others), PASSIVE_TTL, gpus=1)
    assert max(s.wait_us for s in first_come.served if s.tenant != "hog") > 6 * HOUR_US


def test_a_world_that_is_wrong_is_noticed():
    def steal(run: TraceReplay) -> None:
        for name, device in run.world.devices.items():
            run.world.devices[name] = replace(device, free_bytes=device.capacity_bytes)
        run.world.check()

    with pytest.raises(InvariantBroken, match="device gpu-00000 says"):
        TraceReplay(TWO, OURS, gpus=1, after_event=steal).run()


def test_a_pool_of_nothing_is_refused():
    with pytest.raises(BadInput, match="0 GPUs cannot be simulated"):
        replay(TWO, OURS, gpus=0)


# --- the same every time -----------------------------------------------------------------------------------------


def digest(found: ReplayOutcome) -> str:
    return hashlib.sha256(repr((found.served, found.ends, found.held_us, found.events)).encode()).hexdigest()


def one_digest() -> str:
    return digest(replay(people(7, tenants=25, visits=60, apart_s=30), OURS, gpus=3))


def test_a_replay_is_the_same_whatever_the_hash_seed():
    code = "from tests.sim.test_engine import one_digest; print(one_digest())"
    found = {one_digest()}
    for seed in ("0", "4711"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout.strip())
    assert len(found) == 1
