"""The stamp of a ledger: the newest state that was certainly on its disk, as it is known outside of it.

Rules of this file (I5):
- States of one ledger are ordered by (epoch, journal, clock): all three only rise, and a restore raises the
  epoch above everything that was ever granted. So the ledger is from the past exactly when it is behind its
  stamp, and a ledger that was restored is ahead of it.
- A stamp may be behind its ledger: the last write of it may be lost in a crash. It is never ahead of what a
  crash leaves, because it is written after the ledger was synced.
- A stamp without a ledger's id was made just before its ledger and refuses nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class LedgerState(NamedTuple):
    epoch: int
    journal_seq: int
    clock_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    ledger_id: str
    state: LedgerState


#: Behind every ledger.
NEVER = LedgerState(0, 0, 0)
#: Ahead of every state that grants this epoch.
_LAST = 2**63 - 1


def past_reason(stamp: Stamp | None, ledger_id: str, state: LedgerState) -> str:
    """'' or why this ledger is not the newest one that was here."""
    if stamp is None:
        return "the ledger has no stamp beside it that can be read: it may be a copy from the past"
    if not stamp.ledger_id or (stamp.ledger_id == ledger_id and state >= stamp.state):
        return ""
    if stamp.ledger_id != ledger_id:
        return "another ledger was here, which granted leases that this one does not know"
    return (
        f"the ledger went back in time: it ends at epoch {state.epoch}, journal row {state.journal_seq}, and "
        f"was at epoch {stamp.state.epoch}, journal row {stamp.state.journal_seq}"
    )


def raised(stamp: Stamp | None, ledger_id: str, state: LedgerState) -> Stamp | None:
    """The stamp after this state was synced; None to leave it as it is."""
    if stamp is None or stamp.ledger_id not in ("", ledger_id):
        return None
    if stamp.ledger_id and state <= stamp.state:
        return None
    return Stamp(ledger_id=ledger_id, state=state)


def begun_again(stamp: Stamp | None, ledger_id: str, epoch: int) -> Stamp | None:
    """The stamp before this ledger, which takes the other's place, jumps above `epoch`: until it has, it is
    refused. None if the stamp is this ledger's already."""
    if stamp is not None and stamp.ledger_id == ledger_id:
        return None
    return Stamp(ledger_id=ledger_id, state=LedgerState(epoch, _LAST, _LAST))
