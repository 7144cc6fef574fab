"""`sublet lease acquire|renew|release|show`: a lease held by name, or for a process that already runs."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from sublet.cli.output import instant, json_option, print_fields, print_json
from sublet.cli.records import reason_of, short_state
from sublet.core.errors import LeaseLost, NotFound
from sublet.core.leasing.gang import Seat
from sublet.core.leasing.lease import LeaseRecord
from sublet.core.leasing.options import GpuOptions
from sublet.core.scheduling.admission import Wait
from sublet.core.values import format_duration, format_size
from sublet.json_shapes import at_or_none, lease_json
from sublet.leases.request import local_gpu
from sublet.ports.ledger import Answer, LeaseKey
from sublet.settings import Settings, load_settings
from sublet.wiring import open_ledger


@click.group()
def lease() -> None:
    """Acquire, renew, release or show one lease."""


def _key_path(settings: Settings, lease_id: str) -> str:
    if not lease_id.isalnum():
        raise NotFound(f"{lease_id[:40]!r} is not a lease id", remedy="'sublet ps' lists them")
    return str(settings.home / "leases" / lease_id)


def _remember(settings: Settings, key: LeaseKey) -> None:
    """Keep the secret with the user who acquired it, readable by nobody else."""
    path = _key_path(settings, key.lease_id)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump({"epoch": key.epoch, "secret": key.secret}, file)


def _recall(settings: Settings, lease_id: str) -> LeaseKey:
    try:
        with open(_key_path(settings, lease_id)) as file:
            kept = json.load(file)
    except FileNotFoundError:
        raise NotFound(
            f"this user did not acquire lease {lease_id} here", remedy="an operator can 'sublet revoke' it"
        ) from None
    return LeaseKey(lease_id, int(kept["epoch"]), str(kept["secret"]))


def _forget(settings: Settings, lease_id: str) -> None:
    try:
        os.unlink(_key_path(settings, lease_id))
    except FileNotFoundError:
        pass


def show_wait(wait: Wait) -> None:
    eta = f", about {format_duration(wait.eta_us)}" if wait.eta_us is not None else ""
    text = f"waiting: place {wait.position}{eta}; {wait.reason}"
    if sys.stderr.isatty():
        click.echo(f"\r\033[K{text}", nl=False, err=True)
    else:
        click.echo(text, err=True)


@lease.command(epilog="Example:  sublet lease acquire --vram 8GB --ttl 30m --pid $$")
@click.option(
    "--vram", default="1GiB", show_default=True, help="Per device; a range 8GB..16GB takes what is free."
)
@click.option("--ttl", default="5m", show_default=True, help="Ends after this unless renewed.")
@click.option("--count", "--gpus", "count", default=1, show_default=True, help="Devices, all or none.")
@click.option(
    "--exclusivity",
    default="shared",
    show_default=True,
    help="shared, session (own tenant only) or device (alone).",
)
@click.option("--tier", default="interactive", show_default=True, help="interactive, batch or spot.")
@click.option("--wait", default=None, help="How long to queue, e.g. 30m. Default: as long as it takes.")
@click.option("--nonblock", is_flag=True, help="Now or exit 75.")
@click.option("--least", default=None, help="Take a smaller slice, down to this, rather than wait.")
@click.option("--tenant", default=None, help="The tenant it is for.")
@click.option("--job", default="", help="A name that outlives the lease.")
@click.option(
    "--pid",
    default=0,
    help="Bind it to a running process: it ends with the process, and the process with it.",
)
@click.option(
    "--spread",
    default="no",
    show_default=True,
    help="ok: the devices may be of several hosts, when no single one has them.",
)
@click.option("--ticket", is_flag=True, help="Print only what its members join with (SUBLET_GANG).")
@click.option("--short", is_flag=True, help="Print only the device ids, for scripts.")
@json_option
def acquire(nonblock: bool, pid: int, ticket: bool, short: bool, as_json: bool, **words: Any) -> None:
    """Lease a GPU by name. It ends at its ttl unless 'sublet lease renew' extends it.

    With --spread ok several devices may be of several hosts: 'sublet lease show' lists its seats, and a
    process on each of those hosts calls sublet.join() with the ticket.
    """
    settings = load_settings()
    if nonblock:
        words["wait"] = "0s"
    options = GpuOptions(**words, holder="process" if pid else "name")
    held = local_gpu(options, on_wait=None if as_json else show_wait, pid=pid, settings=settings).ask()
    if sys.stderr.isatty() and not as_json:
        click.echo("\r\033[K", nl=False, err=True)
    _remember(settings, held.key)
    if ticket:
        click.echo(held.ticket)
        return
    if short:
        click.echo(",".join(held.devices))
        return
    _show(open_ledger(settings).look(held.id), as_json)


@lease.command(epilog="Example:  sublet lease renew L0123456789abcdef0123")
@click.argument("lease_id")
@json_option
def renew(lease_id: str, as_json: bool) -> None:
    """Extend a lease by its ttl."""
    settings = load_settings()
    _show(open_ledger(settings).renew(_recall(settings, lease_id)), as_json)


@lease.command(epilog="Example:  sublet lease release L0123456789abcdef0123")
@click.argument("lease_id")
@json_option
def release(lease_id: str, as_json: bool) -> None:
    """Give a lease back. Releasing one that is over already is fine."""
    settings = load_settings()
    ledger = open_ledger(settings)
    ledger.release(lease_id, _recall(settings, lease_id).secret)
    _forget(settings, lease_id)
    _show(ledger.look(lease_id), as_json)


@lease.command(epilog="Example:  sublet lease show L0123456789abcdef0123 --json")
@click.argument("lease_id")
@click.option("--check", is_flag=True, help="Exit 76 unless it is active.")
@json_option
def show(lease_id: str, check: bool, as_json: bool) -> None:
    """Everything about one lease."""
    answer = open_ledger(load_settings()).look(lease_id)
    _show(answer, as_json)
    if check and answer.lease.ends_at <= answer.at:
        raise LeaseLost(f"lease {lease_id} is over: {reason_of(answer)}")


def _seats(held: LeaseRecord) -> list[Seat]:
    return open_ledger(load_settings()).seats(held.id) if held.seats else []


def _seat_words(seat: Seat) -> str:
    if seat.settled_at:
        return f"{seat.host} settled"
    return f"{seat.host} pid {seat.member.pid}" if seat.member else f"{seat.host} empty"


def _show(answer: Answer, as_json: bool) -> None:
    seats = _seats(answer.lease)
    if as_json:
        there = [
            {
                "rank": rank,
                "host": seat.host,
                "devices": [s.device_id for s in seat.slices],
                "pid": seat.member.pid if seat.member else None,
                "settled_at": at_or_none(seat.settled_at),
            }
            for rank, seat in enumerate(seats)
        ]
        print_json({**lease_json(answer, operator=True), "seats": there})
        return
    held = answer.lease
    fields = [
        ("lease", held.id),
        ("state", f"{held.state.value} ({short_state(answer)})"),
        ("reason", reason_of(answer)),
        ("tenant", held.tenant),
        ("devices", ", ".join(f"{s.device_id} {format_size(s.vram_bytes)}" for s in held.slices) or "-"),
        ("epoch", str(held.epoch)),
        (
            "holder",
            f"pid {held.holder.pid} on {held.holder.host}"
            if held.holder.pid
            else f"by name on {held.holder.host}",
        ),
        *([("seats", ", ".join(map(_seat_words, seats)))] if seats else []),
        ("granted", instant(held.granted_at) or "-"),
        (
            "ends",
            f"{instant(held.ends_at)} (in {format_duration(held.ends_at - answer.at)})"
            if held.ends_at > answer.at
            else instant(held.ends_at) or "-",
        ),
    ]
    print_fields(fields)
