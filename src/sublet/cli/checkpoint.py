"""`sublet checkpoint …`: what was saved, whether it is whole, and making it whole again."""

from __future__ import annotations

import click

from sublet.cli.output import json_option, print_json, print_table
from sublet.core.checkpoint import Manifest
from sublet.core.effect import Head
from sublet.core.errors import Damaged, NotFound
from sublet.core.values import format_duration, format_size
from sublet.settings import load_settings
from sublet.store.replicas import Health
from sublet.wiring import checkpoints, open_ledger


@click.group()
def checkpoint() -> None:
    """Saved states: list them, look into them, verify and repair their copies."""


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
                    "committed_at": head.committed_at,
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


@checkpoint.command("show", epilog="Example:  sublet checkpoint show spot-resnet --version 3")
@click.argument("name")
@click.option("--version", type=int, default=None, help="An older one; the newest without it.")
@click.option("--limit", default=40, show_default=True, help="The most tensors to list.")
@json_option
def show(name: str, version: int | None, limit: int, as_json: bool) -> None:
    """What is in one: tensors, what is new in it, its history."""
    store = checkpoints()
    manifest = store.manifest(name, version)
    history = list(store.history(name))
    parent = next((m for m in history if m.version < manifest.version), None)
    known = {c.digest for c in parent.chunks} if parent else set()
    new = sum(c.span.size for c in manifest.chunks if c.digest not in known)
    tensors = [(path, manifest.tensors[number]) for path, number in manifest.tensor_paths()]
    if as_json:
        print_json(
            {
                "name": manifest.name,
                "version": manifest.version,
                "step": manifest.step,
                "schema": manifest.schema,
                "epoch": manifest.epoch,
                "bytes": manifest.bytes,
                "bytes_new": new,
                "chunks": len(manifest.chunks),
                "packs": list(manifest.packs),
                "versions": [m.version for m in history],
                "tensors": [
                    {
                        "path": path,
                        "dtype": t.dtype,
                        "shape": list(t.shape),
                        "bytes": manifest.storages[t.storage].size,
                    }
                    for path, t in tensors
                ],
            }
        )
        return
    click.echo(
        f"{manifest.name} version {manifest.version}, step {manifest.step}, {_size(manifest.bytes)} in "
        f"{len(manifest.chunks)} chunks, {_size(new)} of it new; versions kept: "
        f"{', '.join(str(m.version) for m in history)}"
    )
    print_table(
        ["TENSOR", "TYPE", "SHAPE", "SIZE"],
        [
            (path, t.dtype, "×".join(map(str, t.shape)) or "-", _size(manifest.storages[t.storage].size))
            for path, t in tensors[:limit]
        ],
        empty="no tensors in it",
    )
    if len(tensors) > limit:
        click.echo(f"… and {len(tensors) - limit} more (--limit)")


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
    health: Health = store.repair(name)
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
