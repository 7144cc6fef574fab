"""A write that concerns nobody: whether this ledger can be written is known only by writing to it."""

from __future__ import annotations

from sublet.ledger.tx import Tx

_PUT = "INSERT INTO meta VALUES ('proven_at', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


def prove_write(tx: Tx) -> None:
    tx.run(_PUT, str(tx.now))
