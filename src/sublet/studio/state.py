"""What a session saves, in the checkpoint store: the bytes of its tree, as they came.

Rules of this file:
- Neither the service nor the attendant takes them apart: who saved them reads them again, with limits (`store/codec.py`).
- The name of the job holds the tenant, so that two tenants' names never meet.
"""

from __future__ import annotations

from sublet.core.errors import Damaged, NotFound
from sublet.ports.ledger import Ledger
from sublet.runtime.holding import Lease
from sublet.store.checkpoints import CheckpointStore
from sublet.store.saving import Saved

SCHEMA = "sublet-session-state-1"


def save_state(
    store: CheckpointStore, ledger: Ledger, job: str, data: bytes | memoryview, lease: Lease
) -> Saved:
    head = ledger.head(job)
    return store.save(
        job, {"tree": bytes(data)}, expected_version=head.version if head else 0, lease=lease, schema=SCHEMA
    )


def load_state(store: CheckpointStore, ledger: Ledger, job: str, version: int | None) -> bytes | None:
    """None when nothing was saved yet."""
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
