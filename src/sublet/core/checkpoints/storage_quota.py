"""How much a tenant's checkpoints take, and when another one is too much.

Rules of this file:
- A version is charged with what it added to the versions before it. When older ones are dropped, what they
  were charged with goes to the next one that stays, up to its whole size: it may still need all of it. So the
  charges of what is kept are never less than its bytes.
- Checked before a head moves: what was refused has moved nothing, and whoever wrote its bytes removes them at
  once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sublet.core.errors import QuotaReached
from sublet.core.leasing.tenancy import Tenant
from sublet.core.values import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What one version of a job is charged with, and how large its state is."""

    version: int
    charged_bytes: int
    whole_bytes: int


def staying(rows: Sequence[Stored], floor: int, kept: Collection[int]) -> list[Stored]:
    """What is left when versions below the floor are dropped, except those that are kept."""
    found: list[Stored] = []
    carried = 0
    for row in sorted(rows, key=lambda r: r.version):
        if row.version < floor and row.version not in kept:
            carried += row.charged_bytes
        else:
            charged = max(row.charged_bytes, min(row.whole_bytes, row.charged_bytes + carried))
            found.append(replace(row, charged_bytes=charged))
            carried = 0
    return found


def over_storage(tenant: Tenant, stored_bytes: int, more_bytes: int) -> QuotaReached | None:
    if not tenant.max_storage_bytes or more_bytes == 0:
        return None
    if stored_bytes + more_bytes <= tenant.max_storage_bytes:
        return None
    return QuotaReached(
        f"tenant {tenant.name} stores {_size(stored_bytes)} of {_size(tenant.max_storage_bytes)} in "
        f"checkpoints and would add {_size(more_bytes)}; the checkpoint before is untouched",
        remedy="drop old versions with 'sublet checkpoint sweep', save less, or ask the operator for a "
        "larger quota",
    )


def _size(size: int) -> str:
    return format_size(size) if size else "0"
