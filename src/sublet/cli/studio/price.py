"""`sublet price …`: what a GPU-hour costs, by device class and tier."""

from __future__ import annotations

import click

from sublet.cli.leases.operate import actor
from sublet.cli.output import instant, json_option, print_json, print_table
from sublet.core.billing.price import Price, PriceList
from sublet.core.leasing.lease import Tier
from sublet.core.values import parse_price
from sublet.json_shapes import seconds
from sublet.settings import load_settings
from sublet.wiring import open_ledger

_TIER = click.option(
    "--tier", type=click.Choice([t.value for t in Tier]), default=None, help="Only for this tier; none: all."
)


def money(micro: int) -> str:
    """At least two digits after the point, and no more than it takes."""
    whole, rest = divmod(micro, 1_000_000)
    digits = f"{rest:06d}".rstrip("0")
    return f"{whole}.{digits:0<2}"


def price_json(price: Price) -> dict[str, object]:
    micro = price.micro_per_gpu_hour
    return {
        "class": price.device_class,
        "tier": price.tier or None,
        "per_gpu_hour": money(micro) if micro is not None else None,
        "micro_per_gpu_hour": micro,
        "valid_from": seconds(price.valid_from),
    }


@click.group()
def price() -> None:
    """What a GPU-hour costs, by device class and tier: list, set, remove."""


@price.command("ls", epilog="Example:  sublet price ls --json")
@click.option("--all", "with_past", is_flag=True, help="Also what was valid before, and what was removed.")
@json_option
def list_prices(with_past: bool, as_json: bool) -> None:
    """List prices. The narrowest counts: class and tier, class, * and tier, *."""
    ledger = open_ledger(load_settings())
    every = ledger.prices()
    found = every if with_past else PriceList(every).current(ledger.now())
    if as_json:
        print_json([price_json(p) for p in found])
        return
    print_table(
        ["CLASS", "TIER", "PER GPU-HOUR", "VALID FROM"],
        [
            (
                p.device_class,
                p.tier or "all",
                "removed" if p.micro_per_gpu_hour is None else money(p.micro_per_gpu_hour),
                instant(p.valid_from),
            )
            for p in found
        ],
        empty="no prices; 'sublet price set CLASS 2.50' sets one, 'sublet gpus' shows the classes",
    )


@price.command("set", epilog='Example:  sublet price set "NVIDIA A100-SXM4-80GB" 2.50 --tier spot')
@click.argument("device_class", metavar="CLASS")
@click.argument("amount", metavar="PRICE")
@_TIER
@json_option
def set_price(device_class: str, amount: str, tier: str | None, as_json: bool) -> None:
    """Set the price of a GPU-hour from now on. What was granted before costs what it did.

    CLASS is the device's name as 'sublet gpus' shows it, 'host' for devices of the host driver, or * for any.
    """
    micro = parse_price(amount)
    made = open_ledger(load_settings()).set_price(device_class, micro, actor=actor(), tier=tier or "")
    if as_json:
        print_json(price_json(made))
        return
    click.echo(f"{device_class}{f', {tier}' if tier else ''}: {money(micro)} per GPU-hour from now on")


@price.command("rm", epilog="Example:  sublet price rm host --tier spot")
@click.argument("device_class", metavar="CLASS")
@_TIER
def remove(device_class: str, tier: str | None) -> None:
    """Take a price off the list, from now on."""
    open_ledger(load_settings()).remove_price(device_class, actor=actor(), tier=tier or "")
    click.echo(f"{device_class}{f', {tier}' if tier else ''}: no price from now on")
