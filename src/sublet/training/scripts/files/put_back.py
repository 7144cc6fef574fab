"""Files as they were at a position: what `files.notes` says is wanted is done to them.

Rules of this file:
- It is looked first, and done only where something differs: begun again after a kill, it goes on.
- Nothing that was kept is used up here. It is deleted when the notes about it are settled.
- A file that nobody noted is never removed; a folder that holds one stays, and that is said.
- What is restored is on the disk before this returns.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from sublet.machine.durable import sync_path
from sublet.training.scripts.files.kept import KeptFiles
from sublet.training.scripts.files.notes import ContentNote, NameNote, Wanted, WantedContent

_AT_ONCE = 1 << 20
#: The end of a file by which it is known that nobody has cut it and written it again.
_TAIL = 4096


def put_back(
    wanted: Wanted, kept: KeptFiles, shown: Callable[[str], str], *, as_others: bool = False
) -> list[str]:
    """Sentences about what could not be done. `as_others`: a file whose contents are different now is
    replaced by another one, and stays what it is under its second name."""
    work = _PuttingBack(wanted, kept, shown, as_others)
    work.names()
    if not as_others:
        work.contents()
    work.looks_of_folders()
    work.sync()
    return work.said


def look(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def tail_of(fd: int, length: int) -> str:
    """What tells whether a file that is only appended to was cut and filled again."""
    start = max(0, length - _TAIL)
    return f"tail:{blake3(os.pread(fd, length - start, start)).hexdigest()[:32]}"


class ContentDigest:
    """Of a file's bytes from its first, brought up to date as it grows."""

    def __init__(self) -> None:
        self._hasher = blake3()
        self.length = 0

    def read(self, fd: int, length: int) -> str:
        while self.length < length:
            part = os.pread(fd, min(_AT_ONCE, length - self.length), self.length)
            if not part:
                break
            self._hasher.update(part)
            self.length += len(part)
        return f"all:{self._hasher.hexdigest()[:32]}"


def _deepest_last(paths: Iterable[str]) -> list[str]:
    return sorted(paths, key=lambda path: (path.count("/"), path))


class _PuttingBack:
    def __init__(self, wanted: Wanted, kept: KeptFiles, shown: Callable[[str], str], as_others: bool) -> None:
        self._wanted, self._kept, self._shown, self._as_others = wanted, kept, shown, as_others
        self._places: dict[str, str] = {}  # inodes to where they are again
        self._changed: set[str] = set()  # paths that are to be synced
        self.said: list[str] = []

    def _say(self, path: str, why: object) -> None:
        self.said.append(f"{self._shown(path)}: {why}")

    # names

    def names(self) -> None:
        names = self._wanted.names
        order = _deepest_last(names)
        for path in order:
            if names[path].was == "folder":
                self._open_folder(path)
        # From the top: a link that took a folder's place would lead elsewhere.
        for path in order:
            self._try(self._remove_file, path, names[path])
        for path in reversed(order):
            self._try(self._remove_folder, path, names[path])
        for path in order:
            self._try(self._make, path, names[path])

    def _try(self, do: Callable[[str, NameNote], None], path: str, note: NameNote) -> None:
        try:
            do(path, note)
        except OSError as e:
            self._say(path, e.strerror or e)

    def _open_folder(self, path: str) -> None:
        """Its mode may forbid what is to be done in it; it gets its own last."""
        info = look(path)
        if info is not None and stat.S_ISDIR(info.st_mode) and info.st_mode & 0o700 != 0o700:
            with contextlib.suppress(OSError):
                os.chmod(path, stat.S_IMODE(info.st_mode) | 0o700)

    def _remove_file(self, path: str, note: NameNote) -> None:
        info = look(path)
        if info is None or stat.S_ISDIR(info.st_mode) or self._is_right(path, info, note):
            return
        if self._why_not(note):
            return  # there would be nothing to put in its place
        os.unlink(path)
        self._changed.add(os.path.dirname(path))

    def _remove_folder(self, path: str, note: NameNote) -> None:
        info = look(path)
        if info is None or not stat.S_ISDIR(info.st_mode) or note.was == "folder":
            return
        if others := os.listdir(path):
            self._say(path, f"the folder stays, because it holds {others[0]}, which was not seen to be made")
            return
        os.rmdir(path)
        self._changed.add(os.path.dirname(path))

    def _make(self, path: str, note: NameNote) -> None:
        info = look(path)
        if note.was == "absent":
            return
        if info is not None and self._is_right(path, info, note):
            self._places[note.inode] = path
            return
        if why := self._why_not(note):
            if info is None or not note.lost:
                self._say(path, f"it {'stays as it is' if info is not None else 'is gone'}, because {why}")
            return
        if note.was == "folder":
            os.mkdir(path, 0o700)
        elif note.was == "link":
            os.symlink(note.target, path)
            with contextlib.suppress(OSError):
                os.chown(path, note.uid, note.gid, follow_symlinks=False)
        elif self._as_others and note.inode in self._wanted.contents:
            self._make_other(path, note, self._wanted.contents[note.inode])
        else:
            self._kept.put_name(self._second_name(note), path)
            self._places[note.inode] = path
        self._changed.add(os.path.dirname(path))

    def _make_other(self, path: str, note: NameNote, content: WantedContent) -> None:
        self._kept.put_copy(content.copy or self._second_name(note), path, content.facts.length)
        self._look_like(path, os.lstat(path), content.facts)
        os.utime(path, ns=(content.facts.mtime_ns, content.facts.mtime_ns))

    def _why_not(self, note: NameNote) -> str:
        """Why there is nothing to put back; "" if there is."""
        if note.lost or note.was != "file":
            return note.lost
        content = self._wanted.contents.get(note.inode) if self._as_others else None
        if content is not None and content.copy:
            return ""
        if content is not None and content.lost:
            return content.lost
        return "" if self._second_name(note) else "it was too large to be kept for so long"

    def _second_name(self, note: NameNote) -> str:
        names = (note.kept, self._kept.second_name(note.inode))
        return next((name for name in names if name and os.path.lexists(name)), "")

    def _is_right(self, path: str, info: os.stat_result, note: NameNote) -> bool:
        if note.was == "folder":
            return stat.S_ISDIR(info.st_mode)
        if note.was == "link":
            return stat.S_ISLNK(info.st_mode) and os.readlink(path) == note.target
        if self._as_others and note.inode in self._wanted.contents:
            return False
        kept = self._second_name(note)
        return bool(kept) and os.path.samestat(os.lstat(kept), info)

    def looks_of_folders(self) -> None:
        for path in reversed(_deepest_last(self._wanted.names)):
            note = self._wanted.names[path]
            info = look(path)
            if note.was == "folder" and info is not None and stat.S_ISDIR(info.st_mode):
                self._look_like(path, info, note)

    def _look_like(self, path: str, info: os.stat_result, note: NameNote | ContentNote) -> None:
        try:
            if (info.st_uid, info.st_gid) != (note.uid, note.gid):
                os.chown(path, note.uid, note.gid)
            if stat.S_IMODE(info.st_mode) != note.mode:
                os.chmod(path, note.mode)
                self._changed.add(path)
        except OSError as e:
            self._say(path, f"its mode and owner cannot be put back: {e.strerror}")

    # contents

    def contents(self) -> None:
        for inode, content in self._wanted.contents.items():
            put = self._places.get(inode, "")
            path = put or self._kept.second_name(inode) or content.facts.path
            info = look(path)
            try:
                if info is not None and (put or inode.endswith(f":{info.st_ino}")):
                    self._fill(path, info, content)
                elif content.facts.path in self._wanted.names:
                    continue  # it had no name at that position, or another one, which is put back
                elif content.copy:
                    # Native code replaces a file without a word.
                    self._kept.put_copy(content.copy, content.facts.path, content.facts.length)
                    self._changed.add(os.path.dirname(path))
                else:
                    self._say(path, "it was removed or replaced, and it was not seen by whom")
                    continue
                self._look_like(path, os.lstat(path), content.facts)
                os.utime(path, ns=(content.facts.mtime_ns, content.facts.mtime_ns))
            except OSError as e:
                self._say(content.facts.path, e.strerror or e)

    def _fill(self, path: str, info: os.stat_result, content: WantedContent) -> None:
        facts = content.facts
        if not content.copy and content.lost:
            if (info.st_size, info.st_mtime_ns) != (facts.length, facts.mtime_ns):
                self._say(facts.path, f"its bytes were written over and could not be kept: {content.lost}")
            return
        if content.copy:
            self._write_over(path, content.copy, facts.length)
            return
        if info.st_size < facts.length:
            self._say(facts.path, f"it has lost its last {facts.length - info.st_size} bytes")
            return
        if facts.check and not _is_known_by(path, facts.length, facts.check):
            self._say(facts.path, f"its first {facts.length} bytes were written over while it was open")
        if info.st_size > facts.length:
            with _writable(path) as fd:
                os.ftruncate(fd, facts.length)
            self._changed.add(path)

    def _write_over(self, path: str, copy: str, length: int) -> None:
        source = os.open(copy, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _writable(path) as target:
                done = 0
                while done < length and (part := os.pread(source, min(_AT_ONCE, length - done), done)):
                    done += os.pwrite(target, part, done)
                os.ftruncate(target, length)
        finally:
            os.close(source)
        self._changed.add(path)

    def sync(self) -> None:
        for path in self._changed:
            if look(path) is not None:
                sync_path(Path(path))


@contextlib.contextmanager
def _writable(path: str) -> Iterator[int]:
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    if not os.access(path, os.W_OK):
        os.chmod(path, mode | 0o200)
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_known_by(path: str, length: int, check: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = tail_of(fd, length) if check.startswith("tail:") else ContentDigest().read(fd, length)
        return found == check
    finally:
        os.close(fd)
