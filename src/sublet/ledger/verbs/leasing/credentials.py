"""Who may speak for a lease: whoever knows its secret, of which only a hash is kept."""

from __future__ import annotations

from sublet.core.errors import LeaseLost, NotFound
from sublet.core.studio.token import digest_of as secret_hash
from sublet.core.studio.token import opens
from sublet.ledger.rows import LEASE_BY_ID, secret_hash_of
from sublet.ledger.tx import Row, Tx

__all__ = ["not_opened", "opened", "proves", "secret_hash", "unknown"]

_UNKNOWN = "there is no lease {} that this secret opens"


def proves(row: Row, secret: str) -> bool:
    return opens(secret, secret_hash_of(row))


def opened(tx: Tx, lease_id: str, secret: str) -> Row | NotFound:
    """The lease's row, locked, for whoever knows its secret."""
    row = tx.locked(LEASE_BY_ID, lease_id)
    return row if row is not None and proves(row, secret) else unknown(lease_id)


def unknown(lease_id: str) -> NotFound:
    """The same answer for a lease that does not exist and for somebody else's."""
    return NotFound(_UNKNOWN.format(lease_id[:40]))


def not_opened(lease_id: str) -> LeaseLost:
    """As `unknown`, for a holder."""
    return LeaseLost(_UNKNOWN.format(lease_id[:40]))
