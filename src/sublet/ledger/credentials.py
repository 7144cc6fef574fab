"""Who may speak for a lease: whoever knows its secret, of which only a hash is kept."""

from __future__ import annotations

import hashlib
import hmac

from sublet.core.errors import NotFound
from sublet.ledger.rows import LEASE_BY_ID, secret_hash_of
from sublet.ledger.tx import Row, Tx


def secret_hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def proves(row: Row, secret: str) -> bool:
    return hmac.compare_digest(secret_hash_of(row), secret_hash(secret))


def opened(tx: Tx, lease_id: str, secret: str) -> Row | NotFound:
    """The lease's row, locked, for whoever knows its secret."""
    row = tx.locked(LEASE_BY_ID, lease_id)
    return row if row is not None and proves(row, secret) else unknown(lease_id)


def unknown(lease_id: str) -> NotFound:
    """The same words for a lease that is not there and for one that is somebody else's."""
    return NotFound(f"there is no lease {lease_id[:40]} that this secret opens")
