"""`sublet drill`."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import click

from sublet.cli.output import json_option, print_json, print_table
from sublet.core.errors import NotProven, NotReproduced
from sublet.core.runs.drill import KINDS, by_kind, parse_kinds
from sublet.core.values import format_duration, parse_duration
from sublet.json_shapes import seconds
from sublet.runs.drill import Drilled
from sublet.runs.drill import drill as run_drill
from sublet.wiring import close_all


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Example:  sublet drill --kills 20 --seed 7 -- python train.py",
)
@click.option(
    "--kills", type=click.IntRange(1, 100_000), default=20, show_default=True, help="How many losses."
)
@click.option("--seed", type=click.IntRange(1), default=None, help="Repeats a drill; printed first.")
@click.option("--kinds", default=",".join(KINDS), show_default=True, help="Which losses, comma-separated.")
@click.option("--timeout", default="1h", show_default=True, help="The longest each of the two runs may take.")
@click.option(
    "--keep",
    default=None,
    type=click.Path(path_type=Path),
    help="Keep both ledgers and stores in this new folder.",
)
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def drill(
    command: tuple[str, ...],
    kills: int,
    seed: int | None,
    kinds: str,
    timeout: str,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Run COMMAND undisturbed and under losses, and compare: the same final state to the last bit, every step
    committed once.

    Both runs have a ledger and a store of their own in a scratch folder. At random moments the second one is
    killed (SIGKILL), told to leave (SIGTERM), loses its lease (revoke), or is stopped past the end of its
    lease and woken up (stop). It is started again after each loss, until it finishes.

    Exit code 0: bit-equal and proven. 73: not, with what differs.
    """
    seed = seed or random.SystemRandom().randrange(1, 1_000_000)
    wanted = parse_kinds(kinds)
    timeout_us = parse_duration(timeout, what="timeout")
    click.echo(f"seed {seed}   (sublet drill --seed {seed} … draws the same faults again)", err=as_json)
    with tempfile.TemporaryDirectory(prefix="sublet-drill-", ignore_cleanup_errors=True) as scratch:
        folder = (keep or Path(scratch)).absolute()
        try:
            found = run_drill(
                command,
                folder,
                kills=kills,
                seed=seed,
                kinds=wanted,
                timeout_us=timeout_us,
                say=lambda text: click.echo(text, err=as_json),
            )
        finally:
            close_all()
    if as_json:
        print_json(_as_json(found))
    else:
        _show(found)
    if not found.proven:
        first = next(p for p in found.proofs if not p.proven)
        raise NotProven(f"{first.job} is not proven: {first.flaws[0].row}: {first.flaws[0].what}")
    if not found.alike:
        job, what = next(iter(found.different.items()))
        raise NotReproduced(f"{job}: {what}")


def _back(us: int | None) -> str:
    return "-" if us is None else format_duration(us)


def _show(found: Drilled) -> None:
    click.echo()
    print_table(
        ["LOSS", "TIMES", "STEPS WASTED EACH", "AT MOST", "BACK AFTER (MEDIAN)", "AT MOST"],
        [
            (
                k.kind,
                k.count,
                f"{k.wasted / k.count:.1f}",
                k.most_wasted,
                _back(k.median_back_us),
                _back(k.longest_back_us),
            )
            for k in by_kind(found.losses)
        ],
        empty="it finished before a fault could strike",
    )
    if len(found.losses) < found.wanted:
        click.echo(
            f"{len(found.losses)} of {found.wanted} faults struck: it finished first. Give it more to do for "
            "more."
        )
    click.echo(
        f"undisturbed {format_duration(found.undisturbed_us)}, disturbed "
        f"{format_duration(found.disturbed_us)}"
    )
    for proof in found.proofs:
        said = "each committed once" if proof.proven else f"NOT PROVEN: {proof.flaws[0].what}"
        click.echo(
            f"{proof.job}: steps {proof.first}-{proof.step} in {proof.commits} commits under {proof.leases} "
            f"leases, {said}"
        )
    for job, end in found.jobs.items():
        if job not in found.different:
            click.echo(f"{job}: bit-equal to the undisturbed run at step {end.step}")
        if job in found.unseeded:
            click.echo("  (but for random generators the program neither seeds nor, it seems, uses)")
    for job, what in found.different.items():
        click.echo(f"{job}: DIFFERENT: {what}")
        for part in found.parts.get(job, []):
            click.echo(f"  {part}")


def _as_json(found: Drilled) -> dict[str, object]:
    return {
        "seed": found.seed,
        "kills": found.wanted,
        "losses": [
            {
                "kind": loss.kind,
                "grace_seconds": seconds(loss.grace_us),
                "step": loss.working_on,
                "committed": loss.committed,
                "wasted": loss.wasted,
                "back_seconds": None if loss.back_us is None else seconds(loss.back_us),
                "exit_code": loss.exit_code,
            }
            for loss in found.losses
        ],
        "undisturbed_seconds": seconds(found.undisturbed_us),
        "disturbed_seconds": seconds(found.disturbed_us),
        "jobs": {
            job: {
                "step": end.step,
                "content": end.content,
                "equal": job not in found.different,
                "different": found.different.get(job),
                "parts": found.parts.get(job, []),
                "random_generators_equal": job not in found.unseeded,
            }
            for job, end in found.jobs.items()
        },
        "different": found.different,
        "bit_equal": found.alike,
        "proven": found.proven,
        "faults": [f"{p.job}: {f.row}: {f.what}" for p in found.proofs for f in p.flaws],
    }
