"""Reports: what a supervisor leaves in writing for the warden, which may look only after it is gone.

There is one small file per supervised process: what contains it, and once it has ended, how. Whoever settles
the lease removes it.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from sublet.machine.private_files import open_private


def _path(folder: Path, pid: int, started: int) -> Path:
    return folder / f"worker-{pid}-{started}.json"


def keep(folder: Path, pid: int, started: int, facts: dict[str, Any]) -> None:
    """Replace the report as a whole, so that a reader sees the old or the new one. A failure must never stop
    a teardown."""
    path = _path(folder, pid, started)
    with contextlib.suppress(OSError):
        draft = path.with_suffix(".new")
        with os.fdopen(open_private(draft, os.O_WRONLY | os.O_TRUNC), "w") as file:
            file.write(json.dumps(facts))
        draft.rename(path)


def read(folder: Path, pid: int, started: int) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        facts = json.loads(_path(folder, pid, started).read_text())
        if isinstance(facts, dict):
            return facts
    return {}


def remove(folder: Path, pid: int, started: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(_path(folder, pid, started))
