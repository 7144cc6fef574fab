"""`sublet sim jobs`: a job log on one pool: partitions, first come first served, and ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from sublet.cli.output import json_option, on_terminal, print_json, print_table
from sublet.cli.sim.plot import plot_option, show_plot
from sublet.cli.sim.policy import policy_option, with_knobs
from sublet.core.leasing.policy import Policy
from sublet.core.values import HOUR_US, SECOND_US, format_duration, parse_duration
from sublet.sim.engine import MOST_GPUS
from sublet.sim.jobs import RESTART_US, FinishedJob, JobFigures, dedicated, fifo, figures, ours
from sublet.sim.plots import PlotPanel
from sublet.sim.report import seconds
from sublet.sim.traces import JOBS, TraceJob, of_busy_tenants, read_jobs

SCHEMES = {
    "dedicated": "each tenant has GPUs of its own, by its work",
    "fifo": "one pool, strictly first come first served",
    "ours": "one pool, fair order, gangs kept room for",
    "ours-capped": "ours, and who held its GPUs for the hold cap saves and makes room",
}


@click.command(
    "jobs",
    epilog="Example:  sublet sim jobs philly_two_weeks.csv --gpus 250 --longest 24h --least-jobs 20",
    help=f"""Jobs of many tenants on one pool: how long would each have waited?

    TRACE is a job log in CSV with the columns {",".join(JOBS)}: when it was submitted, how long it ran,
    on how many GPUs, whose it is. A job gets all its GPUs at once. WAIT is from submission to end, less
    its own work. Schemes: {"; ".join(f"{n} ({s})" for n, s in SCHEMES.items())}. SLOWDOWN is (wait +
    work) / work of a tenant's jobs, on average, no job counted as shorter than a minute; JAIN is Jain's
    index over 1 / slowdown: 1 when all tenants fared alike.""",
)
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--gpus", type=click.IntRange(1, MOST_GPUS), default=250, show_default=True)
@click.option(
    "--scheme",
    "names",
    multiple=True,
    type=click.Choice(list(SCHEMES)),
    help="Only this one; may be repeated.",
)
@click.option("--longest", default="", help="No job runs longer than this.")
@click.option("--least-jobs", type=click.IntRange(1), default=1, help="Leave tenants with fewer jobs out.")
@click.option("--hold-cap", default="2h", show_default=True, help="Of ours-capped.")
@click.option(
    "--restart",
    default=f"{RESTART_US // SECOND_US}s",
    show_default=True,
    help="What going on after a hold cap costs.",
)
@click.option(
    "--target", default="", help="Also find the fewest GPUs with which ours has a p99 wait of at most this."
)
@policy_option
@plot_option
@json_option
def jobs(
    trace: Path,
    gpus: int,
    names: tuple[str, ...],
    longest: str,
    least_jobs: int,
    hold_cap: str,
    restart: str,
    target: str,
    knobs: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
) -> None:
    found = of_busy_tenants(read_jobs(trace), least_jobs)
    if longest:
        most = parse_duration(longest, what="longest")
        found = [TraceJob(tenant=j.tenant, at=j.at, work_us=min(j.work_us, most), gpus=j.gpus) for j in found]
    cap_us, restart_us = parse_duration(hold_cap, what="hold-cap"), parse_duration(restart, what="restart")
    policy = with_knobs(Policy(), knobs)
    ways: dict[str, Callable[[int], list[FinishedJob]]] = {
        "dedicated": lambda n: dedicated(found, n),
        "fifo": lambda n: fifo(found, n),
        "ours": lambda n: ours(found, n, policy=policy),
        "ours-capped": lambda n: ours(found, n, policy=policy, hold_cap_us=cap_us, restart_us=restart_us),
    }
    rows: list[JobFigures] = []
    for name in dict.fromkeys(names or SCHEMES):
        if on_terminal() and not as_json:
            click.echo(f"replaying {name} …", err=True)
        rows.append(figures(name, gpus, ways[name](gpus)))
    fewest = _fewest(found, parse_duration(target, what="target"), ways["ours"]) if target else None
    if as_json:
        print_json(
            {
                "trace": trace.name,
                "gpus": gpus,
                "jobs": len(found),
                "work_us": sum(j.work_us * j.gpus for j in found),
                "schemes": [r.as_json() for r in rows],
                "fewest_gpus": fewest,
            }
        )
    else:
        _print(found, rows, gpus)
        if fewest is not None:
            _print_fewest(found, fewest, target)
    panels = [
        PlotPanel(title="mean wait", unit="s", bars=tuple((r.scheme, r.mean_us / SECOND_US) for r in rows)),
        PlotPanel(title="p99 wait", unit="s", bars=tuple((r.scheme, r.p99_us / SECOND_US) for r in rows)),
        PlotPanel(
            title="slowdown of the worst tenant",
            unit=" x",
            digits=1,
            bars=tuple((r.scheme, r.worst_slowdown) for r in rows),
        ),
        PlotPanel(
            title="Jain's index (1: all fared alike)", digits=3, bars=tuple((r.scheme, r.jain) for r in rows)
        ),
    ]
    show_plot(plot, f"{trace.name} on {gpus} GPUs", panels, as_json)


def _fewest(
    found: list[TraceJob], target_us: int, replayed: Callable[[int], list[FinishedJob]]
) -> dict[str, object]:
    """By halving: more GPUs never make the waits of this log longer by much, so the edge is found, not
    proven."""
    low, high = max(j.gpus for j in found), 0
    step = low
    tried: dict[int, int] = {}

    def p99(gpus: int) -> int:
        if gpus not in tried:
            tried[gpus] = figures("ours", gpus, replayed(gpus)).p99_us
        return tried[gpus]

    while not high:
        if p99(step) <= target_us or step >= MOST_GPUS:
            high = step
        else:
            low, step = step, min(MOST_GPUS, step * 2)
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        if p99(middle) <= target_us:
            high = middle
        else:
            low = middle
    return {"gpus": high, "p99_us": p99(high), "target_us": target_us, "tried": dict(sorted(tried.items()))}


def _print(found: list[TraceJob], rows: list[JobFigures], gpus: int) -> None:
    work = sum(j.work_us * j.gpus for j in found)
    span = max(j.at for j in found) - min(j.at for j in found)
    click.echo(
        f"{len(found):,} jobs of {rows[0].tenants} tenants, {work / HOUR_US:,.0f} GPU-hours of work in "
        f"{format_duration(span)} on {gpus} GPUs"
        f" ({work / (gpus * max(1, span)):.0%} of them)"
    )
    print_table(
        [
            "SCHEME",
            "WAIT MEAN",
            "P50",
            "P90",
            "P99",
            "AT ONCE",
            "SLOWDOWN",
            "WORST TENANT",
            "JAIN",
            "USED",
            "PREEMPTED",
            "HOW",
        ],
        [
            [
                r.scheme,
                seconds(r.mean_us),
                seconds(r.p50_us),
                seconds(r.p90_us),
                seconds(r.p99_us),
                f"{r.at_once:.0%}",
                f"{r.slowdown:.1f}",
                f"{r.worst_slowdown:.1f}",
                f"{r.jain:.3f}",
                f"{r.utilisation:.0%}",
                f"{r.preemptions:,}",
                SCHEMES[r.scheme],
            ]
            for r in rows
        ],
        empty="nothing was replayed",
    )
    click.echo(
        "waits in seconds, without the job's own work; SLOWDOWN: mean of the tenants; USED: of all GPUs "
        "until the last end"
    )


def _print_fewest(found: list[TraceJob], fewest: dict[str, object], target: str) -> None:
    tried = fewest["tried"]
    assert isinstance(tried, dict)
    steps = ", ".join(f"{n}: {seconds(us)}" for n, us in tried.items())
    click.echo(
        f"\n{fewest['gpus']} GPUs: with them ours keeps the p99 wait within {target}\n"
        f"- the largest job needs {max(j.gpus for j in found)} at once; p99 waits in seconds by number of "
        f"GPUs: {steps}"
    )
