"""What a run on this machine waits for, beside its lease's row: a note for `sublet ps`.

Rules of this file:
- `SUBLET_HOME/run/waiting/<lease id>` is one line of text, replaced whole, and removed when it is no longer
  true. It is not in the ledger: it is true of a process on this machine, and of no use once its lease has
  ended.
- A failure here costs the note and never stops the work.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from sublet.machine.private_files import make_private_folder, open_private

_KEPT_SECONDS = 86_400


def _folder(home: Path) -> Path:
    return home / "run" / "waiting"


def say(home: Path, lease_id: str, reason: str) -> None:
    """Note why saves wait; '' when they no longer do."""
    folder = _folder(home)
    with contextlib.suppress(OSError):
        if not reason:
            (folder / lease_id).unlink(missing_ok=True)
            return
        make_private_folder(folder)
        for old in folder.iterdir():  # of processes that died with a note
            if time.time() - old.stat().st_mtime > _KEPT_SECONDS:
                old.unlink(missing_ok=True)
        draft = folder / f".{lease_id}.{os.getpid()}"
        with os.fdopen(open_private(draft, os.O_WRONLY | os.O_TRUNC), "w") as file:
            file.write(reason)
        draft.rename(folder / lease_id)


def heard(home: Path, lease_id: str) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return (_folder(home) / lease_id).read_text()[:500]
    return ""
