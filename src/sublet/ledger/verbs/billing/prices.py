"""The price list. Rows are only ever added: what a lease cost stays what it cost (core.billing.price)."""

from __future__ import annotations

from sublet.core.billing.price import Price, class_of
from sublet.core.errors import NotFound, SubletError
from sublet.ledger.rows import SELECT_DEVICE, device_of
from sublet.ledger.tx import Tx, write_main

_SELECT = "SELECT device_class, tier, micro_per_gpu_hour, valid_from FROM price"


def list_prices(tx: Tx) -> list[Price]:
    """Every price there ever was, oldest first."""
    found = tx.rows(f"{_SELECT} ORDER BY valid_from, device_class, tier")
    return [
        Price(device_class=r[0], tier=r[1], micro_per_gpu_hour=r[2] if r[2] >= 0 else None, valid_from=r[3])
        for r in found
    ]


def classes(tx: Tx) -> dict[str, str]:
    """The class of every device, by its id."""
    return {d.id: class_of(d) for d in (device_of(r) for r in tx.rows(SELECT_DEVICE))}


def _newest(tx: Tx, device_class: str, tier: str) -> Price | None:
    row = tx.row(
        f"{_SELECT} WHERE device_class = ? AND tier = ? ORDER BY valid_from DESC LIMIT 1", device_class, tier
    )
    if row is None or row[2] < 0:
        return None
    return Price(device_class=row[0], tier=row[1], micro_per_gpu_hour=row[2], valid_from=row[3])


def _put(tx: Tx, device_class: str, tier: str, micro: int) -> None:
    tx.run(
        "INSERT INTO price (device_class, tier, valid_from, micro_per_gpu_hour) VALUES (?,?,?,?) "
        "ON CONFLICT (device_class, tier, valid_from) DO UPDATE SET micro_per_gpu_hour = "
        "excluded.micro_per_gpu_hour",
        device_class,
        tier,
        tx.now,
        micro,
    )


def put(tx: Tx, device_class: str, tier: str, micro: int, actor: str) -> Price:
    _ = tx.pool
    known = _newest(tx, device_class, tier)
    if known is not None and known.micro_per_gpu_hour == micro:
        return known
    _put(tx, device_class, tier, micro)
    body: dict[str, object] = {"tier": tier, "micro_per_gpu_hour": micro, "by": actor}
    write_main(tx, "price.set", "", device_class, body)
    return Price(device_class=device_class, tier=tier, micro_per_gpu_hour=micro, valid_from=tx.now)


def remove(tx: Tx, device_class: str, tier: str, actor: str) -> SubletError | None:
    _ = tx.pool
    if _newest(tx, device_class, tier) is None:
        if tx.again:
            return None
        what = f"{device_class}, tier {tier}" if tier else device_class
        return NotFound(f"there is no price for {what}", remedy="'sublet price ls' lists them")
    _put(tx, device_class, tier, -1)
    write_main(tx, "price.removed", "", device_class, {"tier": tier, "by": actor})
    return None
