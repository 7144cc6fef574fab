"""Receipts: proof of each teardown, kept where operators look for it."""

from __future__ import annotations

from sublet.core.leasing.lease import LeaseRecord
from sublet.ledger.tx import Row, Tx
from sublet.ports.ledger import TeardownRecord
from sublet.ports.processes import Receipt

_COLUMNS = (
    "lease_id, tenant, at, devices, proven, ladder, containment, pids, freed_bytes, scrubbed_bytes, "
    "duration_us, detail, host"
)


def keep(tx: Tx, lease: LeaseRecord, receipt: Receipt, seat: str = "") -> None:
    """`seat`: the host, in a gang."""
    tx.run(
        f"INSERT INTO receipt ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)",
        lease.id,
        lease.tenant,
        tx.now,
        " ".join(s.device_id for s in lease.slices),
        int(receipt.proven),
        receipt.ladder,
        receipt.containment,
        " ".join(map(str, receipt.pids)),
        receipt.freed_bytes,
        receipt.scrubbed_bytes,
        receipt.duration_us,
        receipt.detail[:1000],
        seat,
    )


def replace(tx: Tx, lease: LeaseRecord, receipt: Receipt, seat: str = "") -> None:
    """Replace the Receipt of a teardown that was given up."""
    tx.run("DELETE FROM receipt WHERE lease_id = ? AND host = ?", lease.id, seat)
    keep(tx, lease, receipt, seat)


def withheld_for(lease_id: str, detail: str) -> str:
    """The note of a device whose teardown was not proven."""
    return f"teardown of lease {lease_id} was not proven: {detail}"


def newest(tx: Tx, *, tenant: str, limit: int) -> list[TeardownRecord]:
    where, params = ("WHERE tenant = ?", [tenant]) if tenant else ("", [])
    found = tx.rows(
        f"SELECT {_COLUMNS} FROM receipt {where} ORDER BY at DESC, lease_id, host LIMIT ?", *params, limit
    )
    return [_of(row) for row in found]


def _of(r: Row) -> TeardownRecord:
    return TeardownRecord(
        lease_id=r[0],
        tenant=r[1],
        at=r[2],
        devices=tuple(r[3].split()),
        host=r[12],
        receipt=Receipt(
            proven=bool(r[4]),
            ladder=r[5],
            containment=r[6],
            pids=tuple(map(int, r[7].split())),
            freed_bytes=r[8],
            scrubbed_bytes=r[9],
            duration_us=r[10],
            detail=r[11],
        ),
    )
