"""A replica in a directory.

Rules of this file:
- Nothing is written under its final name. A draft is written, synced, and linked to its name, which fails if
  the name is taken: bytes under a name never change, whoever writes the same thing at the same time (C2).
- Order: data, sync of the file, link, sync of the folder. Only then did it happen (C6). A name whose folder
  would not sync is taken back: whoever looks later would count it.
- Everything below the replica's own folder is opened from that folder and never through a link: what somebody
  planted there leads nowhere. What is no plain file is a bad copy.
- Packs are written past the page cache where the file system lets us: a checkpoint must not push the training
  data out of memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sublet.core.checkpoints.checkpoint import ALIGN, MARK, MAX_MANIFEST_BYTES, ByteSpan
from sublet.core.errors import Misconfigured, NotDurable
from sublet.core.file_modes import file_in
from sublet.machine.durable import make_folder, sync_path, try_hard_link, write_all
from sublet.machine.failpoints import failpoint

_FOLDERS = ("packs", "manifests", "drafts", "aside")
_READ = (
    os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
)  # a pipe under a pack's name must not hold a load up
_MAKE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


def _made(name: str, folder: int, more_flags: int = 0) -> int:
    """A new file, which only its user can open, or the group that shares its folder."""
    mode = file_in(os.fstat(folder).st_mode)
    fd = os.open(name, _MAKE | more_flags, mode, dir_fd=folder)
    if mode & stat.S_IRWXG:
        os.fchmod(fd, mode)  # a umask took the group's part
    return fd


class DirectoryReplica:
    """Implements `ports.store.Replica`."""

    near = True

    def __init__(self, path: Path, domain: str = "") -> None:
        self.path = path
        self.name = f"dir:{path}"
        self.domain = domain or self.name

    @property
    def lane(self) -> str:
        try:
            return f"disk {os.stat(self.path).st_dev}"
        except OSError:
            return self.name

    def check(self) -> None:
        try:
            for folder in _FOLDERS:
                make_folder(self.path / folder, private=True)
                os.close(self.open_folder(folder))
            # Also what was there already: whoever made it may have died before it was durable.
            with contextlib.suppress(PermissionError):  # not ours to read
                sync_path(self.path.parent)
            sync_path(self.path)
            with self._in("drafts") as drafts:
                try_hard_link(drafts)
        except OSError as e:
            raise Misconfigured(
                f"{self.name} cannot be a replica: {e.strerror}",
                remedy="give it a folder you may write hard links in",
            ) from e

    def open_folder(self, folder: str) -> int:
        """One of its four folders, or its root. The replica's own path may lead through links, which are the
        operator's; nothing in it may."""
        root = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        finally:
            os.close(root)

    @contextlib.contextmanager
    def _in(self, folder: str) -> Iterator[int]:
        fd = self.open_folder(folder)
        try:
            yield fd
        finally:
            os.close(fd)

    # packs

    def begin_pack(self, size: int) -> _Draft:
        try:
            return _Draft(self, size)
        except OSError as e:
            raise _not_durable(self, e) from e

    def has_pack(self, pack: str) -> bool:
        try:
            with self._in("packs") as packs:
                os.stat(f"{pack}.pack", dir_fd=packs, follow_symlinks=False)
            return True
        except FileNotFoundError:
            return False

    def read_pack(self, pack: str, at: int, into: memoryview) -> bool:
        """Past the page cache as well, as far as whole blocks go: what was written past it is not in
        there."""
        try:
            with self._in("packs") as packs:
                fd = _open_plain(f"{pack}.pack", packs)
        except FileNotFoundError:
            return False
        if fd < 0:
            return False
        try:
            whole = into.nbytes // ALIGN * ALIGN if at % ALIGN == 0 else 0
            done = _read_directly(fd, at, into[:whole])
            while done < into.nbytes:
                got = os.preadv(fd, [into[done:]], at + done)
                if got == 0:
                    return False
                done += got
            return True
        finally:
            os.close(fd)

    # manifests

    def put_manifest(self, digest: str, data: bytes) -> None:
        try:
            with self._in("drafts") as drafts:
                draft = f"manifest-{secrets.token_hex(8)}"
                fd = _made(draft, drafts)
                try:
                    try:
                        write_all(fd, data)
                        os.fsync(fd)
                    finally:
                        os.close(fd)
                    self.publish_draft(drafts, draft, *self._place("manifest", digest))
                finally:
                    with contextlib.suppress(OSError):  # a draft that stays behind harms nobody
                        os.unlink(draft, dir_fd=drafts)
        except OSError as e:
            raise _not_durable(self, e) from e

    def get_manifest(self, digest: str) -> bytes | None:
        folder, name = self._place("manifest", digest)
        try:
            with self._in(folder) as place:
                fd = _open_plain(name, place)
        except FileNotFoundError:
            return None
        if fd < 0:
            return b""
        with os.fdopen(fd, "rb") as file:
            # More cannot verify, and is not read into memory (C7); nor is room made for what is not there.
            return file.read(min(os.fstat(fd).st_size, MAX_MANIFEST_BYTES) + 1)

    def publish_draft(self, drafts: int, draft: str, folder: str, final: str) -> None:
        with self._in(folder) as place:
            linked = False
            try:
                os.link(draft, final, src_dir_fd=drafts, dst_dir_fd=place, follow_symlinks=False)
                linked = True
            except FileExistsError:
                # A bad copy must not pass for the one that was written (C1), nor be written over (C2).
                if not _same(draft, drafts, final, place):
                    raise
            failpoint("after_publish")
            try:
                os.fsync(place)
            except OSError:
                if linked:
                    with contextlib.suppress(OSError):
                        os.unlink(final, dir_fd=place)
                raise

    # keeping order

    @staticmethod
    def _place(kind: str, name: str) -> tuple[str, str]:
        """Folder and file."""
        if kind in ("drafts", "aside"):
            return kind, name
        if name == MARK:
            return ".", "owner.json"
        return ("packs", f"{name}.pack") if kind == "pack" else ("manifests", f"{name}.json")

    def set_aside(self, kind: str, name: str) -> None:
        folder, file = self._place(kind, name)
        with contextlib.suppress(FileNotFoundError), self._in(folder) as source, self._in("aside") as aside:
            target = f"{file}.{int(time.time())}-{secrets.token_hex(3)}"
            os.rename(file, target, src_dir_fd=source, dst_dir_fd=aside)
            os.fsync(source)

    def packs(self) -> Iterator[tuple[str, float, int]]:
        for name, age, info in self._aged("packs"):
            if name.endswith(".pack"):
                yield name.removesuffix(".pack"), age, info.st_size

    def manifests(self) -> Iterator[tuple[str, float]]:
        for name, age, _ in self._aged("manifests"):
            if name.endswith(".json"):
                yield name.removesuffix(".json"), age

    def leftovers(self) -> Iterator[tuple[str, str, float, int]]:
        for folder in ("drafts", "aside"):
            for name, age, info in self._aged(folder):
                yield folder, name, age, info.st_size

    def _aged(self, folder: str) -> Iterator[tuple[str, float, os.stat_result]]:
        """What is in it, with its age by the clock that stamped it: a file server's may differ from ours.
        Where that cannot be asked everything is new."""
        now = self._its_clock()
        with self._in(folder) as fd, os.scandir(fd) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    info = entry.stat(follow_symlinks=False)
                    yield entry.name, now - info.st_mtime, info

    def _its_clock(self) -> float:
        trial = f"clock-{secrets.token_hex(4)}"
        try:
            with self._in("drafts") as drafts:
                fd = _made(trial, drafts)
                try:
                    return os.fstat(fd).st_mtime
                finally:
                    os.close(fd)
                    os.unlink(trial, dir_fd=drafts)
        except OSError:
            return float("-inf")

    def remove(self, kind: str, name: str) -> None:
        folder, file = self._place(kind, name)
        with contextlib.suppress(FileNotFoundError), self._in(folder) as fd:
            os.unlink(file, dir_fd=fd)


class _Draft:
    """Implements `ports.store.PackDraft`."""

    def __init__(self, replica: DirectoryReplica, size: int) -> None:
        self._replica = replica
        self._name = f"pack-{secrets.token_hex(8)}"
        self._drafts = replica.open_folder("drafts")
        try:
            try:
                self._fd = _made(self._name, self._drafts, os.O_DIRECT)
                self._direct = True
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._name, dir_fd=self._drafts)  # refused after it was created
                self._fd, self._direct = _made(self._name, self._drafts), False
        except BaseException:
            os.close(self._drafts)
            raise
        self._turning = threading.Lock()
        if size:
            with contextlib.suppress(OSError):  # a file system without it only writes more slowly
                os.posix_fallocate(self._fd, 0, -(-size // ALIGN) * ALIGN)

    def write(self, at: int, data: memoryview) -> None:
        direct = self._direct
        try:
            done = 0
            while done < data.nbytes:
                done += os.pwritev(self._fd, [data[done:]], at + done)
        except OSError as e:
            if e.errno != errno.EINVAL or not direct:
                raise _not_durable(self._replica, e) from e
            self._buffered()
            self.write(at, data)

    def _buffered(self) -> None:
        """Open the draft without direct I/O: some file systems refuse it only when it is used. Every thread
        that was refused comes here."""
        with self._turning:
            if not self._direct:
                return
            try:
                fd = os.open(self._name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self._drafts)
            except OSError as e:
                raise _not_durable(self._replica, e) from e
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)
            self._direct = False

    def publish(self, pack: str, pieces: Sequence[ByteSpan]) -> None:
        try:
            os.ftruncate(self._fd, pieces[-1].end if pieces else 0)
            failpoint("after_chunk_write")
            os.fsync(self._fd)
            failpoint("after_chunk_fsync")
            self._replica.publish_draft(self._drafts, self._name, "packs", f"{pack}.pack")
        except OSError as e:
            raise _not_durable(self._replica, e) from e
        finally:
            self.discard()

    def discard(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):  # a draft that stays behind harms nobody
                os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._drafts)
            os.close(self._drafts)


def _read_directly(fd: int, at: int, into: memoryview) -> int:
    """How much was read. Nothing, where the file system or the memory's address does not allow it."""
    if not into.nbytes:
        return 0
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < into.nbytes:
            got = os.preadv(fd, [into[done:]], at + done)
            done += got
            if got == 0 or done % ALIGN:
                break
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return done


def _open_plain(name: str, folder: int) -> int:
    """Open for reading. -1: what is under the name is no plain file (a link, for example), and so no copy of
    anything."""
    try:
        fd = os.open(name, _READ, dir_fd=folder)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENXIO):  # a link, or a socket
            return -1
        raise
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return -1


def _same(one: str, in_one: int, other: str, in_other: int) -> bool:
    with contextlib.ExitStack() as open_files:
        files = []
        for name, folder in ((one, in_one), (other, in_other)):
            try:
                fd = _open_plain(name, folder)
            except FileNotFoundError:
                return False
            if fd < 0:
                return False
            files.append(open_files.enter_context(os.fdopen(fd, "rb")))
        while True:
            parts = [file.read(1 << 20) for file in files]
            if parts[0] != parts[1]:
                return False
            if not parts[0]:
                return True


def _not_durable(replica: DirectoryReplica, error: OSError) -> NotDurable:
    return NotDurable(f"{replica.name} did not take it: {error.strerror or error}")
