"""A look that is shared: taken once for all who wait, and never older than the question."""

from __future__ import annotations

import os
import threading
import time

import pytest

from sublet.machine import single_flight
from sublet.machine.single_flight import SharedLook
from tests.homes import wait_until


class Looks:
    """Each waits to be let on, and finds its own number."""

    def __init__(self) -> None:
        self.begun = 0
        self.let_on = threading.Semaphore(0)
        self.fails: set[int] = set()

    def __call__(self) -> int:
        self.begun += 1
        mine = self.begun
        self.let_on.acquire()
        if mine in self.fails:
            raise OSError(mine)
        return mine


class Asking:
    def __init__(self, shared: SharedLook[int]) -> None:
        self.found: int | None = None
        self.error: Exception | None = None
        self._shared = shared
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self.found = self._shared()
        except Exception as e:
            self.error = e

    def over(self) -> bool:
        return not self._thread.is_alive()


def waiting(shared: SharedLook[int], count: int) -> bool:
    return len(shared._changed._waiters) == count  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_flight, "PATIENCE_S", 60.0)


def test_one_that_began_before_the_question_does_not_answer_it() -> None:
    """K1: what was held when a look began may have been killed since, and the other way round."""
    looks = Looks()
    shared = SharedLook(looks)
    first = Asking(shared)
    wait_until(lambda: looks.begun == 1)
    late = [Asking(shared) for _ in range(20)]
    wait_until(lambda: waiting(shared, 20))
    looks.let_on.release()
    wait_until(first.over)
    wait_until(lambda: looks.begun == 2)
    assert first.found == 1
    assert not any(asking.over() for asking in late)
    looks.let_on.release()
    wait_until(lambda: all(asking.over() for asking in late))
    assert {asking.found for asking in late} == {2}
    assert looks.begun == 2


def test_nothing_is_kept_for_who_comes_later() -> None:
    looks = Looks()
    shared = SharedLook(looks)
    for number in (1, 2, 3):
        looks.let_on.release()
        assert shared() == number


def test_one_that_fails_fails_for_itself_and_the_others_look_again() -> None:
    looks = Looks()
    looks.fails = {1, 2}
    shared = SharedLook(looks)
    first = Asking(shared)
    wait_until(lambda: looks.begun == 1)
    late = [Asking(shared) for _ in range(5)]
    wait_until(lambda: waiting(shared, 5))
    for _ in range(3):
        looks.let_on.release()
    wait_until(lambda: all(asking.over() for asking in (first, *late)))
    assert isinstance(first.error, OSError)
    assert sum(asking.error is not None for asking in late) == 1
    assert [asking.found for asking in late if asking.error is None] == [3] * 4


def test_one_that_hangs_is_given_up_and_the_next_is_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a crowded machine a look takes long. If everybody then looked for itself, none would end."""
    monkeypatch.setattr(single_flight, "PATIENCE_S", 60.0)
    hanging = threading.Event()
    looks = Looks()

    def look() -> int:
        if looks.begun == 0:
            looks.begun += 1
            hanging.wait()
            return 1
        return looks()

    shared = SharedLook(look)
    first = Asking(shared)
    wait_until(lambda: looks.begun == 1)
    late = [Asking(shared) for _ in range(10)]
    wait_until(lambda: waiting(shared, 10))
    with shared._changed:  # who waits was patient for long enough, all at once
        shared._give_up_at = time.monotonic()
        shared._changed.notify_all()
    wait_until(lambda: looks.begun == 2)
    wait_until(lambda: waiting(shared, 9))
    looks.let_on.release()
    wait_until(lambda: all(asking.over() for asking in late))
    assert {asking.found for asking in late} == {2}
    hanging.set()
    wait_until(first.over)
    assert first.found == 1
    looks.let_on.release()
    assert shared() == 3, "what began before and ended late answers nobody"


def test_a_forked_child_looks_for_itself() -> None:
    looks = Looks()
    shared = SharedLook(looks)
    first = Asking(shared)
    wait_until(lambda: looks.begun == 1)
    looks.let_on.release()
    looks.let_on.release()
    shared._give_up_at = time.monotonic() + 60  # as a fork in the middle of a look leaves it
    child = os.fork()
    if not child:
        looks.let_on = threading.Semaphore(1)
        os._exit(0 if shared() else 1)
    assert os.waitpid(child, 0)[1] == 0
    wait_until(first.over)
