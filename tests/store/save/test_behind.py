"""Saves behind the training steps: the copy is all that is waited for, nothing is believed before it is committed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from sublet.core.errors import NotDurable, QuorumNotReached
from sublet.store.checkpoints import CheckpointStore
from tests.homes import process_is_gone, wait_until
from tests.store.rig import JOB, Shelf


def state(seed: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(seed).integers(0, 255, 3 << 20, dtype=np.uint8), "n": np.array(seed)}


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def writer_pid(store: CheckpointStore) -> int:
    process = store._writer._process
    assert process is not None
    return process.pid


def test_the_state_may_change_as_soon_as_it_returns(shelf: Shelf) -> None:
    live = state(1)
    saving = shelf.store.save_behind(JOB, live, expected_version=0, lease=shelf.lease)
    live["w"][:] = 0
    live["n"][...] = 7
    saved = saving.result(30)
    assert (saved.version, saving.done) == (1, True)
    assert same(shelf.open().load(JOB), state(1))
    # The same pack on every replica.
    assert len({tuple(sorted(p.name for p in (f / "packs").iterdir())) for f in shelf.folders}) == 1


def test_the_next_save_waits_for_the_one_before(shelf: Shelf) -> None:
    for version in range(4):
        shelf.store.save_behind(JOB, state(version), expected_version=version, lease=shelf.lease)
        if version % 2:
            shelf.store.settle()
    shelf.store.settle()
    again = shelf.open()
    assert [m.version for m in again.history(JOB)] == [4, 3, 2, 1]
    for version in range(4):
        assert same(again.load(JOB, version=version + 1), state(version))


def test_a_failed_save_is_said_at_the_next_and_the_head_never_moved(shelf: Shelf) -> None:
    """C6: fails behind, surfaces at the next step, once; what it had written is not taken for stored."""
    shelf.store.save(JOB, state(1), expected_version=0, lease=shelf.lease)
    for folder in shelf.folders[1:]:
        (folder / "drafts").rename(folder / "gone")
    saving = shelf.store.save_behind(JOB, state(2), expected_version=1, lease=shelf.lease)
    with pytest.raises(QuorumNotReached, match="replica1"):
        saving.result(30)
    for folder in shelf.folders[1:]:
        (folder / "gone").rename(folder / "drafts")
    with pytest.raises(QuorumNotReached):
        shelf.store.save(JOB, state(2), expected_version=1, lease=shelf.lease)
    assert same(shelf.open().load(JOB), state(1))
    saved = shelf.store.save(JOB, state(2), expected_version=1, lease=shelf.lease)
    assert (saved.version, saved.bytes_written) == (2, saved.bytes_written + saved.bytes_shared)
    assert same(shelf.open().load(JOB), state(2))


def test_a_killed_writer_loses_one_save_and_is_replaced(shelf: Shelf) -> None:
    shelf.store.save_behind(JOB, state(1), expected_version=0, lease=shelf.lease).result(30)
    first = writer_pid(shelf.store)
    os.kill(first, signal.SIGSTOP)
    saving = shelf.store.save_behind(JOB, state(2), expected_version=1, lease=shelf.lease)
    time.sleep(0.1)
    assert not saving.done
    os.kill(first, signal.SIGKILL)
    with pytest.raises(NotDurable, match="writer died"):
        saving.result(30)
    with pytest.raises(NotDurable):
        shelf.store.settle()
    assert same(shelf.open().load(JOB), state(1))
    shelf.store.save_behind(JOB, state(2), expected_version=1, lease=shelf.lease).result(30)
    assert writer_pid(shelf.store) != first
    assert same(shelf.open().load(JOB), state(2))


def test_another_layout_is_another_arena_for_the_writer_too(shelf: Shelf) -> None:
    """Whatever number its descriptor has."""
    for version in range(5):
        grown = {"w": np.full((1 + version) << 20, version, dtype=np.uint8)}
        shelf.store.save_behind(JOB, grown, expected_version=version, lease=shelf.lease).result(30)
        assert np.array_equal(shelf.open().load(JOB)["w"], grown["w"])


def test_closing_waits_and_ends_the_writer(shelf: Shelf) -> None:
    store = shelf.open()
    store.save_behind(JOB, state(1), expected_version=0, lease=shelf.lease)
    store.close()
    assert store._writer._process is None
    assert same(shelf.open().load(JOB), state(1))


def test_the_writer_leaves_with_a_killed_trainer(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        import numpy as np
        from tests.store.rig import JOB, Shelf
        shelf = Shelf(Path(sys.argv[1]), 1)
        shelf.store.save_behind(JOB, {"w": np.ones(1 << 18)}, expected_version=0, lease=shelf.lease).result(30)
        print(shelf.store._writer._process.pid, flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        child.kill()
    wait_until(lambda: process_is_gone(pid))
