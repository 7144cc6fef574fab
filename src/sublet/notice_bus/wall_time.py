"""A limit on how long this process may run (SUBLET_TIME_LIMIT): announced `grace` before it is over."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sublet.core.notice import Notice
from sublet.core.values import SECOND_US, format_duration
from sublet.ports.clock import Clock
from sublet.ports.notices import Surroundings

#: A clock may be suspended while a thread waits, so look now and then.
LOOK_SECONDS = 5.0


class WallTimeSource:
    name = "wall_time"
    risk = ""

    def __init__(self, clock: Clock, *, started_us: int, limit_us: int, grace_us: int) -> None:
        self._clock = clock
        self._limit_us = limit_us
        self._grace_us = grace_us
        self._end_us = started_us + limit_us

    def here(self) -> bool:
        return self._limit_us > 0

    def watch(self, raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        while not stop.is_set():
            pause = self._end_us - self._grace_us - self._clock.monotonic_us()
            if pause <= 0:
                why = f"the time limit of {format_duration(self._limit_us)} is reached"
                raise_notice(Notice(source=self.name, reason=why, deadline_us=self._end_us))
                return
            stop.wait(min(LOOK_SECONDS, pause / SECOND_US))


def open_source(around: Surroundings) -> WallTimeSource:
    return WallTimeSource(
        around.clock,
        started_us=around.started_us,
        limit_us=around.time_limit_us,
        grace_us=around.grace_us,
    )
