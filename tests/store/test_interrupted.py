"""Ctrl-C, forks and threads that do not start: what is under way is never forgotten, and nothing waits for what will not come."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch

from sublet.core.errors import SubletError
from sublet.store.arena import Arena
from sublet.store.checkpoints import CheckpointStore
from sublet.store.save.saving import PendingSave
from tests.homes import wait_until
from tests.store.rig import JOB, Shelf

BIG = 3 << 20


def filled(number: int) -> dict[str, np.ndarray]:
    return {"a": np.full(BIG, number, np.uint8)}


class InterruptedThread(threading.Thread):
    """Ctrl-C comes while it is waited for, once. Not for those of a pool, which may be made meanwhile: the patch is everybody's."""

    waits = 0

    def join(self, timeout: float | None = None) -> None:
        self.waits += 1
        if self.waits == 1 and self.name.startswith("sublet-"):
            raise KeyboardInterrupt
        super().join(timeout)


def gated(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Its saves behind write when they may."""
    gate = threading.Event()
    real = store._write_elsewhere

    def write(arena: Arena, spans: Any) -> Any:
        assert gate.wait(20)
        return real(arena, spans)

    monkeypatch.setattr(store, "_write_elsewhere", write)
    return gate


def interrupt_first_wait(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(f"{module}.threading.Thread", InterruptedThread)


def test_a_save_whose_wait_was_interrupted_is_still_waited_for(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last save of a program that got a Ctrl-C must not be copied over the one being written."""
    gate = gated(shelf.store, monkeypatch)
    with monkeypatch.context() as patch:
        interrupt_first_wait(patch, "sublet.store.save.saving")
        shelf.store.save_behind(JOB, filled(1), expected_version=0, lease=shelf.lease)
    with pytest.raises(KeyboardInterrupt):
        shelf.store.settle()
    threading.Timer(0.2, gate.set).start()
    assert shelf.save(filled(2), 1).version == 2
    assert (shelf.load(version=1)["a"] == 1).all()
    assert (shelf.load()["a"] == 2).all()


def test_an_interrupted_wait_leaves_the_steps_held_back(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optim = torch.optim.SGD([parameter], lr=1)
    gate = gated(shelf.store, monkeypatch)
    with monkeypatch.context() as patch:
        interrupt_first_wait(patch, "sublet.store.save.saving")
        shelf.store.save_behind(JOB, {"p": parameter}, expected_version=0, lease=shelf.lease, overlap=optim)
    with pytest.raises(KeyboardInterrupt):
        shelf.store.settle()
    assert len(optim._optimizer_step_pre_hooks) == 1
    gate.set()
    shelf.store.settle()
    assert len(optim._optimizer_step_pre_hooks) == 0


def test_a_prefetch_whose_wait_was_interrupted_does_not_write_over_a_save(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(filled(1), 0)
    store = shelf.open()
    gate = threading.Event()
    reading = threading.Event()
    real = store._replicas.chunk

    def slow(*args: Any) -> None:
        reading.set()
        assert gate.wait(20)
        real(*args)

    monkeypatch.setattr(store._replicas, "chunk", slow)
    with monkeypatch.context() as patch:
        interrupt_first_wait(patch, "sublet.store.load.loading")
        store.prefetch(JOB)
    assert reading.wait(20)
    with pytest.raises(KeyboardInterrupt):
        store.load(JOB, into=filled(0))
    write = store._write_here

    def after_the_reader(arena: Arena, spans: Any) -> Any:
        gate.set()
        wait_until(lambda: not any(t.name == "sublet-prefetch" for t in threading.enumerate()))
        return write(arena, spans)

    monkeypatch.setattr(store, "_write_here", after_the_reader)
    threading.Timer(0.5, gate.set).start()
    store.save(JOB, filled(2), expected_version=1, lease=shelf.lease)
    assert (shelf.load()["a"] == 2).all()


def test_readers_of_an_interrupted_load_do_not_write_over_a_save(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two Ctrl-C: nobody waits for the threads that were reading into the arena."""
    shelf.save(filled(1), 0)
    store = shelf.open()
    gate, late = threading.Event(), threading.Event()
    real = store._replicas.chunk

    def slow(entry: Any, into: memoryview, health: Any) -> None:
        assert gate.wait(20)
        into[:] = bytes([1]) * into.nbytes
        late.set()

    def interrupted(arena: Arena, manifest: Any, numbers: Any, *_: Any) -> None:
        chunk = manifest.chunks[0]
        view = arena.view[chunk.span.offset : chunk.span.end]
        threading.Thread(target=slow, args=(chunk, view, None)).start()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.load(JOB, into=filled(0))
    assert real == store._replicas.chunk
    write = store._write_here

    def after_the_reader(arena: Arena, spans: Any) -> Any:
        gate.set()
        assert late.wait(20)
        return write(arena, spans)

    monkeypatch.setattr(store, "_write_here", after_the_reader)
    store.save(JOB, filled(2), expected_version=1, lease=shelf.lease)
    assert (shelf.load()["a"] == 2).all()


def test_copiers_of_an_interrupted_save_do_not_write_over_the_next(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(filled(1), 0)
    slot = shelf.store._slots.get(JOB)
    assert slot is not None
    before = open_descriptors()

    def interrupted(*_: Any, **__: Any) -> list[bool]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shelf.save(filled(2), 1)
    shelf.save(filled(3), 1)
    after = shelf.store._slots.get(JOB)
    assert after is not None
    assert after.arena is not slot.arena, "somebody may still be writing to it"
    slot.arena.map[0] = 9  # and may: it is mapped as long as somebody knows of it
    slot = after  # the last who knew of it
    gc.collect()
    assert open_descriptors() == before
    assert (shelf.load()["a"] == 3).all()


def open_descriptors() -> int:
    return sum("sublet-arena" in _target(fd) for fd in os.listdir("/proc/self/fd"))


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_a_save_whose_thread_cannot_start_holds_nobody_up(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    optim = torch.optim.SGD([parameter], lr=1)

    def refuse(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(SubletError, match="thread"):
            shelf.store.save_behind(
                JOB, {"p": parameter}, expected_version=0, lease=shelf.lease, overlap=optim
            )
    assert len(optim._optimizer_step_pre_hooks) == 0
    optim.step()
    slot = shelf.store._slots.get(JOB)
    assert slot is None or not slot.in_use
    assert shelf.save({"p": parameter}, 0).version == 1
    assert torch.equal(shelf.load()["p"], torch.zeros(4))


def test_a_forked_child_closes_its_own_end_only(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its parent's save is under way: there is no thread in the child that could end it, and no lock to be had."""
    parameter = torch.nn.Parameter(torch.ones(1 << 18))
    optim = torch.optim.SGD([parameter], lr=1)
    entered = threading.Event()
    gate = threading.Event()
    real = shelf.store._writer._ask

    def held(*args: Any) -> Any:
        entered.set()
        assert gate.wait(20)
        return real(*args)

    monkeypatch.setattr(shelf.store._writer, "_ask", held)
    saving = shelf.store.save_behind(
        JOB, {"p": parameter}, expected_version=0, lease=shelf.lease, overlap=optim
    )
    assert entered.wait(20)
    child = os.fork()
    if child == 0:
        try:
            shelf.store.close()
            os._exit(0)
        finally:
            os._exit(1)
    ended: list[int] = []

    def is_over() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([status] if pid else [])
        return bool(pid)

    try:
        wait_until(is_over)
    finally:
        if not ended:
            os.kill(child, 9)
            os.waitpid(child, 0)
        gate.set()
    assert ended == [0]
    assert saving.result(30).version == 1


def test_a_forked_child_may_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from sublet.store.save.saving import Owned

    parameter = torch.nn.Parameter(torch.ones(4))
    owned = Owned(torch.optim.SGD([parameter], lr=1))
    monkeypatch.setattr("sublet.store.save.saving.os.getpid", lambda: -1)
    held = threading.Thread(target=owned._hold_back, daemon=True)
    held.start()
    held.join(60)
    assert not held.is_alive()


def test_a_saving_waits_as_long_as_it_is_told() -> None:
    gate = threading.Event()

    def work() -> Any:
        gate.wait(20)
        raise ValueError("no")

    saving = PendingSave(work)
    saving.begin()
    with pytest.raises(TimeoutError):
        saving.result(0.01)
    gate.set()
    with pytest.raises(ValueError, match="no"):
        saving.result(20)
