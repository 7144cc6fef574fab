"""`sublet journal verify|tail|seal|prune`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from sublet.cli.leases.operate import actor
from sublet.cli.output import archive_option, day, instant, json_option, print_json, print_table
from sublet.core.errors import JournalBroken
from sublet.core.journal.chain import Entry
from sublet.core.values import parse_duration
from sublet.settings import load_settings
from sublet.wiring import open_ledger


@click.group()
def journal() -> None:
    """Every decision, hash-chained: follow it, verify it, seal it, prune it."""


@journal.command(epilog="Example:  sublet journal verify --json")
@archive_option
@json_option
def verify(archived: tuple[Path, ...], as_json: bool) -> None:
    """Walk every strand from its beginning to its stored end; name each edit, removal and swap.

    Of a journal that was pruned, from where the prune left it; with --archive, from its first row.
    """
    result = open_ledger(load_settings()).verify(archived)
    if as_json:
        print_json(
            {
                "ok": not result.faults,
                "rows": result.rows,
                "strands": result.strands,
                "head": result.head,
                "faults": [{"strand": f.strand, "seq": f.seq, "what": f.what} for f in result.faults],
                "pruned_before": result.pruned_before,
                "with_archive": bool(archived),
            }
        )
    else:
        print_table(
            ["STRAND", "ROW", "WHAT"], [(f.strand, f.seq, f.what) for f in result.faults], empty="no faults"
        )
        click.echo(f"{result.rows} rows on {result.strands} strands, head {result.head[:16]}…")
        if result.pruned_before and not archived:
            click.echo(
                f"pruned before {day(result.pruned_before)}: verified from there on; --archive FOLDER "
                "verifies all of it"
            )
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


@journal.command(epilog="Example:  sublet journal prune --keep 90d --into /mnt/archive --dry-run")
@click.option("--keep", default="90d", show_default=True, help="What is younger stays.")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the archive. Default: 'archive' in SUBLET_HOME.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def prune(keep: str, into: Path | None, dry_run: bool, as_json: bool) -> None:
    """Archive old journal rows, and remove them with the leases, done items and sessions that were over by
    then.

    The rows go to files whose digests stay in the journal; what the leases used stays as sums by the day, so
    that reports add up. The rest of the journal verifies as before, and with the archive all of it. Effects,
    heads and what is not over stay. It may be run beside everything else, and again after it was killed.
    Results of done items that you want to keep: 'sublet queue export' first.
    """
    settings = load_settings()
    folder = into if into is not None else settings.home / "archive"
    done = open_ledger(settings).prune(
        keep_us=parse_duration(keep, what="--keep"), into=folder, actor=actor(), dry_run=dry_run
    )
    if as_json:
        print_json(
            {
                "before": done.before,
                "dry_run": dry_run,
                "journal_rows": done.rows,
                "leases": done.leases,
                "items": done.items,
                "sessions": done.sessions,
                "files": list(done.files),
            }
        )
        return
    word = "would go" if dry_run else "went"
    click.echo(
        f"before {instant(done.before)}: {done.rows} journal rows, {done.leases} leases, {done.items} done "
        "items "
        f"and {done.sessions} sessions {word}"
    )
    for file in done.files:
        click.echo(f"archived in {file}")
