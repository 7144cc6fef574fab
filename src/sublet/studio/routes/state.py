"""What a session saves, in the checkpoint store: the bytes of its tree, as they came.

Rules of this file:
- Neither the service nor the session host decodes them: the client that saved them does, with limits
  (`store/codec.py`).
- The job's name contains the tenant, so two tenants' names never collide.
"""

from __future__ import annotations

from sublet.core.errors import Damaged, NotFound
from sublet.leases.lease import Lease
from sublet.ports.ledger import Ledger
from sublet.store.checkpoints import CheckpointStore
from sublet.store.save.saving import Saved

SCHEMA = "sublet-session-state-1"


def save_state(
    store: CheckpointStore, ledger: Ledger, job: str, data: bytes | bytearray | memoryview, lease: Lease
) -> Saved:
    head = ledger.head(job)
    return store.save(
        job, {"tree": bytes(data)}, expected_version=head.version if head else 0, lease=lease, schema=SCHEMA
    )


def load_state(store: CheckpointStore, ledger: Ledger, job: str, version: int | None) -> bytes | None:
    """The saved bytes, or None when nothing was saved yet."""
    if ledger.head(job) is None:
        return None
    try:
        found = store.load(job, version=version, schema=SCHEMA)
    except NotFound:
        return None
    tree = found.get("tree") if isinstance(found, dict) else None
    if not isinstance(tree, bytes):
        raise Damaged(f"what was saved as {job} is not a session's state")
    return tree
