"""Slurm: the end of this job's time limit.

Rules of this file:
- The end is known from the start (SLURM_JOB_END_TIME, else `squeue`), so it is announced `grace` before it
  and not earlier.
- Just before that the controller is asked once more: limits are extended, and a job that was given more time
  must not leave.
- The deadline is the end itself. The seconds between Slurm's SIGTERM and its SIGKILL depend on the site and
  are not counted on.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from datetime import datetime

from sublet.core.notice import Notice
from sublet.core.values import SECOND_US
from sublet.ports.clock import Clock
from sublet.ports.notices import Surroundings

LOOK_SECONDS = 5.0
SQUEUE_SECONDS = 20.0
LATER_SECONDS = 300.0


class SlurmSource:
    name = "slurm"
    risk = ""

    def __init__(
        self,
        clock: Clock,
        *,
        job: str,
        end_time: str = "",
        grace_us: int,
        squeue: str = "squeue",
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._clock = clock
        self._job = job
        self._end_us = int(end_time) * SECOND_US if end_time.isascii() and end_time.isdigit() else 0
        self._grace_us = grace_us
        self._squeue = squeue
        self._look_seconds = look_seconds

    def here(self) -> bool:
        return bool(self._job)

    def watch(self, raise_notice: Callable[[Notice], None], stop: threading.Event) -> None:
        end_us = self._end_us
        while not stop.is_set():
            left = end_us - self._clock.wall_us() if end_us else 0
            if left > self._grace_us:
                stop.wait(min(self._look_seconds, (left - self._grace_us) / SECOND_US))
                continue
            answer = self._ask_controller()
            if answer is not None and answer - self._clock.wall_us() > self._grace_us:
                end_us = answer
            elif end_us or answer:
                self._raise(answer or end_us, raise_notice)
                stop.wait(self._look_seconds)
            else:
                stop.wait(LATER_SECONDS)  # a job without a limit, or a controller that does not answer

    def _raise(self, end_us: int, raise_notice: Callable[[Notice], None]) -> None:
        left = max(0, end_us - self._clock.wall_us())
        why = f"Slurm job {self._job} reaches its time limit"
        raise_notice(Notice(source=self.name, reason=why, deadline_us=self._clock.monotonic_us() + left))

    def _ask_controller(self) -> int | None:
        """Ask `squeue` for the end, in the host's local time; None when there is none or it cannot be
        asked."""
        command = [self._squeue, "-h", "-j", self._job, "-o", "%e"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SQUEUE_SECONDS, stdin=subprocess.DEVNULL
            )
            when = datetime.fromisoformat(done.stdout.strip().splitlines()[0])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return None
        return round(when.timestamp() * SECOND_US)


def open_source(around: Surroundings) -> SlurmSource:
    return SlurmSource(
        around.clock,
        job=around.environment.get("SLURM_JOB_ID", ""),
        end_time=around.environment.get("SLURM_JOB_END_TIME", ""),
        grace_us=around.grace_us,
    )
