"""What a process knows of the lease it works under, as a leased worker or as a command that `sublet run`
started.

Rules of this file:
- A worker's is set once by `processes/worker/worker.py`, before any user code runs. A command's is found in
  the folder of its run, which its environment names. Everywhere else it is only read.
- The deadline lies in a page shared with the process that renews, so no message is needed to see that it
  moved. The same page has the number of the step being worked on and of the last one committed, so that
  whoever survives this process knows what was lost.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sublet.core.errors import LeaseLost

if TYPE_CHECKING:
    from sublet.ports.ledger import LeaseKey

PAGE_BYTES = 4096
_DEADLINE = struct.Struct("<q")
_STEPS = struct.Struct("<qq")
_STEPS_AT = 8
_WARNED_AT = 24
_INTERRUPTED = struct.Struct("<q")
_INTERRUPTED_AT = 32
_UNFINISHED_AT = 40

#: The variable that names a page file to which a run reports its steps, for anybody who looks.
STEPS_VARIABLE = "SUBLET_STEPS_FILE"

#: Files of a run, beside the one SUBLET_NOTICE_FILE names.
KEY_FILE = "lease.key"
PAGE_FILE = "page"


def write_deadline(page: mmap.mmap, deadline_us: int) -> None:
    _DEADLINE.pack_into(page, 0, deadline_us)


def read_steps(page: mmap.mmap) -> tuple[int, int]:
    """Read the step being worked on, and the last one committed, as its process wrote them last."""
    working_on, committed = _STEPS.unpack_from(page, _STEPS_AT)
    return working_on, committed


def read_unfinished(page: mmap.mmap) -> bool:
    """Read whether its process left its steps because of a warning, with more of them to make."""
    return page[_UNFINISHED_AT] != 0


def write_steps(page: mmap.mmap, working_on: int, committed: int, unfinished: bool = False) -> None:
    _STEPS.pack_into(page, _STEPS_AT, working_on, committed)
    page[_UNFINISHED_AT] = unfinished


def write_warned(page: mmap.mmap) -> None:
    """Say that the lease will go soon: whoever can save does so at the next opportunity."""
    page[_WARNED_AT] = 1


def write_interrupted(page: mmap.mmap, call: int) -> None:
    """Stop the call of this number. Written before the signal is sent, because a worker that has not read the
    call yet ignores signals."""
    _INTERRUPTED.pack_into(page, _INTERRUPTED_AT, call)


def read_interrupted(page: mmap.mmap) -> int:
    return int(_INTERRUPTED.unpack_from(page, _INTERRUPTED_AT)[0])


def open_page(path: Path, *, create: bool = False) -> mmap.mmap:
    with open(path, "w+b" if create else "r+b") as file:
        if create:
            file.truncate(PAGE_BYTES)
        return mmap.mmap(file.fileno(), PAGE_BYTES)


def onlooker() -> mmap.mmap | None:
    """The page in which somebody outside follows this process's steps, or None. Failing to open it stops no
    work."""
    path = os.environ.get(STEPS_VARIABLE)
    if not path:
        return None
    try:
        return open_page(Path(path))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class ProcessLease:
    """The lease of this process: what a GpuSession needs of one and, in a command, what a commit needs."""

    id: str
    epoch: int
    page: mmap.mmap
    secret: str = ""

    @property
    def key(self) -> LeaseKey:
        from sublet.ports.ledger import LeaseKey  # a supervisor needs none, and starts in half the time

        if not self.secret:
            raise LeaseLost(
                f"lease {self.id} is held for this worker by the process that called it; commit there"
            )
        return LeaseKey(self.id, self.epoch, self.secret)

    @property
    def seconds_left(self) -> float:
        deadline_us: int = _DEADLINE.unpack_from(self.page, 0)[0]
        return max(0.0, (deadline_us - time.monotonic_ns() // 1000) / 1e6)

    @property
    def warned(self) -> bool:
        """Whether the lease was announced to go soon."""
        return self.page[_WARNED_AT] != 0

    def check(self) -> None:
        if self.seconds_left <= 0:
            raise LeaseLost(f"lease {self.id} has ended: it was not renewed in time")

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Do nothing: the call this happens in is work already."""
        yield

    def write_steps(self, working_on: int, committed: int) -> None:
        write_steps(self.page, working_on, committed)


_current: ProcessLease | None = None
_launches = 0


def launched() -> None:
    """Count a kernel launched in this process."""
    global _launches
    _launches += 1


def launches() -> int:
    """How many kernels this process has launched through GpuSessions."""
    return _launches


def set_process_lease(process_lease: ProcessLease) -> None:
    global _current
    _current = process_lease


def process_lease() -> ProcessLease | None:
    """The lease this process is a worker of, or None."""
    return _current


def run_holder() -> tuple[int, int] | None:
    """Pid and start tick, outside its namespace, of what holds the lease of the run this process belongs
    to."""
    notice_file = os.environ.get("SUBLET_NOTICE_FILE")
    if not notice_file:
        return None
    try:
        pid, started = json.loads((Path(notice_file).parent / KEY_FILE).read_text())["holder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return int(pid), int(started)


def of_gang() -> ProcessLease | None:
    """The gang this leased worker is a member of, with the right to commit under it; or None."""
    lease_id, _, rest = os.environ.get("SUBLET_GANG", "").partition(":")
    epoch, _, secret = rest.partition(":")
    if _current is None or (_current.id, str(_current.epoch)) != (lease_id, epoch):
        return None
    return ProcessLease(_current.id, _current.epoch, _current.page, secret)


def of_run() -> ProcessLease | None:
    """The lease of the `sublet run` that started this process, or None."""
    notice_file = os.environ.get("SUBLET_NOTICE_FILE")
    if not notice_file or "SUBLET_LEASE_ID" not in os.environ:
        return None
    folder = Path(notice_file).parent
    try:
        found = json.loads((folder / KEY_FILE).read_text())
        page = open_page(folder / PAGE_FILE)
    except (OSError, ValueError):
        return None
    if found.get("lease") != os.environ["SUBLET_LEASE_ID"]:
        return None
    return ProcessLease(found["lease"], int(found["epoch"]), page, found["secret"])
