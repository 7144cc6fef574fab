"""Two other views of `sublet report`: by studio session, and which tenants delay others."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace

import click

from sublet.cli.output import print_json, print_table
from sublet.core.billing.goodput import MICRO, REFUND_RULE, cost_micro
from sublet.core.billing.neighbours import Neighbour
from sublet.core.studio.session_usage import SessionUsage
from sublet.core.values import format_duration, format_size
from sublet.json_shapes import at_or_none, seconds, usage_json
from sublet.ports.ledger import Ledger
from sublet.studio.views.neighbours import as_json, find

_MOST = 1_000_000


def by_session(
    ledger: Ledger, tenant: str, since: int, price_micro: int | None, *, as_csv: bool, as_json: bool
) -> None:
    found = ledger.session_usage(tenant=tenant, since=since, limit=_MOST)
    if price_micro is not None and not ledger.prices():
        found = [replace(x, cost_micro=cost_micro(x.gpu_us - x.refund_us, price_micro)) for x in found]
    if as_json:
        print_json(
            {
                "by": "session",
                "since": seconds(since),
                "until": seconds(ledger.now()),
                "rows": [_json(x) for x in found],
            }
        )
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        for number, row in enumerate(map(_json, found)):
            if not number:
                writer.writerow(row)
            writer.writerow(["" if value is None else value for value in row.values()])
    else:
        _print_sessions(found)


def _json(used: SessionUsage) -> dict[str, object]:
    return {
        "session_id": used.session_id,
        "name": used.name,
        "tenant": used.tenant,
        "opened_at": at_or_none(used.opened_at),
        "ended_at": at_or_none(used.ended_at),
        **usage_json(used),
        "cost": None if used.cost_micro is None else used.cost_micro / MICRO,
    }


def _print_sessions(found: list[SessionUsage]) -> None:
    rows = [
        [
            x.session_id,
            x.tenant,
            x.name or "-",
            "open" if not x.ended_at else "ended",
            format_duration(x.gpu_us),
            format_duration(x.wait_us) if x.wait_us else "-",
            str(x.leases),
            str(x.calls),
            str(x.errors) if x.errors else "-",
            str(x.launches) if x.launches else "-",
            format_size(x.checkpoint_bytes) if x.checkpoint_bytes else "-",
            format_duration(x.refund_us) if x.refund_us else "-",
            "-" if x.cost_micro is None else f"{x.cost_micro / MICRO:.2f}",
        ]
        for x in found
    ]
    columns = ["SESSION", "TENANT", "NAME", "IS", "HELD", "WAITED", "LEASES", "CALLS", "ERRORS", "LAUNCHES"]
    print_table([*columns, "SAVED", "REFUND", "COST"], rows, empty="no studio session in that time")
    if any(x.refund_us for x in found):
        click.echo(REFUND_RULE)


def by_neighbour(ledger: Ledger, days: int, *, json_wanted: bool) -> None:
    found = find(ledger, days=days)
    if json_wanted:
        print_json({"days": days, "rows": [as_json(row) for row in found]})
        return
    columns = [
        "TENANT",
        "WEIGHT",
        "FAIR",
        "HELD",
        "GPU TIME",
        "WAITED",
        "OTHERS WAITED",
        "CALLS",
        "ERRORS",
        "LAUNCHES",
    ]
    print_table(
        [*columns, "NOISY"],
        [_line(row) for row in found],
        empty=f"nobody held or waited in the last {days} days",
    )


def _line(row: Neighbour) -> list[str]:
    return [
        row.tenant,
        str(row.weight),
        f"{row.fair_ppm / 10_000:.1f}%",
        f"{row.held_ppm / 10_000:.1f}%",
        format_duration(row.device_us),
        format_duration(row.waited_us) if row.waited_us else "-",
        format_duration(row.caused_us) if row.caused_us else "-",
        str(row.calls) if row.calls else "-",
        str(row.errors) if row.errors else "-",
        str(row.launches) if row.launches else "-",
        row.reason or "-",
    ]
