"""The lock that a warden keeps on each physical device its ledger grants, for every user of the machine to
see.

Rules of this file:
- One file per physical device in a folder that all users can write. The kernel owns the lock: it goes with
  the process, and the file that stays says nothing without it.
- The lock is shared by the wardens of one ledger. Who takes it alone writes which ledger it is, and then
  shares it. Once it is shared the text decides, because the text cannot change while anybody shares it.
- A file of somebody else is opened without O_CREAT: in such folders the kernel refuses that even to root.
- A user may remove a file of theirs under the lock. It is then made and locked again.
- A container sees the lock of its host only where it is given the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sublet.core.leasing.device_claim import CLAIM_BYTES, DeviceClaim, read_claim, taken_words, write_claim
from sublet.ports.ledger import FoundDevice

try:
    import fcntl
    import pwd
except ImportError:  # a client of a studio, not on Linux: this file is imported there, and not used
    fcntl = None  # type: ignore[assignment]
    pwd = None  # type: ignore[assignment]

#: Others who only look hold the lock for a moment.
_TRIES, _PAUSE_S = 50, 0.004
_FOLDERS = (Path("/run/lock"), Path("/tmp"))


def lock_folder() -> Path:
    """The same for every user, so it is chosen by its mode and not by who asks."""
    for folder in _FOLDERS:
        with contextlib.suppress(OSError):
            mode = folder.stat().st_mode
            if stat.S_ISDIR(mode) and mode & stat.S_ISVTX and mode & stat.S_IWOTH:
                return folder
    return _FOLDERS[-1]


def user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


class DeviceLocks:
    """Implements `ports.device.DeviceClaims`."""

    def __init__(
        self, mine: DeviceClaim, log: Callable[[str], None] = lambda line: None, folder: Path | None = None
    ) -> None:
        self._mine = mine
        self._log = log
        self.folder = folder or lock_folder()
        self._held: dict[str, int] = {}
        self._lacking: set[str] = set()
        self._said: set[str] = set()

    def claim(self, found: Sequence[FoundDevice]) -> dict[str, str]:
        taken = {}
        for device in found:
            if not device.physical:
                continue
            lacked, holder = self._take(device.physical)
            if lacked:
                taken[device.id] = taken_words(device.id, holder)
        return taken

    def changed(self) -> bool:
        moved = False
        for physical in sorted(self._lacking):
            moved |= not self._take(physical)[0]
        for physical, fd in sorted(self._held.items()):
            if not _leads_to(self._path(physical), fd):
                moved |= self._take(physical)[0]
        return moved

    def is_ours(self, holder: DeviceClaim | None) -> bool:
        return holder is not None and holder.ledger == self._mine.ledger

    def holder(self, physical: str) -> tuple[bool, DeviceClaim | None]:
        """Called by whoever only asks: whether anybody has it now, and who that is, where they say so."""
        try:
            fd = os.open(self._path(physical), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False, None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False, None
        except BlockingIOError:
            return True, read_claim(os.pread(fd, CLAIM_BYTES, 0))
        finally:
            os.close(fd)

    def close(self) -> None:
        for fd in self._held.values():
            os.close(fd)
        self._held.clear()

    def _path(self, physical: str) -> Path:
        return self.folder / f"sublet-{physical}.lock"

    def _take(self, physical: str) -> tuple[bool, DeviceClaim | None]:
        """Whether another ledger has it, and who. A machine where no lock can be kept is used as it is, and
        that is said."""
        path, holder = self._path(physical), None
        had = self._held.get(physical)
        if had is not None and _leads_to(path, had):
            return False, None
        try:
            for _ in range(_TRIES):
                fd = _opened(path)
                if fd is not None:
                    kept, holder = self._shared(path, fd)
                    if kept:
                        if had is not None:
                            os.close(had)
                        self._held[physical] = fd
                        self._lacking.discard(physical)
                        return False, None
                    os.close(fd)
                time.sleep(_PAUSE_S)
        except OSError as e:
            self._say(f"{physical}: {path} cannot be locked ({e.strerror}): other ledgers are not told of us")
            return False, None
        if had is not None:
            os.close(self._held.pop(physical))
        self._lacking.add(physical)
        return True, holder

    def _shared(self, path: Path, fd: int) -> tuple[bool, DeviceClaim | None]:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(fd, write_claim(self._mine), 0)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False, read_claim(os.pread(fd, CLAIM_BYTES, 0))
        holder = read_claim(os.pread(fd, CLAIM_BYTES, 0))
        return self.is_ours(holder) and _leads_to(path, fd), holder

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._log(line)


def _opened(path: Path) -> int | None:
    """Open the file, or make it; None when somebody was faster, or it is no plain file of one name."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return None
        os.fchmod(fd, 0o666)  # the umask took the others' part
    except OSError as e:
        if e.errno == errno.EROFS:
            raise
        return None  # a link, a folder, or a file whose user has not opened it to us yet
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return fd
    os.close(fd)
    return None


def _leads_to(path: Path, fd: int) -> bool:
    try:
        there, here = os.lstat(path), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
