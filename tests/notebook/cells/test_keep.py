"""What a notebook keeps: a snapshot counts when the store has it, one save at a time, and no failure is
silent."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import sublet
from sublet.core.errors import BadInput, NotDurable, SubletError, Unsavable
from sublet.notebook.cells import process_state
from sublet.notebook.cells.keep import KeptState
from sublet.settings import load_settings
from sublet.wiring import open_ledger
from tests.homes import Home, wait_until


class MemoryStore:
    """Keeps trees; can be slow, fail, or be asked how many save at once."""

    def __init__(self) -> None:
        self.saved: list[Mapping[str, Any]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failing: BaseException | None = None
        self.fail_next: BaseException | None = None
        self.inside = self.most_inside = 0
        self.closed = False

    def save(self, name: str, state: Any, *, expected_version: int, lease: Any) -> Any:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        try:
            assert self.gate.wait(60)
            if self.failing is not None:
                now, self.failing = self.failing, self.fail_next or self.failing
                raise now
            assert expected_version == len(self.saved)
            self.saved.append(state)
            return SimpleNamespace(version=len(self.saved), bytes_written=10)
        finally:
            self.inside -= 1

    def load(self, name: str) -> Any:
        return self.saved[-1]

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def kept(store: MemoryStore) -> Iterator[KeptState]:
    made = KeptState("job", lambda: store, lambda job: len(store.saved))
    yield made
    store.gate.set()
    made.close()


def random_states() -> dict[str, bytes]:
    return process_state.take_random_states()


def test_a_save_is_durable_when_it_returns(kept: KeptState, store: MemoryStore) -> None:
    done = kept.save({"n": 1, "w": numpy.ones(3)}, random_states(), "lease")
    assert len(store.saved) == 1
    assert (done.version, done.bytes_written, done.names) == (1, 10, "n, w")
    assert kept.last is done
    assert kept.bytes_written == 10
    assert store.saved[0]["state"]["n"] == 1


def test_a_snapshot_counts_only_when_the_store_has_it(kept: KeptState, store: MemoryStore) -> None:
    store.gate.clear()
    assert kept.save_behind({"n": 1}, random_states(), "lease") == ""
    time.sleep(0.05)
    assert kept.last is None
    store.gate.set()
    assert kept.settle() == ""
    assert kept.last is not None
    assert kept.last.values == {"n": 1}


def test_while_one_is_saved_the_newest_waits_and_older_ones_are_dropped(
    kept: KeptState, store: MemoryStore
) -> None:
    store.gate.clear()
    for n in range(10):
        kept.save_behind({"n": n}, random_states(), "lease")
        wait_until(lambda: store.inside == 1)
    store.gate.set()
    assert kept.settle() == ""
    assert [tree["state"]["n"] for tree in store.saved] == [0, 9]
    assert store.most_inside == 1


def test_a_save_that_must_be_durable_waits_for_the_one_under_way(kept: KeptState, store: MemoryStore) -> None:
    store.gate.clear()
    kept.save_behind({"n": 1}, random_states(), "lease")
    wait_until(lambda: store.inside == 1)
    threading.Timer(0.1, store.gate.set).start()
    assert kept.save({"n": 2}, random_states(), "lease").version == 2
    assert [tree["state"]["n"] for tree in store.saved] == [1, 2]
    assert store.most_inside == 1


@pytest.mark.parametrize("error", [NotDurable("the disk is full", remedy="make room"), OSError("odd")])
def test_a_failure_is_said_once_at_the_next_point(
    kept: KeptState, store: MemoryStore, error: Exception
) -> None:
    store.failing = error
    kept.save_behind({"n": 1}, random_states(), "lease")
    wait_until(lambda: not kept._busy)
    store.failing = None
    said = kept.save_behind({"n": 2}, random_states(), "lease")
    assert said in ("the disk is full (make room)", "OSError: odd")
    assert kept.settle() == ""
    assert [tree["state"]["n"] for tree in store.saved] == [2]
    assert kept.last is not None
    assert kept.last.values == {"n": 2}


def test_a_failure_nobody_heard_of_is_said_before_anything_else_is_saved(
    kept: KeptState, store: MemoryStore
) -> None:
    store.failing = NotDurable("the disk is full")
    kept.save_behind({"n": 1}, random_states(), "lease")
    wait_until(lambda: not kept._busy)
    store.failing = None
    with pytest.raises(NotDurable, match="the disk is full"):
        kept.save({"n": 2}, random_states(), "lease")
    assert store.saved == []
    assert kept.last is None


def test_of_several_failures_the_first_is_said(kept: KeptState, store: MemoryStore) -> None:
    store.gate.clear()
    store.failing = OSError("first")
    kept.save_behind({"n": 1}, random_states(), "lease")
    wait_until(lambda: store.inside == 1)
    kept.save_behind({"n": 2}, random_states(), "lease")
    store.fail_next = OSError("second")
    store.gate.set()
    assert kept.settle() == "OSError: first"
    assert kept.settle() == ""


def test_settling_does_not_wait_for_ever(kept: KeptState, store: MemoryStore) -> None:
    store.gate.clear()
    kept.save_behind({"n": 1}, random_states(), "lease")
    began = time.monotonic()
    assert kept.settle(0.05) == ""
    assert time.monotonic() - began < 60
    assert kept.last is None


def test_what_ends_the_thread_that_saves_is_a_failure_and_nobody_waits_for_it_for_ever(
    kept: KeptState, store: MemoryStore
) -> None:
    store.failing = SystemExit("from deep below")
    kept.save_behind({"n": 1}, random_states(), "lease")
    assert "SystemExit" in kept.settle(5)
    store.failing = None
    kept.save_behind({"n": 2}, random_states(), "lease")
    assert kept.settle(5) == ""
    assert [tree["state"]["n"] for tree in store.saved] == [2]


def test_a_store_that_cannot_be_opened_is_a_failure_like_any_other(store: MemoryStore) -> None:
    def refuse() -> MemoryStore:
        raise BadInput("no such store", remedy="set SUBLET_STORE")

    kept = KeptState("job", refuse, lambda job: 0)
    kept.save_behind({"n": 1}, random_states(), "lease")
    assert kept.settle() == "no such store (set SUBLET_STORE)"
    with pytest.raises(SubletError, match="no such store"):
        kept.save({"n": 1}, random_states(), "lease")


def test_closing_waits_for_what_is_under_way(store: MemoryStore) -> None:
    kept = KeptState("job", lambda: store, lambda job: len(store.saved))
    store.gate.clear()
    kept.save_behind({"n": 1}, random_states(), "lease")
    threading.Timer(0.1, store.gate.set).start()
    kept.close()
    assert len(store.saved) == 1
    assert store.closed


# --- on a real store ---


def version_of(job: str) -> int:
    head = open_ledger(load_settings()).head(job)
    return head.version if head is not None else 0


def test_another_kernel_goes_on_from_what_was_kept(sqlite_home: Home) -> None:
    model = torch.nn.Linear(2, 1)
    values = {"model": model, "losses": [1.5, 2.5], "step": 7, "w": numpy.arange(3.0), "config": {"lr": 0.1}}
    random.seed(5)
    states = process_state.take_random_states()
    first = KeptState("notebook", sublet.checkpoints, version_of)
    with sublet.gpu(vram="1GiB", ttl="1m") as lease:
        done = first.save(values, states, lease)
        assert done.version == version_of("notebook") == 1
        assert done.bytes_written > 0
        again = first.save({**values, "step": 8}, states, lease)
        assert again.version == 2
        assert first.bytes_written == done.bytes_written + again.bytes_written
    first.close()
    expected = random.random()

    second = KeptState("another", sublet.checkpoints, version_of)
    fresh = torch.nn.Linear(2, 1)
    space = {"model": fresh, "losses": [0.0], "w": numpy.zeros(3), "other": 1}
    assert set(second.restore(space, "notebook")) == set(values)
    assert space["model"] is fresh
    assert torch.equal(fresh.weight, model.weight)
    assert (space["losses"], space["step"], space["config"], space["other"]) == (
        [1.5, 2.5],
        8,
        {"lr": 0.1},
        1,
    )
    assert list(space["w"]) == [0, 1, 2]
    assert random.random() == expected
    second.close()


def test_a_lease_that_is_over_saves_nothing(sqlite_home: Home) -> None:
    kept = KeptState("notebook", sublet.checkpoints, version_of)
    with sublet.gpu(vram="1GiB", ttl="1m") as lease:
        kept.save({"n": 1}, random_states(), lease)
    kept.save_behind({"n": 2}, random_states(), lease)
    assert lease.id in kept.settle()
    assert kept.last is not None
    assert (kept.last.version, kept.last.values) == (1, {"n": 1})
    assert version_of("notebook") == 1
    kept.close()


def test_what_cannot_be_saved_is_named(sqlite_home: Home) -> None:
    kept = KeptState("notebook", sublet.checkpoints, version_of)
    with sublet.gpu(vram="1GiB", ttl="1m") as lease:
        with pytest.raises(Unsavable, match="the part 'lock' of the state"):
            kept.save({"n": 1, "lock": threading.Lock()}, random_states(), lease)
        kept.save_behind({"n": 1, "lock": [threading.Lock()]}, random_states(), lease)
        assert "the part 'lock' of the state" in kept.settle()
        assert kept.last is None
        assert kept.save({"n": 1}, random_states(), lease).version == 1
    kept.close()
