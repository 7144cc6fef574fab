"""The memory tier: a restart on the same host restores from memory, verified, and never believes more than it verified."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublet.core.errors import Damaged, NotFound
from sublet.processes.arenas import ArenaHolder, HeldArenas
from sublet.store.arena import Arena
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.quorum import Replicas
from sublet.store.save.packing import digest
from sublet.store.slots import Slots
from tests.forked import Forked
from tests.homes import wait_until
from tests.store.rig import JOB, Shelf

SAVER = """
import os
import sys
import numpy as np
from pathlib import Path
from sublet.core.checkpoints.checkpoint import ReplicaPolicy
from sublet.processes.arenas import HeldArenas
from sublet.ledger.engines.sqlite.engine import open_ledger
from sublet.ports.ledger import LeaseKey
from sublet.store.arena import Arena
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.directory import DirectoryReplica
from sublet.store.replicas.quorum import Replicas
from sublet.store.tree import take_apart
from sublet.testing.clock import VirtualClock

arenas, end, then, job, url, epoch, secret, fill, version, *folders = sys.argv[1:]

class Held:
    key = LeaseKey("holder", int(epoch), secret)
    def check(self): pass

ledger = open_ledger(url, VirtualClock())
replicas = Replicas([DirectoryReplica(Path(f)) for f in folders], ReplicaPolicy(replicas=len(folders)))
store = CheckpointStore(replicas, lambda: ledger, HeldArenas(Path(arenas), "arenas"))
state = {"a": np.full(3 << 20, 1, np.uint8), "b": np.full(100, int(fill), np.uint8)}
store.save(job, state, expected_version=int(version), lease=Held())
exec(then)
print("saved", flush=True)
os.kill(os.getpid(), int(end))
"""
#: What the beginning of another save does to the arena.
COPY = "slot = store._slots.get(job); slot.arena.take(take_apart(state).storages, slot.layout, all_new=False)"


@pytest.fixture
def arenas(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "arenas"
    with ArenaHolder(folder, "arenas"):
        yield folder


def opened(shelf: Shelf, arenas: Path) -> CheckpointStore:
    ledger = shelf.rig.open()
    store = CheckpointStore(
        Replicas(shelf.replicas, shelf.policy), lambda: ledger, HeldArenas(arenas, "arenas")
    )
    shelf._opened.append(store)
    return store


def save_and(
    shelf: Shelf, arenas: Path, fill: int, end: signal.Signals = signal.SIGKILL, then: str = ""
) -> subprocess.Popen[str]:
    key = shelf.lease.key
    process = Forked(
        [sys.executable, "-c", SAVER, str(arenas), str(int(end)), then, JOB, shelf.rig.url, str(key.epoch), key.secret,
         str(fill), str(shelf.version), *map(str, shelf.folders)],
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    if end == signal.SIGKILL:
        process.wait()
    process.stdout.close()
    return process


def lose_all(shelf: Shelf) -> None:
    for number in range(len(shelf.folders)):
        shelf.lose(number)


def blank() -> dict[str, Any]:
    return {"a": np.zeros(3 << 20, np.uint8), "b": np.zeros(100, np.uint8)}


def is_state(state: Any, fill: int) -> bool:
    return bool((state["a"] == 1).all() and (state["b"] == fill).all())


def test_a_restart_needs_no_replica(shelf: Shelf, arenas: Path) -> None:
    save_and(shelf, arenas, 7)
    lose_all(shelf)
    live = blank()
    store = opened(shelf, arenas)
    assert store.load(JOB, into=live) is live
    assert is_state(live, 7)
    assert store.health == type(store.health)()
    with pytest.raises(Damaged):  # and it counted as none: a save from here on writes everything anew
        shelf.open().load(JOB)
    for replica in shelf.replicas:
        replica.check()
    saved = store.save(JOB, live, expected_version=1, lease=shelf.lease)
    assert saved.bytes_shared == 0
    assert is_state(shelf.open().load(JOB), 7)


def test_the_next_save_is_incremental(shelf: Shelf, arenas: Path) -> None:
    save_and(shelf, arenas, 7)
    live = blank()
    store = opened(shelf, arenas)
    store.load(JOB, into=live)
    live["b"][3] = 9
    saved = store.save(JOB, live, expected_version=1, lease=shelf.lease)
    assert 0 < saved.bytes_written < 1 << 20
    assert shelf.load()["b"][3] == 9


@pytest.mark.parametrize(
    "then", ["state['b'][:] = 99", "state['a'][:] = 99", "state['a'][5] = 99; state['b'][:] = 99"]
)
def test_a_copy_that_was_under_way_is_not_believed(shelf: Shelf, arenas: Path, then: str) -> None:
    """Killed while the next state was being copied: what of it verifies is used, the rest comes from the replicas."""
    save_and(shelf, arenas, 7, then=f"{then}; {COPY}")
    live = blank()
    opened(shelf, arenas).load(JOB, into=live)
    assert is_state(live, 7)


def test_not_while_the_old_process_may_still_write(shelf: Shelf, arenas: Path) -> None:
    process = save_and(shelf, arenas, 7, signal.SIGSTOP)
    try:
        live = blank()
        store = opened(shelf, arenas)
        store.load(JOB, into=live)
        assert is_state(live, 7)
        lose_all(shelf)
        with pytest.raises(Damaged):
            opened(shelf, arenas).load(JOB, into=blank())
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_an_older_state_is_not_taken_for_the_head(shelf: Shelf, arenas: Path) -> None:
    """The head moved elsewhere since: the memory has another state, and its own."""
    save_and(shelf, arenas, 7)
    shelf.save({"a": np.full(3 << 20, 1, np.uint8), "b": np.full(100, 8, np.uint8)}, 1)
    live = blank()
    opened(shelf, arenas).load(JOB, into=live)
    assert is_state(live, 8)


def test_a_manifest_that_lies_is_nothing(shelf: Shelf, arenas: Path) -> None:
    given = []

    class Liar(HeldArenas):
        def fetch(self, job: str, digest: str) -> Any:
            found = super().fetch(job, digest)
            assert found is not None
            given.append(os.fstat(found.fd).st_ino)
            return type(found)(found.fd, found.size, found.manifest + b" ")

    save_and(shelf, arenas, 7)
    head = shelf.rig.ledger.head(JOB)
    assert head is not None
    assert Slots(Liar(arenas, "arenas")).recall(JOB, head.digest) is None
    wait_until(lambda: given[0] not in open_files())  # the holder's thread closes its own a moment later


def open_files() -> set[int]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.fstat(int(fd)).st_ino)
    return found


def test_what_a_closed_store_held_is_forgotten(shelf: Shelf, arenas: Path) -> None:
    process = save_and(shelf, arenas, 7, then="store.close()")
    assert process.returncode == -9
    lose_all(shelf)
    with pytest.raises(Damaged):
        opened(shelf, arenas).load(JOB, into=blank())


def test_a_forked_child_leaves_its_parents_arena_alone(shelf: Shelf) -> None:
    state = {"a": np.full(3 << 20, 1, np.uint8), "b": np.full(100, 7, np.uint8)}
    shelf.save(state, 0)
    slot = shelf.store._slots.get(JOB)
    assert slot is not None
    before = digest(slot.arena.view)
    child = os.fork()
    if child == 0:
        try:
            state["a"][:] = 3
            assert shelf.store._slots.get(JOB) is None
            shelf.store._slots.place(JOB, slot.layout).arena.take([memoryview(state["a"]), memoryview(state["b"])], slot.layout, all_new=True)  # fmt: skip
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert digest(slot.arena.view) == before


def test_prefetching_reads_it_before_it_is_asked_for(shelf: Shelf) -> None:
    shelf.save({"a": np.full(3 << 20, 1, np.uint8), "b": np.full(100, 7, np.uint8)}, 0)
    store = shelf.open()
    store.prefetch(JOB)
    store._join_ahead()
    for path in shelf.files("packs"):
        path.unlink()
    live = blank()
    store.load(JOB, into=live)
    assert is_state(live, 7)


def test_prefetching_what_is_not_there_says_nothing_until_it_is_loaded(shelf: Shelf) -> None:
    store = shelf.open()
    store.prefetch(JOB)
    with pytest.raises(NotFound, match="nothing was saved"):
        store.load(JOB, into=blank())


def test_an_arena_that_could_shrink_is_not_mapped(tmp_path: Path) -> None:
    """Whoever else has it could take the pages away under a read, and the reader would die of it."""
    fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192)
    with pytest.raises(ValueError, match="shrink"):
        Arena(8192, fd)
    os.close(fd)
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(8192)
        with pytest.raises((ValueError, OSError)):
            Arena(8192, file.fileno())


def test_an_arena_that_was_not_made_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, OverflowError)):
        Arena(1 << 62)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_was_only_loaded_is_there_after_the_next_restart_too(shelf: Shelf, arenas: Path) -> None:
    again = "store.close(); store = CheckpointStore(replicas, lambda: ledger, HeldArenas(Path(arenas), 'arenas')); store.load(job, into=state)"
    save_and(shelf, arenas, 7, then=again)
    lose_all(shelf)
    live = blank()
    opened(shelf, arenas).load(JOB, into=live)
    assert is_state(live, 7)


def test_an_older_version_is_not_what_lies_in_memory(shelf: Shelf, arenas: Path) -> None:
    shelf.save({"a": np.full(3 << 20, 1, np.uint8), "b": np.full(100, 6, np.uint8)}, 0)
    save_and(shelf, arenas, 7)
    live = blank()
    opened(shelf, arenas).load(JOB, version=1, into=live)
    assert is_state(live, 6)
