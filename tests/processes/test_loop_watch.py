"""I4: a process whose loop died or hangs ends itself, and says so where others look."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sublet.core.leasing.heartbeats import END_AFTER_US, LATE_AFTER_US, LOOK_EVERY_US
from sublet.processes import pid_lock
from sublet.processes.loop_watch import EXIT_BROKEN, LoopBeats, LoopWatch, process_health
from sublet.testing.clock import VirtualClock
from tests.waiting import wait_until


class Watched:
    def __init__(self, home: Path) -> None:
        self.clock = VirtualClock()
        self.beats = LoopBeats(self.clock)
        self.path = home / "x.lock"
        self.said: list[str] = []
        self.ended: list[int] = []
        self.has_deadlines = False
        self.holding = pid_lock.held(self.path)
        lock = self.holding.__enter__()
        self.watch = LoopWatch(
            self.beats,
            lock,
            self.path,
            home,
            self.said.append,
            has_deadlines=lambda: self.has_deadlines,
            end=self.ended.append,
        )

    def looks(self, us: int) -> str:
        """What the last look says, after as many as there are in this time."""
        reason = ""
        for _ in range(us // LOOK_EVERY_US):
            self.clock.advance(LOOK_EVERY_US)
            reason = reason or self.watch.look()
        return reason


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.holding.__exit__(None, None, None)


def _in_thread(work: object) -> None:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_a_loop_that_hangs(watched: Watched) -> None:
    watched.beats.turn("ledger")
    watched.watch.say_ready()
    assert watched.looks(LATE_AFTER_US + 3 * LOOK_EVERY_US) == ""
    seen = process_health(watched.path, watched.clock)
    assert seen.running
    assert seen.late
    assert "'ledger' has not turned for 18s" in seen.problem
    watched.beats.turn("ledger")
    watched.watch.look()
    assert process_health(watched.path, watched.clock).problem == ""
    assert "'ledger' has not turned" in watched.looks(END_AFTER_US + 5 * LOOK_EVERY_US)


def test_a_loop_that_died(watched: Watched) -> None:
    _in_thread(lambda: watched.beats.turn("bell"))
    assert watched.looks(LOOK_EVERY_US) == "its loop 'bell' has died"


def test_a_loop_that_ended_as_it_should(watched: Watched) -> None:
    _in_thread(lambda: (watched.beats.turn("bell"), watched.beats.over("bell")))
    assert watched.looks(LOOK_EVERY_US) == ""


def test_a_process_that_was_stopped_has_no_broken_loops(watched: Watched) -> None:
    watched.beats.turn("ledger")
    watched.watch.look()
    watched.clock.advance(100 * END_AFTER_US)  # nothing of it ran, the watch neither
    assert watched.watch.look() == ""
    assert watched.looks(LATE_AFTER_US) == ""


def test_a_ledger_that_is_silent(watched: Watched) -> None:
    watched.has_deadlines = True
    watched.beats.turn("ledger")
    with watched.beats.asking_ledger("ledger"):
        assert watched.looks(3 * END_AFTER_US) == ""
        watched.has_deadlines = False
        assert "because the ledger does not answer" in watched.looks(LOOK_EVERY_US)


@pytest.mark.parametrize("what", ["lock", "home"])
def test_a_home_that_is_gone(watched: Watched, what: str, tmp_path: Path) -> None:
    assert watched.looks(LOOK_EVERY_US) == ""
    if what == "lock":
        watched.path.rename(tmp_path / "elsewhere")
    else:
        tmp_path.rename(f"{tmp_path}-moved")
        tmp_path.mkdir()
    assert "deleted or unmounted" in watched.looks(LOOK_EVERY_US)


def test_it_ends_the_process_and_says_why(watched: Watched) -> None:
    watched.beats.turn("ledger")
    watched.path.unlink()
    with watched.watch:
        wait_until(lambda: watched.ended)
    assert watched.ended == [EXIT_BROKEN]
    assert "the next one takes over" in watched.said[0]


def test_the_lock_file_needs_no_room_once_it_is_there(watched: Watched) -> None:
    before = os.stat(watched.path).st_size
    for number in range(20):
        watched.beats.turn(f"loop-{number}")
    watched.watch.say_ready()
    assert os.stat(watched.path).st_size == before
    assert pid_lock.state_of(watched.path) == (True, True, os.getpid())


def test_a_state_that_cannot_be_written_is_no_error() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        pid_lock.write_state(full, pid_lock.READY)
    finally:
        os.close(full)
