"""`sublet revoke` and `sublet quarantine …`: what operators do to leases and devices."""

from __future__ import annotations

import contextlib
import re

import click

from sublet.cli.output import json_option, print_json, print_table
from sublet.cli.records import live_leases, reason_of
from sublet.core.errors import BadInput, NotFound
from sublet.core.leasing.lease import EndReason
from sublet.core.notice import DEFAULT_GRACE
from sublet.core.scheduling.device import DeviceState
from sublet.core.values import format_size, parse_duration
from sublet.json_shapes import devices_json, lease_json
from sublet.leases.warden.warden_process import ensure_warden
from sublet.machine.run_folder import find_run
from sublet.ports.ledger import Ledger
from sublet.settings import Settings, load_settings
from sublet.wiring import open_ledger


def actor() -> str:
    return load_settings()["tenant"]


@click.command(epilog='Example:  sublet revoke resnet --grace 30s --reason "maintenance at noon"')
@click.argument("lease", metavar="LEASE_OR_RUN")
@click.option(
    "--grace",
    default=DEFAULT_GRACE,
    show_default=True,
    help="Time to commit and leave before it is torn down.",
)
@click.option(
    "--reason", default="an operator took it back", show_default=True, help="What the holder reads."
)
@json_option
def revoke(lease: str, grace: str, reason: str, as_json: bool) -> None:
    """Take a lease back, or that of a run or job by its name: notice now, fence and teardown when the grace
    is over."""
    settings = load_settings()
    ledger = open_ledger(settings)
    lease_id = _lease_of(lease, ledger, settings)
    answer = ledger.revoke(
        lease_id,
        reason=EndReason.REVOKED,
        detail=reason,
        grace_us=parse_duration(grace, what="grace"),
        actor=actor(),
    )
    ensure_warden(settings, wait=False)
    if as_json:
        print_json(lease_json(answer, operator=True))
    else:
        click.echo(f"{lease_id}: {reason_of(answer)}")


def _lease_of(given: str, ledger: Ledger, settings: Settings) -> str:
    """The id of the lease that is named, or that a run or a job of this name has."""
    if re.fullmatch("L[0-9a-z]*", given):
        return given
    job = given
    with contextlib.suppress(NotFound):
        folder = find_run(settings.home, given)
        job = str(folder.facts().get("name") or folder.id)
    found = [lease.id for lease in live_leases(ledger) if lease.request.job == job]
    if len(found) == 1:
        return found[0]
    if not found:
        raise NotFound(
            f"no run or job named {given[:60]!r} has a lease; nothing was changed",
            remedy="'sublet ps' lists leases with their jobs",
        )
    raise BadInput(
        f"{len(found)} leases are of {given!r}: {', '.join(found[:5])}; nothing was changed",
        remedy="name one of them",
    )


@click.group()
def quarantine() -> None:
    """Devices withheld after a teardown that was not proven."""


@quarantine.command("ls", epilog="Example:  sublet quarantine ls --json")
@json_option
def list_quarantined(as_json: bool) -> None:
    """List withheld devices and why."""
    ledger = open_ledger(load_settings())
    found = [d for d in ledger.devices() if d.state is DeviceState.QUARANTINED]
    if as_json:
        print_json(devices_json(found, live_leases(ledger), operator=True))
        return
    print_table(
        ["DEVICE", "HOST", "VRAM", "REASON"],
        [(d.id, d.host, format_size(d.capacity_bytes), d.note) for d in found],
        empty="no device is withheld",
    )


def _set(device: str, state: str, note: str, as_json: bool) -> None:
    ledger = open_ledger(load_settings())
    changed = ledger.set_device(device, state=state, note=note, actor=actor())
    if as_json:
        print_json(devices_json([changed], live_leases(ledger), operator=True)[0])
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
