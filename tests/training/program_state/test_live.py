"""What belongs to the process stays its own when a state is put back."""

from __future__ import annotations

import logging
import threading

import pytest

from sublet.training.program_state.sorting import Sorting
from tests.training.program_state.carried import assert_carried, carry


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


def test_queues_contexts_and_keys_that_are_made_in_the_loop_go_on_elsewhere() -> None:
    assert_carried("""
import contextvars, functools, queue
key = functools.cmp_to_key(lambda one, other: other - one)
keys = [key(1)]
levels = [contextvars.ContextVar(f"level {n}") for n in range(9)]
def late(box={}):
    if not box:
        box["queue"], box["context"] = queue.Queue(), contextvars.copy_context()
        for level in levels: box["context"].run(level.set, [1])
    box["queue"].put(len(box))
    box["queue"].put(5)
    return box["queue"].get(), [box["context"][level] for level in levels]
begin()
for n in range(5):
    found = late()
    keys = sorted([*keys, key(n * 7 % 5)])
    step()
    print(found, [one.obj for one in keys])
""")


def test_what_was_closed_goes_on_elsewhere() -> None:
    assert_carried("""
import mmap, selectors, socket, sqlite3
chooser = selectors.DefaultSelector()
chooser.close()
base = sqlite3.connect(":memory:")
cursor = base.cursor()
base.close()
early, mapped, to_be_closed = socket.socket(), mmap.mmap(-1, 10), None
early.close()
mapped.close()
begin()
for n in range(6):
    late = sqlite3.connect(":memory:")
    found = late.execute("select 1").fetchone()
    late.close()
    with socket.socket() as to_be_closed: pass
    step()
    try: base.execute("select 1")
    except sqlite3.ProgrammingError as error: print(error, found)
    print(early.fileno(), mapped.closed, to_be_closed.fileno(), cursor.connection is not None)
""")


def test_what_is_open_is_refused_though_another_was_closed() -> None:
    for then in ("", "mine.close()"):
        refused = carry(f"""
import sqlite3
closed, mine = sqlite3.connect(":memory:"), sqlite3.connect(":memory:")
closed.close()
{then}
begin()
for n in range(4):
    step()
""").refused
        assert refused == ("" if then else "mine Connection ")


def test_finalizers_that_call_functions_of_python_go_on_elsewhere() -> None:
    assert_carried("""
import functools, weakref
class Node: pass
told, nodes = [], [Node()]
weakref.finalize(nodes[0], told.append, "early")
begin()
for n in range(6):
    nodes.append(Node())
    weakref.finalize(nodes[-1], told.append, n)
    weakref.finalize(nodes[-1], functools.partial(print, "gone"), n)
    if n > 1: nodes.pop(0)
    step()
    print(told)
""")
