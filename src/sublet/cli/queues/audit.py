"""`sublet queue audit`: the proof that each item of a queue was done exactly once."""

from __future__ import annotations

from pathlib import Path

import click

from sublet.cli.output import archive_option, instant, json_option, print_fields, print_json, print_table
from sublet.cli.runs.audit import flaw_json, refuse_flawed
from sublet.core.queues.item_audit import ItemProof
from sublet.json_shapes import at_or_none
from sublet.settings import load_settings
from sublet.wiring import open_ledger


@click.command(epilog="Example:  sublet queue audit images")
@click.argument("name", metavar="[QUEUE]", required=False, default="")
@click.option("--limit", default=20, show_default=True, help="The most faults to show of one queue.")
@archive_option
@json_option
def audit(name: str, limit: int, archived: tuple[Path, ...], as_json: bool) -> None:
    """Prove from the ledger that each item of QUEUE (or of every queue) was done exactly once.

    It walks the hash chain of the journal from its first row and compares every item with what its consumers
    journalled: none completed twice, none done that nobody completed, no result that was edited, none lost
    that was not purged. Changes nothing. Exit code 73 if anything is wrong, with the row named.
    """
    settings = load_settings()
    ledger = open_ledger(settings)
    tenant = settings["tenant"]
    found = [ledger.queue(tenant, name)] if name else ledger.queues(tenant)
    proofs = [ledger.prove_queue(record.id, archived) for record in found]
    if as_json:
        print_json([_as_json(p) for p in proofs])
    elif name:
        _show_one(proofs[0])
    else:
        _show_all(proofs)
    refuse_flawed([(p.queue, p.flaws, p.more_flaws) for p in proofs], limit, as_json=as_json)


def _show_one(p: ItemProof) -> None:
    once = "each exactly once" if p.proven else "NOT PROVEN"
    fields = [
        ("queue", f"{p.queue} (tenant {p.tenant}), made {instant(p.began_at)}"),
        ("published", f"{p.published}: {p.done} done, {p.waiting} waiting, {p.dead} dead, {p.purged} purged"),
        (
            "completed",
            f"{p.completed}, {once}" + (f"; last {instant(p.completed_at)}" if p.completed else ""),
        ),
        ("failures", f"{p.failed}; {p.redriven} redriven"),
        (
            "refused",
            f"{p.refused} late results, none of which overwrote anything" if p.proven else str(p.refused),
        ),
        (
            "consumers",
            f"{p.consumers}, under {p.leases} leases" if p.leases else f"{p.consumers}, without a lease",
        ),
        (
            "journal",
            f"{p.rows} rows of this queue's consumers, chained from the first row of the ledger to the last",
        ),
    ]
    if not p.proven:
        fields[-1] = ("journal", f"{p.rows} rows of this queue's consumers")
    print_fields(fields)
    if p.proven:
        click.echo("proven")


def _show_all(proofs: list[ItemProof]) -> None:
    print_table(
        ["QUEUE", "PUBLISHED", "DONE", "WAITING", "DEAD", "PURGED", "REFUSED", "PROVEN"],
        [
            (
                p.queue,
                p.published,
                p.done,
                p.waiting,
                p.dead,
                p.purged,
                p.refused,
                "yes" if p.proven else f"NO: {len(p.flaws) + p.more_flaws} faults",
            )
            for p in proofs
        ],
        empty="no queues; 'sublet queue publish NAME ITEM…' makes one",
    )


def _as_json(p: ItemProof) -> dict[str, object]:
    return {
        "queue": p.queue,
        "proven": p.proven,
        "tenant": p.tenant,
        "published": p.published,
        "completed": p.completed,
        "done": p.done,
        "waiting": p.waiting,
        "dead": p.dead,
        "purged": p.purged,
        "failed": p.failed,
        "refused": p.refused,
        "redriven": p.redriven,
        "consumers": p.consumers,
        "leases": p.leases,
        "rows": p.rows,
        "began_at": at_or_none(p.began_at),
        "completed_at": at_or_none(p.completed_at),
        "faults": [flaw_json(f) for f in p.flaws],
        "more_faults": p.more_flaws,
    }
