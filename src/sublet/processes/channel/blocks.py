"""Blocks: shared memory in which large values travel between two processes.

Rules of this file:
- A block belongs to the side that made it (`Lender`). It is lent with a message, mapped once by the other
  side (`Borrower`), and lent again only after the borrower said that nothing refers to it any more. A view
  kept for long keeps its block, nothing else.
- Whoever keeps more than a few values gets copies: a block costs descriptors on both sides, and far more room
  than a small value.
- Mappings are made populated and kept: touching fresh pages costs many times the copy itself.
- Few free blocks are kept; the others go, and the borrower is told to unmap them.
- A child that the borrower forks writes to pages of its own, as into any memory, and what it reads is never
  lent to another message. (It sees what its parent writes there after the fork, in pages it has not written
  to itself: to copy all of them would cost too much.)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sublet.processes.channel import dirty_pages
from sublet.processes.channel.parallel_copy import WORTH_IT_BYTES, in_two_threads

FREE_KEPT = 4
#: How many blocks the borrower may have in use.
BORROWED_MOST = 64
ALIGN = 64
_SMALLEST = 1 << 20
#: A flag beside a block's number: a forked child may still read it.
SPENT = 1 << 31
_TABLE = struct.Struct("<Q")  # how many parts
_PLACE = struct.Struct("<QQ")  # offset and size of one


def _aligned(offset: int) -> int:
    return (offset + ALIGN - 1) // ALIGN * ALIGN


def _room(size: int) -> int:
    """Round a size up, so that nearly equal messages share a block."""
    if size <= _SMALLEST:
        return _SMALLEST
    step = 1 << max(20, size.bit_length() - 4)
    return (size + step - 1) // step * step


def _places(block: memoryview) -> list[tuple[int, int]]:
    """Return the offset and size of each part."""
    (count,) = _TABLE.unpack_from(block)
    return [_PLACE.unpack_from(block, _TABLE.size + _PLACE.size * i) for i in range(count)]


def _mapped(fd: int, size: int) -> mmap.mmap:
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _copy(copies: list[tuple[memoryview, memoryview]]) -> None:
    """Copy each source into its target."""
    pieces: list[tuple[int, int, int]] = []
    kept: list[Any] = []
    for source, into in copies:
        if source.readonly or source.nbytes < WORTH_IT_BYTES:
            into[:] = source
            continue
        ends = [ctypes.c_char.from_buffer(view) for view in (source, into)]
        kept.append(ends)  # as long as their addresses are used
        here, there = map(ctypes.addressof, ends)
        # Two large copies, not many small ones: the C library copies very large pieces past the caches, which
        # is faster by half.
        middle = _aligned(source.nbytes // 2)
        pieces += [(there, here, middle), (there + middle, here + middle, source.nbytes - middle)]
    if pieces:
        in_two_threads(pieces, _move)


def _move(piece: tuple[int, int, int]) -> None:
    ctypes.memmove(*piece)


class _Block:
    __slots__ = ("fd", "map", "number", "size", "view")

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.fd = os.memfd_create("sublet-block", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, size)
            self.map = _mapped(self.fd, size)
        except OSError:
            os.close(self.fd)
            raise
        self.view = memoryview(self.map)

    def close(self) -> None:
        self.view.release()
        self.map.close()
        os.close(self.fd)


class Lender:
    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._free: list[_Block] = []
        self._made = 0
        self.dropped: list[int] = []  # to be told to the borrower

    def lend(self, parts: Sequence[memoryview]) -> tuple[_Block, bool]:
        """Copy the parts into one block, behind a table of where they lie; also return whether the block is
        new to the borrower."""
        end = _aligned(_TABLE.size + _PLACE.size * len(parts))
        table = bytearray(_TABLE.pack(len(parts)))
        for part in parts:
            table += _PLACE.pack(end, part.nbytes)
            end = _aligned(end + part.nbytes)
        block, fresh = self._take(end)
        block.view[: len(table)] = table
        copies = []
        for i, part in enumerate(parts):
            offset, size = _PLACE.unpack_from(table, _TABLE.size + _PLACE.size * i)
            copies.append((part, block.view[offset : offset + size]))
        _copy(copies)
        return block, fresh

    def _take(self, size: int) -> tuple[_Block, bool]:
        room = _room(size)
        fitting = [b for b in self._free if room <= b.size <= 4 * room]
        if fitting:
            block = min(fitting, key=lambda b: b.size)
            self._free.remove(block)
            return block, False
        self._made += 1
        block = self._blocks[self._made] = _Block(self._made, room)
        return block, True

    def returned(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number & SPENT:
                self._let_go(self._blocks[number & ~SPENT])
            else:
                self._free.append(self._blocks[number])
        while len(self._free) > FREE_KEPT:
            self._let_go(self._free.pop(0))

    def _let_go(self, block: _Block) -> None:
        del self._blocks[block.number]
        block.close()
        self.dropped.append(block.number)

    def close(self) -> None:
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()
        self._free.clear()


@dataclass(slots=True)
class _Borrowed:
    """A block while something refers to it."""

    start: int
    size: int
    fd: int
    alive: weakref.ref[Any]
    forked: bool = False  # a child may have it too


class Borrower:
    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._fds: dict[int, int] = {}  # for a child, to map them anew
        self._out: dict[int, _Borrowed] = {}
        self._closed = False
        self.unused: list[int] = []  # to be told to the lender

    def receive(self, number: int, fd: int, size: int) -> None:
        """Map a block that is seen for the first time. The descriptor is ours from now on."""
        try:
            self._maps[number] = _mapped(fd, size)
        except OSError:
            os.close(fd)
            raise
        self._fds[number] = fd

    def borrow(self, number: int) -> list[memoryview]:
        """Return views of the parts. The block counts as used until the last object made from any of them is
        gone."""
        memory = self._maps[number]
        if len(self._out) >= BORROWED_MOST:
            with memoryview(memory) as lent:
                copies = [memoryview(bytearray(lent[at : at + size])) for at, size in _places(lent)]
            self.unused.append(number)
            return copies
        whole = (ctypes.c_char * len(memory)).from_buffer(memory)
        start = ctypes.addressof(whole)
        dirty_pages.borrowed(start, len(memory))
        gone = weakref.ref(whole, lambda _: self._back(number, start))
        self._out[number] = _all_out[start] = _Borrowed(start, len(memory), self._fds[number], gone)
        view = memoryview(whole).cast("B")
        return [view[offset : offset + size] for offset, size in _places(view)]

    def _back(self, number: int, start: int) -> None:
        dirty_pages.given_back(start)
        borrowed = self._out.pop(number, None)
        _all_out.pop(start, None)
        if self._closed:
            self._close_fd(number)
        else:
            self.unused.append(number | (SPENT if borrowed is not None and borrowed.forked else 0))

    def drop(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._maps.pop(number).close()
            self._close_fd(number)

    def close(self) -> None:
        """Unmap what nothing refers to; the rest stays until it is gone."""
        self._closed = True
        for number in [n for n in self._maps if n not in self._out]:
            self._maps.pop(number).close()
            self._close_fd(number)
        self._maps.clear()

    def _close_fd(self, number: int) -> None:
        fd = self._fds.pop(number, -1)
        if fd >= 0:
            os.close(fd)


_MAP_FIXED = 0x10
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
#: Mapped blocks by address. What was borrowed may outlive its borrower, and is kept here as long.
_all_out: dict[int, _Borrowed] = {}


def _before_fork() -> None:
    for borrowed in list(_all_out.values()):
        borrowed.forked = True


def _in_child() -> None:
    for b in list(_all_out.values()):
        # Where the kernel refuses this, the child shares the memory with its parent.
        _libc.mmap(b.start, b.size, _READ_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED, b.fd, 0)


os.register_at_fork(before=_before_fork, after_in_child=_in_child)
