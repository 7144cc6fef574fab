"""The folder of a run: what its command is told, and what the run leaves behind.

Rules of this file:
- `SUBLET_HOME/run/jobs/<run id>/`, for its user only. Every file is replaced whole, so that a reader sees the
  old one or the new one.
- The page comes before the key: whoever reads the old key beside the new page finds a deadline of 0, and
  stops.
- Readers never trust a pid alone: with it stands the start tick of its process, and the host it is a pid of.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublet.core.errors import NotFound
from sublet.core.notice import Notice
from sublet.core.values import SECOND_US
from sublet.machine import lease_environment
from sublet.machine.private_files import make_private_folder

if TYPE_CHECKING:
    from sublet.ports.ledger import LeaseKey

NOTICE_FILE = "notice.json"
RUN_FILE = "run.json"
EXIT_FILE = "exit.json"
LOG_FILE = "log"
CANCEL_FILE = "cancel.json"
#: Ended runs beyond these are removed when a new one starts, oldest first.
KEPT_RUNS = 200


def new_run_id() -> str:
    return "R" + secrets.token_hex(6)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file, readable by its user only from its first moment."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    draft.rename(path)


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_bytes())
        if isinstance(found, dict):
            return found
    return {}


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def log(self) -> Path:
        return self.path / LOG_FILE

    @property
    def notice_file(self) -> Path:
        return self.path / NOTICE_FILE

    # written by the run

    def make(self) -> None:
        make_private_folder(self.path.parent)
        self.path.mkdir(mode=0o700, exist_ok=True)

    def record(self, **facts: Any) -> None:
        """Write what `ps`, `logs`, `attach` and `cancel` read."""
        known = self.facts() | facts
        replace_file(self.path / RUN_FILE, json.dumps(known).encode())

    def new_page(self) -> mmap.mmap:
        """Make the page of the next lease: its deadline is 0 until the lease is granted."""
        draft = self.path / ".page"
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, lease_environment.PAGE_BYTES)
            page = mmap.mmap(fd, lease_environment.PAGE_BYTES)
        finally:
            os.close(fd)
        draft.rename(self.path / lease_environment.PAGE_FILE)
        return page

    def write_key(self, key: LeaseKey, holder_pid: int, holder_started: int) -> None:
        """Write the lease's key and its holder, which nobody can find out inside a PID namespace."""
        content = {
            "lease": key.lease_id,
            "epoch": key.epoch,
            "secret": key.secret,
            "holder": [holder_pid, holder_started],
        }
        replace_file(self.path / lease_environment.KEY_FILE, json.dumps(content).encode())

    def withdraw_key(self) -> None:
        """Remove the key when the lease is over and its secret of no use."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / lease_environment.KEY_FILE).unlink()

    def write_notice(self, notice: Notice, now_us: int, wall_us: int) -> None:
        replace_file(self.notice_file, notice_text(notice, now_us, wall_us))

    def withdraw_notice(self) -> None:
        """Remove the notice when a new attempt begins, to which nothing has been announced."""
        with contextlib.suppress(FileNotFoundError):
            self.notice_file.unlink()

    def leave(self, **facts: Any) -> None:
        replace_file(self.path / EXIT_FILE, json.dumps(facts).encode())

    def ask_to_cancel(self, *, now: bool, grace_us: int | None) -> None:
        replace_file(self.path / CANCEL_FILE, json.dumps({"now": now, "grace_us": grace_us}).encode())

    # read by anybody

    def facts(self) -> dict[str, Any]:
        return _read(self.path / RUN_FILE)

    def exit(self) -> dict[str, Any]:
        return _read(self.path / EXIT_FILE)

    def cancelled(self) -> dict[str, Any]:
        return _read(self.path / CANCEL_FILE)


def notice_text(notice: Notice, now_us: int, wall_us: int) -> bytes:
    """The notice, as `notice_bus/notice_file.py` reads it."""
    left_us = max(0, notice.deadline_us - now_us)
    ends = datetime.fromtimestamp((wall_us + left_us) / SECOND_US, UTC)
    said = {
        "source": notice.source,
        "reason": notice.reason,
        "deadline": ends.isoformat(),
        "deadline_monotonic_us": notice.deadline_us,
        "seconds_left": left_us / SECOND_US,
    }
    return (json.dumps(said) + "\n").encode()


# --- all of them ---


def runs_folder(home: Path) -> Path:
    return home / "run" / "jobs"


def all_runs(home: Path) -> list[RunFolder]:
    """Every run, newest first."""
    folder = runs_folder(home)
    found: list[tuple[float, RunFolder]] = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            run = RunFolder(path)
            facts = run.facts()
            if facts:
                found.append((float(facts.get("started_at", 0)), run))
    return [run for _, run in sorted(found, key=lambda pair: (-pair[0], pair[1].id))]


def find_run(home: Path, wanted: str) -> RunFolder:
    """Find a run by id, or by name: the one that has not ended, else the newest."""
    named = [run for run in all_runs(home) if wanted == run.id or run.facts().get("name") == wanted]
    if not named:
        raise NotFound(
            f"there is no run {wanted[:60]!r} in {home}", remedy="'sublet ps --runs' lists this user's runs"
        )
    return next((run for run in named if not run.exit()), named[0])


def prune(home: Path, keep: int = KEPT_RUNS) -> None:
    ended = [run for run in all_runs(home) if run.exit()]
    for run in ended[keep:]:
        shutil.rmtree(run.path, ignore_errors=True)
