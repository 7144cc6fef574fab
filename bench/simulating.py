"""How long a large replay takes: 10,000 GPUs, and as many requests as SUBLET_SIM_REQUESTS says (100,000 unless said; a million is the claim).

Rules of this file:
- The workload is drawn from a seed: people who come at random, each with a few requests of half a minute, enough for the pool to be full at its peaks.
- Scheme 'ours', so every grant, wait and revocation is a decision of `core`. Requests a second are of this machine; how they change with size is not.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from bench.measure import Section, progress
from sublet.core.values import SECOND_US
from sublet.sim.engine import replay
from sublet.sim.report import figures
from sublet.sim.schemes import OURS
from sublet.sim.workload import Arrival, Workload

GPUS = 10_000


def crowd(requests: int, gpus: int, seed: int = 1) -> Workload:
    """About 85 % of the GPUs are wanted at any time, and more than all of them now and then."""
    draw = random.Random(seed)
    found: list[Arrival] = []
    at, visits = 0.0, 0
    a_visit_s = 4 * (30 + 22.7) + 60.0  # what it occupies, about
    while len(found) < requests:
        busy = 1.15 if visits // (2 * gpus) % 4 == 3 else 0.75
        at += draw.expovariate(busy * gpus / a_visit_s)
        visits += 1
        who, when = f"t{draw.randrange(4 * gpus):06d}", at
        for _ in range(draw.randint(2, 6)):
            work = max(1, int(draw.lognormvariate(3.2, 0.6) * SECOND_US))
            found.append(Arrival(tenant=who, at=int(when * SECOND_US), work_us=work))
            when += draw.choice((5.0, 30.0, 60.0))
    return Workload(arrivals=tuple(sorted(found[:requests], key=lambda a: a.at)))


def run(place: Path) -> list[Section]:
    requests = int(os.environ.get("SUBLET_SIM_REQUESTS", "100000"))
    progress(f"simulating: {requests:,} requests on {GPUS:,} GPUs ...")
    section = Section(
        f"A replay of {requests:,} requests, scheme ours",
        ["GPUs", "requests", "events", "cpu s", "events/s", "p95 wait s", "taken from idle"],
    )
    for gpus, count in ((GPUS // 1000, requests // 100), (GPUS, requests)):
        workload = crowd(count, gpus)
        began = time.process_time()
        outcome = replay(workload, OURS, gpus=gpus)
        took = time.process_time() - began
        found = figures(outcome)
        section.rows.append(
            [
                f"{gpus:,}",
                f"{count:,}",
                f"{outcome.events:,}",
                f"{took:.1f}",
                f"{outcome.events / took:,.0f}",
                f"{found.wait.p95_us / SECOND_US:.1f}",
                f"{outcome.ends.get('idle', 0):,}",
            ]
        )
        section.data[f"{gpus}"] = {"requests": count, "events": outcome.events, "cpu_s": took}
    return [section]
