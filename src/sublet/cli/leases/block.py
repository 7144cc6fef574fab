"""`sublet block …`: what block leases hold, and giving them up."""

from __future__ import annotations

import click

from sublet.cli.output import instant, json_option, print_fields, print_json, print_table
from sublet.core.checkpoints.region import Bad, Empty, Slot
from sublet.core.leasing.block import BlockState, check_locator
from sublet.core.values import format_duration, format_size
from sublet.json_shapes import at_or_none
from sublet.leases.blocks.block import seen_dead
from sublet.leases.blocks.durable import remove_block, sweep_blocks
from sublet.ports.ledger import BlockAnswer
from sublet.settings import load_settings
from sublet.wiring import open_ledger, processes, regions


@click.group()
def block() -> None:
    """Block leases: durable values by locator; list, look into, remove, sweep."""


def _json(answer: BlockAnswer) -> dict[str, object]:
    row = answer.block
    return {
        "locator": row.id,
        "tenant": row.tenant,
        "state": row.state_at(answer.at).value,
        "blocks": row.blocks,
        "size_bytes": row.size_bytes,
        "epoch": row.epoch,
        "host": row.holder.host,
        "pid": row.holder.pid,
        "expires_at": at_or_none(row.expires_at),
        "kept_until": at_or_none(row.kept_until),
        "reason": row.reason.value if row.reason else "",
        "sequence": row.sequence,
        "digest": row.digest,
        "bytes": row.bytes,
        "checkpointed_at": at_or_none(row.recorded_at),
    }


def _until(answer: BlockAnswer) -> str:
    row, settings = answer.block, load_settings()
    if row.state_at(answer.at) is BlockState.HELD:
        if seen_dead(processes(settings), row, settings["host"]):
            return f"its process {row.holder.pid} is gone: it can be attached now"
        return (
            f"held by {row.holder.pid} on {row.holder.host} for {format_duration(row.expires_at - answer.at)}"
        )
    left = row.kept_until - answer.at
    return (
        f"kept for {format_duration(left)}"
        if left > 0
        else "its retention is over: the next sweep removes it"
    )


@block.command("ls", epilog="Example:  sublet block ls --json")
@json_option
def ls(as_json: bool) -> None:
    """Every block of your tenant, with its last checkpoint."""
    settings = load_settings()
    found = open_ledger(settings).blocks(tenant=settings["tenant"])
    if as_json:
        print_json([_json(answer) for answer in found])
        return
    print_table(
        ["LOCATOR", "SIZE", "CHECKPOINT", "BYTES", "AGE", "UNTIL"],
        [
            (
                a.block.id,
                format_size(a.block.size_bytes),
                a.block.sequence if a.block.sequence >= 0 else "?",
                format_size(a.block.bytes) if a.block.bytes else "0",
                format_duration(a.at - a.block.recorded_at) if a.block.recorded_at else "-",
                _until(a),
            )
            for a in found
        ],
        empty="no blocks; sublet.block() makes one",
    )


@block.command("show", epilog="Example:  sublet block show B0123456789abcdef0123")
@click.argument("locator")
@json_option
def show(locator: str, as_json: bool) -> None:
    """One block: who holds it, until when, and what is in its two slots. Changes nothing."""
    settings = load_settings()
    check_locator(locator)
    answer = open_ledger(settings).look_block(locator, settings["tenant"])
    row = answer.block
    slots = regions(settings).inspect(locator, row.blocks)
    said = [_slot(slot, row.sequence) for slot in slots] if slots else ["not in this SUBLET_HOME"] * 2
    if as_json:
        print_json(_json(answer) | {"slots": said})
        return
    print_fields(
        [
            ("locator", row.id),
            ("tenant", row.tenant),
            ("size", f"{row.blocks} blocks, {format_size(row.size_bytes)}"),
            ("lease", _until(answer)),
            (
                "checkpoint",
                f"{row.sequence}, {row.bytes} bytes, {instant(row.recorded_at)}" if row.sequence else "none",
            ),
            ("digest", row.digest or "-"),
            ("first slot", said[0]),
            ("second slot", said[1]),
        ]
    )


def _slot(slot: Slot, recorded: int) -> str:
    if isinstance(slot, Empty):
        return "empty"
    if isinstance(slot, Bad):
        return f"not readable: {slot.reason}"
    header = slot.header
    counts = "" if header.sequence <= recorded or recorded < 0 else ", never recorded"
    return (
        f"checkpoint {header.sequence} of epoch {header.epoch}, {header.length} bytes, {header.codec}{counts}"
    )


@block.command("rm", epilog="Example:  sublet block rm B0123456789abcdef0123")
@click.argument("locator")
@json_option
def rm(locator: str, as_json: bool) -> None:
    """Give up a block and what is in it. Refused while a living process holds it."""
    removed = remove_block(locator)
    if as_json:
        print_json({"locator": locator, "removed": removed})
    else:
        click.echo(f"removed {locator}" if removed else f"{locator} was removed already")


@block.command("sweep", epilog="Example:  sublet block sweep")
@json_option
def sweep(as_json: bool) -> None:
    """Remove blocks whose retention is over, and files left behind by removed ones."""
    swept, unknown = sweep_blocks()
    if as_json:
        print_json({"removed": swept, "unknown": unknown})
        return
    for locator in swept:
        click.echo(f"removed {locator}: its retention was over")
    for locator in unknown:
        click.echo(f"left alone {locator}: this ledger does not know it")
    if not swept and not unknown:
        click.echo("nothing to remove")
