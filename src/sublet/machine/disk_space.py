"""The free space of a disk, and what of it is kept for the ledger: `core.studio.disk_reserve` decides."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sublet.core.studio.disk_reserve import AUTO, short_of_disk


@dataclass(frozen=True, slots=True)
class DiskReserve:
    """What the operator wants kept free."""

    said: str = AUTO

    def short_of(self, folders: Iterable[Path], more_bytes: int = 0) -> str:
        """Why so much more must not be written to one of these folders' disks, or ''."""
        return next((why for folder in folders if (why := self.refusal(folder, more_bytes))), "")

    def refusal(self, folder: Path, more_bytes: int = 0) -> str:
        """Why so much more must not be written to this folder's disk, or ''."""
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        try:
            found = os.statvfs(folder)
        except OSError:
            return ""  # whoever writes is told by the system
        disk, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
        return short_of_disk(self.said, disk, free, more_bytes)
