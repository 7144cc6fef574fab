"""What belongs to the process stays its own when a state is put back."""

from __future__ import annotations

import logging
import threading

import pytest

from sublet.training.program_state.sorting import Sorting


@pytest.fixture
def sorting() -> Sorting:
    return Sorting(lambda module: False)


def test_who_waits_for_a_condition_goes_on_waiting(sorting: Sorting) -> None:
    """X1. TensorBoard's writer waits for events in a thread: put back without it, the next flush would never end."""
    condition = threading.Condition()
    kind = sorting.kind_of(condition)
    saved = kind.content(threading.Condition(vars(condition)["_lock"]))  # as it was when nobody waited
    entered, woken = threading.Event(), threading.Event()

    def wait() -> None:
        with condition:
            entered.set()
            condition.wait()
        woken.set()

    threading.Thread(target=wait, daemon=True).start()
    entered.wait()
    with condition:
        kind.fill(condition, saved)
        condition.notify()
    assert woken.wait(30)


def test_a_lock_that_another_thread_has_for_a_moment_is_not_taken_from_it(sorting: Sorting) -> None:
    lock = threading.Lock()
    kind = sorting.kind_of(lock)
    saved = kind.content(lock)
    had, failed = threading.Event(), []

    def work() -> None:
        try:
            with lock:
                had.set()
                threading.Event().wait(0.02)
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    had.wait()
    kind.fill(lock, saved)
    thread.join()
    assert not failed
    assert not lock.locked()


def test_what_a_logger_would_find_again_is_not_saved(sorting: Sorting) -> None:
    """Putting back the level of one logger makes all of them forget what they remember."""
    known, unknown = logging.getLogger("test_live.known"), logging.Logger("test_live.unknown")
    for one in (known, unknown):
        one.setLevel(logging.WARNING)
        assert not one.isEnabledFor(logging.INFO)
    kind = sorting.kind_of(known)
    assert kind.content(known)[-1] == {}
    unknown.level = logging.DEBUG  # nobody told it to forget
    assert kind.content(unknown)[-1] == {logging.INFO: False}
    kind.fill(known, kind.content(known))
    kind.fill(unknown, kind.content(unknown))
    assert not unknown.isEnabledFor(logging.INFO)
