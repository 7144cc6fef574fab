"""`sublet report`."""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable
from datetime import UTC, datetime

import click

from sublet.cli.output import day as instant_day
from sublet.cli.output import json_option, print_json, print_table
from sublet.cli.studio.report_views import by_neighbour, by_session
from sublet.core.billing.goodput import (
    MICRO,
    REFUND_RULE,
    GoodputTotals,
    Stretch,
    accounts,
    day_of,
    stretches,
)
from sublet.core.billing.price import PriceList, class_of
from sublet.core.values import DAY_US, format_duration, parse_price
from sublet.json_shapes import seconds
from sublet.settings import load_settings
from sublet.wiring import open_ledger


def _day(part: Stretch) -> str:
    return datetime.fromtimestamp(day_of(part.until) * DAY_US / MICRO, UTC).strftime("%Y-%m-%d")


GROUPS: dict[str, Callable[[Stretch], str]] = {
    "job": lambda part: part.job or "-",
    "tenant": lambda part: part.tenant,
    "tier": lambda part: part.tier,
    "day": _day,
}


@click.command(epilog="Example:  sublet report --by tenant --days 30 --price 2.50 --csv")
@click.option("--by", type=click.Choice([*GROUPS, "session"]), default="job", show_default=True)
@click.option("--neighbours", is_flag=True, help="Instead: who had more than its share while others waited.")
@click.option("--days", type=click.IntRange(1, 3650), default=7, show_default=True, help="How far back.")
@click.option("--job", default="", help="Only this job's leases.")
@click.option("--tenant", default="", help="Only this tenant's.")
@click.option(
    "--price",
    default="",
    help="Of one GPU-hour of what 'sublet price ls' does not list, in your currency. Default: SUBLET_PRICE.",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, times in microseconds.")
@json_option
def report(
    by: str, neighbours: bool, days: int, job: str, tenant: str, price: str, as_csv: bool, as_json: bool
) -> None:
    """Where the GPU time went: goodput, waste, losses, refunds and cost.

    HELD is GPU time from grant to end. GOODPUT is the part of it spent in steps that were committed. OVERHEAD
    is starting, restoring and saving; WASTED is the time after the last commit of a lease that was lost; OPEN
    is not decided yet: the lease is held, and its last commit is past. Jobs that commit no steps have no
    goodput ('-'). COST is less refunds, at the prices of 'sublet price ls' when each lease was granted.

    --by session shows what studio sessions used, and what was done in them.
    """
    settings = load_settings()
    price = price or settings["price"]
    price_micro = parse_price(price, what="the price") if price else None
    ledger = open_ledger(settings)
    since = max(0, ledger.now() - days * DAY_US)
    if neighbours or by == "session":
        if job:
            raise click.UsageError("--job does not go with this view: a session is its tenant's")
        if neighbours:
            if as_csv or tenant:
                raise click.UsageError("--neighbours is of all tenants, as a table or --json")
            by_neighbour(ledger, days, json_wanted=as_json)
        else:
            by_session(ledger, tenant, since, price_micro, as_csv=as_csv, as_json=as_json)
        return
    found = ledger.held(tenant=tenant, job=job, since=since)
    listed = PriceList(ledger.prices())
    classes = {d.id: class_of(d) for d in ledger.devices()}
    tariffs = {
        lease.id: tariff
        for lease in found.leases
        if (tariff := listed.tariff(lease, classes, price_micro)) is not None
    }
    costs = price_micro is not None or bool(listed)
    rows, total = accounts(
        stretches(found.leases, found.commits, since=since, now=found.at),
        GROUPS[by],
        tariffs=tariffs,
        removed=found.removed,
        unlisted_micro=price_micro,
    )
    pruned = found.pruned_before if found.removed else 0
    if as_json:
        shown = {
            "by": by,
            "since": seconds(since),
            "until": seconds(found.at),
            "refund_rule": REFUND_RULE,
            "pruned_before": pruned,
            "rows": [_as_json(a, costs) for a in rows],
            "total": _as_json(total, costs),
        }
        print_json(shown)
    elif as_csv:
        _print_csv(by, rows, costs)
    else:
        _print(by, rows, total, costs, days)
        if pruned:
            click.echo(
                f"pruned before {instant_day(pruned)}: sums of whole days from then on back, without the "
                "time between commits"
            )


def _percent(part: int, whole: int) -> str:
    return f"{part / whole * 100:.1f}%" if whole else "-"


def _losses(account: GoodputTotals) -> str:
    words = [f"{count} {reason}" for reason, count in sorted(account.losses.items())]
    return ", ".join(words) or "-"


def _priced(account: GoodputTotals) -> bool:
    return account.unpriced_us < account.held_us or not account.held_us


def _cost(account: GoodputTotals) -> str:
    return f"{account.cost_micro / MICRO:.2f}" if _priced(account) else "-"


def _print(by: str, rows: list[GoodputTotals], total: GoodputTotals, costs: bool, days: int) -> None:
    columns = ["HELD", "GOODPUT", "OVERHEAD", "WASTED", "OPEN", "STEPS", "COMMITS", "BETWEEN", "LEASES"]
    if costs:
        columns += ["REFUND", "COST"]
    table = []
    for a in [*rows, total] if len(rows) > 1 else rows:
        counted = a.held_us - a.other_us
        goodput = a.goodput_ppm
        shown = goodput is not None or a.commits
        line = [
            a.name,
            format_duration(a.held_us),
            "-" if goodput is None else f"{goodput / 10_000:.1f}%",
            _percent(a.overhead_us, counted) if shown else "-",
            _percent(a.wasted_us, counted) if shown or a.wasted_us else "-",
            format_duration(a.open_us) if a.open_us else "-",
            str(a.steps) if a.commits else "-",
            str(a.commits) if a.commits else "-",
            "-" if a.median_gap_us is None else format_duration(a.median_gap_us),
            str(a.lease_count),
        ]
        if costs:
            line += [format_duration(a.refund_us) if a.refund_us else "-", _cost(a)]
        table.append([*line, _losses(a)])
    print_table([by.upper(), *columns, "LOSSES"], table, empty=f"no GPU was held in the last {days} days")
    if not rows:
        return
    lost = sum(total.losses.values())
    if lost:
        click.echo(f"{lost} leases were lost, {total.noticed} of them with notice")
    if costs:
        click.echo(REFUND_RULE)


def _as_json(a: GoodputTotals, costs: bool) -> dict[str, object]:
    lost = sum(a.losses.values())
    return {
        "name": a.name,
        "held_gpu_seconds": seconds(a.held_us),
        "useful_gpu_seconds": seconds(a.useful_us),
        "overhead_gpu_seconds": seconds(a.overhead_us),
        "wasted_gpu_seconds": seconds(a.wasted_us),
        "open_gpu_seconds": seconds(a.open_us),
        "other_gpu_seconds": seconds(a.other_us),
        "goodput": None if a.goodput_ppm is None else a.goodput_ppm / MICRO,
        "steps": a.steps,
        "commits": a.commits,
        "median_between_commits_seconds": None if a.median_gap_us is None else seconds(a.median_gap_us),
        "leases": a.lease_count,
        "losses": dict(sorted(a.losses.items())),
        "losses_with_notice": a.noticed,
        "losses_without_notice": lost - a.noticed,
        "refund_gpu_seconds": seconds(a.refund_us),
        "cost": a.cost_micro / MICRO if costs and _priced(a) else None,
        "unpriced_gpu_seconds": seconds(a.unpriced_us) if costs else None,
    }


def _print_csv(by: str, rows: list[GoodputTotals], costs: bool) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    header: list[str] | None = None
    for a in rows:
        row = _as_json(a, costs) | {"losses": ";".join(f"{k}={v}" for k, v in sorted(a.losses.items()))}
        if header is None:
            header = [by, *list(row)[1:]]
            writer.writerow(header)
        writer.writerow(["" if value is None else value for value in row.values()])
