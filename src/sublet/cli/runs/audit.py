"""`sublet audit`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import click

from sublet.cli.output import archive_option, instant, json_option, print_fields, print_json, print_table
from sublet.core.errors import NotProven, SubletError
from sublet.core.journal.replay import Flaw
from sublet.core.journal.step_audit import Proof
from sublet.core.progress.effect import Effect
from sublet.core.progress.verifying import DIFFERS_TAG, repeated_name
from sublet.json_shapes import at_or_none
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

    It walks the hash chain of the journal from its first row, follows the job from its first step to its
    head, and compares every effect and lease row with what was journalled: no gap, no repeat, no commit
    without a live lease, nothing edited by hand. Changes nothing. Exit code 73 if anything is wrong, with the
    row named.
    """
    ledger = open_ledger(load_settings())
    proofs = ledger.prove(*([job] if job else []), archived=archived)
    proofs, looked = _attested(proofs, look or (True if deep else look), deep)
    if effects:
        _show_effects(ledger, [p.job for p in proofs], as_json)
    elif as_json:
        print_json([_as_json(p, looked, _differing(ledger, p.job)) for p in proofs])
    elif job:
        _show_one(proofs[0], looked, _differing(ledger, job))
    else:
        _show_all(proofs)
    refuse_flawed([(p.job, p.flaws, 0) for p in proofs], limit, as_json=as_json)


def _attested(proofs: list[Proof], look: bool | None, deep: bool) -> tuple[list[Proof], str]:
    """The proofs with the findings on the replicas, and whether these were read."""
    if look is False:
        return proofs, "not looked at"
    from sublet.store.upkeep.attesting import attest

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


def _differing(ledger: Ledger, job: str) -> int | None:
    """The version that came out differently when a resume repeated its steps."""
    kept = ledger.versions(job).tags.get(DIFFERS_TAG)
    return None if kept is None else kept.version


def _show_one(p: Proof, looked: str, differing: int | None) -> None:
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
    if differing is not None:
        words = f"version {differing} came out differently when a resume repeated its steps; "
        fields.append(("resumes", f"{words}what came out instead: {repeated_name(p.job)}"))
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


def refuse_flawed(found: Sequence[tuple[str, Sequence[Flaw], int]], limit: int, *, as_json: bool) -> None:
    """Show the flaws of each name and raise `NotProven`, if there are any. The number counts flaws that were
    not kept."""
    flawed = [(name, flaws, more) for name, flaws, more in found if flaws]
    if not flawed:
        return
    if not as_json:
        for _, flaws, more in flawed:
            _show_flaws(flaws, limit, more)
    count = sum(len(flaws) + more for _, flaws, more in flawed)
    names = ", ".join(name for name, _, _ in flawed[:5])
    raise NotProven(f"not proven: {count} fault{'s' * (count != 1)} in {names}")


def _show_flaws(flaws: Sequence[Flaw], limit: int, more: int) -> None:
    """Each with its row, and what to do."""
    click.echo()
    shown = flaws[:limit]
    print_table(["ROW", "RULE", "WHAT IS WRONG"], [(f.row, f.rule, f.what) for f in shown], empty="")
    if len(flaws) + more > limit:
        click.echo(f"… and {len(flaws) + more - limit} more (--limit)")
    for remedy in dict.fromkeys(f.remedy for f in shown):
        click.echo(f"→ {remedy}")


def flaw_json(flaw: Flaw) -> dict[str, str]:
    return {"row": flaw.row, "rule": flaw.rule, "what": flaw.what, "remedy": flaw.remedy}


def _as_json(p: Proof, looked: str, differing: int | None) -> dict[str, object]:
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
        "began_at": at_or_none(p.began_at),
        "committed_at": at_or_none(p.committed_at),
        "rows": p.rows,
        "checkpoint": looked,
        "resume_differs": differing,
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
