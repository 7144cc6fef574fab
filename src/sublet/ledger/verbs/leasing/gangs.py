"""The seats of a gang: laid out at its grant, taken by its members, settled one by one.

Rules of this file:
- Everything that writes here holds the pool's lock, so two gangs that want the same hosts cannot deadlock.
- A lease on one host has no row here and pays for none of this.
- Slices of a host are free when its seat is settled: with a Receipt if a member was there, else at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from sublet.core.errors import LeaseLost, SubletError
from sublet.core.leasing import gang
from sublet.core.leasing.gang import Seat, seat_lost
from sublet.core.leasing.lease import Holder, LeaseRecord, Request
from sublet.core.scheduling.device import Slice
from sublet.core.scheduling.spread import Spread
from sublet.ledger.rows import slices_of, slices_text
from sublet.ledger.tx import Row, Tx, write_main
from sublet.ledger.verbs.leasing import receipts
from sublet.ledger.verbs.leasing import slices as slicing
from sublet.ports.bell import host_topic, lease_topic
from sublet.ports.ledger import Answer
from sublet.ports.processes import Receipt

_COLUMNS = "host, slices, pid, pid_started, address, settled_at"


def seat_of(r: Row) -> Seat:
    return Seat(
        host=r[0],
        slices=slices_of(r[1]),
        member=Holder(host=r[0], pid=r[2], started=r[3]) if r[2] else None,
        address=r[4],
        settled_at=r[5],
    )


def load(tx: Tx, lease_id: str) -> tuple[Seat, ...]:
    """The seats in the order of their ranks."""
    found = tx.rows(f"SELECT {_COLUMNS} FROM seat WHERE lease_id = ? ORDER BY rank", lease_id)
    return tuple(seat_of(r) for r in found)


# --- granted ------------------------------------------------------------------------------------------------


def laid_out(tx: Tx, request: Request, slices: Sequence[Slice]) -> tuple[Seat, ...]:
    """The seats of a grant; none where it is on one host."""
    if request.spread is not Spread.OK or request.count == 1:
        return ()
    marks = ",".join("?" * len(slices))
    hosts: dict[str, str] = dict(
        tx.rows(f"SELECT id, host FROM device WHERE id IN ({marks})", *(s.device_id for s in slices))
    )
    seats = gang.seats_of(slices, hosts)
    return seats if len(seats) > 1 else ()


def lay(tx: Tx, lease: LeaseRecord) -> None:
    for rank, seat in enumerate(laid_out(tx, lease.request, lease.slices)):
        tx.run(
            f"INSERT INTO seat (lease_id, rank, {_COLUMNS}) VALUES (?,?,?,?,0,0,'',0)",
            lease.id,
            rank,
            seat.host,
            slices_text(seat.slices),
        )
        tx.rings.add(host_topic(seat.host))


# --- sat on -------------------------------------------------------------------------------------------------


def sit(tx: Tx, lease: LeaseRecord, epoch: int, member: Holder, address: str) -> Answer | SubletError:
    seats = load(tx, lease.id)
    refusal = gang.take_seat(lease, seats, epoch, tx.now, member)
    if refusal:
        return LeaseLost(
            f"gang {lease.id} has no seat for process {member.pid} on {member.host}: {refusal}",
            remedy="start one member on each host of the gang, while it is held",
        )
    mine = next(s for s in seats if s.host == member.host)
    if mine.member != member or mine.address != address:
        tx.run(
            "UPDATE seat SET pid = ?, pid_started = ?, address = ? WHERE lease_id = ? AND host = ?",
            member.pid,
            member.started,
            address,
            lease.id,
            member.host,
        )
        said(tx, "seat.taken", lease, member.host, {"pid": member.pid})
    return Answer(lease=lease, at=tx.now)


def stand_up(tx: Tx, lease: LeaseRecord, member: Holder) -> bool:
    """The member says that it uses nothing any more. Its slices stay with the gang until that ends."""
    left = tx.run(
        "UPDATE seat SET pid = 0, pid_started = 0, address = '' WHERE lease_id = ? AND host = ? AND pid = "
        "? AND pid_started = ? "
        "AND settled_at = 0",
        lease.id,
        member.host,
        member.pid,
        member.started,
    )
    if left:
        said(tx, "seat.left", lease, member.host, {"pid": member.pid})
    return bool(left)


def said(tx: Tx, kind: str, lease: LeaseRecord, host: str, more: dict[str, object]) -> None:
    write_main(tx, kind, lease.tenant, lease.id, {"epoch": lease.epoch, "host": host, **more})
    tx.rings.update((lease_topic(lease.id), host_topic(host)))


# --- over ---------------------------------------------------------------------------------------------------


def why_lost(tx: Tx, lease: LeaseRecord, host: str, what: str) -> str:
    for rank, seat in enumerate(load(tx, lease.id)):
        if seat.host == host:
            return seat_lost(host, rank, lease.seats, what)
    return what


def sits(tx: Tx, lease: LeaseRecord, host: str) -> bool:
    return any(s.member is not None and s.host == host for s in load(tx, lease.id))


def unsettled_hosts(tx: Tx, lease: LeaseRecord) -> list[str]:
    """The hosts where something of the gang may still run."""
    return [s.host for s in load(tx, lease.id) if not s.settled_at] if lease.seats else [lease.holder.host]


def ring(tx: Tx, lease: LeaseRecord) -> None:
    """Wake everybody who has to act on a change of this gang."""
    hosts = [lease.holder.host, *(s.host for s in load(tx, lease.id))] if lease.seats else [lease.holder.host]
    tx.rings.update((lease_topic(lease.id), *map(host_topic, hosts)))


def nobody_sits(tx: Tx, lease: LeaseRecord) -> bool:
    return not any(s.member for s in load(tx, lease.id) if not s.settled_at)


def settle_empty(tx: Tx, lease: LeaseRecord, *, all_of_it: bool) -> None:
    """The gang has just ended: slices of seats that nobody took are free at once."""
    free = gang.at_once(load(tx, lease.id))
    for seat in free:
        tx.run("UPDATE seat SET settled_at = ? WHERE lease_id = ? AND host = ?", tx.now, lease.id, seat.host)
        body: dict[str, object] = {"slices": slices_text(seat.slices), "detail": "nobody sat there"}
        said(tx, "seat.settled", lease, seat.host, body)
        slicing.vacate(tx, lease, seat.slices, last=all_of_it and seat is free[-1])


def settle(tx: Tx, lease: LeaseRecord, host: str, receipt: Receipt) -> tuple[Seat, bool] | None:
    """Settle one seat. Returns whether it was the last, or None when it was settled before or is not of this
    gang."""
    seats = load(tx, lease.id)
    mine = next((s for s in seats if s.host == host and not s.settled_at), None)
    if mine is None:
        return None
    last = not any(s is not mine and not s.settled_at for s in seats)
    receipts.keep(tx, replace(lease, slices=mine.slices), receipt, host)
    tx.run("UPDATE seat SET settled_at = ? WHERE lease_id = ? AND host = ?", tx.now, lease.id, host)
    said(tx, "seat.settled", lease, host, {"slices": slices_text(mine.slices), **asdict(receipt)})
    slicing.vacate(tx, lease, mine.slices, last=last)
    if last:
        tx.run("UPDATE lease SET settled_at = ? WHERE id = ?", tx.now, lease.id)
        told = tx.rows("SELECT proven, duration_us FROM receipt WHERE lease_id = ?", lease.id)
        body: dict[str, object] = {
            "proven": all(proven for proven, _ in told),
            "duration_us": max(took for _, took in told),
            "seats": lease.seats,
        }
        write_main(tx, "lease.settled", lease.tenant, lease.id, body)
        tx.rings.add(lease_topic(lease.id))
    return mine, last


def as_it_stands(tx: Tx, lease: LeaseRecord) -> LeaseRecord:
    """A gang that is over, with the slices it still has."""
    return replace(lease, slices=gang.still_held(load(tx, lease.id)))
