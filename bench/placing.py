"""What it costs to place a leased worker on a Ray node, beside a bare Ray actor placed on the same node.

Rules of this file:
- One cluster of two real nodes on this machine, one driver, both in turns: an actor until it has answered once, and a lease asked for,
  granted, placed, seated and armed until its worker has answered once.
- Both are given back before the next turn begins.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path

from bench.measure import Goal, Section, median_ratio, progress
from sublet.testing.postgres import PostgresServer
from sublet.testing.ray_cluster import PYTHON, running

TURNS = 9
CALLS = 300

DRIVER = """
import json, sys, time
import ray, sublet
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

turns, calls = int(sys.argv[1]), int(sys.argv[2])
taken = {"bare actor": [], "leased worker": [], "bare actor, a call": [], "leased worker, a call": []}

def timed(name, work, times=1):
    begun = time.perf_counter()
    for _ in range(times):
        done = work()
    taken[name].append((time.perf_counter() - begun) * 1000 / times)
    return done

def worker():
    lease = sublet.gpu(vram="1MiB", ttl="1m").acquire()
    lease.run(len, "a")
    return lease

worker().release()  # agents, wardens and zygotes are there from now on
node = next(n["NodeID"] for n in ray.nodes() if n["Alive"])

@ray.remote(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
class Bare:
    def length(self, text):
        return len(text)

def bare():
    actor = Bare.remote()
    ray.get(actor.length.remote("a"))
    return actor

for _ in range(turns):
    time.sleep(0.5)
    actor = timed("bare actor", bare)
    timed("bare actor, a call", lambda: ray.get(actor.length.remote("a")), calls)
    ray.kill(actor)
    time.sleep(0.5)
    lease = timed("leased worker", worker)
    timed("leased worker, a call", lambda: lease.run(len, "a"), calls)
    lease.release()
print(json.dumps(taken))
"""


def run(place: Path) -> list[Section]:
    if not os.path.exists(PYTHON):
        progress("placing: there is no Ray here (make setup puts it into .venv/ray); left out")
        return []
    progress("placing: a cluster of two nodes ...")
    server = PostgresServer()
    server.start()
    try:
        with running(server.url, {"z": "host:1x1GiB", "a": "host:1x1GiB"}) as cluster:
            progress("placing: leased workers and bare actors, in turns ...")
            done = subprocess.run(
                [PYTHON, "-c", DRIVER, str(TURNS), str(CALLS)],
                env=cluster.environment(),
                stdout=subprocess.PIPE,
                check=True,
                timeout=900,
            )
    finally:
        server.stop()
    return [_section(json.loads(done.stdout.splitlines()[-1]))]


def _section(taken: dict[str, list[float]]) -> Section:
    section = Section(
        "On a Ray node, until it has answered once, and per call, ms", ["", "median", "range", "ratio"]
    )
    for name, times in taken.items():
        ratio = median_ratio(times, taken[name.replace("leased worker", "bare actor")])
        section.rows.append(
            [name, f"{statistics.median(times):.2f}", f"{min(times):.2f}-{max(times):.2f}", f"{ratio:.2f}"]
        )
        if name == "leased worker":
            section.goals.append(
                Goal("a leased worker placed, against a bare actor", ratio, 1.3, at_most=True)
            )
    section.notes.append(
        "the actor is a new process each time, as Ray starts it; the worker is forked from the node's zygote"
    )
    section.data = dict(taken)
    return section
