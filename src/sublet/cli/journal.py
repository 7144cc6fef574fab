"""`sublet journal verify|tail|seal`."""

from __future__ import annotations

import json
import time

import click

from sublet.cli.output import instant, json_option, print_json, print_table
from sublet.core.errors import JournalBroken
from sublet.core.journal import Entry
from sublet.settings import load_settings
from sublet.wiring import open_ledger


@click.group()
def journal() -> None:
    """Every decision, hash-chained: follow it, verify it, seal it."""


@journal.command(epilog="Example:  sublet journal verify --json")
@json_option
def verify(as_json: bool) -> None:
    """Walk every strand from its beginning to its stored end; name each edit, removal and swap."""
    result = open_ledger(load_settings()).verify()
    if as_json:
        print_json(
            {
                "ok": not result.faults,
                "rows": result.rows,
                "strands": result.strands,
                "head": result.head,
                "faults": [{"strand": f.strand, "seq": f.seq, "what": f.what} for f in result.faults],
            }
        )
    else:
        print_table(
            ["STRAND", "ROW", "WHAT"], [(f.strand, f.seq, f.what) for f in result.faults], empty="no faults"
        )
        click.echo(f"{result.rows} rows on {result.strands} strands, head {result.head[:16]}…")
    if result.faults:
        raise JournalBroken(f"the journal does not verify: {len(result.faults)} fault(s)")


def _line(entry: Entry) -> tuple[str, str, str, str, str]:
    body = json.loads(entry.body)
    reason = body.get("detail") or body.get("reason") or ""
    rest = " ".join(
        f"{k}={v}"
        for k, v in body.items()
        if k not in ("reason", "detail") and not isinstance(v, (dict, list))
    )
    return (instant(entry.at), entry.kind, entry.tenant or "-", entry.subject, f"{reason} {rest}".strip())


@journal.command(epilog="Example:  sublet journal tail -n 20 --follow")
@click.option("-n", "--lines", default=20, show_default=True)
@click.option("-f", "--follow", is_flag=True, help="Go on printing as decisions are made; Ctrl-C ends it.")
@json_option
def tail(lines: int, follow: bool, as_json: bool) -> None:
    """The newest decisions, oldest first."""
    ledger = open_ledger(load_settings())
    found = ledger.tail(limit=lines)
    columns = ["AT", "WHAT", "TENANT", "SUBJECT", "REASON"]

    def as_record(number: int, e: Entry) -> dict[str, object]:
        return {
            "id": number,
            "strand": e.strand,
            "seq": e.seq,
            "at": e.at,
            "kind": e.kind,
            "tenant": e.tenant,
            "subject": e.subject,
            "body": json.loads(e.body),
            "hash": e.hash,
        }

    if not follow:
        if as_json:
            print_json([as_record(number, e) for number, e in found])
        else:
            print_table(columns, [_line(e) for _, e in found], empty="the journal is empty")
        return
    last = -1
    while True:
        for number, entry in found:
            last = number
            click.echo(json.dumps(as_record(number, entry)) if as_json else "  ".join(_line(entry)))
        time.sleep(0.3)
        found = ledger.tail(after=last, limit=500) if last >= 0 else ledger.tail(limit=lines)


@journal.command(epilog="Example:  sublet journal seal >> /mnt/other-machine/seals")
def seal() -> None:
    """Write where every strand stands into the main strand, and print its head to keep elsewhere."""
    click.echo(open_ledger(load_settings()).seal())
