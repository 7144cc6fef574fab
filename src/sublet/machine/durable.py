"""What a file needs to survive a power cut: whoever writes one that others count on uses these.

The order is: the data, a sync of the file, its name, a sync of the folder.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from sublet.machine.private_files import make_private_folder


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a folder."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path, *, private: bool = False) -> None:
    """Make a folder and its parents, each of them durable: a file is lost with a folder that is lost."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        make_folder(folder.parent, private=private)
    if private:
        make_private_folder(folder)
    else:
        folder.mkdir(exist_ok=True)
    sync_path(folder.parent)


def write_all(fd: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, memoryview(data)[done:])


def try_hard_link(folder: int) -> None:
    """Raise OSError if this folder takes no files, or no second names for them."""
    trial = f"trial-{secrets.token_hex(8)}"
    os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder))
    try:
        os.link(trial, f"{trial}.link", src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        os.unlink(f"{trial}.link", dir_fd=folder)
    finally:
        os.unlink(trial, dir_fd=folder)
