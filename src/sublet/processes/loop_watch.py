"""The loops of a background process: each says when it turns, and one thread ends the process when one does
not.

Rules of this file:
- What is late, and what ends the process, is decided by `core.leasing.heartbeats`.
- The watching thread calls nothing that can block for long: no ledger, no device. Each turn of it is written
  into the lock file, so that its own death is seen from outside like any other loop's.
- Ending is `os._exit`: a thread that hangs cannot be joined. Whoever needs the process starts the next one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sublet.core.leasing.heartbeats import (
    END_AFTER_US,
    LOOK_EVERY_US,
    LoopBeat,
    reason_to_end,
    seen_from_outside,
    too_late,
)
from sublet.ports.clock import Clock
from sublet.processes import pid_lock

#: The exit status of a process that ended itself because it was broken (EX_SOFTWARE).
EXIT_BROKEN = 70
WATCHING = "watching"


@dataclass(slots=True)
class _Turns:
    at: int  # monotonic
    thread: threading.Thread
    waits_for_ledger: bool = False
    seen_at: int = 0  # the turn that the watch last saw
    silent_us: int = 0


@dataclass(slots=True)
class LoopBeats:
    """The loops of this process. A loop is known from its first turn on."""

    clock: Clock
    _loops: dict[str, _Turns] = field(default_factory=dict)

    def turn(self, name: str) -> None:
        """Called by the loop itself, at each turn."""
        now, thread = self.clock.monotonic_us(), threading.current_thread()
        found = self._loops.get(name)
        if found is None or found.thread is not thread:
            self._loops[name] = _Turns(now, thread)
        else:
            found.at = now

    @contextlib.contextmanager
    def asking_ledger(self, name: str) -> Iterator[None]:
        """Around what the loop asks of the ledger, which may be long in answering."""
        loop = self._loops.get(name)
        before = loop is not None and loop.waits_for_ledger
        if loop is not None:
            loop.waits_for_ledger = True
        try:
            yield
        finally:
            if loop is not None:
                loop.waits_for_ledger = before

    def over(self, name: str) -> None:
        """The loop has ended because it should."""
        self._loops.pop(name, None)

    def turned_at(self) -> dict[str, int]:
        return {name: loop.at for name, loop in list(self._loops.items())}

    def look(self, awake_us: int) -> list[LoopBeat]:
        """Every loop, after the watch was awake for so long since its last look."""
        found = []
        for name, loop in list(self._loops.items()):
            loop.silent_us = loop.silent_us + awake_us if loop.seen_at == loop.at else 0
            loop.seen_at = loop.at
            found.append(
                LoopBeat(
                    name=name,
                    silent_us=loop.silent_us,
                    alive=loop.thread.is_alive(),
                    waits_for_ledger=loop.waits_for_ledger,
                )
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHealth:
    """What the lock file of a background process says of it."""

    pid: int
    running: bool
    late: bool  # one of its loops does not turn
    problem: str  # in words; '' while it is ready and all its loops turn
    silent_us: dict[str, int]  # each loop, since its last turn


def process_health(path: Path, clock: Clock) -> ProcessHealth:
    """Read the lock file and nothing else: this answers whatever the process itself waits for."""
    found, now = pid_lock.read_lock(path), clock.monotonic_us()
    late = [too_late(beat) for beat in seen_from_outside(found.turned_at, now)]
    problem = "; ".join(late)
    if not found.running:
        problem = "it does not run"
    elif not found.ready and not late:
        problem = "it is starting"
    silent_us = {name: max(0, now - at) for name, at in sorted(found.turned_at.items())}
    return ProcessHealth(
        pid=found.pid, running=found.running, late=bool(late), problem=problem, silent_us=silent_us
    )


class LoopWatch:
    def __init__(
        self,
        beats: LoopBeats,
        lock: int,
        path: Path,
        home: Path,
        log: Callable[[str], None],
        *,
        has_deadlines: Callable[[], bool],
        end_after_us: int = END_AFTER_US,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        self._beats = beats
        self._lock = lock
        self._places = {lock: path, os.open(home, os.O_PATH | os.O_CLOEXEC): home}
        self._log = log
        self._has_deadlines = has_deadlines
        self._end_after_us = end_after_us
        self._end = end
        self._over = threading.Event()
        self._word = pid_lock.STARTING
        self._looked_at = beats.clock.monotonic_us()
        self._thread = threading.Thread(target=self._run, name="sublet-loop-watch", daemon=True)

    def __enter__(self) -> LoopWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=2)
        os.close(next(fd for fd in self._places if fd != self._lock))

    def say_ready(self) -> None:
        self._word = pid_lock.READY
        self._write(self._beats.clock.monotonic_us())

    def _write(self, now: int) -> None:
        pid_lock.write_state(self._lock, self._word, self._beats.turned_at() | {WATCHING: now})

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_US / 1e6):
            try:
                reason = self.look()
            except Exception as e:  # a watch that failed watches nothing
                reason = f"its loops cannot be watched: {type(e).__name__}: {e}"
            if reason and not self._over.is_set():
                self._log(f"{reason}; this process ends, and the next one takes over from the ledger")
                self._end(EXIT_BROKEN)
                return

    def look(self) -> str:
        """One look; the reason to end, or ''."""
        now = self._beats.clock.monotonic_us()
        # This thread may have been stopped with all the others: then it was awake for one pause at the most.
        awake_us = min(now - self._looked_at, 2 * LOOK_EVERY_US)
        self._looked_at = now
        loops = self._beats.look(awake_us)
        self._write(now)
        return reason_to_end(
            loops,
            findable=all(pid_lock.is_found_at(fd, path) for fd, path in self._places.items()),
            has_deadlines=self._has_deadlines(),
            end_after_us=self._end_after_us,
        )
