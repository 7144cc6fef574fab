"""The arena: one run of shared memory a state is copied into, reused from save to save.

Rules of this file:
- Copying is all the training thread pays: what already lies in the arena is compared and left alone, so most
  of it is read and not written when little changed. Comparing is exact; a tensor's own version counter misses
  fused optimizers.
- Its pages are there before the first save, and stay: touching fresh memory costs thirty times the copy.
- It is an anonymous file: a writer process maps the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sublet.core.checkpoints.checkpoint import ByteSpan, Layout, aligned

try:
    import fcntl
except ImportError:  # a client of a studio, not on Linux: this file is imported there, and not used
    fcntl = None  # type: ignore[assignment]

THREADS = 2
#: Fresh pages come from the kernel, or from the host below it, and wait there: more threads than cores.
POPULATE_THREADS = 4
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memmove.restype = ctypes.c_void_p
_PIECE = 1 << 20


class Arena:
    def __init__(self, size: int, fd: int = -1, *, shared: bool = True, populate: bool = True) -> None:
        """A new one of zeros, or the one behind a descriptor that was given to us. One that is not shared has
        no descriptor: what becomes a loaded state's own memory must not be the memory of processes forked
        later too."""
        self.size = max(size, mmap.PAGESIZE)
        self.fd = fd
        if fd < 0 and shared:
            self.fd = os.memfd_create("sublet-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            if fd < 0 and shared:
                os.ftruncate(self.fd, self.size)
                # Whoever maps it as well must not find it shorter one day.
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            elif shared:
                _check_given(self.fd, self.size)
            self.map = mmap.mmap(self.fd, self.size, flags=kind)
        except BaseException:
            if fd < 0 and shared:
                os.close(self.fd)
            raise
        self._anchor = ctypes.c_char.from_buffer(self.map)
        self.address = ctypes.addressof(self._anchor)
        self.view = memoryview(self.map)
        if populate and fd < 0:
            self._populate_all()

    def populate(self, span: ByteSpan) -> None:
        """Allocate the pages now. A kernel that cannot do that allocates them when they are touched."""
        first = span.offset // mmap.PAGESIZE * mmap.PAGESIZE
        last = min(aligned(span.end, mmap.PAGESIZE), aligned(self.size, mmap.PAGESIZE))
        _libc.madvise(self.address + first, last - first, _MADV_POPULATE_WRITE)

    def _populate_all(self) -> None:
        if self.size <= POPULATE_THREADS * _PIECE:
            self.populate(ByteSpan(0, self.size))
            return
        each = aligned(-(-self.size // POPULATE_THREADS), mmap.PAGESIZE)
        parts = [ByteSpan(at, min(each, self.size - at)) for at in range(0, self.size, each)]
        with ThreadPoolExecutor(POPULATE_THREADS) as pool:
            list(pool.map(self.populate, parts))

    def take(
        self,
        storages: Sequence[memoryview],
        layout: Layout,
        *,
        all_new: bool,
        only: Sequence[int] | None = None,
    ) -> list[bool]:
        """Copy the storages in, or only those of these numbers; for each chunk, whether it is different from
        what lay there."""
        pieces = self._pieces(storages, layout, range(len(storages)) if only is None else only)
        dirty = [all_new] * len(layout.chunks)
        if len(pieces) > 1 and layout.size > 4 * _PIECE:
            with ThreadPoolExecutor(THREADS) as pool:
                changed = itertools.chain.from_iterable(pool.map(_put, _batches(pieces)))
        else:
            changed = itertools.chain(_put(pieces))
        for number in changed:
            dirty[number] = True
        return dirty

    def _pieces(
        self, storages: Sequence[memoryview], layout: Layout, numbers: Sequence[int]
    ) -> list[tuple[int, int, int, int]]:
        """(chunk, target, source, length) of each part of a storage that lies in one chunk."""
        pieces = []
        chunk = 0
        for number in sorted(numbers, key=lambda n: layout.storages[n].offset):
            place = layout.storages[number]
            if not place.size:
                continue
            source = address_of(storages[number]) - place.offset
            while layout.chunks[chunk].end <= place.offset:
                chunk += 1
            at, first = place.offset, chunk
            while at < place.end:
                end = min(place.end, layout.chunks[first].end)
                pieces.append((first, self.address + at, source + at, end - at))
                at = end
                first += 1
        return pieces

    def abandon(self) -> None:
        """Give the descriptor back, and leave the memory to the threads that may still write to it: it goes
        with the last of them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        self.view.release()
        del self._anchor
        with contextlib.suppress(BufferError):
            self.map.close()
        if self.fd >= 0:
            os.close(self.fd)


def _batches(pieces: list[tuple[int, int, int, int]]) -> list[list[tuple[int, int, int, int]]]:
    """A few batches for each thread, of about as many bytes each: handing out small pieces one by one costs
    more than copying them."""
    most = sum(size for *_, size in pieces) // (4 * THREADS) + 1
    batches: list[list[tuple[int, int, int, int]]] = [[]]
    taken = 0
    for piece in pieces:
        if taken >= most:
            batches.append([])
            taken = 0
        batches[-1].append(piece)
        taken += piece[3]
    return batches


def _put(pieces: Sequence[tuple[int, int, int, int]]) -> list[int]:
    """Copy the pieces. Returns the chunks that were different."""
    changed = []
    memcmp, memmove = _libc.memcmp, _libc.memmove
    for chunk, target, source, size in pieces:
        at = 0
        while at < size:
            length = min(_PIECE, size - at)
            if memcmp(target + at, source + at, length):
                # From the first difference on a plain copy: comparing what will be copied anyway only reads
                # it twice.
                memmove(target + at, source + at, size - at)
                changed.append(chunk)
                break
            at += length
    return changed


def _check_given(fd: int, size: int) -> None:
    if os.fstat(fd).st_size < size:
        raise ValueError("the arena is shorter than what should be in it")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("the arena could shrink while it is read")


def address_of(memory: memoryview) -> int:
    """Where the bytes lie, also of memory that may not be written to."""
    if memory.readonly:
        holder = ctypes.py_object(memory)
        buffer = _PyBuffer()
        ctypes.pythonapi.PyObject_GetBuffer(holder, ctypes.byref(buffer), 0)
        try:
            return int(buffer.buf)
        finally:
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )
