"""Folders and files that only their user can open: `core.file_modes` says with which mode.

Rules of this file:
- A mode is set at creation and does not depend on the umask. A file of ours that is wider is tightened when
  it is opened.
- What root makes in somebody's folder is that somebody's: `sudo sublet` must not lock a user out of a home.
- What belongs to somebody else is left as it is.
- `make_private_file` and `tighten` open nothing under the file's name: a process that closes any descriptor
  of a SQLite file loses every lock that its connections hold on it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
from pathlib import Path

from sublet.core.file_modes import file_in, folder_in, tightened_home


def make_private_folder(folder: Path) -> None:
    """Make a folder and its missing parents. One that exists is left as it is."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_private_folder(folder.parent)
    above = os.stat(folder.parent)
    mode = folder_in(above.st_mode)
    try:
        os.mkdir(folder, mode)
    except FileExistsError:  # another process was faster
        return
    if mode & stat.S_IRWXG:
        os.chmod(folder, mode)  # a umask took the group's part
    _give_to_owner_of(above, str(folder))


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file that is made if it is missing. `flags` as for `os.open`, without O_CREAT."""
    folder = os.stat(os.path.dirname(os.path.abspath(path)))
    mode = file_in(folder.st_mode)
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    try:
        found = os.fstat(fd)
        if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(fd, mode)
        if found.st_size == 0:
            _give_to_owner_of(folder, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_private_file(path: Path) -> None:
    """Make an empty file, unless there is one."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        os.close(open_private(draft, os.O_WRONLY))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another process was faster
        except OSError:  # a file system without second names
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    finally:
        with contextlib.suppress(OSError):
            os.unlink(draft)


def tighten(path: Path) -> None:
    """Take from others what an existing file of ours grants them."""
    with contextlib.suppress(FileNotFoundError):
        found, folder = os.stat(path), os.stat(path.parent)
        mode = stat.S_IMODE(found.st_mode) & file_in(folder.st_mode)
        if found.st_uid == os.geteuid() and mode != stat.S_IMODE(found.st_mode):
            os.chmod(path, mode)


def make_private_socket(path: str, folder: str) -> None:
    """Give a socket that was just bound its mode. It cannot be reached before: its folder is closed."""
    os.chmod(path, file_in(os.stat(folder).st_mode))


def _give_to_owner_of(folder: os.stat_result, made: str | int) -> None:
    if os.geteuid() == 0 and folder.st_uid != 0:
        with contextlib.suppress(OSError):
            os.chown(made, folder.st_uid, folder.st_gid)


def tighten_home(home: Path) -> None:
    """Close an existing home that others can enter, and say so. One of somebody else is not ours to close."""
    try:
        found = os.stat(home)
        wanted = tightened_home(found.st_mode) if found.st_uid == os.geteuid() else None
        if wanted is None:
            return
        os.chmod(home, wanted)
    except OSError:
        return  # it is not there yet, or lies on a read-only disk
    with contextlib.suppress(OSError, ValueError):
        print(
            f"sublet: {home} could be entered by other users of this machine (mode "
            f"{stat.S_IMODE(found.st_mode):o}); it is closed to them now (mode {wanted:o})",
            file=sys.stderr,
        )
