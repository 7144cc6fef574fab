"""The notice file: how `sublet run` tells the command it started. Both ends of the format are here.

    {"source": "lease", "reason": "…", "deadline": "2026-01-02T03:04:05.678901+00:00",
     "deadline_monotonic_us": 123, "seconds_left": 14.9}

Rules of this file:
- Written beside and renamed into place: a reader sees the old file or the new one, never half of one.
- `deadline_monotonic_us` is the host's monotonic clock, the same in every process of it. `seconds_left` was
  true when it was written, so a deadline farther away than that comes from another boot, and the calendar is
  used instead.
- A notice that was over before this process began was meant for an earlier one.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from sublet.core.notice import Notice
from sublet.core.values import SECOND_US
from sublet.machine.run_folder import notice_text
from sublet.notice_bus.metadata import time_in_words
from sublet.ports.clock import Clock
from sublet.ports.notices import Surroundings

LOOK_SECONDS = 0.2
MOST_BYTES = 1 << 16


def write_notice(path: str | os.PathLike[str], notice: Notice, now_us: int) -> None:
    """`now_us` is the monotonic clock the notice's deadline is on."""
    data = notice_text(notice, now_us, time.time_ns() // 1000)
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        beside.write_bytes(data)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def read_notice(path: str | os.PathLike[str], clock: Clock) -> Notice | None:
    """Read the file; None when there is none, or it is not a notice."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            return None
        found = json.loads(data)
        deadline_us, seconds_left = int(found["deadline_monotonic_us"]), float(found["seconds_left"])
        now_us = clock.monotonic_us()
        if deadline_us - now_us > (seconds_left + 1) * SECOND_US:
            ends = time_in_words(str(found["deadline"]))
            left = 0 if ends is None else round(ends.timestamp() * SECOND_US) - clock.wall_us()
            deadline_us = now_us + max(0, left)
        return Notice(source=str(found["source"]), reason=str(found["reason"]), deadline_us=deadline_us)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


class NoticeFileSource:
    name = "notice_file"
    risk = ""

    def __init__(
        self, clock: Clock, path: str, *, started_us: int, look_seconds: float = LOOK_SECONDS
    ) -> None:
        self._clock = clock
        self._path = path
        self._started_us = started_us
        self._look_seconds = look_seconds

    def here(self) -> bool:
        return bool(self._path)

    def watch(self, raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        seen: tuple[int, int, int] | None = None
        while not stop.is_set():
            try:
                stat = os.stat(self._path)
                now = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            except (OSError, ValueError):
                now = None
            if now is not None and now != seen:
                notice = read_notice(self._path, self._clock)
                if notice is not None and notice.deadline_us >= self._started_us:
                    raise_notice(notice)
            seen = now
            stop.wait(self._look_seconds)


def open_source(around: Surroundings) -> NoticeFileSource:
    return NoticeFileSource(
        around.clock, around.environment.get("SUBLET_NOTICE_FILE", ""), started_us=around.started_us
    )
