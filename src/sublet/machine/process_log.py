"""Lines of a process that runs in the background, on its standard error.

Rules of this file:
- Writing a line never raises. The log often lies on the same disk as everything else, and a full disk must
  not end the thread that wanted to report it (I4).
- Lines that could not be written are counted, and the count is the first line that can be written again.
- A line is one line: control characters are escaped, and its length is limited.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

LINE_MOST = 2000


def write_stderr(data: bytes) -> None:
    # Not through sys.stderr: its buffer keeps what a full disk refused, and fails at every later line.
    while data:
        data = data[os.write(2, data) :]


class ProcessLog:
    """Called with a line; see the rules of this file."""

    def __init__(self, name: str, write: Callable[[bytes], None] = write_stderr) -> None:
        self._name = name
        self._write = write
        self._lost = 0
        self._lock = threading.Lock()

    def __call__(self, line: str) -> None:
        try:
            with self._lock:
                if self._lost:
                    self._write(self._stamped(f"{self._lost} lines could not be written here"))
                    self._lost = 0
                self._write(self._stamped(line))
        except (OSError, ValueError):
            self._lost += 1

    def _stamped(self, line: str) -> bytes:
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)[:LINE_MOST]
        head = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {self._name}[{os.getpid()}] "
        return (head + shown + "\n").encode(errors="backslashreplace")
