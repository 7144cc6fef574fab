"""Accounts: what a supervisor leaves in writing for the warden, which may look only after it is gone.

One small file per supervised worker: what contains it, and once it has ended, how. Whoever settles the lease takes it away.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def _path(folder: Path, pid: int, started: int) -> Path:
    return folder / f"worker-{pid}-{started}.json"


def keep(folder: Path, pid: int, started: int, facts: dict[str, Any]) -> None:
    """Replaced whole: a reader sees the old account or the new one. Not having one must never stop a teardown."""
    path = _path(folder, pid, started)
    with contextlib.suppress(OSError):
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(facts))
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
