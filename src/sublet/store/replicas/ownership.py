"""Whose replica it is: one ledger's, because what a ledger does not know of is garbage to its sweep.

Rules of this file:
- A replica carries one mark, written create-only before the first pack is, as a manifest would be, under a
  name no digest has.
- A mark of another ledger stops a save, a sweep and a rebuild. A mark that does not read stops a sweep only:
  one flipped bit must not keep anybody from saving.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sublet.core.checkpoints.checkpoint import MARK
from sublet.core.errors import Misconfigured, SubletError
from sublet.ports.store import Remote, Replica
from sublet.store.save.packing import digest

#: How long a replica behind a network is waited for before its first save.
ASK_SECONDS = 5.0


def claim(replicas: Sequence[Replica], ledger_id: str) -> None:
    """Before a save. A replica that cannot be reached now is claimed by a later one: all are asked at once,
    and not for long."""

    def ask(replica: Replica) -> Misconfigured | None:
        asked = replica.hurried(ASK_SECONDS) if isinstance(replica, Remote) else replica
        with contextlib.suppress(OSError):
            owner = owner_of(asked)
            if owner is None:
                with contextlib.suppress(SubletError):
                    asked.put_manifest(MARK, _mark(ledger_id))
                owner = owner_of(asked)  # somebody else may have been first
            if owner and owner != ledger_id:
                return _foreign(replica)
        return None

    if len(replicas) == 1:
        answers = [ask(replicas[0])]
    else:
        with ThreadPoolExecutor(len(replicas)) as pool:
            answers = list(pool.map(ask, replicas))
    for foreign in answers:
        if foreign is not None:
            raise foreign


def require_own(replica: Replica, ledger_id: str) -> None:
    """Before anything is deleted, or believed. `OSError` when the replica cannot be asked."""
    owner = owner_of(replica)
    if owner is None:
        replica.put_manifest(MARK, _mark(ledger_id))
        owner = owner_of(replica)
    if not owner:
        raise Misconfigured(
            f"{replica.name} does not say which ledger it belongs to: its mark is damaged; nothing was "
            "deleted",
            remedy="if it is yours, run 'sublet checkpoint rebuild --take-over', which writes the mark anew",
        )
    if owner != ledger_id:
        raise _foreign(replica)


def take_over(replica: Replica, ledger_id: str) -> None:
    """The ledger it belonged to is lost, says the operator."""
    if owner_of(replica) == ledger_id:
        return
    replica.remove("manifest", MARK)
    replica.put_manifest(MARK, _mark(ledger_id))


def owner_of(replica: Replica) -> str | None:
    """The id of its ledger; None without a mark, '' if the mark does not read."""
    data = replica.get_manifest(MARK)
    if data is None:
        return None
    try:
        owner = json.loads(data)["ledger"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return owner if isinstance(owner, str) and data == _mark(owner) else ""


def _mark(ledger_id: str) -> bytes:
    check = digest(f"sublet ledger {ledger_id}".encode())
    return json.dumps({"check": check, "ledger": ledger_id}, sort_keys=True).encode()


def _foreign(replica: Replica) -> Misconfigured:
    return Misconfigured(
        f"{replica.name} belongs to another ledger, whose checkpoints this one does not know; nothing was "
        "changed",
        remedy="use a folder or prefix of its own; if that ledger is lost: 'sublet checkpoint rebuild "
        "--take-over'",
    )
