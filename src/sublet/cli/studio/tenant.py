"""`sublet tenant …` and `sublet quota …`; `sublet tenant token …` is in `token.py`."""

from __future__ import annotations

from collections import Counter

import click

from sublet.cli.leases.operate import actor
from sublet.cli.output import instant, json_option, print_json, print_table
from sublet.cli.studio.token import token
from sublet.core.billing.allowance import Allowance, allowance
from sublet.core.errors import BadInput
from sublet.core.leasing.tenancy import DEFAULT_WEIGHT, Tenant, used_now
from sublet.core.values import format_duration, format_size, parse_duration, parse_size
from sublet.json_shapes import tenant_json
from sublet.ports.ledger import Ledger
from sublet.settings import load_settings
from sublet.wiring import open_ledger


def _limit(text: str | None) -> int | None:
    if text is None:
        return None
    return 0 if text in ("0", "none") else parse_size(text, what="max-vram")


def _per_day(text: str | None) -> int | None:
    if text is None:
        return None
    return 0 if text in ("0", "none") else parse_duration(f"{text}h", what="gpu-hours-per-day")


_PER_DAY = "GPU-hours a day, for example 2 or 0.5, refilled evenly over 24 h; none: no limit."
_SESSIONS = "Studio sessions open at once;"
_STORAGE = "Of checkpoints, for example 20GB; none: no limit."


def _show(ledger: Ledger, tenants: list[Tenant], as_json: bool) -> None:
    now, half_life = ledger.now(), ledger.policy().half_life_us
    used = {t.name: used_now(t, now, half_life) for t in tenants}
    times = {t.name: ledger.allowance(t.name) if t.gpu_us_per_day else allowance(t, 0, now) for t in tenants}
    stays = Counter(x.session.tenant for x in ledger.sessions(limit=1_000_000))
    if as_json:
        print_json(
            [
                tenant_json(
                    t,
                    used[t.name],
                    times[t.name],
                    sessions=stays[t.name],
                    stored_bytes=ledger.stored_bytes(t.name),
                )
                for t in tenants
            ]
        )
        return
    print_table(
        [
            "TENANT",
            "WEIGHT",
            "LEASES",
            "VRAM",
            "WAITING",
            "SESSIONS",
            "STORED",
            "RECENT GPU TIME",
            "GPU TIME A DAY",
        ],
        [
            (
                t.name,
                t.weight,
                f"{t.live_leases} of {t.max_leases or '∞'}",
                _of(t.live_bytes, t.max_vram_bytes),
                f"{t.waiting} of {t.max_waiting or ledger.policy().tenant_waiting_max}",
                f"{stays[t.name]} of {t.max_sessions or '∞'}",
                _of(ledger.stored_bytes(t.name), t.max_storage_bytes),
                format_duration(used[t.name]),
                _by_the_day(times[t.name]),
            )
            for t in tenants
        ],
        empty="no tenants; 'sublet tenant add NAME' makes one",
    )


def _of(size: int, most: int) -> str:
    return f"{format_size(size) if size else '0'} of {format_size(most) if most else '∞'}"


def _by_the_day(time: Allowance) -> str:
    if not time.per_day_us:
        return "∞"
    left = format_duration(max(0, time.left_us))
    return f"left {left} of {format_duration(time.per_day_us)}, full again at {instant(time.full_at)}"


@click.group()
def tenant() -> None:
    """Who may lease: add, list, change, remove."""


tenant.add_command(token)


@tenant.command("ls", epilog="Example:  sublet tenant ls --json")
@json_option
def list_tenants(as_json: bool) -> None:
    """List tenants with what they hold and have used."""
    ledger = open_ledger(load_settings())
    _show(ledger, ledger.tenants(), as_json)


@tenant.command(epilog="Example:  sublet tenant add ada --weight 200 --max-vram 32GB")
@click.argument("name")
@click.option("--weight", default=DEFAULT_WEIGHT, show_default=True, help="Share relative to others.")
@click.option("--max-leases", default=0, help="0: no limit.")
@click.option("--max-vram", default=None, help="For example 32GB; none: no limit.")
@click.option("--max-waiting", default=0, help="0: the policy's limit.")
@click.option("--gpu-hours-per-day", default=None, help=_PER_DAY)
@click.option("--sessions", default=0, help=f"{_SESSIONS} 0: no limit.")
@click.option("--storage", default=None, help=_STORAGE)
@click.option("--returning", is_flag=True, help="It was removed and comes back to what it had.")
@json_option
def add(
    name: str,
    weight: int,
    max_leases: int,
    max_vram: str | None,
    max_waiting: int,
    gpu_hours_per_day: str | None,
    sessions: int,
    storage: str | None,
    returning: bool,
    as_json: bool,
) -> None:
    """Add a tenant. The name of one that was removed is refused: what it had is kept under it."""
    ledger = open_ledger(load_settings())
    made = ledger.add_tenant(
        Tenant(
            name=name,
            weight=weight,
            max_leases=max_leases,
            max_vram_bytes=_limit(max_vram) or 0,
            max_waiting=max_waiting,
            gpu_us_per_day=_per_day(gpu_hours_per_day) or 0,
            max_sessions=sessions,
            max_storage_bytes=_limit(storage) or 0,
        ),
        actor=actor(),
        returning=returning,
    )
    _show(ledger, [made], as_json)


@tenant.command("rm", epilog="Example:  sublet tenant rm ada")
@click.argument("name")
def remove(name: str) -> None:
    """Remove a tenant that holds nothing. What it had is kept, and its name stays reserved."""
    open_ledger(load_settings()).remove_tenant(name, actor=actor())
    click.echo(
        f"{name}: removed, its tokens are revoked; its checkpoints, leases, receipts and "
        "journal rows are kept, and so its name stays reserved"
    )


@click.group()
def quota() -> None:
    """What a tenant may hold and what it has used."""


@quota.command(epilog="Example:  sublet quota show ada")
@click.argument("name", required=False)
@json_option
def show(name: str | None, as_json: bool) -> None:
    """Show one tenant's quota (default: your own)."""
    settings = load_settings()
    ledger = open_ledger(settings)
    _show(ledger, [ledger.tenant(name or settings["tenant"])], as_json)


@quota.command("set", epilog="Example:  sublet quota set ada --max-vram 48GB --sessions 3 --storage 20GB")
@click.argument("name")
@click.option("--weight", type=int, default=None)
@click.option("--max-leases", type=int, default=None, help="0: no limit.")
@click.option("--max-vram", default=None, help="For example 32GB; none: no limit.")
@click.option("--max-waiting", type=int, default=None, help="0: the policy's limit.")
@click.option("--gpu-hours-per-day", default=None, help=_PER_DAY)
@click.option("--sessions", type=int, default=None, help=f"{_SESSIONS} 0: no limit.")
@click.option("--storage", default=None, help=_STORAGE)
@json_option
def change(
    name: str,
    weight: int | None,
    max_leases: int | None,
    max_vram: str | None,
    max_waiting: int | None,
    gpu_hours_per_day: str | None,
    sessions: int | None,
    storage: str | None,
    as_json: bool,
) -> None:
    """Change a tenant's quota or weight. Live leases keep what they have."""
    asked = (weight, max_leases, max_vram, max_waiting, gpu_hours_per_day, sessions, storage)
    if all(v is None for v in asked):
        raise BadInput(
            "nothing to change: give --weight, --max-leases, --max-vram, --max-waiting, "
            "--gpu-hours-per-day, --sessions "
            "or --storage"
        )
    ledger = open_ledger(load_settings())
    changed = ledger.set_tenant(
        name,
        actor=actor(),
        weight=weight,
        max_leases=max_leases,
        max_vram_bytes=_limit(max_vram),
        max_waiting=max_waiting,
        gpu_us_per_day=_per_day(gpu_hours_per_day),
        max_sessions=sessions,
        max_storage_bytes=_limit(storage),
    )
    _show(ledger, [changed], as_json)
