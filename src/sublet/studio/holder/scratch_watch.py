"""Counts the scratch folders of this host's sessions, and stops who is over the limit.

Rules of this file:
- `core.studio.scratch_quota` decides. Counting takes at most a tenth of one core.
- Who is stopped is told why, in the session and in the call that runs; nothing else is touched.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from sublet.core.studio.scratch_quota import ScratchUse, over_scratch, to_stop_for_space
from sublet.processes.loop_watch import LoopBeats
from sublet.processes.sandbox.scratch_use import scratch_use
from sublet.studio.holder.held_session import HeldSession

LOOK_SECONDS = 1.0
SHARE = 10
PAUSE_MOST_SECONDS = 30.0
#: A folder needs a moment to be removed before the disk is asked again.
REMOVAL_SECONDS = 10.0
SCRATCH = "scratch"


class ScratchWatch:
    def __init__(
        self,
        sessions: Callable[[], Iterable[HeldSession]],
        home: Path,
        limit_bytes: int,
        reserve: str,
        beats: LoopBeats,
        log: Callable[[str], None],
    ) -> None:
        self._sessions = sessions
        self._home = home
        self._limit_bytes = limit_bytes
        self._reserve = reserve
        self._beats = beats
        self._log = log
        self._stopped_at = -REMOVAL_SECONDS

    def start(self) -> None:
        threading.Thread(target=self._run, name="scratch", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._beats.turn(SCRATCH)
            began = time.monotonic()
            try:
                self.look()
            except Exception as e:  # one folder that cannot be counted must not end the watch over the others
                self._log(f"scratch folders could not be counted: {type(e).__name__}: {e}")
            pause = min(PAUSE_MOST_SECONDS, SHARE * (time.monotonic() - began))
            while True:
                time.sleep(LOOK_SECONDS)
                self._beats.turn(SCRATCH)
                pause -= LOOK_SECONDS
                if pause <= 0:
                    break

    def look(self) -> None:
        uses: dict[str, ScratchUse] = {}
        held = {one.session.id: one for one in self._sessions()}
        for session_id, one in held.items():
            place = one.scratch
            if not place:
                continue
            self._beats.turn(SCRATCH)
            use = scratch_use(*place, self._limit_bytes)
            why = over_scratch(use, self._limit_bytes)
            if why:
                one.stop(why)
            else:
                uses[session_id] = use
        if time.monotonic() - self._stopped_at < REMOVAL_SECONDS:
            return
        disk = os.statvfs(self._home)
        size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        session_id, why = to_stop_for_space(uses, self._reserve, size, free)
        if session_id:
            self._stopped_at = time.monotonic()
            held[session_id].stop(why)
