"""Regions in a directory: one file for each block and epoch.

Rules of this file:
- A file is named by the block's id and the epoch it belongs to, and appears under that name only when it is
  whole and synced. The highest epoch is the block; whoever has an older file open writes where nobody looks.
- A file's size never changes and its space is taken when it is made, so a checkpoint needs no new space and
  moves no metadata.
- Names are checked, opened relative to the folder, and never followed through a link.
- A slot is copied, hashed and written from memory of our own: a value that changes meanwhile cannot make a
  slot that does not verify.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from sublet.core.checkpoints.region import (
    DIGEST_AT,
    DIGEST_BYTES,
    HEADER_BYTES,
    Bad,
    Empty,
    Good,
    Slot,
    SlotHeader,
    blocks_for,
    capacity_bytes,
    pack_header,
    read_header,
    slot_at,
)
from sublet.core.errors import BlockTooSmall, Damaged, Fenced, NotDurable
from sublet.core.leasing.block import BLOCK_BYTES, check_locator
from sublet.machine.durable import sync_path
from sublet.machine.failpoints import failpoint

_FILE = re.compile(r"(B[0-9a-f]{20})\.([0-9]{1,19})", re.ASCII)
_DRAFT = re.compile(r"draft-(B[0-9a-f]{20})\.([0-9]{1,19})-[0-9a-f]{16}", re.ASCII)
_COPY_BYTES = 1 << 20
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def _blake3() -> Any:
    return import_module("blake3").blake3


class DirectoryRegions:
    """Implements `ports.region.Regions`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # files

    @contextlib.contextmanager
    def _folder(self, *, make: bool = False) -> Iterator[int]:
        if make and not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            sync_path(self.path.parent)
            sync_path(self.path.parent.parent)
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    @staticmethod
    def _names(folder: int, pattern: re.Pattern[str], block_id: str) -> list[tuple[int, str]]:
        """Files of one block, by epoch."""
        found = (pattern.fullmatch(name) for name in os.listdir(folder))
        return sorted((int(m.group(2)), m.group(0)) for m in found if m and m.group(1) == block_id)

    def create(self, block_id: str, epoch: int, blocks: int) -> FileRegion:
        return self._make(check_locator(block_id), epoch, blocks, None)

    def take_over(self, block_id: str, epoch: int, blocks: int, *, empty_ok: bool) -> FileRegion:
        check_locator(block_id)
        with _durably(), self._folder(make=True) as folder:
            there = self._names(folder, _FILE, block_id)
            if any(number >= epoch for number, _ in there):
                raise Fenced(f"block {block_id} was attached by somebody else since")
            if not there and not empty_ok:
                raise Damaged(
                    f"the region of block {block_id} is missing from this home's blocks folder",
                    remedy="restore it from a backup of SUBLET_HOME, or use the SUBLET_HOME it was made in",
                )
            source = None
            try:
                if there:
                    source = _open_file(folder, there[-1][1])
                made = self._make(block_id, epoch, blocks, source)
            finally:
                if source is not None:
                    os.close(source)
            # Nobody looks for these any more. A writer that still has one open keeps it until it ends.
            for number, name in there + self._names(folder, _DRAFT, block_id):
                if number < epoch:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=folder)
            return made

    def _make(self, block_id: str, epoch: int, blocks: int, source: int | None) -> FileRegion:
        """Make a file: synced whole before it has its name, and its name synced before this returns (C6)."""
        name = f"{block_id}.{epoch}"
        draft = f"draft-{name}-{secrets.token_hex(8)}"
        with _durably(), self._folder(make=True) as folder:
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)
            try:
                os.posix_fallocate(fd, 0, blocks * BLOCK_BYTES)
                if source is not None:
                    _copy(source, fd, blocks * BLOCK_BYTES)
                os.fsync(fd)
                failpoint("before_region_link")
                os.link(draft, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
                failpoint("after_region_link")
                os.fsync(folder)
            except BaseException:
                os.close(fd)
                raise
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(draft, dir_fd=folder)
        return FileRegion(fd, block_id, blocks)

    def present(self, block_id: str) -> bool:
        check_locator(block_id)
        with _durably("read"), contextlib.suppress(FileNotFoundError), self._folder() as folder:
            return bool(self._names(folder, _FILE, block_id))
        return False

    def inspect(self, block_id: str, blocks: int) -> tuple[Slot, Slot] | None:
        check_locator(block_id)
        with _durably("read"), contextlib.suppress(FileNotFoundError), self._folder() as folder:
            there = self._names(folder, _FILE, block_id)
            if not there:
                return None
            region = FileRegion(_open_file(folder, there[-1][1]), block_id, blocks)
            try:
                return region.slots()
            finally:
                region.close()
        return None

    def remove(self, block_id: str) -> int:
        check_locator(block_id)
        gone = 0
        with _durably("removed"), contextlib.suppress(FileNotFoundError), self._folder() as folder:
            for pattern in (_FILE, _DRAFT):
                for _, name in self._names(folder, pattern, block_id):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)
                        gone += 1
            os.fsync(folder)
        return gone

    def known(self) -> list[str]:
        with _durably("read"), contextlib.suppress(FileNotFoundError), self._folder() as folder:
            found = [_FILE.fullmatch(name) or _DRAFT.fullmatch(name) for name in os.listdir(folder)]
            return sorted({m.group(1) for m in found if m})
        return []


def _open_file(folder: int, name: str) -> int:
    """Open for reading what must be a plain file, and no link or pipe in its place."""
    try:
        fd = os.open(name, os.O_RDONLY | _OPEN, dir_fd=folder)
    except OSError as e:
        if e.errno != errno.ELOOP:
            raise
        fd = -1
    if fd < 0 or not stat.S_ISREG(os.fstat(fd).st_mode):
        if fd >= 0:
            os.close(fd)
        raise Damaged(
            "the block's region is not a plain file", remedy="restore it from a backup of SUBLET_HOME"
        )
    return fd


def _copy(source: int, target: int, size: int) -> None:
    """Copy what is there, up to the region's size. A slot that is cut short does not verify, the other one
    may."""
    buffer = memoryview(mmap.mmap(-1, min(_COPY_BYTES, size)))
    at = 0
    while at < size:
        got = os.preadv(source, [buffer[: min(len(buffer), size - at)]], at)
        if got == 0:
            return
        if buffer[:got] != bytes(got):  # what was never written stays unwritten
            _write(target, buffer[:got], at)
        at += got


def _write(fd: int, data: memoryview, at: int) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:], at + done)


class FileRegion:
    """Implements `ports.region.Region`."""

    def __init__(self, fd: int, block_id: str, blocks: int) -> None:
        self._fd = fd
        self._close = weakref.finalize(
            self, os.close, fd
        )  # a block that was forgotten must not keep its file
        self._block_id = block_id
        self._blocks = blocks
        self._staging: memoryview | None = None

    def slots(self) -> tuple[Slot, Slot]:
        return self.read(0)[0], self.read(1)[0]

    def read(self, slot: int) -> tuple[Slot, memoryview]:
        nothing = memoryview(b"")
        at = slot_at(self._blocks, slot)
        try:
            found = read_header(os.pread(self._fd, HEADER_BYTES, at), self._block_id, self._blocks)
            if isinstance(found, (Empty, Bad)):
                return found, nothing
            header, claimed = found
            # Memory that begins at a page, so that tensors in it are aligned; bounded by the region's own
            # size (C7).
            payload = memoryview(mmap.mmap(-1, max(1, header.length)))[: header.length]
            done = 0
            while done < header.length:
                got = os.preadv(self._fd, [payload[done:]], at + HEADER_BYTES + done)
                if got == 0:
                    return Bad("the region is shorter than it was made"), nothing
                done += got
        except OSError as e:
            return Bad(f"it could not be read: {e.strerror}"), nothing
        digest = _blake3()(pack_header(header)).update(payload)
        if digest.digest() != claimed:
            return Bad("its digest does not match its bytes"), nothing
        return Good(header, digest.hexdigest()), payload

    def write(self, slot: int, header: SlotHeader, parts: Sequence[memoryview]) -> str:
        if header.length > capacity_bytes(self._blocks):
            needed = blocks_for(header.length)
            raise BlockTooSmall(
                f"the value takes {header.length} bytes, and the block's {self._blocks} blocks hold "
                f"{capacity_bytes(self._blocks)}: it needs {needed} blocks; the checkpoint before is "
                "untouched",
                remedy=f"take a larger block, sublet.block(blocks={needed}), and checkpoint there",
            )
        staged = self._stage(header.length)
        fields = pack_header(header)
        at = HEADER_BYTES
        for part in parts:
            staged[at : at + part.nbytes] = part.cast("B") if part.nbytes else b""
            at += part.nbytes
        digest = _blake3()(fields).update(staged[HEADER_BYTES:at])
        staged[:HEADER_BYTES] = (fields + digest.digest()).ljust(HEADER_BYTES, b"\0")
        try:
            _write(self._fd, staged[:at], slot_at(self._blocks, slot))
            failpoint("after_slot_write")
            os.fdatasync(self._fd)
            failpoint("after_slot_fsync")
        except OSError as e:
            raise _not_durable(e) from e
        return str(digest.hexdigest())

    def _stage(self, length: int) -> memoryview:
        """A buffer, kept from one checkpoint to the next: fresh memory costs many times the copy."""
        wanted = HEADER_BYTES + length
        if self._staging is None or len(self._staging) < wanted:
            self._staging = memoryview(mmap.mmap(-1, wanted))
        return self._staging

    def close(self) -> None:
        self._close()


assert DIGEST_AT + DIGEST_BYTES <= HEADER_BYTES


@contextlib.contextmanager
def _durably(what: str = "written") -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise _not_durable(e, what) from e


def _not_durable(error: OSError, what: str = "written") -> NotDurable:
    remedy = "nothing is lost: the checkpoint before is untouched; correct the cause and try again"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "make room on the disk of SUBLET_HOME; nothing is lost, the checkpoint before is untouched"
    return NotDurable(
        f"the block's region was not {what}: {error.strerror or type(error).__name__}", remedy=remedy
    )
