"""The host's memory of checkpoints: arenas that outlive the process that filled them.

Rules of this port:
- It is faster than a replica and never counts as one: it is gone with the host, and nothing is lost with it.
- It is asked, never relied on: no call of it fails, and what it gives is verified like anything else that is read (C3).
- An arena is given out only when the process that kept it is dead: nobody else may write to it any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Remembered:
    fd: int  # the arena; the caller's to close
    size: int
    manifest: bytes


class HostMemory(Protocol):
    def keep(self, job: str, fd: int, size: int, digest: str, manifest: bytes) -> None:
        """Called when a save was committed: the arena has the state this manifest describes, until the next save begins."""

    def fetch(self, job: str, digest: str) -> Remembered | None:
        """Called by a load: the arena that was kept with this manifest, if its process is gone. It is then the caller's."""

    def drop(self, job: str) -> None:
        """Called when a job's memory is wanted back."""
