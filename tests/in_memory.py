"""A folder whose syncs cost nothing, for what is done thousands of times. What a sync is worth is tried on a disk, or cut off by strace."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    fast = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=fast if os.access(fast, os.W_OK) else None, prefix="sublet-test-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
