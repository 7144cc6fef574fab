"""A replica in a directory.

Rules of this file:
- Nothing is written under its final name. A draft is written, synced, and linked to its name, which fails if the name is taken: bytes
  under a name never change, whoever writes the same thing at the same time (C2).
- Order: data, sync of the file, link, sync of the folder. Only then did it happen (C6).
- Packs are written past the page cache where the file system lets us: a checkpoint must not push the training data out of memory.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from sublet.core.checkpoint import ALIGN, MAX_MANIFEST_BYTES, Span
from sublet.core.errors import Misconfigured, NotDurable
from sublet.failpoints import failpoint

_FOLDERS = ("packs", "manifests", "drafts", "aside")


class DirectoryReplica:
    """Implements `ports.store.Replica`."""

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
                _make_folder(self.path / folder)
            trial = self.path / "drafts" / f"trial-{secrets.token_hex(4)}"
            trial.touch()
            try:
                os.link(trial, trial.with_suffix(".link"))
                os.unlink(trial.with_suffix(".link"))
            finally:
                trial.unlink(missing_ok=True)
        except OSError as e:
            raise Misconfigured(
                f"{self.name} cannot be a replica: {e.strerror}",
                remedy="give it a folder you may write hard links in",
            ) from e

    # packs

    def begin_pack(self, size: int) -> _Draft:
        try:
            return _Draft(self, size)
        except OSError as e:
            raise _not_durable(self, e) from e

    def _pack(self, pack: str) -> Path:
        return self.path / "packs" / f"{pack}.pack"

    def has_pack(self, pack: str) -> bool:
        return self._pack(pack).exists()

    def read_pack(self, pack: str, at: int, into: memoryview) -> bool:
        """Past the page cache as well, as far as whole blocks go: what was written past it is not in there."""
        path = self._pack(pack)
        whole = into.nbytes // ALIGN * ALIGN if at % ALIGN == 0 else 0
        try:
            done = _read(path, os.O_DIRECT, at, into[:whole]) if whole else 0
        except OSError as e:
            if e.errno != errno.EINVAL:  # a file system without it, or memory that lies askew
                raise
            done = 0
        if done is None:
            return False
        rest = _read(path, 0, at + done, into[done:])
        return rest is not None and done + rest == into.nbytes

    # manifests

    def put_manifest(self, digest: str, data: bytes) -> None:
        try:
            draft = self.path / "drafts" / f"manifest-{secrets.token_hex(8)}"
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                self._publish(draft, self.path / "manifests" / f"{digest}.json")
            finally:
                draft.unlink(missing_ok=True)
        except OSError as e:
            raise _not_durable(self, e) from e

    def get_manifest(self, digest: str) -> bytes | None:
        path = self.path / "manifests" / f"{digest}.json"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)  # more cannot verify, and is not read into memory (C7)

    def _publish(self, draft: Path, final: Path) -> None:
        try:
            os.link(draft, final)
        except FileExistsError:
            # A bad copy must not pass for the one that was written (C1), nor be written over (C2).
            if not _same(draft, final):
                raise
        failpoint("after_publish")
        _sync_folder(final.parent)

    # keeping order

    def _file(self, kind: str, name: str) -> Path:
        return self._pack(name) if kind == "pack" else self.path / "manifests" / f"{name}.json"

    def set_aside(self, kind: str, name: str) -> None:
        source = self._file(kind, name)
        target = self.path / "aside" / f"{source.name}.{int(time.time())}-{secrets.token_hex(3)}"
        with contextlib.suppress(FileNotFoundError):
            source.rename(target)
            _sync_folder(source.parent)

    def packs(self) -> Iterator[tuple[str, float, int]]:
        for entry in os.scandir(self.path / "packs"):
            if entry.name.endswith(".pack"):
                info = entry.stat()
                yield entry.name.removesuffix(".pack"), time.time() - info.st_mtime, info.st_size

    def manifests(self) -> Iterator[tuple[str, float]]:
        for entry in os.scandir(self.path / "manifests"):
            if entry.name.endswith(".json"):
                yield entry.name.removesuffix(".json"), time.time() - entry.stat().st_mtime

    def remove(self, kind: str, name: str) -> None:
        self._file(kind, name).unlink(missing_ok=True)


class _Draft:
    """Implements `ports.store.Draft`."""

    def __init__(self, replica: DirectoryReplica, size: int) -> None:
        self._replica = replica
        self._path = replica.path / "drafts" / f"pack-{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._fd = os.open(self._path, flags | os.O_DIRECT, 0o644)
            self._direct = True
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            self._path.unlink(missing_ok=True)  # refused after it was created
            self._fd, self._direct = os.open(self._path, flags, 0o644), False
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
        """Opened with direct I/O on a file system that refuses it only when it is used. Every thread that was refused comes here."""
        with self._turning:
            if not self._direct:
                return
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as e:
                raise _not_durable(self._replica, e) from e
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)
            self._direct = False

    def publish(self, pack: str, pieces: Sequence[Span]) -> None:
        try:
            os.ftruncate(self._fd, pieces[-1].end if pieces else 0)
            failpoint("after_chunk_write")
            os.fsync(self._fd)
            failpoint("after_chunk_fsync")
            self._replica._publish(self._path, self._replica._pack(pack))
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
                self._path.unlink()


def _read(path: Path, flags: int, at: int, into: memoryview) -> int | None:
    """How much of it there was; None for a file that is not there."""
    if not into.nbytes:
        return 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    except FileNotFoundError:
        return None
    try:
        done = 0
        while done < into.nbytes:
            got = os.preadv(fd, [into[done:]], at + done)
            if got == 0 or (flags and (done + got) % ALIGN):
                done += got
                break
            done += got
        return done
    finally:
        os.close(fd)


def _make_folder(folder: Path) -> None:
    """With its parents, each of them durable: what is synced in a folder that is lost is lost with it."""
    if folder.is_dir():
        return
    if folder.parent != folder:
        _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _same(one: Path, other: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return filecmp.cmp(one, other, shallow=False)
    return False


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _not_durable(replica: DirectoryReplica, error: OSError) -> NotDurable:
    return NotDurable(f"{replica.name} did not take it: {error.strerror or error}")
