"""Who may read what lies in a home: the modes of folders and files, and what to say when one cannot be used.

Rules of this file:
- A home and everything in it is its user's alone (threat 25). It holds the ledger, checkpoints, sockets and
  the lock that every writer takes.
- People who share a ledger share its folder by a group that may write it. What is made in such a folder is
  the group's, whatever the umask of whoever makes it; others get nothing.
"""

from __future__ import annotations

import errno
import stat

from sublet.core.errors import Misconfigured, NotDurable, SubletError

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
GROUP_FOLDER, GROUP_FILE = 0o2770, 0o660


def is_shared(folder_mode: int) -> bool:
    """Whether somebody made this folder for a group: its files become the group's, which may write it."""
    return bool(folder_mode & stat.S_ISGID and folder_mode & stat.S_IWGRP)


def folder_in(folder_mode: int) -> int:
    """The mode of a folder made in a folder of this mode."""
    return GROUP_FOLDER if is_shared(folder_mode) else PRIVATE_FOLDER


def file_in(folder_mode: int) -> int:
    """The mode of a file or socket in a folder of this mode."""
    return GROUP_FILE if is_shared(folder_mode) else PRIVATE_FILE


def tightened_home(mode: int) -> int | None:
    """The mode an existing home should have; None if it need not change."""
    wanted = stat.S_IMODE(mode) & (GROUP_FOLDER if is_shared(mode) else PRIVATE_FOLDER)
    return None if wanted == stat.S_IMODE(mode) else wanted


_WHY = {
    errno.EROFS: "it lies on a read-only file system",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.ENOTDIR: "a part of that path is a file, not a folder",
    errno.EIO: "the disk reported an error",
}


def unusable(path: str, number: int | None) -> SubletError | None:
    """What an error of the system at this path means to whoever set it; None if it says nothing about the
    place."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return NotDurable(
            f"there is no room left for {path}; what was being written is not there",
            remedy="make room, or set SUBLET_HOME to a disk that has some; then try again",
        )
    why = _WHY.get(number or 0)
    if why is None:
        return None
    return Misconfigured(
        f"{path} cannot be written: {why}; nothing was changed",
        remedy="make it writable for this user, or set SUBLET_HOME (or SUBLET_LEDGER) to a place that is",
    )
