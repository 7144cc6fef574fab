"""Calls that wait for their turn: in order, not too many, and gone with their client."""

from __future__ import annotations

import threading

import pytest

from sublet.core.errors import Stale, TooMany
from sublet.studio.holder import call_queue
from sublet.studio.holder.call_queue import CallQueue
from sublet.studio.holder.call_record import CallRecord
from tests.homes import wait_until


class _Waiter:
    """One call that waits in a thread of its own, and ends when it is let go."""

    def __init__(self, queue: CallQueue, order: list[str], name: str) -> None:
        self.record = CallRecord(name)
        self.let_go = threading.Event()
        self.left: Stale | None = None
        self._queue, self._order = queue, order
        queue.enter(self.record)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with self._queue.turn(self.record):
                self._order.append(self.record.call)
                self.let_go.wait(60)
        except Stale as e:
            self.left = e


def test_calls_run_one_at_a_time_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_queue, "LOOK_SECONDS", 0.01)
    queue, order = CallQueue(), list[str]()
    waiters = [_Waiter(queue, order, name) for name in "abc"]
    for done, waiter in enumerate(waiters, start=1):
        wait_until(lambda done=done: len(order) == done)
        assert queue.running is waiter.record
        waiter.let_go.set()
    assert order == ["a", "b", "c"]
    waiters[-1].thread.join(60)
    assert queue.running is None


def test_a_call_nobody_listens_to_leaves_while_it_waits_and_never_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_queue, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(call_queue, "ALONE_SECONDS", 0.05)
    queue, order = CallQueue(), list[str]()
    first = _Waiter(queue, order, "first")
    wait_until(lambda: order == ["first"])
    left = _Waiter(queue, order, "left")
    kept = CallRecord("kept")
    with kept.listened_to():
        queue.enter(kept)
        left.thread.join(60)
        assert left.left is not None
        assert "nothing of it was begun" in left.left.message
        assert len(queue) == 1  # who is listened to stays, however long it takes
        first.let_go.set()
        with queue.turn(kept):
            order.append("kept")
    assert order == ["first", "kept"]


def test_a_call_that_runs_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_queue, "ALONE_SECONDS", 0.0)
    queue, order = CallQueue(), list[str]()
    alone = _Waiter(queue, order, "alone")
    wait_until(lambda: order == ["alone"])
    assert alone.record.alone_since is not None
    assert queue.running is alone.record
    alone.let_go.set()
    alone.thread.join(60)
    assert alone.left is None


def test_one_more_than_may_wait_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_queue, "WAITING_MOST", 2)
    queue = CallQueue()
    for name in "ab":
        queue.enter(CallRecord(name))
    with pytest.raises(TooMany, match="2 calls wait"):
        queue.enter(CallRecord("c"))
    assert len(queue) == 2
