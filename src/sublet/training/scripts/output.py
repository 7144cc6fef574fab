"""What a script prints, printed once: steps that are repeated after a loss do not print their lines again.

Rules of this file:
- Lines of the script are counted, from its first start on. How many were ever printed is on this host's disk
  with each line; how many belong to a saved step is saved with it.
- A line that was printed before is dropped. What is not a whole line yet is not counted, and may come twice.
- Standard error is left alone: progress bars and our own words go there.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import sys
from pathlib import Path
from typing import Any

_COUNT_BYTES = 8


class _Lines(io.RawIOBase):
    """Standard output, with the lines that were printed before left out."""

    def __init__(self, fd: int, page: mmap.mmap) -> None:
        self._fd = fd
        self._page = page
        self.count = 0  # lines of the script, those left out too

    def forget(self) -> None:
        self._page[:_COUNT_BYTES] = bytes(_COUNT_BYTES)

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
        left = self.printed - self.count
        lines = text.count(b"\n")
        if left > lines:
            self.count += lines
            return len(text)
        shown = text
        for _ in range(max(0, left)):
            shown = shown[shown.index(b"\n") + 1 :]
        self.count += lines
        while shown:
            shown = shown[os.write(self._fd, shown) :]
        if self.count > self.printed:
            self._page[:_COUNT_BYTES] = self.count.to_bytes(_COUNT_BYTES, "little")
        return len(text)


def is_printed_once(stream: Any) -> bool:
    """Whether this is the standard output of a script, or its buffer."""
    raw = getattr(getattr(stream, "buffer", stream), "raw", None)
    return isinstance(raw, _Lines)


class PrintedOnce:
    """`sys.stdout` while a script runs."""

    def __init__(self, file: Path, *, anew: bool) -> None:
        """`anew`: nothing is saved, so the script prints all of it again."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "a+b") as opened:
            if opened.seek(0, os.SEEK_END) < _COUNT_BYTES:
                opened.truncate(_COUNT_BYTES)
            page = mmap.mmap(opened.fileno(), _COUNT_BYTES)
        plain = self._plain = sys.stdout  # whoever lets it go closes it
        self._lines = _Lines(plain.fileno(), page)
        self._stream = io.TextIOWrapper(
            io.BufferedWriter(self._lines),
            encoding=plain.encoding,
            errors=plain.errors,
            line_buffering=bool(plain.line_buffering),
            write_through=getattr(plain, "write_through", False),
        )
        if anew:
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
