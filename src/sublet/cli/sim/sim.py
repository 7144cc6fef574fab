"""`sublet sim …`: how a sharing scheme would have served a recorded workload."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from sublet.cli.output import json_option, on_terminal, print_json, print_table
from sublet.cli.sim.jobs import jobs
from sublet.cli.sim.plot import plot_option, show_plot
from sublet.cli.sim.policy import policy_option, with_knobs
from sublet.cli.sim.spot import spot
from sublet.core.errors import BadInput
from sublet.core.leasing.lease import MAX_TTL_US, MIN_TTL_US
from sublet.core.values import DAY_US, HOUR_US, format_duration, parse_duration
from sublet.sim.engine import MOST_GPUS, RESTORE_US, TEARDOWN_US, replay
from sublet.sim.plots import PlotPanel
from sublet.sim.report import Figures, figures, seconds
from sublet.sim.schemes import SCHEMES, ServiceOrder, with_ttl
from sublet.sim.sizing import advise
from sublet.sim.workload import COLUMNS, Workload, first_part, read_requests

#: Left out by default: on a long trace it takes minutes, and shows only what one rule of ours is worth.
NOT_BY_DEFAULT = ("fair-ttl",)


@click.group()
def sim() -> None:
    """Replay a recorded workload in virtual time, with the decisions of the live system."""


sim.add_command(spot)
sim.add_command(jobs)


@sim.command(
    epilog="Example:  sublet sim studio alibaba_genai_requests.csv --gpus 8",
    help=f"""Many tenants, few GPUs: how long would each request of TRACE have waited?

    TRACE is a request log in CSV with the columns {",".join(COLUMNS)}; requests that did not succeed are
    left out. A tenant has one session, its requests run one after another, and a session that got a GPU
    restores its state before it goes on. WAIT is from the arrival of a request to the start of its run,
    with all of that in it. Schemes: {"; ".join(f"{s.name} ({s.says})" for s in SCHEMES.values())}. Only
    'ours' and 'fair-ttl' take the decisions of sublet; the others serve who came first.""",
)
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--gpus", type=click.IntRange(1, MOST_GPUS), default=8, show_default=True)
@click.option(
    "--scheme",
    "names",
    multiple=True,
    type=click.Choice(list(SCHEMES)),
    help="Only this one; may be repeated. Default: all but fair-ttl, which takes minutes on a long trace.",
)
@click.option("--ttl", default="5m", show_default=True, help="Of ours, fair-ttl and passive-ttl.")
@click.option(
    "--restore",
    default=f"{RESTORE_US / 1e6}s",
    show_default=True,
    help="What a session that got a GPU needs before it runs.",
)
@click.option(
    "--days",
    type=click.FloatRange(0, min_open=True),
    help="Only what arrives in the first days of the trace.",
)
@click.option(
    "--target",
    default="",
    help="Also find the fewest GPUs, and the ttl, with which ours has a p95 wait of at most this.",
)
@policy_option
@plot_option
@json_option
def studio(
    trace: Path,
    gpus: int,
    names: tuple[str, ...],
    ttl: str,
    restore: str,
    days: float | None,
    target: str,
    knobs: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
) -> None:
    ttl_us = parse_duration(ttl, what="ttl")
    if not MIN_TTL_US <= ttl_us <= MAX_TTL_US:
        raise BadInput(
            f"ttl {ttl} is out of range: use {format_duration(MIN_TTL_US)} to {format_duration(MAX_TTL_US)}"
        )
    restore_us = parse_duration(restore, what="restore")
    workload = read_requests(trace)
    if days is not None:
        workload = first_part(workload, int(days * DAY_US))
    chosen = names or tuple(n for n in SCHEMES if n not in NOT_BY_DEFAULT)
    found = []
    for name in dict.fromkeys(chosen):
        if on_terminal() and not as_json:
            click.echo(f"replaying {name} …", err=True)
        scheme = with_ttl(SCHEMES[name], ttl_us)
        if scheme.order is ServiceOrder.OURS:
            scheme = replace(scheme, policy=with_knobs(scheme.policy, knobs))
        outcome = replay(workload, scheme, gpus=gpus, restore_us=restore_us)
        found.append(figures(outcome))
    advice = advise(workload, parse_duration(target, what="target"), restore_us) if target else None
    if as_json:
        print_json(
            {
                "trace": trace.name,
                "requests": len(workload.arrivals),
                "tenants": workload.tenants,
                "left_out": dict(workload.left_out),
                "work_us": workload.work_us,
                "gpus": gpus,
                "restore_us": restore_us,
                "teardown_us": TEARDOWN_US,
                "schemes": [f.as_json() for f in found],
                "advice": advice.as_json() if advice is not None else None,
            }
        )
    else:
        _print(workload, found, gpus, restore_us)
        if advice is not None:
            click.echo(f"\n{advice.gpus} GPUs and a ttl of {format_duration(advice.ttl_us)}:")
            for reason in advice.reasons:
                click.echo(f"- {reason}")
    panels = [
        PlotPanel(
            title="p95 wait", unit="s", digits=1, bars=tuple((f.scheme, f.wait.p95_us / 1e6) for f in found)
        ),
        PlotPanel(
            title="mean wait of the worst tenant",
            unit="s",
            bars=tuple((f.scheme, f.worst_tenant_mean_us / 1e6) for f in found),
        ),
        PlotPanel(
            title="GPU-hours held", unit="h", bars=tuple((f.scheme, f.held_us / HOUR_US) for f in found)
        ),
    ]
    show_plot(plot, f"{trace.name} on {gpus} GPUs", panels, as_json)


def _print(workload: Workload, found: list[Figures], gpus: int, restore_us: int) -> None:
    left_out = sum(workload.left_out.values())
    click.echo(
        f"{len(workload.arrivals):,} requests of {workload.tenants:,} tenants, "
        f"{workload.work_us / HOUR_US:.1f} GPU-hours of work, "
        f"on {gpus} GPUs; a restore takes {restore_us / 1e6:g}s"
        + (f"; {left_out:,} that did not succeed are left out" if left_out else "")
    )
    columns = [
        "SCHEME",
        "WAIT P50",
        "P95",
        "P99",
        "MEAN",
        "WORST TENANT",
        "JAIN",
        "HELD",
        "USED",
        "RESTORES",
        "HOW",
    ]
    rows = [
        [
            f.scheme,
            seconds(f.wait.p50_us),
            seconds(f.wait.p95_us),
            seconds(f.wait.p99_us),
            seconds(f.wait.mean_us),
            seconds(f.worst_tenant_mean_us),
            f"{f.jain:.3f}",
            f"{f.held_us / HOUR_US:,.0f}h",
            f"{f.used_of_held * 100:.1f}%",
            f"{f.grants:,}",
            f.says,
        ]
        for f in found
    ]
    print_table(columns, rows, empty="nothing was replayed")
    click.echo(
        "waits in seconds, from arrival to the start of the run; WORST TENANT: its mean wait; HELD: "
        "GPU-hours; USED: of what was held"
    )
