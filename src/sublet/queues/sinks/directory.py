"""Results as files, one for each item: `FOLDER/QUEUE/12/12345.json`.

Rules of this file:
- A result is not written under its final name. A draft is written, synced, and linked to its name, which
  fails if the name is taken: the first result stays, and nobody who comes later writes over it or tears it.
- Order: data, sync of the file, link, sync of the folders. What somebody else linked may not be synced yet,
  so whoever finds it syncs the folder before counting on it.
- The sink's own folder is made when it is opened and never again: a folder that is gone later is a disk that
  is gone, and one made in its place would be somewhere else.
- Everything in it is opened from it and never through a link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from sublet.core.errors import BadInput, Misconfigured, SinkDown
from sublet.machine.durable import make_folder, sync_path, try_hard_link, write_all
from sublet.ports.sink import Made
from sublet.queues.sinks.documents import document_of, place_of
from sublet.queues.sinks.rows import batches, newest

DRAFTS = ".unfinished"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
#: Files open at once while a batch is written.
_AT_ONCE = 200


class DirectorySink:
    """Implements `ports.sink.Sink`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._device: int | None = None
        self._closed = False

    def check(self) -> None:
        """`Misconfigured` for what can never work. Makes the folder."""
        try:
            make_folder(self.path)
            with self._root() as root:
                with contextlib.suppress(PermissionError):  # not ours to read
                    sync_path(self.path.parent)  # whoever made the folder may have died before it was durable
                self._device = os.fstat(root).st_dev
                with self._folder(root, DRAFTS, make=True) as drafts:
                    try_hard_link(drafts)
        except OSError as e:
            raise Misconfigured(
                f"results cannot be put in {self.path}: {e.strerror}",
                remedy="name a folder you may write in, on a disk with room that has hard links",
            ) from e

    def store(self, results: Sequence[Made]) -> None:
        # Results that are there already stay, and are not written again.
        there = self.known([made.key for made in results])
        todo = sorted(
            ((place_of(made.key), made) for made in newest(results) if made.key not in there),
            key=lambda it: it[0],
        )
        if not todo:
            return
        with self._translated(), self._root() as root, self._folder(root, DRAFTS, make=True) as drafts:
            for some in batches(todo, _AT_ONCE):
                with self._drafted(drafts, [made for _, made in some]) as names:
                    named = zip(names, (place for place, _ in some), strict=True)
                    for (queue, thousand), these in groupby(named, key=lambda it: it[1][:2]):
                        with self._two_down(root, queue, thousand, make=True) as folder:
                            for draft, place in these:
                                _link(draft, drafts, place[2], folder)
                            os.fsync(folder)

    def known(self, keys: Sequence[str]) -> set[str]:
        found: set[str] = set()
        wanted: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for key in keys:
            queue, thousand, name = place_of(key)
            wanted.setdefault((queue, thousand), []).append((key, name))
        with self._translated(), self._root() as root:
            for (queue, thousand), names in wanted.items():
                with contextlib.suppress(FileNotFoundError), self._two_down(root, queue, thousand) as folder:
                    there = [key for key, name in names if _is_file(name, folder)]
                    if there:
                        os.fsync(folder)
                        found.update(there)
        return found

    def describe(self) -> dict[str, str]:
        return {"kind": "folder", "place": str(self.path)}

    def close(self) -> None:
        self._closed = True

    # folders

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        """Open the sink's folder. Its own path may lead through links, which are the user's."""
        if self._closed:
            raise SinkDown("the sink was closed", remedy="open it again")
        root = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if self._device is not None and os.fstat(root).st_dev != self._device:
                raise SinkDown(
                    f"{self.path} is on another disk than when it was opened; nothing was acknowledged",
                    remedy="mount the disk again, or start again to use the new one",
                )
            yield root
        finally:
            os.close(root)

    @contextlib.contextmanager
    def _folder(self, above: int, name: str, *, make: bool = False) -> Iterator[int]:
        try:
            folder = os.open(name, _FOLDER, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):  # somebody was faster
                os.mkdir(name, 0o755, dir_fd=above)
            folder = os.open(name, _FOLDER, dir_fd=above)
        try:
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _two_down(self, root: int, queue: str, thousand: str, *, make: bool = False) -> Iterator[int]:
        """A folder of results. The two above it are synced too, because their maker may have died before it
        did so."""
        with self._folder(root, queue, make=make) as above, self._folder(above, thousand, make=make) as found:
            os.fsync(above)
            os.fsync(root)
            yield found

    # files

    @contextlib.contextmanager
    def _drafted(self, drafts: int, results: Sequence[Made]) -> Iterator[list[str]]:
        """Durable under names nobody looks for. All are written before the first is synced, so that the disk
        gets them together."""
        written: list[tuple[str, int]] = []
        try:
            for made in results:
                name = secrets.token_hex(12)
                fd = os.open(name, _MAKE, 0o644, dir_fd=drafts)
                written.append((name, fd))
                write_all(fd, document_of(made))
            for _, fd in written:
                os.fsync(fd)
            yield [name for name, _ in written]
        finally:
            for name, fd in written:
                with contextlib.suppress(OSError):  # a draft that stays behind harms nobody
                    os.close(fd)
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=drafts)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SinkDown(
                    f"the disk of {self.path} is full; nothing was acknowledged",
                    remedy="free some space: results are stored again from where they stopped",
                ) from e
            raise SinkDown(
                f"{self.path} does not take results: {e.strerror or e}; nothing was acknowledged",
                remedy="bring the folder back and let this user write there: results are stored again "
                "from where they stopped",
            ) from e


def _link(draft: str, drafts: int, name: str, folder: int) -> None:
    try:
        os.link(draft, name, src_dir_fd=drafts, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        if not _is_file(name, folder):  # what lies there is no result
            raise


def _is_file(name: str, folder: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def open_directory(url: str) -> DirectorySink:
    """`dir:PATH`."""
    path = url.removeprefix("dir:")
    if not path or "\0" in path:
        raise BadInput(
            "dir: is followed by a folder's path; nothing was opened", remedy="write dir:/data/results"
        )
    sink = DirectorySink(Path(path).expanduser().absolute())
    sink.check()
    return sink
