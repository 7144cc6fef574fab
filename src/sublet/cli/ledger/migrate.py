"""`sublet migrate`: schema, backup, and putting a backup back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

from sublet.cli.leases.operate import actor
from sublet.core.errors import BadInput, Misconfigured
from sublet.leases.warden.warden_process import warden_state
from sublet.settings import Settings, load_settings
from sublet.wiring import CLOCK, copy_ledger, migrate_ledger, open_ledger, plug_in, sqlite_path


@click.command(epilog="Example:  sublet migrate --backup /mnt/backup/ledger.db")
@click.option(
    "--backup", "backup_to", type=click.Path(path_type=Path), help="Copy the live ledger to this new file."
)
@click.option(
    "--restore",
    "restore_from",
    type=click.Path(path_type=Path),
    help="Put this backup in the ledger's place.",
)
@click.option(
    "--restored", is_flag=True, help="Say that the database was restored by other means (pg_restore)."
)
def migrate(backup_to: Path | None, restore_from: Path | None, restored: bool) -> None:
    """Bring the ledger to this version's schema. With an option: back it up, or put a backup back.

    After a restore every lease the backup knew is ended and the epoch jumps far ahead, so that nobody who
    held a lease before can ever write again.
    """
    settings = load_settings()
    if backup_to is not None:
        _backup(settings, backup_to)
        return
    if restore_from is not None:
        _restore(settings, restore_from)
        restored = True
    else:
        _report(migrate_ledger(settings))
    if restored:
        ended = open_ledger(settings).mark_restored(actor=actor())
        click.echo(f"restored: {ended} lease(s) of the backup ended, epochs jumped, old holders are fenced")


def _report(done: list[str]) -> None:
    for name in done:
        click.echo(f"applied {name}")
    if not done:
        click.echo("the ledger is at this version's schema")


def _backup(settings: Settings, target: Path) -> None:
    if not sqlite_path(settings).exists():
        raise Misconfigured("there is no ledger to back up yet")
    if target.exists():
        raise BadInput(f"{target} exists already; name a new file")
    copy_ledger(settings, target)
    click.echo(f"copied to {target}")


def _restore(settings: Settings, source: Path) -> None:
    path = sqlite_path(settings)
    if not source.exists():
        raise BadInput(f"{source} does not exist")
    running, _, pid = warden_state(settings)
    if running:
        raise BadInput(
            f"a warden (pid {pid}) uses the ledger",
            remedy="stop the holders and the warden first, then restore",
        )
    # Prove that it opens before anything is moved.
    trial = path.with_name(f"{path.name}.restoring")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, trial)
    plug_in("sublet.ledgers", "sqlite")(f"sqlite:{trial}", CLOCK).close()
    for leftover in (f"{trial}-wal", f"{trial}-shm", f"{trial}-gate", f"{path}-wal", f"{path}-shm"):
        Path(leftover).unlink(missing_ok=True)
    if path.exists():
        os.replace(path, path.with_name(f"{path.name}.before-restore"))
    os.replace(trial, path)
    click.echo(f"put {source} in the place of {path}; the old one is {path.name}.before-restore")
