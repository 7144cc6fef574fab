"""Which borrowed blocks were written to since somebody last looked, told by the kernel instead of by reading
them.

Rules of this file:
- A look write-protects the pages of a block; the first write to one lifts that again and is remembered by the
  kernel (userfaultfd with asynchronous write protection, asked by PAGEMAP_SCAN, Linux 6.7). Nothing is
  stopped, and nothing in this process handles a fault.
- A stamp stands for the content of a stretch of memory: it is the same only while nothing was written there.
  Two stretches that share a page get new stamps together: more is called changed than was, never less.
- A block most of which is written between two looks is let go: a fault for each of its pages costs more than
  reading it.
- Only writes through this process's own page tables are seen. Blocks are borrowed by one process, so that is
  all there are, but for two: a child forked by the user's code, whose writes go to pages of its own
  (`blocks`), and a device that writes into pinned memory, which is therefore not stamped where torch can
  tell.
- Whatever the kernel refuses, there is no stamp, and the caller reads the memory.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import sys
import threading
from bisect import bisect_right
from dataclasses import dataclass, field

try:
    import fcntl
except ImportError:  # a client of a studio, not on Linux: this file is imported there, and not used
    fcntl = None  # type: ignore[assignment]

_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_API, _REGISTER = 0xC018AA3F, 0xC020AA00
_API_VERSION = 0xAA
#: write protection; also of shared memory; also of pages that are not there; resolved by the kernel itself
_FEATURES = 1 << 0 | 1 << 12 | 1 << 13 | 1 << 15
_REGISTER_WP = 2
_SCAN = 0xC0606610
_SCAN_ARGUMENTS = struct.Struct("<12Q")
_PROTECT_FOUND, _ONLY_IF_REGISTERED = 1, 2
_IS_WRITTEN = 2
_RANGE = struct.Struct("<QQQ")
_RANGES_AT_ONCE = 1024
_PAGE = mmap.PAGESIZE


@dataclass(slots=True)
class _Loan:
    """One block, during one loan."""

    start: int
    end: int
    stamps: dict[tuple[int, int], int] = field(default_factory=dict)
    protected: bool = False
    let_go: bool = False


class _PageTracker:
    """The userfaultfd and pagemap descriptors, which are bound to the memory of the process that opened
    them."""

    def __init__(self) -> None:
        self.process = os.getpid()
        libc = ctypes.CDLL(None, use_errno=True)
        number = _SYS_USERFAULTFD.get(os.uname().machine, -1)
        self._faults = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        if self._faults < 0:
            raise OSError(ctypes.get_errno(), "userfaultfd")
        self._pages = -1
        try:
            fcntl.ioctl(self._faults, _API, bytearray(struct.pack("<QQQ", _API_VERSION, _FEATURES, 0)))
            self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self.close()
            raise
        self._found = ctypes.create_string_buffer(_RANGE.size * _RANGES_AT_ONCE)

    def close(self) -> None:
        for fd in (self._faults, self._pages):
            if fd >= 0:
                os.close(fd)

    def register(self, start: int, end: int) -> None:
        fcntl.ioctl(
            self._faults, _REGISTER, bytearray(struct.pack("<QQQQ", start, end - start, _REGISTER_WP, 0))
        )

    def written(self, start: int, end: int, *, protect: bool) -> list[tuple[int, int]]:
        """Return the ranges written to since they were protected, in order. An OSError if the memory is not
        registered."""
        flags = _ONLY_IF_REGISTERED | (_PROTECT_FOUND if protect else 0)
        written: list[tuple[int, int]] = []
        while start < end:
            arguments = bytearray(
                _SCAN_ARGUMENTS.pack(
                    _SCAN_ARGUMENTS.size,
                    flags,
                    start,
                    end,
                    0,
                    ctypes.addressof(self._found),
                    _RANGES_AT_ONCE,
                    0,
                    0,
                    _IS_WRITTEN,
                    0,
                    _IS_WRITTEN,
                )
            )
            count = fcntl.ioctl(self._pages, _SCAN, arguments)
            for i in range(count):
                first, last, _ = _RANGE.unpack_from(self._found, _RANGE.size * i)
                written.append((first, last))
            start = _SCAN_ARGUMENTS.unpack(arguments)[4]
        return written


_lock = threading.Lock()
_loans: dict[int, _Loan] = {}  # by where they start
_numbers = itertools.count(1)
_kernel: _PageTracker | None = None
_refused = False


def borrowed(start: int, size: int) -> None:
    """Note that a block was borrowed again: its content is new, and nothing is known of it."""
    _loans[start] = _Loan(start, start + size // _PAGE * _PAGE)


def given_back(start: int) -> None:
    """Note the end of a loan. Called when the last reference is collected, possibly in the middle of anything
    here."""
    _loans.pop(start, None)


def stamps(parts: list[memoryview]) -> list[int | None]:
    """Return what stands for the content of each part, or None for one that has to be read."""
    if not _loans or _refused:
        return [None] * len(parts)
    with _lock:
        loans = [_loan_of(part) for part in parts]
        for loan in {id(loan): loan for loan in loans if loan is not None}.values():
            _look(loan)
        return [_stamp(loan, part) for loan, part in zip(loans, parts, strict=True)]


def _loan_of(part: memoryview) -> _Loan | None:
    start = _address(part)
    for loan in list(_loans.values()):
        if loan.start <= start and start + part.nbytes <= loan.end:
            return None if loan.let_go or _is_pinned(part) else loan
    return None


def _look(loan: _Loan) -> None:
    """Give new stamps to whatever was written to."""
    global _kernel, _refused
    # The kernel reports each write once: if this is left by an exception, nothing is known of the block any
    # more.
    loan.let_go = True
    try:
        if _kernel is None:
            _kernel = _PageTracker()
        if not loan.protected:
            # It may be registered from an earlier loan, and may have been unmapped since.
            _kernel.register(loan.start, loan.end)
            _kernel.written(loan.start, loan.end, protect=True)
            written: list[tuple[int, int]] = []
        else:
            written = _kernel.written(loan.start, loan.end, protect=False)
            if sum(last - first for first, last in written) * 2 > loan.end - loan.start:
                return
            if written:  # and what has been since
                written = _kernel.written(loan.start, loan.end, protect=True)
    except OSError:
        _refused = True
        return
    ends = [last for _, last in written]
    for stretch in loan.stamps:
        at = bisect_right(ends, stretch[0])
        if at < len(written) and written[at][0] < stretch[1]:
            loan.stamps[stretch] = next(_numbers)
    loan.protected, loan.let_go = True, False


def _stamp(loan: _Loan | None, part: memoryview) -> int | None:
    if loan is None or loan.let_go:
        return None
    stretch = (start := _address(part), start + part.nbytes)
    if stretch not in loan.stamps:
        loan.stamps[stretch] = next(_numbers)
    return loan.stamps[stretch]


def _address(part: memoryview) -> int:
    """Return its address, or 0 for memory that this view cannot write to, which is no block's."""
    if part.readonly or not part.nbytes:
        return 0
    return ctypes.addressof(ctypes.c_char.from_buffer(part))


def _is_pinned(part: memoryview) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    return bool(torch.frombuffer(part, dtype=torch.uint8).is_pinned())


def _in_child() -> None:
    """Drop everything in a forked child: the descriptors are of the parent's memory, and earlier loans are
    read from now on."""
    global _kernel, _lock
    _lock = threading.Lock()
    _loans.clear()
    if _kernel is not None:
        _kernel.close()
        _kernel = None


os.register_at_fork(after_in_child=_in_child)
