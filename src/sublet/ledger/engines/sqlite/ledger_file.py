"""The file of an embedded ledger, before SQLite opens it: where it may lie, and who may read and write it.

Rules of this file:
- No descriptor of the ledger or its log is ever opened here. Closing one would drop every lock that SQLite
  holds on that file in this process, and two writers would meet.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from sublet.core.errors import Misconfigured
from sublet.core.file_modes import unusable
from sublet.machine.private_files import make_private_file, tighten

NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "ceph", "glusterfs", "lustre", "beegfs"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph"}
)


def file_system_of(path: Path, mounts: str | None = None) -> str:
    """The file system type a path lies on, from the kernel's mount table."""
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in text.splitlines():
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        point = parts[1].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, parts[2]
    return kind


def check_place(path: Path) -> None:
    kind = file_system_of(path.parent)
    if kind in NETWORK_FILE_SYSTEMS:
        raise Misconfigured(
            f"the ledger would lie on a network file system ({kind}), where file locks do not protect it",
            remedy="set SUBLET_LEDGER to a local path, or to postgresql://… to share it between hosts",
        )


def make_ledger_private(path: Path) -> None:
    """SQLite gives its log and its index the mode of the ledger itself, so that is made first."""
    try:
        make_private_file(path)
        for name in (path, *(Path(f"{path}-{end}") for end in ("wal", "shm", "stamp"))):
            tighten(name)
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        writable = os.access(path, os.R_OK | os.W_OK)
    except OSError as e:
        ours = unusable(f"the ledger {path}", e.errno)
        if ours is not None and e.errno not in (errno.EACCES, errno.EPERM):
            raise ours from e
        writable = False
    if not writable:
        raise Misconfigured(
            f"the ledger {path} cannot be opened for writing: it belongs to somebody else; "
            "nothing was changed",
            remedy="use it as its owner; to share one between users, put it into a folder of a group that "
            "may write it ('chmod 2770', see docs/how-to/share-a-machine.md), or use postgresql://…",
        )
