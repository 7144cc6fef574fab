"""`sublet sim spot`: how much of the time of spot nodes becomes committed work, by how often it is saved."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from pathlib import Path

import click

from sublet.cli.output import json_option, print_json, print_table
from sublet.cli.sim.plot import plot_option, show_plot
from sublet.core.errors import BadInput
from sublet.core.progress.cadence import parse_cadence
from sublet.core.values import HOUR_US, SECOND_US, format_duration, parse_duration, parse_size
from sublet.sim.plots import PlotPanel
from sublet.sim.spot import (
    AUTO,
    WAYS,
    SaveAdvice,
    SavePlan,
    SpotResult,
    Training,
    advise,
    cost_per_useful_hour,
    fixed,
    replay,
)
from sublet.sim.traces import KINDS, Availability, read_availability

#: What was measured here for 1.07 GB (docs/explain/figures.md): bytes a second to copy away, to make durable,
#: to read back; and to start a process.
COPIED, WRITTEN, READ = 12_000_000_000, 2_000_000_000, 3_000_000_000
START_US = 15 * SECOND_US
_FORMATS = "; ".join(f"{','.join(columns)} ({says})" for columns, says in KINDS.items())


@click.command(
    "spot",
    epilog="Example:  sublet sim spot bamboo_p3_events.csv --state 10GB --step 2s --notice 30s --price 0.918",
    help=f"""Train on nodes that are taken away: how much of their time becomes committed work?

    TRACE is CSV, of one of these kinds: {_FORMATS}. Each node runs a job; a job whose node is taken goes
    on the next one that comes. Compared are every=auto, fixed intervals, and never saving. GOODPUT is
    useful time over the time nodes were there. What a save and a restart cost follows from --state,
    unless it is said.""",
)
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--state", default="1GB", show_default=True, help="Size of what is saved.")
@click.option("--step", default="1s", show_default=True, help="What a training step takes.")
@click.option("--stall", help="What a save stops training for. Default: copying the state at 12 GB/s.")
@click.option(
    "--save", help="From the beginning of a save until it is durable. Default: the state at 2 GB/s."
)
@click.option(
    "--restart", help="From a node to the first step. Default: 15s and reading the state at 3 GB/s."
)
@click.option("--every", multiple=True, help="Only these: auto, never, or a duration. May be repeated.")
@click.option("--notice", default="0s", show_default=True, help="How long before a loss it is announced.")
@click.option("--price", help="Of a node for an hour, in any currency.")
@plot_option
@json_option
def spot(
    trace: Path,
    state: str,
    step: str,
    stall: str | None,
    save: str | None,
    restart: str | None,
    every: tuple[str, ...],
    notice: str,
    price: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    training = _training(state, step, stall, save, restart)
    notice_us = parse_duration(notice, what="notice")
    price_micro = _price(price)
    ways = [_way(text, notice_us) for text in dict.fromkeys(every)] or _all(notice_us)
    found = [(part, [replay(part, training, way) for way in ways]) for part in read_availability(trace)]
    advice = advise([part for part, _ in found], training, notice_us=notice_us)
    panels = [
        PlotPanel(
            title=f"{part.name}: goodput",
            unit="%",
            digits=1,
            bars=tuple((r.saving.name, r.goodput * 100) for r in results),
        )
        for part, results in found
    ]
    if as_json:
        print_json(
            {
                "trace": trace.name,
                "training": {
                    "step_us": training.step_us,
                    "stall_us": training.stall_us,
                    "save_us": training.save_us,
                    "restart_us": training.restart_us,
                },
                "notice_us": notice_us,
                "parts": [
                    {
                        "name": part.name,
                        "nodes": len(part.spans),
                        "node_us": part.node_us,
                        "losses": part.losses,
                        "ways": [r.as_json(price_micro) for r in results],
                    }
                    for part, results in found
                ],
                "advice": advice.as_json(),
            }
        )
    else:
        for part, results in found:
            _print(part, results, price_micro)
        _print_advice(advice)
    show_plot(plot, f"Training on {trace.name}", panels, as_json)


def _training(state: str, step: str, stall: str | None, save: str | None, restart: str | None) -> Training:
    size = parse_size(state, what="state")

    def given(text: str | None, what: str, bytes_a_second: int, more_us: int = 0) -> int:
        return parse_duration(text, what=what) if text else more_us + size * SECOND_US // bytes_a_second

    step_us = parse_duration(step, what="step")
    if not step_us:
        raise BadInput("a step of no time cannot be simulated: use 1ms or more")
    stall_us = given(stall, "stall", COPIED)
    return Training(
        step_us=step_us,
        stall_us=stall_us,
        save_us=max(stall_us, given(save, "save", WRITTEN)),
        restart_us=given(restart, "restart", READ, START_US),
    )


def _price(text: str | None) -> int:
    if text is None:
        return 0
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal(-1)
    if not value.is_finite() or not 0 < value < 1_000_000:
        raise BadInput(f"price {text[:40]!r} is no price of an hour: write a number such as 0.918")
    return int(value * 1_000_000)


def _way(text: str, notice_us: int) -> SavePlan:
    if text == "never":
        return fixed(0, notice_us)
    cadence = parse_cadence(text)
    return fixed(cadence.us, notice_us) if cadence.us else _auto(notice_us)


def _auto(notice_us: int) -> SavePlan:
    name = AUTO.name + (f" + {format_duration(notice_us)} notice" if notice_us else "")
    return SavePlan(name=name, every_us=None, notice_us=notice_us)


def _all(notice_us: int) -> list[SavePlan]:
    told = [_auto(notice_us)] if notice_us else []
    return [AUTO, *told, *WAYS]


def _print(part: Availability, results: list[SpotResult], price_micro: int) -> None:
    click.echo(
        f"{part.name}: {part.node_us / HOUR_US:,.1f} node-hours of {len(part.spans):,} nodes in "
        f"{part.ends_at / HOUR_US:.1f} h, "
        f"{part.losses:,} of them taken"
    )
    columns = ["SAVED", "GOODPUT", "LOST", "SAVING", "STARTING", "LEFT OVER", "SAVES"]
    rows = []
    for r in results:
        row = [
            r.saving.name,
            f"{r.goodput:.3f}",
            *(
                f"{part_us / r.node_us:.3f}"
                for part_us in (r.lost_us, r.saving_us, r.starting_us, r.left_over_us)
            ),
            f"{r.saves:,}",
        ]
        if price_micro:
            row.append(f"{cost_per_useful_hour(r, price_micro) / 1e6:.3f}")
        rows.append(row)
    print_table([*columns, *(["A USEFUL HOUR"] if price_micro else [])], rows, empty="nothing was replayed")
    click.echo("")


def _print_advice(advice: SaveAdvice) -> None:
    click.echo(
        f"save every {format_duration(advice.every_us)} or every=auto, with a ttl of "
        f"{format_duration(advice.ttl_us)}:"
    )
    for reason in advice.reasons:
        click.echo(f"- {reason}")
