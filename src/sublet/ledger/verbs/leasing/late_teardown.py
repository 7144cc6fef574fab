"""Teardowns that were given up while their host was silent, and are examined after all.

Rules of this file:
- Given up (`core.leasing.hosts`): somebody else settled the lease with a Receipt that proves nothing, and its
  devices are withheld.
- Only the warden of that host can examine it, as it does for any lease that ended. Its Receipt replaces the
  other one.
"""

from __future__ import annotations

from dataclasses import asdict

from sublet.core.leasing.hosts import reassess_withheld
from sublet.core.leasing.lease import Holder, LeaseRecord, changed
from sublet.core.scheduling.device import Slice
from sublet.ledger.rows import LEASE_COLUMNS, SELECT_DEVICE, device_of, lease_of, of_table, slices_of
from sublet.ledger.tx import Tx, write_main
from sublet.ledger.verbs.leasing import receipts
from sublet.ports.bell import SCHEDULE_TOPIC
from sublet.ports.processes import Receipt

#: The Receipt's `ladder` when nobody was there to see the teardown.
NOBODY_SAW = "unseen"


def receipt(why: str) -> Receipt:
    return Receipt(proven=False, ladder=NOBODY_SAW, containment="", detail=why)


def here(tx: Tx, host: str) -> list[LeaseRecord]:
    """The given-up leases this host's warden has yet to examine, with the host's own process and slices."""
    return [lease for lease, _ in _waiting(tx, host)]


def _waiting(tx: Tx, host: str) -> list[tuple[LeaseRecord, str]]:
    """The given-up leases of a host, and why their devices are withheld."""
    found = tx.rows(
        f"SELECT {of_table('l', LEASE_COLUMNS)}, s.slices, s.pid, s.pid_started, r.detail FROM receipt r "
        "JOIN lease l ON l.id = r.lease_id "
        "LEFT JOIN seat s ON s.lease_id = l.id AND s.host = r.host "
        f"WHERE r.ladder = '{NOBODY_SAW}' AND r.proven = 0 AND coalesce(s.host, l.host) = ? ORDER BY l.id",
        host,
    )
    leases = []
    for row in found:
        lease = lease_of(row)
        if row[-4] is not None:  # a gang's
            holder = Holder(host=host, pid=row[-3], started=row[-2])
            lease = changed(lease, slices=slices_of(row[-4]), holder=holder)
        leases.append((lease, receipts.withheld_for(lease.id, row[-1])))
    return leases


def record_examination(tx: Tx, lease: LeaseRecord, told: Receipt, host: str) -> tuple[Slice, ...] | None:
    """Record what the host's own warden saw. Returns the slices that stay withheld, or None when the lease
    was not given up there or was examined before."""
    waiting = {one.id: (one, why) for one, why in _waiting(tx, host)}
    if lease.id not in waiting:
        return None
    mine, why = waiting.pop(lease.id)
    receipts.replace(tx, mine, told, host if mine.seats else "")
    write_main(tx, "lease.looked_at", mine.tenant, mine.id, {"host": host, **asdict(told)})
    if not told.proven:
        return mine.slices
    for piece in mine.slices:
        row = tx.row(f"{SELECT_DEVICE} WHERE id = ?", piece.device_id)
        others = [
            note for one, note in waiting.values() if piece.device_id in {s.device_id for s in one.slices}
        ]
        returns = reassess_withheld(device_of(row), host, why, others) if row is not None else None
        if returns is None:
            continue
        state, note = returns
        tx.run("UPDATE device SET state = ?, note = ? WHERE id = ?", state.value, note, piece.device_id)
        body: dict[str, object] = {
            "reason": note or f"host {host} has shown that nothing is left of {mine.id}"
        }
        write_main(tx, f"device.{state.value}", "", piece.device_id, body | {"by": "warden"})
        tx.rings.add(SCHEDULE_TOPIC)
    return ()
