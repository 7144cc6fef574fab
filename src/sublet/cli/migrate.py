"""`sublet migrate`: schema, backup, and putting a backup back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import click

from sublet.cli.operate import actor
from sublet.core.errors import BadInput, Misconfigured
from sublet.settings import Settings, load_settings
from sublet.wiring import CLOCK, open_ledger, warden_state


def _sqlite_path(settings: Settings) -> Path:
    url = settings["ledger"]
    if not url.startswith("sqlite:"):
        raise BadInput(
            "this ledger is a PostgreSQL database: use pg_dump and pg_restore, then 'sublet migrate --restored'"
        )
    return Path(url.removeprefix("sqlite:")).expanduser()


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

    After a restore every lease the backup knew is ended and the epoch jumps far ahead, so that nobody who held a lease
    before can ever write again.
    """
    settings = load_settings()
    if backup_to is not None:
        _backup(_sqlite_path(settings), backup_to)
        return
    if restore_from is not None:
        _restore(settings, restore_from)
        restored = True
    elif settings["ledger"].startswith("sqlite:"):
        from sublet.ledger.sqlite import apply_migrations

        path = _sqlite_path(settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        _report(apply_migrations(path, CLOCK))
    else:
        from sublet.ledger.postgres import apply_migrations as apply_on_postgres

        _report(apply_on_postgres(settings["ledger"], CLOCK))
    if restored:
        ended = open_ledger(settings).mark_restored(actor=actor())
        click.echo(f"restored: {ended} lease(s) of the backup ended, epochs jumped, old holders are fenced")


def _report(done: list[str]) -> None:
    for name in done:
        click.echo(f"applied {name}")
    if not done:
        click.echo("the ledger is at this version's schema")


def _backup(path: Path, target: Path) -> None:
    from sublet.ledger.sqlite import backup

    if not path.exists():
        raise Misconfigured("there is no ledger to back up yet")
    if target.exists():
        raise BadInput(f"{target} exists already; name a new file")
    backup(path, target)
    click.echo(f"copied to {target}")


def _restore(settings: Settings, source: Path) -> None:
    from sublet.ledger.sqlite import open_ledger as open_sqlite

    path = _sqlite_path(settings)
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
    open_sqlite(f"sqlite:{trial}", CLOCK).close()
    for leftover in (f"{trial}-wal", f"{trial}-shm", f"{trial}-gate", f"{path}-wal", f"{path}-shm"):
        Path(leftover).unlink(missing_ok=True)
    if path.exists():
        os.replace(path, path.with_name(f"{path.name}.before-restore"))
    os.replace(trial, path)
    click.echo(f"put {source} in the place of {path}; the old one is {path.name}.before-restore")
