"""`sublet checkpoint …`: what was saved, whether it is whole, and making it whole again."""

from __future__ import annotations

import click

from sublet.cli.checkpoints import files, upkeep
from sublet.cli.checkpoints.show import show
from sublet.cli.output import json_option, print_json, print_table
from sublet.core.checkpoints.checkpoint import Manifest
from sublet.core.errors import Damaged, NotFound
from sublet.core.progress.effect import Head
from sublet.core.values import format_duration, format_size
from sublet.json_shapes import at_or_none
from sublet.settings import load_settings
from sublet.wiring import checkpoints, open_ledger


@click.group()
def checkpoint() -> None:
    """Saved states: list them, look into them, verify and repair their copies."""


checkpoint.add_command(show)
for _command in (*upkeep.COMMANDS, *files.COMMANDS):
    checkpoint.add_command(_command)


@checkpoint.command("ls", epilog="Example:  sublet checkpoint ls --json")
@json_option
def ls(as_json: bool) -> None:
    """Every name that has a head, with its newest version."""
    ledger, store = open_ledger(load_settings()), checkpoints()
    found: list[tuple[Head, Manifest | None]] = []
    for head in ledger.heads():
        try:
            found.append((head, store.manifest(head.job)))
        except (NotFound, Damaged):
            found.append((head, None))
    now = ledger.now()
    if as_json:
        print_json(
            [
                {
                    "name": head.job,
                    "tenant": head.tenant,
                    "version": head.version,
                    "step": head.step,
                    "digest": head.digest,
                    "committed_at": at_or_none(head.committed_at),
                    "bytes": manifest.bytes if manifest else None,
                }
                for head, manifest in found
            ]
        )
        return
    print_table(
        ["NAME", "TENANT", "VERSION", "STEP", "SIZE", "AGE", "DIGEST"],
        [
            (
                head.job,
                head.tenant,
                head.version,
                head.step,
                _size(manifest.bytes) if manifest else "no state",
                format_duration(max(0, now - head.committed_at)),
                head.digest[:16],
            )
            for head, manifest in found
        ],
        empty="nothing was committed yet",
    )


def _size(value: int) -> str:
    return format_size(value) if value else "0"


@checkpoint.command("verify", epilog="Example:  sublet checkpoint verify spot-resnet")
@click.argument("name")
@json_option
def verify(name: str, as_json: bool) -> None:
    """Read every copy of every chunk of every version, and compare it with its digest. Changes nothing."""
    store = checkpoints()
    rows = store.verify(name)
    if as_json:
        print_json([{"replica": r, "pack": p, "state": s} for r, p, s in rows])
    else:
        print_table(
            ["REPLICA", "PACK", "STATE"], [(r, p[:16], s) for r, p, s in rows], empty="nothing stored"
        )
    if any(s != "good" for _, _, s in rows):
        raise Damaged(
            f"{sum(s != 'good' for _, _, s in rows)} copies of {name} are missing or bad",
            remedy=f"run 'sublet checkpoint repair {name}'",
        )


@checkpoint.command("repair", epilog="Example:  sublet checkpoint repair spot-resnet")
@click.argument("name")
@json_option
def repair(name: str, as_json: bool) -> None:
    """Give every replica a good copy of everything. Bad copies are set aside first and never copied from."""
    store = checkpoints()
    health = store.repair(name)
    if as_json:
        print_json(
            {"repaired": health.repaired, "set_aside": health.set_aside, "unreachable": health.unreachable}
        )
        return
    for what, lines in (
        ("repaired", health.repaired),
        ("set aside", health.set_aside),
        ("NOT reached", health.unreachable),
    ):
        for line in sorted(set(lines)):
            click.echo(f"{what}: {line}")
    if not (health.repaired or health.set_aside or health.unreachable):
        click.echo("every replica has a good copy of everything")
