"""`sublet revoke` and `sublet quarantine …`: what operators do to leases and devices."""

from __future__ import annotations

import click

from sublet.cli.output import json_option, print_json, print_table
from sublet.cli.records import device_json, lease_json, reason_of
from sublet.core.device import DeviceState
from sublet.core.lease import EndReason
from sublet.core.values import format_size, parse_duration
from sublet.settings import load_settings
from sublet.wiring import ensure_warden, open_ledger


def actor() -> str:
    return load_settings()["tenant"]


@click.command(
    epilog='Example:  sublet revoke L0123456789abcdef0123 --grace 30s --reason "maintenance at noon"'
)
@click.argument("lease_id")
@click.option(
    "--grace", default="15s", show_default=True, help="Time to commit and leave before it is torn down."
)
@click.option(
    "--reason", default="an operator took it back", show_default=True, help="What the holder reads."
)
@json_option
def revoke(lease_id: str, grace: str, reason: str, as_json: bool) -> None:
    """Take a lease back: notice now, fence and teardown when the grace is over."""
    settings = load_settings()
    ledger = open_ledger(settings)
    answer = ledger.revoke(
        lease_id,
        reason=EndReason.REVOKED,
        detail=reason,
        grace_us=parse_duration(grace, what="grace"),
        actor=actor(),
    )
    ensure_warden(settings, wait=False)
    if as_json:
        print_json(lease_json(answer))
    else:
        click.echo(f"{lease_id}: {reason_of(answer)}")


@click.group()
def quarantine() -> None:
    """Devices withheld after a teardown that was not proven."""


@quarantine.command("ls", epilog="Example:  sublet quarantine ls --json")
@json_option
def list_quarantined(as_json: bool) -> None:
    """List withheld devices and why."""
    found = [d for d in open_ledger(load_settings()).devices() if d.state is DeviceState.QUARANTINED]
    if as_json:
        print_json([device_json(d) for d in found])
        return
    print_table(
        ["DEVICE", "HOST", "VRAM", "REASON"],
        [(d.id, d.host, format_size(d.capacity_bytes), d.note) for d in found],
        empty="no device is withheld",
    )


def _set(device: str, state: str, note: str, as_json: bool) -> None:
    changed = open_ledger(load_settings()).set_device(device, state=state, note=note, actor=actor())
    if as_json:
        print_json(device_json(changed))
    else:
        click.echo(f"{device}: {changed.state.value}{f' ({note})' if note else ''}")


@quarantine.command("set", epilog='Example:  sublet quarantine set lab1-host0 --reason "fan is loud"')
@click.argument("device")
@click.option("--reason", default="withheld by an operator", show_default=True)
@json_option
def withhold(device: str, reason: str, as_json: bool) -> None:
    """Withhold a device: live leases go on, no new ones."""
    _set(device, "quarantined", reason, as_json)


@quarantine.command(epilog="Example:  sublet quarantine clear lab1-host0")
@click.argument("device")
@json_option
def clear(device: str, as_json: bool) -> None:
    """Say that a device is clean: it may be leased again."""
    _set(device, "ready", "", as_json)
