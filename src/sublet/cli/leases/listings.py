"""`sublet gpus` and `sublet ps`."""

from __future__ import annotations

import click

from sublet.cli.output import json_option, print_json, print_table
from sublet.cli.records import left_us, live_leases, reason_of, running_us, short_state
from sublet.cli.runs.runs import show_runs
from sublet.core.leasing.lease import LeaseState
from sublet.core.scheduling.device import MANY_TENANTS
from sublet.core.values import format_duration, format_size
from sublet.json_shapes import devices_json, lease_json, receipt_json
from sublet.leases.warden.warden_process import ensure_warden
from sublet.machine import waiting_note
from sublet.ports.ledger import Answer
from sublet.settings import Settings, load_settings
from sublet.wiring import open_ledger


@click.command(epilog="Example:  sublet gpus --json")
@json_option
def gpus(as_json: bool) -> None:
    """Devices: what is free, who is on them, what is withheld."""
    settings = load_settings()
    ledger = open_ledger(settings)
    ensure_warden(settings)
    found = ledger.devices()
    if as_json:
        print_json(devices_json(found, live_leases(ledger), operator=True))
        return
    print_table(
        ["DEVICE", "HOST", "STATE", "FREE", "VRAM", "LEASES", "TENANT", "REASON"],
        [
            (
                d.id,
                d.host,
                d.state.value,
                format_size(d.free_bytes) if d.free_bytes else "0",
                format_size(d.capacity_bytes),
                d.leases,
                "several" if d.sole_tenant == MANY_TENANTS else d.sole_tenant or "-",
                d.note or d.name,
            )
            for d in found
        ],
        empty="no devices; set SUBLET_DEVICES, for example host:2x16GiB",
    )


@click.command(epilog="Example:  sublet ps --all --tenant ada")
@click.option("-a", "--all", "everything", is_flag=True, help="Ended leases too, newest first.")
@click.option("--tenant", default="", help="Only this tenant's.")
@click.option("--runs", is_flag=True, help="This user's runs ('sublet run') instead of leases.")
@click.option("--receipts", is_flag=True, help="How teardowns went, newest first.")
@click.option("--limit", default=200, show_default=True, help="The most to show.")
@json_option
def ps(everything: bool, tenant: str, runs: bool, receipts: bool, limit: int, as_json: bool) -> None:
    """Leases and waiters, each with its reason.

    ST: R runs, PD waits, CG is leaving; with --all also CD released, TO expired, CA revoked, PR preempted, NF
    holder or device lost, F refused.

    --receipts: how each lease was torn down: PROVEN clean or not, the rung of the LADDER it took (gone, term,
    kill), what contained its processes, how much device memory was FREED and SCRUBBED, and how long it TOOK.
    """
    if runs:
        show_runs(load_settings(), everything=everything, limit=limit, as_json=as_json)
        return
    if receipts:
        _show_receipts(tenant, limit, as_json)
        return
    settings = load_settings()
    found = open_ledger(settings).leases(live_only=not everything, tenant=tenant, limit=limit)
    waits = {a.lease.id: _waits(settings, a) for a in found}
    if as_json:
        print_json([lease_json(a, operator=True) | {"waits": waits[a.lease.id]} for a in found])
        return
    rows = []
    for a in found:
        left = left_us(a)
        size = a.lease.vram_bytes or a.lease.request.vram_bytes
        count = f"{a.lease.request.count}×" if a.lease.request.count > 1 else ""
        rows.append(
            (
                a.lease.id,
                a.lease.request.job or "-",
                a.lease.tenant,
                a.lease.request.tier.value,
                short_state(a),
                format_duration(running_us(a)),
                "-" if left is None else format_duration(left),
                count + format_size(size),
                ",".join(s.device_id for s in a.lease.slices) or "-",
                waits[a.lease.id] or reason_of(a),
            )
        )
    print_table(
        ["LEASE", "JOB", "TENANT", "TIER", "ST", "TIME", "LEFT", "VRAM", "DEVICES", "REASON"],
        rows,
        empty="no leases",
    )


def _waits(settings: Settings, answer: Answer) -> str:
    """What the saves of a run on this machine wait for, as the run reports it."""
    return (
        waiting_note.heard(settings.home, answer.lease.id) if answer.lease.state is LeaseState.ACTIVE else ""
    )


def _show_receipts(tenant: str, limit: int, as_json: bool) -> None:
    found = open_ledger(load_settings()).receipts(tenant=tenant, limit=limit)
    if as_json:
        print_json([receipt_json(t, operator=True) for t in found])
        return
    print_table(
        [
            "LEASE",
            "TENANT",
            "PROVEN",
            "LADDER",
            "CONTAINMENT",
            "FREED",
            "SCRUBBED",
            "TOOK",
            "DEVICES",
            "DETAIL",
        ],
        [
            (
                t.lease_id,
                t.tenant,
                "yes" if t.receipt.proven else "NO",
                t.receipt.ladder,
                t.receipt.containment,
                format_size(t.receipt.freed_bytes) if t.receipt.freed_bytes else "0",
                format_size(t.receipt.scrubbed_bytes) if t.receipt.scrubbed_bytes else "0",
                format_duration(t.receipt.duration_us),
                ",".join(t.devices) or "-",
                t.receipt.detail or "-",
            )
            for t in found
        ],
        empty="no receipts: no lease had anything to tear down",
    )
