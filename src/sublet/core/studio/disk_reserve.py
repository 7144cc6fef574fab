"""How much of a disk stays free for the ledger, whatever tenants write.

Rules of this file:
- The reserve is the operator's, in bytes; `auto` is a gibibyte, but never more than a twentieth of the disk.
- Who would write into it is refused in words, before anything is written.
"""

from __future__ import annotations

from sublet.core.values import format_size, parse_size

AUTO = "auto"
AUTO_BYTES = 1 << 30
AUTO_SHARE = 20


def reserve_bytes(said: str, disk_bytes: int) -> int:
    if said.strip() in ("", AUTO):
        return min(AUTO_BYTES, disk_bytes // AUTO_SHARE)
    return parse_size(said, what="disk reserve")


def short_of_disk(said: str, disk_bytes: int, free_bytes: int, more_bytes: int = 0) -> str:
    """Why so much more must not be written, or ''."""
    reserve = reserve_bytes(said, disk_bytes)
    if free_bytes - more_bytes >= reserve:
        return ""
    wanted = f", {format_size(more_bytes)} were to be written," if more_bytes else ""
    return (
        f"the disk of this host has {_size(free_bytes)} free{wanted} and {_size(reserve)} of it are kept for "
        "the ledger"
    )


def _size(size: int) -> str:
    return format_size(size) if size else "0 bytes"
