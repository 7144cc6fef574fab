"""After a backup was put back: nobody who held a lease before may write again (L1)."""

from __future__ import annotations

import secrets

from sublet.core.leasing.lease import EndReason
from sublet.ledger.rows import SELECT_LEASE
from sublet.ledger.tx import Tx, write_main
from sublet.ledger.verbs.leasing import blocks, leases
from sublet.ledger.verbs.studio import sessions, tokens
from sublet.ports.ledger import Identity

#: Where the clock cannot be trusted: more grants than any ledger makes between two backups.
EPOCH_GAP = 1 << 40


def mark_restored(tx: Tx, actor: str, highest_epoch: int) -> int:
    """End what the backup thought was live, jump the epoch, change the incarnation. Returns how many it
    ended. `highest_epoch` is the highest that anybody knows to have been granted."""
    pool = tx.pool
    ended = 0
    waiting = tx.rows(f"{SELECT_LEASE} WHERE state = 'waiting' ORDER BY id")
    holding = tx.rows(f"{SELECT_LEASE} WHERE state IN ('active', 'revoking') ORDER BY id")
    for row in [*waiting, *holding]:
        # Holders keep their slices until their host's warden has shown that they are gone.
        leases.finish(
            tx,
            row,
            EndReason.REVOKED,
            "the ledger was restored from a backup",
            settled=row[14] == 0,
            then_hand_out=False,
        )
        ended += 1
    ended += blocks.end_all(tx, "the ledger was restored from a backup")
    sessions.after_restore(tx)
    # Which tokens were revoked since the backup nobody knows any more, so none is let in.
    revoked = tokens.revoke_all(tx, "", actor, "the ledger was restored from a backup")
    # One backup may be put back twice, and the ledger in between has granted epochs too: a jump counted from
    # the backup alone would land on them. A grant takes longer than a microsecond, so the clock is always
    # ahead of every epoch.
    pool.epoch = max(pool.epoch, highest_epoch)
    pool.epoch = tx.now if tx.now > pool.epoch else pool.epoch + EPOCH_GAP
    pool.dirty = True
    incarnation = secrets.token_hex(8)
    tx.run("UPDATE meta SET value = ? WHERE key = 'incarnation'", incarnation)
    # Its heads are of the past: what was saved since is on the replicas, and no sweep may take it for
    # garbage.
    tx.run("UPDATE meta SET value = 'no' WHERE key = 'heads_current'")
    write_main(
        tx,
        "ledger.restored",
        "",
        "ledger",
        {"by": actor, "incarnation": incarnation, "epoch": pool.epoch, "ended": ended, "tokens": revoked},
    )
    return ended


def mark_current(tx: Tx, actor: str) -> None:
    """The heads have been compared with the replicas, or the operator says so: sweeps may go on."""
    _ = tx.pool
    tx.run("UPDATE meta SET value = 'yes' WHERE key = 'heads_current'")
    write_main(tx, "ledger.heads_current", "", "ledger", {"by": actor})


def identity(tx: Tx) -> Identity:
    found = {r[0]: r[1] for r in tx.rows("SELECT key, value FROM meta")}
    return Identity(id=found["ledger_id"], heads_current=found["heads_current"] == "yes")
