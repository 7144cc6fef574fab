"""How much the files of one session may take, and whom to stop when a disk runs short.

Rules of this file:
- A session may have so many bytes in files, and so many files. Over either it is stopped, in words, and its
  neighbours are left alone.
- When less than half of the reserve of the disk is free, the session whose files take most is stopped: the
  ledger stops for everybody when the disk is full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sublet.core.studio.disk_reserve import reserve_bytes
from sublet.core.values import format_size, parse_size

#: Counting more would take longer than filling a disk.
FILES_MOST = 200_000
DEPTH_MOST = 100
#: Whoever takes less is not why a disk is full.
BLAMED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ScratchUse:
    """What a session's files take. Counting stops at a limit: then it is at least this."""

    bytes: int = 0
    files: int = 0
    too_deep: bool = False


def scratch_limit(said: str) -> int:
    """In bytes; 0: none."""
    return 0 if said.strip() in ("", "0", "none") else parse_size(said, what="scratch limit")


def over_scratch(use: ScratchUse, limit_bytes: int) -> str:
    """Why the session is stopped, or ''."""
    if not limit_bytes:
        return ""
    if use.bytes > limit_bytes:
        return f"its files took {format_size(use.bytes)}, and a session may have {format_size(limit_bytes)}"
    if use.files > FILES_MOST:
        return f"it had more than {FILES_MOST} files and folders, and a session may have no more"
    if use.too_deep:
        return f"its folders lay more than {DEPTH_MOST} deep in each other, where files cannot be counted"
    return ""


def to_stop_for_space(
    uses: Mapping[str, ScratchUse], said_reserve: str, disk_bytes: int, free_bytes: int
) -> tuple[str, str]:
    """The session to stop because the disk runs short, and why; ('', '') when none is to be stopped."""
    if free_bytes >= reserve_bytes(said_reserve, disk_bytes) // 2:
        return "", ""
    most = max(sorted(uses), key=lambda session: uses[session].bytes, default="")
    if not most or uses[most].bytes < BLAMED_BYTES:
        return "", ""
    return most, (
        f"the disk of this host has only {format_size(free_bytes)} left, and of all sessions its files took "
        f"most: {format_size(uses[most].bytes)}"
    )
