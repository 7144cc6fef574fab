"""The file of an embedded ledger, before SQLite opens it: where it may lie, and who may read and write it.

Rules of this file:
- No descriptor of the ledger or its log is ever opened here. Closing one would drop every lock that SQLite
  holds on that file in this process, and two writers would meet.
"""

from __future__ import annotations

import os
from pathlib import Path

from sublet.core.errors import Misconfigured
from sublet.machine.private_files import make_private_file, tighten

NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph"}
)


def make_ledger_private(path: Path) -> None:
    """SQLite gives its log and its index the mode of the ledger itself, so that is made first."""
    try:
        make_private_file(path)
        for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
            tighten(name)
        writable = os.access(path, os.R_OK | os.W_OK)
        why = "it belongs to somebody else"
    except OSError as e:
        writable, why = False, str(e.strerror)
    if not writable:
        raise Misconfigured(
            f"the ledger {path} cannot be opened for writing: {why}; nothing was changed",
            remedy="use it as its owner; to share one between users, put it into a folder of a group that "
            "may write it ('chmod 2770', see docs/how-to/share-a-machine.md), or use postgresql://…",
        )
