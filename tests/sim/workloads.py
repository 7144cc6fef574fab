"""Small workloads for the tests of the simulator, and what must hold after every event of any replay."""

from __future__ import annotations

import random
from pathlib import Path

from sublet.core.values import SECOND_US
from sublet.sim.engine import Doing, TraceReplay
from sublet.sim.workload import Arrival, Workload

#: Beside the checkout; the project does not contain it.
SHARED_TRACE = Path(__file__).parents[2].parent / "shared" / "traces" / "alibaba_genai_requests.csv"


def came(*requests: tuple[str, float, float]) -> Workload:
    """(tenant, when, how long), in seconds."""
    return Workload(
        arrivals=tuple(
            Arrival(tenant=tenant, at=int(at * SECOND_US), work_us=int(work * SECOND_US))
            for tenant, at, work in sorted(requests, key=lambda r: r[1])
        )
    )


def people(seed: int, *, tenants: int, visits: int, apart_s: float) -> Workload:
    """People who come, try a few things with pauses between them, and go: sometimes faster than their requests run."""
    draw = random.Random(seed)
    found: list[tuple[str, float, float]] = []
    at = 0.0
    for _ in range(visits):
        at += draw.expovariate(1 / apart_s)
        who, when = f"t{draw.randrange(tenants):03d}", at
        for _ in range(draw.randint(1, 8)):
            found.append((who, round(when, 3), round(draw.lognormvariate(3.1, 0.7), 3)))
            when += draw.choice((2, 20, 60, 200))
    return came(*found)


def holds(replay: TraceReplay) -> None:
    """After every event."""
    world = replay.world
    world.check()
    owners = [x.tenant for x in world.leases.values() if x.state.value != "ended"]
    assert len(owners) == len(set(owners)), f"a tenant holds two GPUs: {owners}"
    for session in replay.sessions.values():
        with_gpu = session.doing in (Doing.RESTORING, Doing.RUNNING, Doing.RESTING)
        assert with_gpu == (session.lease is not None)
        if with_gpu:
            assert world.leases[session.lease.id].tenant == session.tenant
        assert not session.backlog or session.doing is not Doing.NOTHING, f"{session.tenant} was forgotten"
    if world.waiters:
        free = [d.id for d in world.devices.values() if d.leases == 0]
        assert not free, f"{free} are free while {list(world.waiters)} wait"
