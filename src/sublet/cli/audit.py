"""`sublet audit`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

from sublet.cli.output import archive_option, instant, json_option, print_fields, print_json, print_table
from sublet.core.effect import Effect
from sublet.core.errors import NotProven, SubletError
from sublet.core.proof import Flaw, Proof
from sublet.ports.ledger import Ledger
from sublet.settings import load_settings
from sublet.wiring import checkpoints, open_ledger

PAGE = 1000


@click.command(epilog="Example:  sublet audit spot-resnet --deep")
@click.argument("job", required=False, default="")
@click.option("--effects", is_flag=True, help="List the job's effects: key, step or version, outcome.")
@click.option(
    "--store/--no-store",
    "look",
    default=None,
    help="Also look for the head's checkpoint on the replicas (default: if they can be reached).",
)
@click.option("--deep", is_flag=True, help="Also read every copy of every pack of the job's checkpoints.")
@click.option("--limit", default=20, show_default=True, help="The most faults to show of one job.")
@archive_option
@json_option
def audit(
    job: str,
    effects: bool,
    look: bool | None,
    deep: bool,
    limit: int,
    archived: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Prove from the ledger that each step and effect of JOB (or of every job) was committed exactly once.

    It walks the hash chain of the journal from its first row, follows the job from its first step to its head, and compares every
    effect and lease row with what was journalled: no gap, no repeat, no commit without a live lease, nothing edited by hand.
    Changes nothing. Exit code 73 if anything is wrong, with the row named.
    """
    ledger = open_ledger(load_settings())
    proofs = ledger.prove(*([job] if job else []), archived=archived)
    proofs, looked = _attested(proofs, look or (True if deep else look), deep)
    if effects:
        _show_effects(ledger, [p.job for p in proofs], as_json)
    elif as_json:
        print_json([_as_json(p, looked) for p in proofs])
    elif job:
        _show_one(proofs[0], looked)
    else:
        _show_all(proofs)
    broken = [p for p in proofs if not p.proven]
    if not broken:
        return
    if not as_json:
        for p in broken:
            show_flaws(p.flaws, limit)
    count = sum(len(p.flaws) for p in broken)
    names = ", ".join(p.job for p in broken[:5])
    raise NotProven(f"not proven: {count} fault{'s' * (count != 1)} in {names}")


def _attested(proofs: list[Proof], look: bool | None, deep: bool) -> tuple[list[Proof], str]:
    """The proofs with what the replicas have to say, and whether they were asked."""
    if look is False:
        return proofs, "not looked at"
    from sublet.store.attesting import attest

    try:
        with checkpoints() as store:
            told = [replace(p, flaws=(*p.flaws, *attest(store, p, deep=deep))) for p in proofs]
    except (SubletError, OSError) as e:
        if look:
            raise
        return proofs, f"not reached: {e}"
    return told, "every copy read" if deep else "on the replicas"


def _steps(p: Proof) -> str:
    if not p.step or p.step < p.first:
        return "none of its own"
    return f"{p.first}-{p.step}" if p.first != p.step else str(p.step)


def _show_one(p: Proof, looked: str) -> None:
    once = "each committed once" if p.proven else "NOT PROVEN"
    commits = f"{p.commits}"
    if p.undone:
        commits += f", and {p.undone} that a rollback took back"
    fields = [
        ("job", f"{p.job} (tenant {p.tenant})"),
        ("steps", f"{_steps(p)}, {once}"),
        ("commits", f"{commits}; version {p.version}, {instant(p.committed_at)}"),
        ("effects", f"{p.effects}, {once}" if p.effects else "none beyond the steps"),
        ("leases", f"{p.leases}, epochs {p.epochs[0]} to {p.epochs[1]}; every commit under a live one"),
        ("journal", f"{p.rows} rows of this job, chained from the first row of the ledger to the last"),
        ("checkpoint", looked if p.digest else "none"),
    ]
    if not p.proven:
        fields[4] = ("leases", f"{p.leases}, epochs {p.epochs[0]} to {p.epochs[1]}")
        fields[5] = ("journal", f"{p.rows} rows of this job")
    if p.moves:
        fields.insert(3, ("moved", f"{p.moves} times by an operator (rollback, fork, import or rebuild)"))
    print_fields(fields)
    if p.proven:
        click.echo("proven")


def _show_all(proofs: list[Proof]) -> None:
    print_table(
        ["JOB", "TENANT", "STEPS", "COMMITS", "EFFECTS", "LEASES", "VERSION", "PROVEN"],
        [
            (
                p.job,
                p.tenant or "-",
                _steps(p),
                p.commits,
                p.effects,
                p.leases,
                p.version,
                "yes" if p.proven else f"NO: {len(p.flaws)} faults",
            )
            for p in proofs
        ],
        empty="no job has committed anything yet",
    )


def show_flaws(flaws: Sequence[Flaw], limit: int, more: int = 0) -> None:
    """Each with its row, and what to do; `more` were counted and not kept."""
    click.echo()
    shown = flaws[:limit]
    print_table(["ROW", "RULE", "WHAT IS WRONG"], [(f.row, f.rule, f.what) for f in shown], empty="")
    if len(flaws) + more > limit:
        click.echo(f"… and {len(flaws) + more - limit} more (--limit)")
    for remedy in dict.fromkeys(f.remedy for f in shown):
        click.echo(f"→ {remedy}")


def flaw_json(flaw: Flaw) -> dict[str, str]:
    return {"row": flaw.row, "rule": flaw.rule, "what": flaw.what, "remedy": flaw.remedy}


def _as_json(p: Proof, looked: str) -> dict[str, object]:
    return {
        "job": p.job,
        "proven": p.proven,
        "tenant": p.tenant,
        "version": p.version,
        "digest": p.digest,
        "first_step": p.first,
        "last_step": p.step,
        "commits": p.commits,
        "undone_commits": p.undone,
        "moves": p.moves,
        "effects": p.effects,
        "reserved": p.reserved,
        "leases": p.leases,
        "epochs": list(p.epochs),
        "began_at": p.began_at,
        "committed_at": p.committed_at,
        "rows": p.rows,
        "checkpoint": looked,
        "faults": [flaw_json(f) for f in p.flaws],
    }


def _every_effect(ledger: Ledger, jobs: list[str]) -> Iterator[Effect]:
    for job in jobs:
        after = ""
        while page := ledger.effects(job, after=after, limit=PAGE):
            yield from page
            after = page[-1].key


def _show_effects(ledger: Ledger, jobs: list[str], as_json: bool) -> None:
    found = _every_effect(ledger, jobs)
    if as_json:
        for effect in found:  # a line each: there may be millions
            row = {
                "key": effect.key,
                "job": effect.job,
                "committed": effect.completed,
                "version": effect.version,
                "lease": effect.owner,
                "epoch": effect.epoch,
                "outcome": effect.outcome,
            }
            click.echo(json.dumps(row))
        return
    print_table(
        ["EFFECT", "JOB", "COMMITTED", "LEASE", "OUTCOME"],
        (
            (
                e.key,
                e.job,
                f"version {e.version}" if e.completed else "no: begun only",
                e.owner,
                e.outcome if len(e.outcome) <= 100 else f"{e.outcome[:97]}…",
            )
            for e in found
        ),
        empty="no effects",
    )
