"""kill -9 at the n-th system call of one save, or an error from it, by strace: old or new, never between (C6).

Three programs are disturbed: one that saves, one whose save runs behind it, and that one's writer process. Every call that changes a file or
talks to the other process is a place to die, each at its first, second, … time. A spread sample here, all of them in `make proof`
(`SUBLET_KILLS=all`).
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sublet.core.checkpoints import checkpoint
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.quorum import Replicas
from sublet.store.save.packing import digest
from tests.homes import process_is_gone, wait_until
from tests.in_memory import in_memory
from tests.seeds import SEED
from tests.store.rig import JOB, Shelf
from tests.traced import Programs, places_of

KILLS = os.environ.get("SUBLET_KILLS", "6")
CALLS = (
    "openat,write,pwrite64,pwritev,pwritev2,ftruncate,fallocate,fsync,fdatasync,link,linkat,rename,renameat,renameat2,"
    "unlink,unlinkat,mkdir,mkdirat,sendto,sendmsg"
)

pytestmark = pytest.mark.timeout(900 if KILLS == "all" else 180)

PROGRAM = """
from pathlib import Path
import numpy as np
from sublet.core.checkpoints.checkpoint import ReplicaPolicy, ByteSpan
from sublet.ledger.engines.sqlite.engine import open_ledger
from sublet.ports.ledger import LeaseKey
from sublet.store import checkpoints
from sublet.store.arena import Arena
from sublet.store.checkpoints import CheckpointStore
from sublet.store.replicas.directory import DirectoryReplica
from sublet.store.save.packing import digest
from sublet.store.replicas.quorum import Replicas
from sublet.testing.clock import VirtualClock
from tests.store.test_killed_at_a_call import a_state, small

small()
digest(b"")

class Held:
    def __init__(self, key): self.key = LeaseKey(*key)
    def check(self): pass

def program(url, key, folders, version, fill, behind):
    ledger = open_ledger(url, VirtualClock())
    store = CheckpointStore(Replicas([DirectoryReplica(Path(f)) for f in folders], ReplicaPolicy(replicas=3)), lambda: ledger)
    writer = 0
    checkpoints.WORTH_A_PROCESS = 0  # small states too
    if behind:
        store._write_elsewhere(Arena(4096), [ByteSpan(0, 1)])  # it is up
        writer = store._writer._process.pid
    ledger.head("team/job")
    begin(writer=writer)
    lease, state = Held(key), a_state(fill)
    if behind:
        saved = store.save_behind("team/job", state, expected_version=version, lease=lease).result(60)
    else:
        saved = store.save("team/job", state, expected_version=version, lease=lease)
    say(saved=saved.version)
"""


def small() -> None:
    """Several chunks in a few kilobytes."""
    checkpoint.GROUP_BYTES, checkpoint.CHUNK_BYTES = 4096, 16384


def a_state(fill: int) -> dict[str, Any]:
    rng = random.Random(fill)
    return {
        "w": np.frombuffer(rng.randbytes(40_000), np.uint8),
        "same": np.zeros(9000),
        "b": bytes([fill % 256]) * 100,
        "n": fill,
    }


def filled(state: dict[str, Any]) -> int:
    """Which one it is; fails if it is none of them."""
    wanted = a_state(state["n"])
    assert state.keys() == wanted.keys()
    assert np.array_equal(state["w"], wanted["w"])
    assert np.array_equal(state["same"], wanted["same"])
    assert state["b"] == wanted["b"]
    return int(state["n"])


class Savers:
    def __init__(self, shelf: Shelf, folder: Path) -> None:
        self.shelf = shelf
        self._writers: list[int] = []
        self._programs = Programs(PROGRAM, CALLS, folder / "calls")

    def run(self, fill: int, whom: str, inject: str = "") -> tuple[list[dict[str, Any]], dict[str, int]]:
        """One save under strace: what was said until it ended, and how often each call was made."""
        key = self.shelf.lease.key
        order = {
            "url": self.shelf.rig.url, "key": [key.lease_id, key.epoch, key.secret], "folders": [str(f) for f in self.shelf.folders],
            "version": self.shelf.version, "fill": fill, "behind": whom != "save",
        }  # fmt: skip
        born, said, often = self._programs.run(order, inject, "writer" if whom == "writer" else "pid")
        # Nobody waits for the writer of a program that was killed: the next one does not know of it either.
        self._writers = [pid for pid in (*self._writers, born["writer"]) if pid and not process_is_gone(pid)]
        return said, often

    def close(self) -> None:
        self._programs.close()
        wait_until(lambda: all(process_is_gone(pid) for pid in self._writers), 20)


def check_head(shelf: Shelf) -> int:
    """The head's version is whole on as many replicas as must confirm, and loads from every quorum. Which state it is."""
    head = shelf.rig.ledger.head(JOB)
    assert head is not None
    having = [r for r in shelf.replicas if digest(r.get_manifest(head.digest) or b"") == head.digest]
    assert len(having) >= shelf.policy.write_quorum
    replicas = Replicas(shelf.replicas, shelf.policy)
    good: Counter[str] = Counter()
    for _, pack, how in replicas.inspect([replicas.manifest(head.digest)]):
        good[pack] += how == "good"
    assert min(good.values()) >= shelf.policy.write_quorum
    found = set()
    for lost in range(len(shelf.folders)):
        shelf.folders[lost].rename(f"{shelf.folders[lost]}-lost")
        ledger = shelf.rig.ledger
        with CheckpointStore(Replicas(shelf.replicas, shelf.policy), lambda ledger=ledger: ledger) as store:
            found.add(filled(store.load(JOB)))
        Path(f"{shelf.folders[lost]}-lost").rename(shelf.folders[lost])
    assert len(found) == 1
    return found.pop()


@pytest.fixture
def kept_sizes() -> Iterator[None]:
    before = checkpoint.GROUP_BYTES, checkpoint.CHUNK_BYTES
    small()
    yield
    checkpoint.GROUP_BYTES, checkpoint.CHUNK_BYTES = before


def places_in(programs: Savers, whom: str, least: int) -> list[tuple[str, int]]:
    """Each call of one save, at its first, second, … time; or a spread sample of them."""
    said, often = programs.run(1, whom)
    assert said[0] == {"saved": 2}, said
    written = "pwritev2" if "pwritev2" in often else "pwritev"
    assert {written, "fsync", "linkat"} <= often.keys() or whom == "behind", often
    places = places_of(often)
    if KILLS != "all":
        places = sorted(random.Random(SEED).sample(places, min(least, len(places))))
    return places


@pytest.mark.usefixtures("kept_sizes")
@pytest.mark.parametrize("whom", ["save", "behind", "writer"])
def test_killed_at_the_nth_call(whom: str) -> None:
    with in_memory() as folder:
        shelf = Shelf(folder)
        programs = Savers(shelf, folder)
        shelf.save(a_state(0), 0)
        places = places_in(programs, whom, int(KILLS) if KILLS != "all" else 0)
        outcomes: Counter[str] = Counter()
        for number, (call, n) in enumerate(places):
            before, fill = shelf.version, 10 + 2 * number
            was = check_head(shelf)
            said, _ = programs.run(fill, whom, f"{call}:signal=KILL:when={n}")
            where = f"{whom} killed at {call} number {n} (seed {SEED}): {said}"
            now = check_head(shelf)
            assert shelf.version in (before, before + 1), where
            assert now == (was if shelf.version == before else fill), where
            if any("saved" in s for s in said):
                assert shelf.version == before + 1, where
            assert (
                said[-1]["ended"] == signal.SIGKILL or whom == "writer" or any("saved" in s for s in said)
            ), where
            outcomes["new" if shelf.version > before else "old"] += 1
            outcomes["killed"] += not any("saved" in s for s in said)
            saved = shelf.save(a_state(fill + 1), shelf.version)
            assert (saved.version, check_head(shelf)) == (shelf.version, fill + 1), where
        assert outcomes["killed"] >= 0.6 * len(places), f"{outcomes} of {len(places)}"
        assert outcomes["old"], outcomes
        if whom != "writer" and KILLS == "all":
            assert outcomes["new"], outcomes
        assert shelf.rig.faults() == []
        print(f"{whom}: {len(places)} places, {dict(outcomes)}")
        programs.close()
        shelf.close()


#: What a disk, a quota or a remounted file system says.
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS")


@pytest.mark.usefixtures("kept_sizes")
@pytest.mark.parametrize("whom", ["save", "behind", "writer"])
@pytest.mark.parametrize("error", ERRORS if KILLS == "all" else ERRORS[:1])
def test_the_nth_call_fails(whom: str, error: str) -> None:
    """C6: whatever one call answers, the state is the old one or the new one, whole; a save that says it succeeded did."""
    with in_memory() as folder:
        shelf = Shelf(folder)
        programs = Savers(shelf, folder)
        shelf.save(a_state(0), 0)
        places = places_in(programs, whom, 3)
        outcomes: Counter[str] = Counter()
        for number, (call, n) in enumerate(places):
            before, fill = shelf.version, 10 + 2 * number
            was = check_head(shelf)
            said, _ = programs.run(fill, whom, f"{call}:error={error}:when={n}")
            where = f"{error} for {whom} at {call} number {n} (seed {SEED}): {said}"
            now = check_head(shelf)
            assert shelf.version in (before, before + 1), where
            assert now == (was if shelf.version == before else fill), where
            if any("saved" in s for s in said):
                assert shelf.version == before + 1, where
            failed = next((s["failed"] for s in said if "failed" in s), "")
            outcomes[
                "saved"
                if any("saved" in s for s in said)
                else f"{failed or 'silent'}, {'new' if shelf.version > before else 'old'}"
            ] += 1
            saved = shelf.save(a_state(fill + 1), shelf.version)
            assert (saved.version, check_head(shelf)) == (shelf.version, fill + 1), where
        assert shelf.rig.faults() == []
        print(f"{whom} {error}: {len(places)} places, {dict(outcomes)}")
        programs.close()
        shelf.close()
