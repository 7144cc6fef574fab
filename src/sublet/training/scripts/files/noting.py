"""What a file or a name is like before it changes: looked at, kept where it must be, noted once a position.

Rules of this file:
- Appending costs one note, removing and replacing a second name, writing over a copy.
- A file that was not there at this position needs no note: its name has one.
- A name or file that cannot be kept is noted as lost, with the reason. The program goes on.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sublet.training.scripts.files.descriptors import (
    descriptors_of,
    is_locked,
    open_for_writing,
    opened,
    path_of_descriptor,
)
from sublet.training.scripts.files.events import Change, FileChange
from sublet.training.scripts.files.kept import KeptFiles
from sublet.training.scripts.files.notes import ContentNote, NameNote, Note
from sublet.training.scripts.files.put_back import ContentDigest, look, tail_of

#: A file that is emptied is copied below this, and stays the same file. A larger one is set aside.
SET_ASIDE_FROM = 1 << 20
#: A file that is read and appended to is copied up to here, because it may be cut first. A larger one is a
#: log.
_CUT_UP_TO = 1 << 20
#: The time of a file moves in steps: two writes within one do not show.
_TIME_STEP_NS = 50_000_000
#: A file that gets another name is kept by one of ours too: it may lose the one it is noted by.
_OF_NAMES = (FileChange.NAMED, FileChange.LINKED)
_WAYS_TO_OPEN = (FileChange.MADE, FileChange.EMPTIED, FileChange.WRITTEN)
_MAPPED_FOR_WRITING = (0, 2)  # mmap's ACCESS_DEFAULT and ACCESS_WRITE


class NoteTaker:
    def __init__(
        self, kept: KeptFiles, write: Callable[[Sequence[Note]], None], is_left_alone: Callable[[str], bool]
    ) -> None:
        self._kept = kept
        self._put = write
        self._left_alone = is_left_alone
        self.lost: dict[str, str] = {}  # path to the reason
        self.changed: set[str] = set()  # paths, for whoever wants them on the disk
        # Of this position:
        self._at = 0
        self._names: set[str] = set()
        self._contents: dict[str, ContentNote] = {}
        # Of files that are open for writing, over positions:
        self._ways: dict[str, FileChange] = {}  # path to how it was opened
        self._mapped: set[str] = set()
        self._locked: set[str] = set()
        self._digests: dict[str, ContentDigest] = {}  # by inode
        self._copies: dict[str, tuple[tuple[int, ...], str]] = {}  # inode to its looks, and its copy

    def begin(self, at: int) -> None:
        """A new position: nothing is noted of it."""
        self._at = at
        self._names.clear()
        self._contents.clear()

    def close(self) -> None:
        """Files are others than they were: nothing is known of those that are open."""
        for known in (self._ways, self._mapped, self._locked, self._digests, self._copies):
            known.clear()

    # one change

    def change(self, changes: Iterable[Change], *, coming: bool) -> None:
        """`coming`: it is about to happen. Otherwise it may have happened."""
        for change in changes:
            path = change.path
            if self._is_left_alone(path):
                continue
            info = look(path)
            touched = change.what is FileChange.TOUCHED
            if info is None or change.what in _OF_NAMES or (touched and stat.S_ISDIR(info.st_mode)):
                self.names([path])
            elif stat.S_ISREG(info.st_mode) and change.what is not FileChange.MADE:
                self._content(change.what, path, info, coming=coming)
            if not touched:
                self.changed.add(path)
            if change.what in _WAYS_TO_OPEN and self._ways.get(path) is not FileChange.WRITTEN:
                self._ways[path] = change.what  # whoever may write it over can do so until it is closed

    def rename(self, source: str, target: str) -> None:
        """A folder takes all names in it along, and an open file the way it was opened."""
        info = look(source)
        below = _names_below(source) if info is not None and stat.S_ISDIR(info.st_mode) else []
        ends = [end for end in (source, target) if not self._is_left_alone(end)]
        self.names([os.path.join(end, name) if name else end for name in ("", *below) for end in ends])
        self.changed.update(ends)
        if source in self._ways:
            self._ways[target] = self._ways.pop(source)

    def map(self, fd: int, access: int) -> None:
        """Through its memory a file is written without a call."""
        path = path_of_descriptor(fd)
        if path and access in _MAPPED_FOR_WRITING:
            self._ways[path] = FileChange.WRITTEN
            self._mapped.add(path)

    def put_back(self, path: str, mode: str) -> None:
        """A file is open again as it was. One that is read and written may be written over anywhere."""
        if "r" in mode and "+" in mode:
            self._ways[path] = FileChange.WRITTEN

    def lock(self, fd: int) -> None:
        if path := path_of_descriptor(fd):
            self._locked.add(path)

    def names(self, paths: Iterable[str]) -> None:
        """What they mean now."""
        notes = [self._name(path) for path in dict.fromkeys(paths) if path not in self._names]
        self._write(notes)

    # names

    def _name(self, path: str) -> NameNote:
        info = look(path)
        if info is None:
            return NameNote(at=self._at, path=path, was="absent")
        looks: dict[str, Any] = {"mode": stat.S_IMODE(info.st_mode), "uid": info.st_uid, "gid": info.st_gid}
        if stat.S_ISDIR(info.st_mode):
            return NameNote(at=self._at, path=path, was="folder", **looks)
        if stat.S_ISLNK(info.st_mode):
            return NameNote(at=self._at, path=path, was="link", target=os.readlink(path), **looks)
        if not stat.S_ISREG(info.st_mode):
            return NameNote(at=self._at, path=path, was="file", lost="it is a pipe, a socket or a device")
        kept = lost = ""
        try:
            kept = self._kept.keep_name(path, info)
        except OSError as e:
            lost = self._is_lost(path, e)
        inode = self._kept.inode(path, info)
        return NameNote(at=self._at, path=path, was="file", inode=inode, kept=kept, lost=lost, **looks)

    # contents

    def _content(self, what: FileChange, path: str, info: os.stat_result, *, coming: bool) -> None:
        if path in self._names and info.st_nlink == 1:
            return  # it was not there at this position
        noted = self._contents.get(self._kept.inode(path, info))
        if noted is not None and (noted.copy or noted.lost or not noted.length):
            return  # whatever happens to it, this is enough
        grows = what is FileChange.READ_AND_APPENDED and info.st_size > _CUT_UP_TO
        if grows or what is FileChange.APPENDED or what is FileChange.TOUCHED or not info.st_size:
            if noted is None:
                self._write([self._facts(path, info)])
        elif what is not FileChange.EMPTIED or info.st_size < SET_ASIDE_FROM:
            self._write([self._copied(path, info)])
        elif not coming:
            self._write([self._facts(path, info)])  # it was kept when its event came
        elif not self._set_aside(path, info):
            self._write([self._copied(path, info)])

    def _set_aside(self, path: str, info: os.stat_result) -> bool:
        """A large file that will be emptied stays as it is, without its name; another gets that, and is
        emptied. Not where somebody could tell: by another name of it, or because it is open or locked."""
        folder = os.path.dirname(path)
        if self._kept.own_links(path, info) > 1 or not os.access(path, os.W_OK):
            return False
        if not os.access(folder, os.W_OK | os.X_OK) or descriptors_of(info) or is_locked(info):
            return False
        self.names([path])
        if not self._kept.second_name(self._kept.inode(path, info)):
            return path not in self.lost  # it was copied, because there can be no second name
        try:
            self._kept.empty(path, info)
        except OSError:
            return False
        return True

    def _facts(self, path: str, info: os.stat_result, **more: str) -> ContentNote:
        if not more and info.st_size and path not in self._locked:
            with contextlib.suppress(OSError), opened(path) as fd:
                more = {"check": tail_of(fd, info.st_size)}
        return ContentNote(
            at=self._at,
            path=path,
            inode=self._kept.inode(path, info),
            length=info.st_size,
            mode=stat.S_IMODE(info.st_mode),
            uid=info.st_uid,
            gid=info.st_gid,
            mtime_ns=info.st_mtime_ns,
            **more,
        )

    def _copied(self, path: str, info: os.stat_result) -> ContentNote:
        try:
            with opened(path, info) as fd:
                return self._facts(path, info, copy=self._kept.keep_copy(path, fd))
        except OSError as e:
            return self._facts(path, info, lost=self._is_lost(path, e))

    def _is_lost(self, path: str, error: OSError) -> str:
        why = error.strerror or str(error)
        self.lost[path] = why
        return why

    # files that stay open for writing: no event comes when they are written to

    def open_files(self) -> None:
        notes: dict[str, ContentNote] = {}
        paths = set()
        for fd, flags, info in open_for_writing():
            path = path_of_descriptor(fd)
            if path and not self._is_left_alone(path):
                paths.add(path)
                inode = self._kept.inode(path, info)
                if inode not in self._contents and inode not in notes:
                    notes[inode] = self._open_file(fd, path, info, flags)
        self._write(list(notes.values()))
        self.changed |= paths
        self._mapped &= paths
        self._locked &= paths
        self._ways = {path: way for path, way in self._ways.items() if path in paths}
        self._digests = {inode: digest for inode, digest in self._digests.items() if inode in notes}

    def _open_file(self, fd: int, path: str, info: os.stat_result, flags: int) -> ContentNote:
        if self._ways.get(path) is FileChange.WRITTEN:
            return self._copied_again(path, info)
        if flags & os.O_APPEND:
            return self._facts(path, info)
        digest = self._digests.get(self._kept.inode(path, info))
        if digest is None or digest.length > info.st_size:
            digest = self._digests[self._kept.inode(path, info)] = ContentDigest()
        if flags & os.O_ACCMODE == os.O_RDWR:
            return self._facts(path, info, check=digest.read(fd, info.st_size))
        with opened(path, info) as readable:
            return self._facts(path, info, check=digest.read(readable, info.st_size))

    def _copied_again(self, path: str, info: os.stat_result) -> ContentNote:
        inode = self._kept.inode(path, info)
        looks = (info.st_size, info.st_mtime_ns, info.st_ctime_ns)
        known = self._copies.get(inode)
        if known is not None and known[0] == looks and path not in self._mapped and os.path.exists(known[1]):
            return self._facts(path, info, copy=known[1])
        note = self._copied(path, info)
        if note.copy and time.time_ns() - info.st_mtime_ns > _TIME_STEP_NS:
            self._copies[inode] = looks, note.copy
        return note

    def _is_left_alone(self, path: str) -> bool:
        return self._left_alone(path) or self._kept.is_on_a_shelf(path)

    def _write(self, notes: Sequence[Note]) -> None:
        if not notes:
            return
        self._put(notes)
        for note in notes:
            if isinstance(note, NameNote):
                self._names.add(note.path)
            else:
                self._contents[note.inode] = note


def _names_below(folder: str) -> list[str]:
    found = []
    for parent, folders, files in os.walk(folder):
        below = os.path.relpath(parent, folder)
        found += [os.path.normpath(os.path.join(below, name)) for name in (*folders, *files)]
    return found
