"""What is kept of files that are about to change: second names and copies, on a shelf of their file system.

A second name (a hard link) keeps a file that is removed or replaced, and costs nothing. A copy keeps the
bytes of one that is written over; where the file system can share blocks it costs nothing either.

Rules of this file:
- A shelf is a folder on the same mount, because there are no hard links between mounts: the history's own
  folder on its mount, and the topmost folder that can be written to on any other.
- Whatever a note will speak of is on the disk before `settle` returns.
- A name on a shelf is never given twice: a note may speak of one that is gone.
- A file has at most one second name of ours. So the links that are the program's own can be counted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from sublet.machine.durable import sync_path
from sublet.training.scripts.files.notes import NameNote, Notes, Shelf

#: Ask the file system to share the blocks of another file (Linux' FICLONE).
_SHARE_BLOCKS = 0x40049409
_AT_ONCE = 1 << 24


class TooLargeToCopy(OSError):
    """It would take too long, and the file system cannot share blocks."""


class KeptFiles:
    def __init__(self, folder: Path, notes: Notes, say: Callable[[Shelf], None], copy_at_most: int) -> None:
        self._folder = folder
        self._say = say  # a shelf is on record before anything lies in it
        self._copy_at_most = copy_at_most
        self._shelves: dict[str, Shelf] = {shelf.mount: shelf for shelf in notes.shelves}
        self._mounts = _mount_points()
        self._unsynced: set[str] = set()
        self._names: dict[str, str] = {}  # inode to its second name
        for note in notes.notes:
            if isinstance(note, NameNote) and note.kept:
                self._names[note.inode] = note.kept
        self.drop_but(notes.held())

    # what is where

    def inode(self, path: str, info: os.stat_result) -> str:
        return f"{self._shelf(path).number}:{info.st_ino}"

    def second_name(self, inode: str) -> str:
        """ "" if there is none."""
        return self._names.get(inode, "")

    def own_links(self, path: str, info: os.stat_result) -> int:
        """How many names the program has for it."""
        return info.st_nlink - (self.inode(path, info) in self._names)

    def is_on_a_shelf(self, path: str) -> bool:
        return any(f"{path}/".startswith(f"{s.folder}/") for s in self._shelves.values() if s.folder)

    def _shelf(self, path: str) -> Shelf:
        mount = max((m for m in self._mounts if path.startswith(m)), key=len, default="/")
        found = self._shelves.get(mount)
        if found is None:
            found = Shelf(number=len(self._shelves), mount=mount, folder=self._place(path, mount))
            self._say(found)
            self._shelves[mount] = found
        return found

    def _place(self, path: str, mount: str) -> str:
        own = str(self._folder / "kept")
        if max((m for m in self._mounts if own.startswith(m)), key=len, default="/") == mount:
            return own
        name = f".sublet-{hashlib.sha256(os.fsencode(self._folder)).hexdigest()[:12]}"
        for parent in reversed(Path(path).parents):
            if os.path.join(parent, "").startswith(mount) and os.access(parent, os.W_OK | os.X_OK):
                return str(parent / name)
        return ""

    def _new(self, path: str) -> str:
        folder = self._shelf(path).folder
        if not folder:
            raise PermissionError(errno.EACCES, "no folder of its file system can be written to")
        if folder not in self._unsynced and not os.path.isdir(folder):
            os.mkdir(folder, 0o700)
            sync_path(Path(folder).parent)
        self._unsynced.add(folder)
        return os.path.join(folder, secrets.token_hex(8))

    # keeping

    def keep_name(self, path: str, info: os.stat_result) -> str:
        """A second name for this file, or a copy where there can be none. Raises OSError."""
        inode = self.inode(path, info)
        if inode not in self._names:
            name = self._new(path)
            try:
                os.link(path, name, follow_symlinks=False)
            except FileNotFoundError:
                raise
            except OSError:
                with _opened(path) as fd:
                    return self.keep_copy(path, fd, like=info)
            self._names[inode] = name
        return self._names[inode]

    def keep_copy(self, path: str, fd: int, *, like: os.stat_result | None = None) -> str:
        """A copy of what can be read at `fd`. `like`: it may take the file's place, so it looks like it."""
        name = self._new(path)
        target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _copy_bytes(fd, target, self._copy_at_most)
            if like is not None:
                _look_like(target, like)
            os.fsync(target)
        except BaseException:
            os.unlink(name)
            raise
        finally:
            os.close(target)
        return name

    def settle(self) -> None:
        while self._unsynced:
            sync_path(Path(self._unsynced.pop()))

    def empty(self, path: str, info: os.stat_result) -> None:
        """Another file, empty and of the same mode and owner, takes the name of one that was kept."""
        name = self._new(path)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for attribute in os.listxattr(path):
                os.setxattr(fd, attribute, os.getxattr(path, attribute))
            _look_like(fd, info)
            self.settle()
            os.rename(name, path)
        except BaseException:
            os.unlink(name)
            raise
        finally:
            os.close(fd)

    # putting back

    def put_name(self, kept: str, path: str) -> None:
        """The name means that file again."""
        name = self._new(path)
        try:
            os.link(kept, name, follow_symlinks=False)
        except OSError:
            with _opened(kept) as fd:
                name = self.keep_copy(path, fd, like=os.fstat(fd))
        os.rename(name, path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)  # both were names of one file: then a rename does nothing

    def put_copy(self, source: str, path: str, length: int) -> None:
        """The name means another file, with the first bytes of that one."""
        name = self._new(path)
        with _opened(source) as fd:
            target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _copy_bytes(fd, target, sys.maxsize)
                os.ftruncate(target, length)
                os.fsync(target)
            finally:
                os.close(target)
        os.rename(name, path)

    # forgetting

    def drop_but(self, held: set[str]) -> None:
        """Delete whatever no note speaks of."""
        self._names = {inode: name for inode, name in self._names.items() if name in held}
        for shelf in self._shelves.values():
            for name in _names_in(shelf.folder):
                if (path := os.path.join(shelf.folder, name)) not in held:
                    with contextlib.suppress(OSError):
                        os.unlink(path)

    def beyond(self, total: int, names: set[str]) -> set[str]:
        """The largest of these, without which the others take no more than that in total."""
        sizes = sorted((os.lstat(name).st_size, name) for name in names if os.path.exists(name))
        fitting = 0
        for number, (size, _) in enumerate(sizes):
            fitting += size
            if fitting > total:
                return {name for _, name in sizes[number:]}
        return set()

    def clear(self) -> None:
        self.drop_but(set())
        for shelf in self._shelves.values():
            with contextlib.suppress(OSError):
                os.rmdir(shelf.folder)
        self._shelves.clear()


def _names_in(folder: str) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if re.fullmatch("[0-9a-f]{16}", name)]
    except OSError:
        return []


def _mount_points() -> list[str]:
    """Each with a slash at its end."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ["/"]
    points = [re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), line.split(" ")[4]) for line in lines]
    return [os.path.join(point, "") for point in points]


def _look_like(fd: int, info: os.stat_result) -> None:
    """Raises PermissionError where only its owner could be that."""
    own = os.fstat(fd)
    if (own.st_uid, own.st_gid) != (info.st_uid, info.st_gid):
        os.fchown(fd, info.st_uid, info.st_gid)
    os.fchmod(fd, stat.S_IMODE(info.st_mode))
    os.utime(fd, ns=(info.st_atime_ns, info.st_mtime_ns))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)


def _copy_bytes(source: int, target: int, at_most: int) -> None:
    try:
        fcntl.ioctl(target, _SHARE_BLOCKS, source)
        return
    except OSError:
        pass
    size = os.fstat(source).st_size
    if size > at_most:
        raise TooLargeToCopy(errno.EFBIG, f"its {size:,} bytes are too many to copy each time")
    done = 0
    while done < size:
        try:
            part = os.copy_file_range(source, target, min(_AT_ONCE, size - done), done)
        except OSError:
            part = os.write(target, os.pread(source, min(_AT_ONCE, size - done), done))
        if not part:
            break  # somebody else has cut it
        done += part
