"""What was given up while its host was silent, and is looked at after all.

Rules of this file:
- Given up (`core.hosts`): somebody else settled it with a Receipt that says nobody could see, and its devices are withheld.
- Only its own host's warden can look. It does so as for any lease that ended, and its Receipt takes the place of the other: there is one for each
  teardown, and the last word is that of whoever was there.
"""

from __future__ import annotations

from dataclasses import asdict

from sublet.core.device import Slice
from sublet.core.hosts import after_a_look
from sublet.core.lease import Holder, Lease, changed
from sublet.ledger import receipts
from sublet.ledger.rows import LEASE_COLUMNS, SELECT_DEVICE, device_of, lease_of, of_table, slices_of
from sublet.ledger.tx import Tx, write_main
from sublet.ports.processes import Receipt
from sublet.ports.topics import SCHEDULE_TOPIC

#: How far the ladder was climbed: nobody was there.
NOBODY_SAW = "unseen"


def receipt(why: str) -> Receipt:
    return Receipt(proven=False, ladder=NOBODY_SAW, containment="", detail=why)


def here(tx: Tx, host: str) -> list[Lease]:
    """What this host's warden has yet to look at, as it must see it: its own process, its own slices."""
    return [lease for lease, _ in _waiting(tx, host)]


def _waiting(tx: Tx, host: str) -> list[tuple[Lease, str]]:
    """And why its devices are withheld."""
    found = tx.rows(
        f"SELECT {of_table('l', LEASE_COLUMNS)}, s.slices, s.pid, s.pid_started, r.detail FROM receipt r JOIN lease l ON l.id = r.lease_id "
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


def look(tx: Tx, lease: Lease, told: Receipt, host: str) -> tuple[Slice, ...] | None:
    """Its own warden has looked, and this is what it saw: where it proved nothing either, the slices it must go on without. None: it was not given
    up there, or was looked at before."""
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
        returns = after_a_look(device_of(row), host, why, others) if row is not None else None
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
