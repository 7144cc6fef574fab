"""What a script prints, printed once: steps that are repeated after a loss do not print their lines again.

Rules of this file:
- Lines of the script are counted, from its first start on. How many were ever printed is on this host's disk
  with each line; how many belong to a saved step is saved with it.
- A line that was printed before is dropped. What is not a whole line yet is not counted, and may come twice.
- A script of which nothing is saved prints all of it again: its lines are dropped as long as they are the
  same, by their digests, which are kept with the count.
- Standard error is left alone: progress bars and our own words go there.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import mmap
import os
import sys
from pathlib import Path
from typing import Any

_COUNT_BYTES = _DIGEST_BYTES = 8


class _Lines(io.RawIOBase):
    """Standard output, with the lines that were printed before left out."""

    def __init__(self, fd: int, page: mmap.mmap, digests: int | None) -> None:
        """`digests`: the file of those of all lines, if the script begins anew."""
        self._fd = fd
        self._page = page
        self._digests = digests
        self._cut = b""  # of a line that may be the same as one before
        self.is_same = digests is not None  # as what was printed before, as far as is known
        self.count = 0  # lines of the script, those left out too

    def forget(self, but: int = 0) -> None:
        self._page[:_COUNT_BYTES] = but.to_bytes(_COUNT_BYTES, "little")

    def rest(self) -> bytes:
        self.is_same, rest, self._cut = False, self._cut, b""
        return rest

    @property
    def printed(self) -> int:
        return int.from_bytes(self._page[:_COUNT_BYTES], "little")

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any, /) -> int:
        text = bytes(data)
        self._write(self._unlike_before(text) if self.is_same else text)
        return len(text)

    def _unlike_before(self, text: bytes) -> bytes:
        assert self._digests is not None
        self._cut += text
        while self.count < self.printed and b"\n" in self._cut:
            line, _, rest = self._cut.partition(b"\n")
            if os.pread(self._digests, _DIGEST_BYTES, _DIGEST_BYTES * self.count) != _digest(line):
                self.forget(but=self.count)
                break
            self.count, self._cut = self.count + 1, rest
        return self.rest() if self.count >= self.printed else b""

    def _write(self, text: bytes) -> None:
        left = self.printed - self.count
        lines = text.count(b"\n")
        if left > lines:
            self.count += lines
            return
        if self._digests is not None and lines:
            made = b"".join(map(_digest, text.split(b"\n")[:-1]))
            os.pwrite(self._digests, made, _DIGEST_BYTES * self.count)
        shown = text
        for _ in range(max(0, left)):
            shown = shown[shown.index(b"\n") + 1 :]
        self.count += lines
        while shown:
            shown = shown[os.write(self._fd, shown) :]
        if self.count > self.printed:
            self.forget(but=self.count)


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=_DIGEST_BYTES).digest()


def is_printed_once(stream: Any) -> bool:
    """Whether this is the standard output of a script, or its buffer."""
    raw = getattr(getattr(stream, "buffer", stream), "raw", None)
    return isinstance(raw, _Lines)


class PrintedOnce:
    """`sys.stdout` while a script runs."""

    def __init__(self, file: Path, *, anew: str = "") -> None:
        """`anew`: nothing is saved, so the script prints all of it again; which script it is, by its digest.
        What another one printed does not count."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a+b") as opened:
            if opened.seek(0, os.SEEK_END) < _COUNT_BYTES:
                opened.truncate(_COUNT_BYTES)
            page = mmap.mmap(opened.fileno(), _COUNT_BYTES)
        plain = self._plain = sys.stdout  # whoever lets it go closes it
        digests, is_known = _digests_of(file, anew) if anew else (None, True)
        self._lines = _Lines(plain.fileno(), page, digests)
        self._stream = io.TextIOWrapper(
            io.BufferedWriter(self._lines),
            encoding=plain.encoding,
            errors=plain.errors,
            # PYTHONUNBUFFERED asks for text at once: here a whole line at once.
            line_buffering=bool(plain.line_buffering or getattr(plain, "write_through", False)),
            write_through=getattr(plain, "write_through", False),
        )
        if not is_known:
            self._lines.forget()
        plain.flush()
        sys.stdout = self._stream

    def count(self) -> int:
        """The lines of the script so far."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()
        return self._lines.count

    def go_on_at(self, count: int) -> None:
        """The script was put back to where it had printed so many lines."""
        self.count()
        self._lines.count = count

    def is_over(self, *, forget: bool) -> None:
        """Nothing more is printed. `forget`: whoever starts the script again is to see all of it."""
        self.count()
        os.write(self._lines.fileno(), self._lines.rest())
        if forget:
            self._lines.forget()


def _digests_of(file: Path, script: str) -> tuple[int, bool]:
    """The open file of the lines' digests, and whether they are those of this script."""
    path = file.with_name(f"{file.name}-lines-{script[:32]}")
    is_known = path.exists()
    for other in [] if is_known else file.parent.glob(f"{glob.escape(file.name)}-lines-*"):
        other.unlink(missing_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), is_known
