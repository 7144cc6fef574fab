"""Writes the tables of docs/explain/simulation.md from the traces: `python docs/traces.py FOLDER [--long]`. A test compares.

Rules of this file:
- A table stands between two comments that name it. What is between them is written here, and nothing else is touched.
- Without `--long` only what takes seconds is written anew; the job log under our own decisions takes minutes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from sublet.core.values import DAY_US, HOUR_US, SECOND_US
from sublet.sim import jobs, spot
from sublet.sim.engine import replay
from sublet.sim.report import figures, seconds
from sublet.sim.schemes import OURS, PASSIVE_TTL, PER_REQUEST
from sublet.sim.traces import Availability, TraceJob, of_busy_tenants, read_availability, read_jobs
from sublet.sim.workload import first_part, read_requests

PAGE = Path(__file__).parent / "explain" / "simulation.md"
SPOT = (
    "bamboo_p3_events.csv",
    "bamboo_g4dn_events.csv",
    "bamboo_gcp_v100x1-east1c_count.csv",
    "parcae_segments.csv",
)
S = SECOND_US
#: 10 GB of state: it stops training for 0.83 s, is durable after 5 s, and a restart takes a minute.
TRAINING = spot.Training(step_us=S, stall_us=833_333, save_us=5 * S, restart_us=60 * S)
WAYS = (
    spot.AUTO,
    *(spot.fixed(us) for us in (10 * S, 60 * S, 600 * S, HOUR_US, 0)),
    spot.SavePlan(name="every=auto + 30s notice", every_us=None, notice_us=30 * S),
)
GPUS, CAP_US = 250, 4 * HOUR_US
STUDIO_DAYS = 3


def spot_row(part: Availability) -> str:
    found = [spot.replay(part, TRAINING, way).goodput for way in WAYS]
    advice = spot.advise([part], TRAINING)
    best = f"{advice.goodput:.3f} ({advice.every_us / S:.0f} s)"
    shown = part.name.replace(".csv", "").replace("_events", "").replace("_count", "")
    return (
        f"| {shown} | {part.node_us / HOUR_US:,.0f} | {part.losses} | **{found[0]:.3f}** | "
        + " | ".join(f"{g:.3f}" for g in found[1:])
        + f" | {best} |"
    )


def spot_table(traces: Path) -> str:
    head = [
        f"| trace | node-hours | losses | {' | '.join(w.name for w in WAYS)} | best fixed |",
        "|---|---|---|" + "---|" * (len(WAYS) + 1),
    ]
    return "\n".join([*head, *(spot_row(p) for name in SPOT for p in read_availability(traces / name))])


def philly(traces: Path) -> list[TraceJob]:
    found = of_busy_tenants(read_jobs(traces / "philly_two_weeks.csv"), 20)
    return [TraceJob(tenant=j.tenant, at=j.at, work_us=min(j.work_us, DAY_US), gpus=j.gpus) for j in found]


JOB_WAYS: dict[str, Callable[[list[TraceJob]], list[jobs.FinishedJob]]] = {
    "dedicated partitions": lambda found: jobs.dedicated(found, GPUS),
    "one pool, first come first served": lambda found: jobs.fifo(found, GPUS),
    "ours, nothing is taken from a job": lambda found: jobs.ours(found, GPUS),
    "**ours, hold cap 4 h**": lambda found: jobs.ours(found, GPUS, hold_cap_us=CAP_US),
}
QUICK_JOB_WAYS = 2
JOB_HEAD = (
    "| 250 GPUs | mean wait s | p90 | p99 | at once | slowdown | worst tenant | Jain | GPUs used | preempted |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def job_row(name: str, found: list[TraceJob]) -> str:
    f = jobs.figures(name, GPUS, JOB_WAYS[name](found))
    return (
        f"| {name} | {seconds(f.mean_us)} | {seconds(f.p90_us)} | {seconds(f.p99_us)} | {f.at_once:.0%} | {f.slowdown:.1f} | "
        f"{f.worst_slowdown:.1f} | {f.jain:.3f} | {f.utilisation:.0%} | {f.preemptions:,} |"
    )


def jobs_table(traces: Path) -> str:
    found = philly(traces)
    return "\n".join([JOB_HEAD, *(job_row(name, found) for name in JOB_WAYS)])


def studio_table(traces: Path) -> str:
    """The first days only: the whole is in fairness.md."""
    workload = first_part(read_requests(traces / "alibaba_genai_requests.csv"), STUDIO_DAYS * DAY_US)
    rows = [
        f"| first {STUDIO_DAYS} days, {len(workload.arrivals):,} requests of {workload.tenants} tenants, 4 GPUs | p50 s | p95 | p99 | worst tenant | Jain | restores |",
        "|---|---|---|---|---|---|---|",
    ]
    for scheme in (OURS, PASSIVE_TTL, PER_REQUEST):
        f = figures(replay(workload, scheme, gpus=4))
        rows.append(
            f"| {scheme.name} | {seconds(f.wait.p50_us)} | {seconds(f.wait.p95_us)} | {seconds(f.wait.p99_us)} | "
            f"{seconds(f.worst_tenant_mean_us)} | {f.jain:.3f} | {f.grants:,} |"
        )
    return "\n".join(rows)


TABLES: dict[str, Callable[[Path], str]] = {"spot": spot_table, "studio": studio_table}
LONG_TABLES: dict[str, Callable[[Path], str]] = {"jobs": jobs_table}


def table_in(text: str, name: str) -> str:
    found = _place(name).search(text)
    if found is None:
        raise SystemExit(f"{PAGE} has no place for the table {name}")
    return found[2]


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- table: {name} -->\n)(.*?)(\n<!-- end -->)", re.S)


def main(folder: Path, long: bool) -> None:
    text = PAGE.read_text()
    for name, table in (TABLES | (LONG_TABLES if long else {})).items():
        table_in(text, name)
        made = table(folder)
        text = _place(name).sub(lambda m, made=made: m[1] + made + m[3], text)  # type: ignore[misc]
    PAGE.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--long" in sys.argv[2:])
