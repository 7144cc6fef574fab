"""What is installed here by entry point, looked up once.

Rules of this file:
- Reading the metadata of every installed package takes longer than opening a ledger, and a start needs three
  groups. It is read once per process, and a forked child has what its parent read.
- What is not found is looked for once more: it may have been installed since, as from a notebook.
"""

from __future__ import annotations

from importlib.metadata import EntryPoints, entry_points
from typing import Any

_read: Any = None


def installed(group: str, name: str = "") -> EntryPoints:
    """The entry points of the group. With a name, one of them has it unless no package offers it."""
    global _read
    if _read is None or (name and name not in _read.select(group=group).names):
        _read = entry_points()
    found: EntryPoints = _read.select(group=group)
    return found
